"""Training survives what dies under it: every sample is trained exactly as often as planned."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from benchmarks.stream import StorePeak
from eagle3_train.config import JobConfig
from eagle3_train.corpus.table import write_shard
from eagle3_train.engines.pool import engine_pool, spec_for
from eagle3_train.records import Sample
from eagle3_train.rundir import RunDir
from eagle3_train.runlog import JobError, read_metrics
from eagle3_train.stages import train
from eagle3_train.target.facts import read_facts, resolve_boundaries
from tests.integration.test_pipeline import tiny_config
from tests.tiny import token_ids

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(400)]


def job(folder: Path, name: str, **train_settings: Any) -> JobConfig:
    """A run whose rollout is already there: 48 samples of random tokens."""
    raw = tiny_config(folder, name)
    raw["train"] |= {"checkpoint_every": 2, "eval_every": 6} | train_settings
    config = JobConfig.model_validate(raw)
    samples = []
    for number in range(48):
        ids = token_ids(30 + number % 40, number)
        mask = np.arange(len(ids)) >= 12
        samples.append(Sample(f"{number:04x}", "test", ids, mask, "stop"))
    write_shard(RunDir(config.run_path).samples, samples, ["null"] * len(samples))
    return config


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ray_cluster: str) -> Iterator[Any]:
    config = job(tmp_path_factory.mktemp("pool"), "pool")
    boundaries = resolve_boundaries(None, read_facts(config.target.path).num_layers)
    with engine_pool(spec_for(config, "capture", boundaries)) as handle:
        yield handle


def losses(config: JobConfig) -> dict[int, float]:
    lines = read_metrics(RunDir(config.run_path).metrics)
    return {m["step"]: m["train/loss"] for m in lines if "train/loss" in m}


def wait_for_step(config: JobConfig, step: int, running: threading.Thread) -> None:
    while max(losses(config), default=0) < step:
        assert running.is_alive(), "training ended before the blow"
        time.sleep(0.05)


def kill_train_worker() -> None:
    """SIGKILL one Ray Train worker process."""
    for process in psutil.process_iter(["cmdline"]):
        if "ray::RayTrainWorker" in " ".join(process.info["cmdline"] or []):
            os.kill(process.pid, signal.SIGKILL)
            return
    raise AssertionError("no training worker to kill")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, pool: Any) -> tuple[JobConfig, Any]:
    config = job(tmp_path_factory.mktemp("undisturbed"), "undisturbed")
    with StorePeak() as store:
        result = train.run(config, pool)
    return config, result | {"store_peak_bytes": store.nbytes}


def test_every_pair_is_trained_once_and_bytes_stay_within_the_budget(
    undisturbed: tuple[JobConfig, Any],
) -> None:
    config, result = undisturbed
    assert result["samples_trained"] == result["samples_expected"] > 0
    assert result["bad_samples"] == 0
    assert 0 < result["peak_bytes_in_flight"] <= config.stream.max_bytes_in_flight
    beside = 150_000  # Ray Data's rows, the samples, the job
    assert result["store_peak_bytes"] <= config.stream.max_bytes_in_flight + beside


def test_a_killed_worker_and_a_killed_engine_change_neither_counts_nor_losses(
    undisturbed: tuple[JobConfig, Any], pool: Any, tmp_path: Path
) -> None:
    reference, expected = undisturbed
    config = job(tmp_path, "killed")
    results: list[Any] = []
    running = threading.Thread(target=lambda: results.append(train.run(config, pool)))
    running.start()
    wait_for_step(config, 4, running)
    kill_train_worker()
    wait_for_step(config, 7, running)
    replica = next(iter(ray.get(pool.handles.remote()).values()))
    os.kill(ray.get(replica.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    running.join()
    (result,) = results
    assert result["samples_trained"] == result["samples_expected"] == expected["samples_expected"]
    assert ray.get(pool.replacements.remote()) == 1
    calm, hit = losses(reference), losses(config)
    assert list(hit) == list(calm), "steps are recorded once, in order"
    np.testing.assert_allclose(list(hit.values()), list(calm.values()), rtol=1e-4)


def test_what_a_worker_fails_of_is_one_line_and_an_unregistered_checkpoint_goes(
    undisturbed: tuple[JobConfig, Any], pool: Any, tmp_path: Path
) -> None:
    config, _ = undisturbed
    raw = config.model_dump(mode="json") | {"runs_dir": str(tmp_path)}
    raw["train"] |= {"max_failures": 0}
    config = JobConfig.model_validate(raw)
    paths = RunDir(config.run_path)
    shutil.copytree(undisturbed[0].run_path, paths.root)
    paths.train_result.unlink()
    registered = set(paths.checkpoints.glob("checkpoint_*/"))
    for folder in registered:
        (folder / ".metadata").unlink()
    unregistered = paths.checkpoints / "checkpoint_2026-12-02_01-02-03.000004"
    unregistered.mkdir()
    with pytest.raises(JobError, match="etadata") as failed:
        train.run(config, pool)
    assert "\n" not in str(failed.value)
    assert str(paths.log("driver", 0)) in str(failed.value)
    assert set(paths.checkpoints.glob("checkpoint_*/")) == registered


def test_a_list_of_checkpoints_cut_by_a_kill_costs_the_last_checkpoint_alone(
    pool: Any, tmp_path: Path
) -> None:
    config = job(tmp_path, "cut", keep_checkpoints=50)
    paths, steps = RunDir(config.run_path), train.run(config, pool)["steps"]
    paths.train_result.unlink()
    listed = paths.registered.read_text()
    paths.registered.write_text(listed[: len(listed) // 2])
    result = train.run(config, pool)
    assert result["steps"] == steps
    assert result["samples_trained"] == result["samples_expected"]
    json.loads(paths.registered.read_text())
    paths.registered.write_text("")
    paths.registered_before.unlink()
    with pytest.raises(ValueError, match="restore it"):
        train.check(config)


def test_a_run_that_goes_on_with_other_epochs_is_refused_before_anything_starts(
    undisturbed: tuple[JobConfig, Any],
) -> None:
    config, _ = undisturbed
    more = config.train.model_copy(update={"epochs": 4})
    with pytest.raises(ValueError, match="ledger does not hold 4 epochs"):
        train.check(config.model_copy(update={"train": more}))


def test_one_worker_learns_what_two_learn(
    undisturbed: tuple[JobConfig, Any], pool: Any, tmp_path: Path
) -> None:
    reference, _ = undisturbed
    config = job(tmp_path, "alone", workers=1, accumulation=2)
    train.run(config, pool)
    calm, alone = losses(reference), losses(config)
    np.testing.assert_allclose(list(alone.values()), list(calm.values()), rtol=1e-3)


def test_training_that_has_stalled_stops_on_every_rank_with_a_checkpoint(
    pool: Any, tmp_path: Path
) -> None:
    config = job(tmp_path, "stalled", lr=1e-12, eval_every=2, early_stop_evals=2)
    result = train.run(config, pool)
    assert (
        max(losses(config)) == result["steps"] == 4
    )  # the first evaluation is a gain over nothing
    assert 0 < result["samples_trained"] < result["samples_expected"]


def test_fewer_samples_than_workers_is_refused_at_once(pool: Any, tmp_path: Path) -> None:
    raw = tiny_config(tmp_path, "few")
    raw["corpus"]["held_out_fraction"] = 0.0
    config = JobConfig.model_validate(raw)
    ids = token_ids(30, 1)
    sample = Sample("0001", "test", ids, np.arange(30) >= 12, "stop")
    write_shard(RunDir(config.run_path).samples, [sample], ["null"])
    with pytest.raises(ValueError, match="at least 2 samples"):
        train.run(config, pool)


def test_a_budget_below_one_window_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    config = job(tmp_path, "small")
    train.check(config)
    small = config.stream.model_copy(update={"max_bytes_in_flight": 1000})
    with pytest.raises(
        ValueError, match=r"less than the largest optimiser window, [0-9]{5,} bytes"
    ):
        train.check(config.model_copy(update={"stream": small}))


def test_the_result_names_checkpoints_that_exist(undisturbed: tuple[JobConfig, Any]) -> None:
    _, result = undisturbed
    for key in ("best_checkpoint", "last_checkpoint"):
        state = json.loads((Path(result[key]) / "state.json").read_text())
        assert state["step"] > 0
