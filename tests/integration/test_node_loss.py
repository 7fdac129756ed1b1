"""A machine that dies in the middle of a run takes an engine and a part of the cache with it, and nothing else."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from eagle3_train.config import JobConfig
from eagle3_train.engines.pool import close_pool, spec_for, start_pool
from eagle3_train.rundir import RunDir
from eagle3_train.runlog import read_metrics
from eagle3_train.stages import train
from tests.integration.test_stream import write_run

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(400)]

Node = subprocess.Popen[bytes]


@pytest.fixture
def second_node(ray_cluster: str) -> Iterator[Node]:
    """A raylet with three CPUs of its own."""
    address = ray.get_runtime_context().gcs_address
    start = [str(Path(sys.executable).parent / "ray"), "start", "--address", address, "--block"]
    sizes = ["--num-cpus=3", "--object-store-memory=100000000"]
    alive = sum(node["Alive"] for node in ray.nodes())
    node = subprocess.Popen([*start, *sizes], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) == alive:
        assert time.monotonic() < deadline, "the second node never joined"
        time.sleep(0.5)
    yield node
    lose(node)


def lose(node: Node) -> None:
    """SIGKILL everything that runs there: raylet, agents, actors."""
    if node.poll() is None:
        whole = psutil.Process(node.pid)
        for process in [*whole.children(recursive=True), whole]:
            process.kill()
        node.wait()


def test_a_dead_node_costs_its_engine_and_its_cached_samples_only(
    second_node: Node, tmp_path: Path
) -> None:
    raw = write_run(tmp_path, "two-nodes", cache_share=0.6, count=100).model_dump(mode="json")
    raw["engine"] |= {"replicas": 2, "cpus": 3}  # one a node
    raw["train"] |= {"checkpoint_every": 5}
    raw["stream"] |= {"max_bytes_in_flight": 700_000}
    config = JobConfig.model_validate(raw)
    pool = start_pool(spec_for(config, "capture", (2, 4, 5, 8)), config.engine)
    results: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: results.append(train.run(config, pool)))
    running.start()
    try:
        while not any(m["step"] >= 12 for m in read_metrics(RunDir(config.run_path).metrics)):
            assert running.is_alive(), "training ended before the blow"
            time.sleep(0.1)
        lose(second_node)
        running.join(timeout=250)
        assert not running.is_alive(), "training hangs"
    finally:
        close_pool(pool)
    (result,) = results
    assert result["samples_trained"] == result["samples_expected"] == 500
    assert result["peak_bytes_in_flight"] <= config.stream.max_bytes_in_flight
    assert result["captures"] - result["captures_planned"] == result["recaptures"] > 0
