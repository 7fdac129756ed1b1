"""`train`: stream captured packs into the drafter until every (epoch, sample) pair has been trained.

Driver: prepares the initial weights, starts the stream's coordinator and a Ray Train worker group.
Worker: restores the latest checkpoint, plans what is left, then steps window by window.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.actor import ActorHandle
from ray.train.torch import TorchTrainer

from eagle3_train import runlog
from eagle3_train.config import JobConfig
from eagle3_train.corpus.split import is_held_out
from eagle3_train.corpus.table import read_samples
from eagle3_train.records import Sample
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.runlog import JobError, MetricsLog, log, reason
from eagle3_train.stream.cache import pin, planned_captures
from eagle3_train.stream.coordinator import coordinating
from eagle3_train.stream.ledger import Ledger
from eagle3_train.stream.meter import StreamMeter, bottleneck
from eagle3_train.stream.pipeline import StreamLink, captured_packs
from eagle3_train.stream.plan import Window, plan_run
from eagle3_train.target.facts import bytes_per_token, read_facts, resolve_boundaries
from eagle3_train.training import checkpoint
from eagle3_train.training.feed import FedPack, feed
from eagle3_train.training.initial import write_initial
from eagle3_train.training.state import TrainState, plan_shape
from eagle3_train.training.step import Evaluation, train_step


def run(config: JobConfig, pool: ActorHandle[Any]) -> dict[str, Any]:
    """Train to the end and return the content of train/result.json; complete runs return at once."""
    paths = RunDir(config.run_path)
    if is_complete(config):
        log.info("train: already complete (%s)", paths.train_result)
        done: dict[str, Any] = json.loads(paths.train_result.read_text())
        return done
    train, held_out = check(config)
    token_bytes = _token_bytes(config)
    write_initial(config, train)
    shutil.rmtree(paths.saving, ignore_errors=True)  # what an interrupted job was writing
    _remove_unregistered(paths)
    pinned = pin(train, token_bytes, config.stream.cache_bytes, config.train.seed)
    with coordinating(
        pool,
        [*train, *held_out],
        pinned,
        config.stream.cache_dir,
        config.stream.max_bytes_in_flight,
        config.train.workers,
        config.engine.max_replacements + 1,
    ) as coordinator:
        job = {
            "config": config.model_dump(mode="json"),
            "coordinator": coordinator,
            "samples": ray.put((train, held_out)),
            "bytes_per_token": token_bytes,
        }
        fit = _fit(config, job)
        counters, spilled = ray.get([coordinator.counters.remote(), coordinator.spilled.remote()])
    _remove_unregistered(paths)
    result = _result(config, fit, len(train)) | {
        "peak_bytes_in_flight": counters.peak_in_flight,
        "captures": counters.captures,
        "recaptures": counters.recaptures,
        "cache_hits": counters.cache_hits,
        "spilled_bytes": spilled,
        "hidden_state_bytes_total": sum(s.captured_tokens for s in train) * token_bytes,
        "captures_planned": planned_captures(pinned, config.train.epochs // config.stream.replay),
    }
    write_atomic(paths.train_result, json.dumps(result, indent=1))
    return result


def _fit(config: JobConfig, job: dict[str, Any]) -> ray.train.Result:
    """Run the worker group to its end. Raises JobError."""
    paths, settings = RunDir(config.run_path), config.train
    gpus = {"GPU": settings.gpus_per_worker} if settings.gpus_per_worker > 0 else {}
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=job,
        scaling_config=ray.train.ScalingConfig(
            num_workers=settings.workers,
            use_gpu=bool(gpus),
            resources_per_worker={"CPU": settings.cpus_per_worker} | gpus,
        ),
        run_config=ray.train.RunConfig(
            name=paths.checkpoints.name,
            storage_path=str(paths.train_storage.resolve()),
            failure_config=ray.train.FailureConfig(max_failures=settings.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=settings.keep_checkpoints,
                checkpoint_score_attribute="eval/expected_acceptance_length",
            ),
        ),
    )
    try:
        return trainer.fit()
    except ray.train.TrainingFailedError as error:
        cause: Exception = error
        if isinstance(error, ray.train.WorkerGroupError):
            cause = error.worker_failures[min(error.worker_failures)]
        log.debug("%s", cause)  # Ray Train's own text leaves out the middle
        raise JobError(
            f"train: {reason(cause)} (traceback: {paths.log('driver', 0)}). Once that is mended, the "
            "same command goes on from the last checkpoint"
        ) from error


def _remove_unregistered(paths: RunDir) -> None:
    """Remove checkpoints that were written but not registered, which Ray Train does a second or two later.

    It neither resumes from them nor removes them. Call while no worker group runs.
    """
    known = checkpoint.registered(paths)
    for folder in paths.checkpoints.glob("checkpoint_*/"):
        if folder not in known:
            log.info("removing %s: interrupted before it was registered", folder)
            shutil.rmtree(folder)


def is_complete(config: JobConfig) -> bool:
    """Whether training has finished."""
    return RunDir(config.run_path).train_result.exists()


def check(config: JobConfig) -> tuple[list[Sample], list[Sample]]:
    """Training and held-out samples of the rollout, in a stable order; needs neither Ray nor engines.

    Raises ValueError when what is left to train cannot be laid out as configured.
    """
    samples = sorted(read_samples(RunDir(config.run_path).samples), key=lambda sample: sample.id)
    usable = [s for s in samples if len(s.input_ids) <= config.corpus.max_len and s.loss_mask.any()]
    held = [s for s in usable if is_held_out(s.id, config.corpus.held_out_fraction)]
    held_out = held[: config.train.eval_samples]
    train = [s for s in usable if not is_held_out(s.id, config.corpus.held_out_fraction)]
    ledger, step = Ledger(config.train.epochs, len(train)), 0
    if known := checkpoint.registered(RunDir(config.run_path)):
        saved = json.loads((known[-1] / checkpoint.STATE).read_text())
        ledger = Ledger.from_hex(saved["ledger"], config.train.epochs, len(train))
        step = saved["step"]
    windows = plan_run(train, held_out, plan_shape(config), ledger.trained, step)
    largest = max((window.tokens for window in windows), default=0) * _token_bytes(config)
    if largest > config.stream.max_bytes_in_flight:
        raise ValueError(
            f"stream.max_bytes_in_flight={config.stream.max_bytes_in_flight} is less than the largest optimiser window, "
            f"{largest} bytes; raise it, or lower stream.tokens_per_pack or train.accumulation"
        )
    return train, held_out


def _token_bytes(config: JobConfig) -> int:
    """Bytes of one token's hidden states."""
    facts = read_facts(config.target.path)
    boundaries = resolve_boundaries(config.drafter.aux_layers, facts.num_layers)
    return bytes_per_token(facts.hidden_size, len(boundaries), config.stream.dtype)


def train_worker(job: dict[str, Any]) -> None:
    """One Ray Train worker: restore, then go window by window until the plan is done."""
    config = JobConfig.model_validate(job["config"])
    runlog.setup(config, "train", ray.train.get_context().get_world_rank())
    state = TrainState.create(config, *ray.get(job["samples"]))
    state.restore()
    coordinator = job["coordinator"]
    attempt = state.agree(lambda: int(ray.get(coordinator.begin.remote())))
    link = StreamLink(coordinator, attempt, job["bytes_per_token"], config.stream.lookahead_packs)
    windows = state.plan()
    packs = feed(captured_packs(windows, state.rank, link), state.documents, state.feed_shape())
    record = MetricsLog(config, state.step) if state.rank == 0 else None
    meter, evaluation = StreamMeter(), Evaluation(state)
    for number, window in enumerate(windows):
        for metrics in _passes(state, window, packs, evaluation):
            if record is not None and metrics:
                metrics |= meter.read(ray.get(coordinator.counters.remote()))
                record.write(state.step, metrics | {"time_s": time.time()})
                _log_line(state, metrics)
        coordinator.ack.remote(attempt, window.index, state.rank)
        rest = [] if state.has_stalled else windows[number + 1 :]
        if _checkpoint_due(config, window, rest):
            # Only weights that were just evaluated may become the best checkpoint.
            score = state.evaluations.last if window.kind == "eval" else 0.0
            state.save({"eval/expected_acceptance_length": score})
        if state.has_stalled:
            log.info("stopped: E[len] has not risen above %.3f lately", state.evaluations.best)
            break
    if record is not None:
        record.close()


def _passes(
    state: TrainState, window: Window, packs: Iterator[FedPack], evaluation: Evaluation
) -> Iterator[dict[str, Any]]:
    """Metrics of each pass over a window; they are done one by one, as the caller asks for the next."""
    if window.kind == "eval":
        yield evaluation.add(window, packs)
        return
    replays = state.config.stream.replay
    resident = itertools.tee(packs, replays) if replays > 1 else (packs,)
    for number, batches in enumerate(resident):
        yield train_step(state, window, batches, number)


def _checkpoint_due(config: JobConfig, window: Window, rest: list[Window]) -> bool:
    """Every checkpoint_every steps and at the end, but after the evaluation of the same step."""
    if window.step == 0 or (rest and rest[0].step == window.step):
        return False
    return not rest or window.step % config.train.checkpoint_every == 0


def _log_line(state: TrainState, metrics: dict[str, Any]) -> None:
    """One line per step or evaluation; it names the bottleneck and what to change."""
    if "train/loss" not in metrics:
        log.info(
            "eval after step %d | E[len] %.3f at k=%d | step accuracy %s",
            state.step,
            metrics["eval/expected_acceptance_length"],
            state.config.evaluate.num_speculative_tokens,
            " ".join(f"{a:.3f}" for a in metrics["eval/step_accuracy"]),
        )
        return
    wait = metrics["perf/data_wait_frac"]
    log.info(
        "step %d/%d | loss %.4f | acc %s | lr %.1e | %.0f tok/s | capture %.0f tok/s | %.1f MB in flight | "
        "data-wait %.0f %% | bottleneck: %s",
        state.step,
        state.total_steps,
        metrics["train/loss"],
        " ".join(f"{a:.2f}" for a in metrics["train/accuracy_k"]),
        metrics["train/lr"],
        metrics["perf/tokens_per_s"],
        metrics["stream/capture_tokens_per_s"],
        metrics["stream/bytes_in_flight"] / 1e6,
        100 * wait,
        bottleneck(wait, metrics["stream/capture_busy_frac"]),
    )


def _best(checkpoints: list[tuple[Any, dict[str, Any]]]) -> str:
    """Path of the checkpoint with the highest score; the newest of equals (names are times)."""
    ranked = [(float(m["eval/expected_acceptance_length"]), c.path) for c, m in checkpoints]
    return str(max(ranked)[1])


def _result(config: JobConfig, fit: ray.train.Result, samples: int) -> dict[str, Any]:
    """Content of train/result.json, as far as the fit tells it."""
    assert fit.checkpoint is not None
    saved = json.loads((Path(fit.checkpoint.path) / checkpoint.STATE).read_text())
    return {
        "best_checkpoint": _best(fit.best_checkpoints),
        "last_checkpoint": fit.checkpoint.path,
        "samples_expected": config.train.epochs * samples,
        "samples_trained": Ledger.from_hex(saved["ledger"], config.train.epochs, samples).count,
        "bad_samples": saved["bad_samples"],
        "steps": saved["step"],
    }
