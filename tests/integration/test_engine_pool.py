"""Replicas on a Ray cluster: leased, replaced when killed, delivering states that outlive them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayActorError

from eagle3_train.engines.launch import EngineError
from eagle3_train.engines.pool import engine_pool
from eagle3_train.engines.spec import EngineSpec, Request
from tests import tiny

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(240)]


class Keeper:
    """Stands in for the stream's coordinator: calls replicas and so owns what they return."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._packs: dict[str, Any] = {}

    def capture(self, key: str, lengths: tuple[int, ...]) -> tuple[int, int, dict[int, str]]:
        """(replica, bytes, bad samples)."""
        samples = [tiny.token_ids(length, seed) for seed, length in enumerate(lengths)]
        replica, handle = ray.get(self._pool.lease.remote(sum(lengths)))
        try:
            self._packs[key], meta = handle.capture.options(num_returns=2).remote(samples)
            nbytes, bad = ray.get(meta)
        finally:
            ray.get(self._pool.release.remote(replica, sum(lengths)))
        return replica, nbytes, bad

    def take(self, key: str) -> list[Any]:
        return [self._packs[key]]


def capture_spec(target: Path, **engine: Any) -> EngineSpec:
    return tiny.engine_spec(target, "capture", (2, 4, 5, 8), capture_dtype="bfloat16", **engine)


@pytest.fixture(scope="module")
def pool(ray_cluster: None, tiny_models: Path) -> Iterator[Any]:
    values = {"replicas": 2, "cpus": 1, "request_timeout_s": 60, "max_replacements": 2}
    with engine_pool(capture_spec(tiny_models / "llama", **values)) as handle:
        yield handle
        before = ray.available_resources()["CPU"]
    assert eventually(lambda: ray.available_resources()["CPU"] == before + 2)


@pytest.fixture(scope="module")
def keeper(pool: Any) -> Any:
    return ray.remote(Keeper).options(num_cpus=0).remote(pool)


def eventually(condition: Callable[[], bool], timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def test_leases_go_to_the_least_loaded_replica(pool: Any) -> None:
    first, _ = ray.get(pool.lease.remote(100))
    second, _ = ray.get(pool.lease.remote(10))
    third, _ = ray.get(pool.lease.remote(10))
    assert first != second == third
    for replica, cost in ((first, 100), (second, 10), (third, 10)):
        ray.get(pool.release.remote(replica, cost))


def test_a_pack_is_one_array_whose_bad_samples_are_zero_and_named(keeper: Any) -> None:
    # 300 tokens exceed the engine's 256
    _, nbytes, bad = ray.get(keeper.capture.remote("mixed", (20, 300, 31)))
    array = ray.get(ray.get(keeper.take.remote("mixed"))[0])
    assert array.shape == (351, 4 * tiny.HIDDEN)
    assert array.dtype == np.int16
    assert nbytes == array.nbytes
    assert list(bad) == [1]
    assert not array[20:320].any()
    states = torch.from_numpy(array.copy()).view(torch.bfloat16)
    assert states.isfinite().all()
    assert (states[:20].abs().amax(1) > 0).all()
    assert (states[320:].abs().amax(1) > 0).all()


def test_a_refused_request_is_an_answer_with_a_reason_and_harms_nobody(pool: Any) -> None:
    _, handle = ray.get(pool.lease.remote(0))
    good = Request("good", tuple(tiny.token_ids(9, 1).tolist()), 5, ignore_eos=True)
    bad = Request("bad", tuple(tiny.token_ids(400, 1).tolist()), 5)
    refused, answered = ray.get(handle.generate.remote([bad, good]))
    assert (refused.id, refused.finish_reason, refused.output_ids) == ("bad", "error", ())
    assert "256" in refused.text
    assert (answered.id, len(answered.output_ids)) == ("good", 5)


def test_a_killed_replica_is_replaced_while_the_other_serves_and_its_states_survive(
    pool: Any, keeper: Any
) -> None:
    victim, _, _ = ray.get(keeper.capture.remote("before", (40,)))
    handle = ray.get(pool.handles.remote())[victim]
    os.kill(ray.get(handle.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    with pytest.raises(RayActorError):
        ray.get(handle.facts.remote())
    ray.get(pool.failed.remote(victim))
    ray.get(pool.failed.remote(victim))  # a second caller reports the same death
    other, _, _ = ray.get(keeper.capture.remote("after", (40,)))
    assert other != victim
    assert ray.get(pool.replacements.remote()) == 1
    assert eventually(lambda: len(ray.get(pool.handles.remote())) == 2, 90)
    survived = ray.get(ray.get(keeper.take.remote("before"))[0])
    repeated = ray.get(ray.get(keeper.take.remote("after"))[0])
    np.testing.assert_array_equal(survived, repeated)


def test_a_cluster_that_is_too_small_is_named_at_once(ray_cluster: None, tiny_models: Path) -> None:
    started = time.monotonic()
    pool = engine_pool(capture_spec(tiny_models / "llama", replicas=50, cpus=2))
    with pytest.raises(EngineError, match="need 100 CPU, the cluster has 4"), pool:
        pass
    assert time.monotonic() - started < 30


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(
    ray_cluster: None, tiny_models: Path
) -> None:
    before = ray.available_resources()["CPU"]
    spec = tiny.engine_spec(tiny_models / "llama", "capture", (2, 4))
    with pytest.raises(EngineError, match="boundaries that end with L=8"), engine_pool(spec):
        pass
    assert eventually(lambda: ray.available_resources()["CPU"] == before)
