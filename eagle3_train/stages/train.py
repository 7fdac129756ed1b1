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
from eagle3_train.stream.flight import StreamCounters
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
    train, held_out = split_samples(config)
    token_bytes = _check_layout(config, train, held_out)
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
    result = _result(config, fit, counters, len(train)) | {
        "spilled_bytes": spilled,
        "hidden_state_bytes_total": sum(s.captured_tokens for s in train) * token_bytes,
        "captures_planned": planned_captures(pinned, config.train.epochs // config.stream.replay),
    }
    write_atomic(paths.train_result, json.dumps(result, indent=1))
    return result


def _fit(config: JobConfig, job: dict[str, Any]) -> ray.train.Result:
    """Run the worker group to its end. Raises JobError."""
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=job,
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.train.workers,
            use_gpu=config.train.gpus_per_worker > 0,
            resources_per_worker=_resources(config),
        ),
        run_config=_run_config(config),
    )
    try:
        return trainer.fit()
    except ray.train.TrainingFailedError as error:
        cause: Exception = error
        if isinstance(error, ray.train.WorkerGroupError):
            cause = error.worker_failures[min(error.worker_failures)]
        log.debug("%s", cause)  # Ray Train's own text leaves out the middle
        raise JobError(
            f"train: {reason(cause)} (traceback: {RunDir(config.run_path).log('driver', 0)}). Once that is mended, the "
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


def _run_config(config: JobConfig) -> ray.train.RunConfig:
    """Where Ray Train keeps checkpoints, which ones, and how often it may restart the workers."""
    return ray.train.RunConfig(
        name=RunDir(config.run_path).checkpoints.name,
        storage_path=str(RunDir(config.run_path).train_storage.resolve()),
        failure_config=ray.train.FailureConfig(max_failures=config.train.max_failures),
        checkpoint_config=ray.train.CheckpointConfig(
            num_to_keep=config.train.keep_checkpoints,
            checkpoint_score_attribute="eval/expected_acceptance_length",
        ),
    )


def check(config: JobConfig) -> None:
    """Raise ValueError when the samples cannot be laid out as configured; needs neither Ray nor engines."""
    _check_layout(config, *split_samples(config))


def _check_layout(config: JobConfig, train: list[Sample], held_out: list[Sample]) -> int:
    """Bytes of one token's hidden states, once it is clear that what is left to train can be, window by window."""
    facts = read_facts(config.target.path)
    boundaries = resolve_boundaries(config.drafter.aux_layers, facts.num_layers)
    token_bytes = bytes_per_token(facts.hidden_size, len(boundaries), config.stream.dtype)
    ledger, step = Ledger(config.train.epochs, len(train)), 0
    if known := checkpoint.registered(RunDir(config.run_path)):
        saved = json.loads((known[-1] / checkpoint.STATE).read_text())
        ledger = Ledger.from_hex(saved["ledger"], config.train.epochs, len(train))
        step = saved["step"]
    windows = plan_run(train, held_out, plan_shape(config), ledger.trained, step)
    largest = max((window.tokens for window in windows), default=0) * token_bytes
    if largest > config.stream.max_bytes_in_flight:
        raise ValueError(
            f"stream.max_bytes_in_flight={config.stream.max_bytes_in_flight} is less than one optimiser "
            f"window: {config.train.workers} workers x {config.train.accumulation} packs of up to "
            f"{config.stream.tokens_per_pack} tokens x {token_bytes} bytes = {largest} bytes; raise it, "
            "or lower stream.tokens_per_pack or train.accumulation"
        )
    return token_bytes


def split_samples(config: JobConfig) -> tuple[list[Sample], list[Sample]]:
    """Training and held-out samples of the rollout, in a stable order."""
    samples = sorted(read_samples(RunDir(config.run_path).samples), key=lambda sample: sample.id)
    if not samples:
        raise ValueError(
            f"no samples in {RunDir(config.run_path).samples}; run ray_jobs/rollout.py first"
        )
    usable = [s for s in samples if len(s.input_ids) <= config.corpus.max_len and s.loss_mask.any()]
    held = [s for s in usable if is_held_out(s.id, config.corpus.held_out_fraction)]
    train = [s for s in usable if not is_held_out(s.id, config.corpus.held_out_fraction)]
    return train, held[: config.train.eval_samples]


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


def _resources(config: JobConfig) -> dict[str, float]:
    """What one training worker reserves."""
    resources = {"CPU": config.train.cpus_per_worker}
    if config.train.gpus_per_worker > 0:
        resources["GPU"] = config.train.gpus_per_worker
    return resources


def _best(checkpoints: list[tuple[Any, dict[str, Any]]]) -> str:
    """Path of the checkpoint with the highest score; the newest of equals (names are times)."""
    ranked = [(float(m["eval/expected_acceptance_length"]), c.path) for c, m in checkpoints]
    return str(max(ranked)[1])


def _result(
    config: JobConfig,
    fit: ray.train.Result,
    counters: StreamCounters,
    samples: int,
) -> dict[str, Any]:
    """Content of train/result.json, as far as the fit and the stream's counters tell it."""
    assert fit.checkpoint is not None
    saved = json.loads((Path(fit.checkpoint.path) / checkpoint.STATE).read_text())
    last_eval = [
        m for m in runlog.read_metrics(RunDir(config.run_path).metrics) if "eval/step_accuracy" in m
    ]
    trained = Ledger.from_hex(saved["ledger"], config.train.epochs, samples).count
    return {
        "best_checkpoint": _best(fit.best_checkpoints),
        "last_checkpoint": fit.checkpoint.path,
        "samples_expected": config.train.epochs * samples,
        "samples_trained": trained,
        "bad_samples": saved["bad_samples"],
        "steps": saved["step"],
        "peak_bytes_in_flight": counters.peak_in_flight,
        "max_bytes_in_flight": config.stream.max_bytes_in_flight,
        "captures": counters.captures,
        "recaptures": counters.recaptures,
        "cache_hits": counters.cache_hits,
        "expected_acceptance_length": last_eval[-1]["eval/expected_acceptance_length"]
        if last_eval
        else None,
        "expected_by_k": last_eval[-1]["eval/expected_by_k"] if last_eval else None,
    }
