"""`train`: stream captured packs into the drafter until every (epoch, sample) pair has been trained.

Driver: prepares the initial weights, starts the stream's coordinator and a Ray Train worker group.
Worker: restores the latest checkpoint, plans what is left, then steps window by window.
"""

from __future__ import annotations

import json
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
from eagle3_train.runlog import MetricsLog, log
from eagle3_train.stream.coordinator import StreamCoordinator
from eagle3_train.stream.flight import StreamCounters
from eagle3_train.stream.ledger import Ledger
from eagle3_train.stream.pipeline import StreamLink, captured_packs, token_table
from eagle3_train.stream.plan import Window, plan_run
from eagle3_train.target.facts import bytes_per_token, read_facts, resolve_boundaries
from eagle3_train.training import checkpoint
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
    coordinator = (
        ray.remote(StreamCoordinator)
        .options(num_cpus=0)
        .remote(
            pool,
            ray.put(token_table([*train, *held_out])),
            config.stream.max_bytes_in_flight,
            config.train.workers,
            config.engine.max_replacements + 1,
        )
    )
    job = {
        "config": config.model_dump(mode="json"),
        "coordinator": coordinator,
        "samples": ray.put((train, held_out)),
        "bytes_per_token": token_bytes,
    }
    fit = TorchTrainer(
        train_worker,
        train_loop_config=job,
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.train.workers,
            use_gpu=config.train.gpus_per_worker > 0,
            resources_per_worker=_resources(config),
        ),
        run_config=_run_config(config),
    ).fit()
    counters = ray.get(coordinator.counters.remote())
    ray.kill(coordinator)
    epoch_bytes = sum(sample.captured_tokens for sample in train) * token_bytes
    result = _result(config, fit, counters, len(train), epoch_bytes)
    write_atomic(paths.train_result, json.dumps(result, indent=1))
    return result


def is_complete(config: JobConfig) -> bool:
    """Whether training has finished."""
    return RunDir(config.run_path).train_result.exists()


def _run_config(config: JobConfig) -> ray.train.RunConfig:
    """Where Ray Train keeps checkpoints, which ones, and how often it may restart the workers."""
    return ray.train.RunConfig(
        name="ray_train",
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
    """Bytes of one token's hidden states, once it is clear that every window fits the byte budget."""
    if config.stream.cache_bytes:
        raise ValueError(
            "stream.cache_bytes is planned but not built yet: every epoch recaptures; set 0"
        )
    facts = read_facts(config.target.path)
    boundaries = resolve_boundaries(config.drafter.aux_layers, facts.num_layers)
    itemsize = 2 if config.stream.dtype == "bfloat16" else 4
    token_bytes = bytes_per_token(facts.hidden_size, len(boundaries), itemsize)
    nothing = Ledger(config.train.epochs, len(train)).trained
    windows = plan_run(train, held_out, plan_shape(config), nothing, 0)
    largest = max(window.tokens for window in windows) * token_bytes
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
    packs = captured_packs(windows, state.rank, link)
    record = MetricsLog(config, state.step) if state.rank == 0 else None
    evaluation = Evaluation(state)
    for number, window in enumerate(windows):
        if window.kind == "train":
            metrics = train_step(state, window, packs)
        else:
            metrics = evaluation.add(window, packs)
        ray.get(coordinator.ack.remote(attempt, window.index, state.rank))
        if record is not None and metrics:
            record.write(window.step, metrics | _stream_metrics(coordinator))
            _log_line(state, window, metrics)
        if _checkpoint_due(config, window, windows[number + 1 :]):
            state.save({"eval/expected_acceptance_length": state.expected_acceptance_length})
    if record is not None:
        record.close()


def _checkpoint_due(config: JobConfig, window: Window, rest: list[Window]) -> bool:
    """Every checkpoint_every steps and at the end, but after the evaluation of the same step."""
    if window.step == 0 or (rest and rest[0].step == window.step):
        return False
    return not rest or window.step % config.train.checkpoint_every == 0


def _stream_metrics(coordinator: ActorHandle[Any]) -> dict[str, float]:
    """Bytes in flight and waits, for the record."""
    counters: StreamCounters = ray.get(coordinator.counters.remote())
    return {
        "stream/bytes_in_flight": counters.in_flight,
        "stream/peak_bytes_in_flight": counters.peak_in_flight,
        "stream/captures": counters.captures,
        "stream/bytes_total": counters.delivered_total,
    }


def _log_line(state: TrainState, window: Window, metrics: dict[str, Any]) -> None:
    """One line per step or evaluation, bottleneck visible."""
    if window.kind == "eval":
        log.info(
            "eval after step %d | E[len] %.3f at k=%d | step accuracy %s",
            window.step,
            metrics["eval/expected_acceptance_length"],
            state.config.evaluate.num_speculative_tokens,
            " ".join(f"{a:.3f}" for a in metrics["eval/step_accuracy"]),
        )
        return
    wait = metrics["perf/data_wait_frac"]
    log.info(
        "step %d/%d | loss %.4f | acc %s | lr %.1e | %.0f tok/s | data-wait %.0f %%%s",
        window.step,
        state.total_steps,
        metrics["train/loss"],
        " ".join(f"{a:.2f}" for a in metrics["train/accuracy_k"]),
        metrics["train/lr"],
        metrics["perf/tokens_per_s"],
        100 * wait,
        " (capture is the bottleneck)" if wait > 0.5 else "",
    )


def _resources(config: JobConfig) -> dict[str, float]:
    """What one training worker reserves."""
    resources = {"CPU": config.train.cpus_per_worker}
    if config.train.gpus_per_worker > 0:
        resources["GPU"] = config.train.gpus_per_worker
    return resources


def _result(
    config: JobConfig,
    fit: ray.train.Result,
    counters: StreamCounters,
    samples: int,
    epoch_bytes: int,
) -> dict[str, Any]:
    """Content of train/result.json."""
    assert fit.checkpoint is not None
    best = max(fit.best_checkpoints, key=lambda c: float(c[1]["eval/expected_acceptance_length"]))[
        0
    ]
    saved = json.loads((Path(fit.checkpoint.path) / checkpoint.STATE).read_text())
    last_eval = [
        m for m in runlog.read_metrics(RunDir(config.run_path).metrics) if "eval/step_accuracy" in m
    ]
    trained = Ledger.from_hex(saved["ledger"], config.train.epochs, samples).count
    return {
        "best_checkpoint": best.path,
        "last_checkpoint": fit.checkpoint.path,
        "samples_expected": config.train.epochs * samples,
        "samples_trained": trained,
        "bad_samples": saved["bad_samples"],
        "steps": saved["step"],
        "peak_bytes_in_flight": counters.peak_in_flight,
        "max_bytes_in_flight": config.stream.max_bytes_in_flight,
        "hidden_state_bytes_total": epoch_bytes,
        "captures": counters.captures,
        "expected_acceptance_length": last_eval[-1]["eval/expected_acceptance_length"]
        if last_eval
        else None,
        "expected_by_k": last_eval[-1]["eval/expected_by_k"] if last_eval else None,
    }
