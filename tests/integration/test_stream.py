"""The stream on a Ray cluster: captures by the formula, damage repaired, bytes bounded, nothing left behind."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import ray
import yaml
from ray.util.state import list_actors

from benchmarks.stream import StorePeak
from eagle3_train.config import JobConfig
from eagle3_train.corpus.table import write_shard
from eagle3_train.engines.pool import engine_pool, spec_for
from eagle3_train.records import Sample
from eagle3_train.rundir import RunDir
from eagle3_train.runlog import read_metrics
from eagle3_train.stages import train
from eagle3_train.stream.cache import HEADER_BYTES, pin, planned_captures
from eagle3_train.stream.coordinator import coordinating
from eagle3_train.stream.flight import StreamCounters
from eagle3_train.stream.ledger import Ledger
from eagle3_train.stream.meter import StreamMeter
from eagle3_train.stream.pipeline import StreamLink, captured_packs
from eagle3_train.stream.plan import PlanShape, Window, plan_run
from eagle3_train.stream.store import Spill, store_stats
from tests.integration.test_pipeline import ROOT, tiny_config
from tests.tiny import HIDDEN, token_ids

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(300)]

TOKEN_BYTES = 4 * HIDDEN * 2
SHAPE = PlanShape(ranks=1, accumulation=2, tokens_per_pack=256, epochs=5, seed=1, eval_every=1000)
BUDGET = 4 * 2 * 256 * TOKEN_BYTES


def samples(count: int) -> list[Sample]:
    made = []
    for number in range(count):
        ids = token_ids(30 + number % 40, number)
        made.append(Sample(f"{number:04x}", "test", ids, np.arange(len(ids)) >= 12, "stop"))
    return made


def config_of(folder: Path, name: str) -> JobConfig:
    raw = tiny_config(folder, name)
    raw["train"] |= {"epochs": 5, "workers": 1, "accumulation": 1, "eval_every": 40}
    raw["train"] |= {"checkpoint_every": 1000}
    raw["log"] = {"wandb_mode": "disabled"}  # wandb leaves folders of its own behind
    return JobConfig.model_validate(raw)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ray_cluster: str) -> Iterator[Any]:
    config = config_of(tmp_path_factory.mktemp("pool"), "pool")
    with engine_pool(spec_for(config, "capture", (2, 4, 5, 8))) as handle:
        yield handle


class Reader:
    """A consumer without a drafter: keeps the states of every (epoch, sample) it is given."""

    def __init__(
        self,
        pool: Any,
        train_samples: list[Sample],
        cache_bytes: int = 0,
        shape: PlanShape = SHAPE,
        budget: int = BUDGET,
    ) -> None:
        self.samples = train_samples
        self.shape, self.budget = shape, budget
        self.pinned = pin(train_samples, TOKEN_BYTES, cache_bytes, 0)
        self.ledger = Ledger(shape.epochs, len(train_samples))
        self.states: dict[tuple[int, int], npt.NDArray[np.int16]] = {}
        self._running = coordinating(pool, train_samples, self.pinned, None, budget, 1, 3)
        self.coordinator: Any = self._running.__enter__()

    def read(self, stop: Callable[[Window], bool] = lambda _: False) -> None:
        """One attempt: train what the ledger lacks, until `stop`, which may also do some harm."""
        attempt = ray.get(self.coordinator.begin.remote())
        windows = plan_run(self.samples, [], self.shape, self.ledger.trained, 0)
        packs = captured_packs(windows, 0, StreamLink(self.coordinator, attempt, TOKEN_BYTES, 4))
        for window in windows:
            for _ in window.packs:
                self._keep(next(packs))
            held = ray.get(self.coordinator.counters.remote())
            assert 0 < held.in_flight <= held.reserved <= self.budget
            self.ledger.mark(entry for pack in window.packs for entry in pack.entries)
            ray.get(self.coordinator.ack.remote(attempt, window.index, 0))
            if stop(window):
                return

    def _keep(self, captured: Any) -> None:
        assert captured.bad == {}
        for states, indices in captured.parts:
            position = 0
            for index in indices:
                epoch, row = captured.pack.entries[index]
                length = self.samples[row].captured_tokens
                self.states[epoch, row] = states[position : position + length].copy()
                position += length

    def close(self) -> StreamCounters:
        """End the actors; check every epoch's states against the first epoch's."""
        counters: StreamCounters = ray.get(self.coordinator.counters.remote())
        self._running.__exit__(None, None, None)
        assert self.ledger.trained.all()
        for (_, row), states in self.states.items():
            np.testing.assert_allclose(
                as_float(states), as_float(self.states[0, row]), rtol=2e-2, atol=2e-2
            )
        assert counters.in_flight == counters.reserved == 0
        assert 0 < counters.peak_in_flight <= self.budget
        return counters


def as_float(halves: npt.NDArray[np.int16]) -> npt.NDArray[np.float32]:
    """bf16, viewed as int16, as float32."""
    return (halves.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def cache_for(train_samples: list[Sample], share: float) -> int:
    return int(share * sum(s.captured_tokens * TOKEN_BYTES + HEADER_BYTES for s in train_samples))


@pytest.mark.parametrize("share", [0.0, 0.35, 1.0])
def test_captures_equal_the_formula_for_every_cache_size(pool: Any, share: float) -> None:
    reader = Reader(pool, samples(20), cache_for(samples(20), share))
    reader.read()
    counters = reader.close()
    assert counters.captures == planned_captures(reader.pinned, SHAPE.epochs)
    assert counters.cache_hits == (SHAPE.epochs - 1) * reader.pinned.sum()
    assert counters.recaptures == 0


def test_what_rays_store_holds_by_its_own_count_stays_within_the_budget(pool: Any) -> None:
    shape = replace(SHAPE, accumulation=1, tokens_per_pack=1024)
    reader = Reader(pool, samples(200), shape=shape, budget=2 * 1024 * TOKEN_BYTES)
    with StorePeak() as store:
        reader.read()
    packs = len(plan_run(reader.samples, [], shape, np.zeros((5, 200), dtype=np.bool_), 0))
    reader.close()
    rows = packs * 4096  # Ray Data's blocks, one a pack: names and counts
    assert 1024 * TOKEN_BYTES < store.nbytes <= reader.budget + rows < 3 * 1024 * TOKEN_BYTES


def test_bytes_that_the_store_writes_to_disk_are_counted_and_warned_of(
    pool: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("eagle3_train"), "propagate", True)
    reader, spill = Reader(pool, samples(20)), Spill()
    ray.get(reader.coordinator.counters.remote())  # it has started
    held = [
        ray.put(np.zeros(64 << 20, dtype=np.uint8)) for _ in range(10)
    ]  # the store has room for 7
    assert spill.read() > 64 << 20
    del held
    assert ray.get(reader.coordinator.spilled.remote()) == spill.nbytes
    counters = ray.get(reader.coordinator.counters.remote())
    assert StreamMeter().read(counters)["stream/spilled_bytes"] == spill.nbytes
    for remedy in ("object_store_memory", "stream.max_bytes_in_flight"):
        assert remedy in caplog.text
    reader.read()
    reader.close()


def shard_file() -> tuple[Path, int]:
    """The cache's nameless file, as its process sees it, and its size."""
    for process in psutil.process_iter(["cmdline", "pid"]):
        if "ray::ShardFile" in " ".join(process.info["cmdline"] or []):
            for link in Path(f"/proc/{process.info['pid']}/fd").iterdir():
                name = str(link.readlink())
                if "(deleted)" in name and tempfile.gettempdir() in name:
                    return link, link.stat().st_size
    raise AssertionError("no process holds a cache")


def test_a_damaged_cache_and_a_lost_worker_group_cost_recaptures_and_nothing_else(
    pool: Any,
) -> None:
    reader = Reader(pool, samples(20), cache_for(samples(20), 0.5))

    def damage(window: Window) -> bool:
        if all(epoch > 0 for pack in window.packs for epoch, _ in pack.entries):
            link, size = shard_file()
            with link.open("r+b") as disk:
                disk.seek(size // 3)
                disk.write(b"\xff" * (size // 4))
            return True
        return False

    reader.read(stop=damage)
    hits = ray.get(reader.coordinator.counters.remote()).cache_hits
    reader.read()  # a new worker group: what was in flight for the old one is captured again
    counters = reader.close()
    assert counters.captures - counters.recaptures == planned_captures(reader.pinned, SHAPE.epochs)
    assert counters.recaptures > 0
    assert counters.cache_hits > hits, "the cache outlives the worker group"


def left_on_disk() -> set[str]:
    """Names outside the run that a run could leave; Ray's own session and pytest's folders are theirs."""
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    names = {entry.name for folder in folders for entry in folder.iterdir()}
    return {name for name in names if not name.startswith(("ray", "pytest-of", "bash_jobs"))}


def alive() -> list[str]:
    """Classes of the actors that run on this cluster, whatever other one an earlier process announced."""
    actors = list_actors(ray.get_runtime_context().gcs_address, limit=1000)
    return sorted(actor.class_name for actor in actors if actor.state == "ALIVE")


def write_run(folder: Path, name: str, cache_share: float, count: int = 200) -> JobConfig:
    """A run with `count` training samples, a budget of 1/20 of their bytes and a part of them cached."""
    raw = config_of(folder, name).model_dump(mode="json")
    made = samples(count)
    total = sum(s.captured_tokens for s in made) * TOKEN_BYTES
    raw["corpus"]["held_out_fraction"] = 0.0
    raw["stream"] |= {"max_bytes_in_flight": total // 20, "cache_bytes": int(cache_share * total)}
    raw["stream"] |= {"cache_dir": str(folder), "tokens_per_pack": 448}
    config = JobConfig.model_validate(raw)
    write_shard(RunDir(config.run_path).samples, made, ["null"] * len(made))
    return config


def test_five_epochs_over_200_samples_with_a_twentieth_of_their_bytes(
    pool: Any, tmp_path: Path
) -> None:
    config = write_run(tmp_path, "five", cache_share=0.4)
    before = left_on_disk()
    result = train.run(config, pool)
    assert result["samples_trained"] == result["samples_expected"] == 1000
    assert result["captures"] == result["captures_planned"]
    assert 200 < result["captures"] < 1000
    assert result["peak_bytes_in_flight"] <= config.stream.max_bytes_in_flight
    assert 20 * config.stream.max_bytes_in_flight <= result["hidden_state_bytes_total"]
    assert result["spilled_bytes"] == 0
    assert left_on_disk() == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"target", "prompts.jsonl", "runs"}


def test_replay_in_fp8_trains_every_pair_with_fewer_captures(pool: Any, tmp_path: Path) -> None:
    raw = write_run(tmp_path, "replayed", cache_share=0.0, count=60).model_dump(mode="json")
    raw["train"] |= {"epochs": 4, "eval_every": 4, "checkpoint_every": 4, "workers": 2, "fp8": True}
    raw["stream"] |= {"replay": 4, "max_bytes_in_flight": 300_000, "dtype": "float8_e4m3fn"}
    config = JobConfig.model_validate(raw)
    result = train.run(config, pool)
    assert result["samples_trained"] == 240
    assert result["captures"] == result["captures_planned"] == 60
    lines = read_metrics(RunDir(config.run_path).metrics)
    losses = [m["train/loss"] for m in lines if "train/loss" in m]
    assert len(losses) == result["steps"]
    assert losses[-1] < losses[0]


def test_an_interrupted_job_leaves_nothing_behind(pool: Any, tmp_path: Path) -> None:
    config = write_run(tmp_path, "interrupted", cache_share=1.0)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    before, used, actors = left_on_disk(), store_stats().object_store_bytes_used, alive()
    groups = len(ray.util.placement_group_table())
    job = subprocess.Popen(
        [sys.executable, "ray_jobs/train.py", "-c", str(file)],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not any(m["step"] >= 3 for m in read_metrics(RunDir(config.run_path).metrics)):
        assert job.poll() is None, "the job ended before it was interrupted"
        time.sleep(0.1)
    assert "ShardFile" in alive()
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=90) != 0
    deadline = time.monotonic() + 30  # Ray ends a driver's actors a moment after the driver
    while alive() != actors and time.monotonic() < deadline:
        time.sleep(0.5)
    assert alive() == actors
    table = ray.util.placement_group_table().values()
    assert len([g for g in table if g["state"] != "REMOVED"]) <= groups
    assert store_stats().object_store_bytes_used <= used
    assert left_on_disk() == before
    assert {e.name for e in tmp_path.iterdir()} == {"target", "prompts.jsonl", "runs", "job.yaml"}
