"""Two nodes: one that dies in the middle of a run, and one whose GPUs an engine shares with trainers."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from eagle3_train.config import JobConfig
from eagle3_train.engines.pool import GpuShare, engine_pool, spec_for
from eagle3_train.rundir import RunDir
from eagle3_train.runlog import read_metrics
from eagle3_train.stages import train
from tests import tiny
from tests.integration.test_stream import write_run

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(400)]

Node = subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def second_node(ray_cluster: str) -> Iterator[Node]:
    """A raylet with three CPUs and two (logical) GPUs of its own."""
    address = ray.get_runtime_context().gcs_address
    start = [str(Path(sys.executable).parent / "ray"), "start", "--address", address, "--block"]
    sizes = ["--num-cpus=3", "--num-gpus=2", "--object-store-memory=100000000"]
    before = alive()
    node = subprocess.Popen([*start, *sizes], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: alive() > before, "the second node never joined")
    yield node
    lose(node)
    wait_until(
        lambda: alive() == before, "Ray has not noticed"
    )  # it would still place actors there


def alive() -> int:
    """Nodes that Ray believes to live."""
    return sum(node["Alive"] for node in ray.nodes())


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait up to a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.5)


def lose(node: Node) -> None:
    """SIGKILL everything that runs there: raylet, agents, actors."""
    if node.poll() is None:
        whole = psutil.Process(node.pid)
        for process in [*whole.children(recursive=True), whole]:
            process.kill()
        node.wait()


def test_an_engine_shares_each_of_its_gpus_with_a_trainer(
    second_node: Node, tiny_models: Path
) -> None:
    values = {"tensor_parallel": 2, "gpus_per_worker": 0.7, "cpus": 1}
    spec = tiny.engine_spec(tiny_models / "llama", "capture", (2, 8), **values)
    with engine_pool(spec) as pool:
        (engine,) = ray.get(pool.handles.remote()).values()
        shown = ray.get(engine.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"]))
        trainers = [ray.remote(GpuShare).options(num_cpus=0, num_gpus=0.3).remote() for _ in "ab"]
        gpus = [gpu for _, gpu in ray.get([t.where.remote() for t in trainers], timeout=60)]
        assert sorted(shown.split(",")) == sorted(gpus) == ["0", "1"]
    del trainers
    wait_until(lambda: ray.available_resources().get("GPU") == 2, "shares were kept")


def test_a_dead_node_costs_its_engine_and_its_cached_samples_only(
    second_node: Node, tmp_path: Path
) -> None:
    raw = write_run(tmp_path, "two-nodes", cache_share=0.6, count=100).model_dump(mode="json")
    raw["engine"] |= {"replicas": 2, "cpus": 3}  # one a node
    raw["train"] |= {"checkpoint_every": 5}
    raw["stream"] |= {"max_bytes_in_flight": 700_000}
    config = JobConfig.model_validate(raw)
    results: list[dict[str, Any]] = []
    with engine_pool(spec_for(config, "capture", (2, 4, 5, 8))) as pool:
        running = threading.Thread(target=lambda: results.append(train.run(config, pool)))
        running.start()
        while not any(m["step"] >= 12 for m in read_metrics(RunDir(config.run_path).metrics)):
            assert running.is_alive(), "training ended before the blow"
            time.sleep(0.1)
        lose(second_node)
        running.join(timeout=250)
        assert not running.is_alive(), "training hangs"
    (result,) = results
    assert result["samples_trained"] == result["samples_expected"] == 500
    assert result["peak_bytes_in_flight"] <= config.stream.max_bytes_in_flight
    assert result["captures"] - result["captures_planned"] == result["recaptures"] > 0
