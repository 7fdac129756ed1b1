"""The live depth on real engines: a tiny Llama, and a tiny target in Kimi-K2.5's shape (wrapper, MLA, MoE)."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from eagle3_train.config import JobConfig
from eagle3_train.drafter.losses import LossOptions
from eagle3_train.drafter.rows import PackedBatch, plan_rows
from eagle3_train.preflight.check import failed
from eagle3_train.preflight.live import (
    capture_spec,
    captured_answers,
    live_checks,
    untrained_drafter,
)
from eagle3_train.preflight.nodes import node_versions, object_store
from eagle3_train.stages.preflight import in_cluster, require, run
from eagle3_train.target.facts import read_facts
from tests.tiny import AUX, write_kimi, write_target

pytestmark = pytest.mark.vllm


def job(folder: Path, target: Path, **drafter: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "t",
            "runs_dir": str(folder),
            "target": {"path": str(target)},
            "drafter": {"intermediate_size": 128, **drafter},
            "corpus": {"max_len": 256},
            "engine": {
                "dtype": "float32",
                "max_model_len": 256,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 512,
                "kv_cache_bytes": 64 << 20,
                "enforce_eager": True,
            },
            "stream": {"max_bytes_in_flight": 64 << 20},
            "train": {"dtype": "float32"},
        }
    )


@pytest.mark.ray
def test_a_sound_llama_passes_every_live_check_inside_a_cluster(
    tmp_path: Path, ray_cluster: str
) -> None:
    target = write_target(tmp_path / "target", "llama")
    report = run(job(tmp_path, target, draft_vocab_size=256), "live", tmp_path)
    assert failed(report.checks) == []
    names = [check.name for check in report.depths["live"] if check.verdict == "ok"]
    assert {"versions", "teacher_parity", "chunked_prefill", "prefix_hit", "lossless"} <= set(names)
    assert "draft_parity" in names


@pytest.mark.ray
def test_a_process_that_dies_with_its_engine_is_a_failed_check(
    tmp_path: Path, ray_cluster: str
) -> None:
    def die() -> None:
        os._exit(1)

    (check,) = in_cluster(job(tmp_path, tmp_path), die)
    assert (check.name, check.verdict) == ("engine_start", "fail")


@pytest.mark.ray
def test_every_node_is_asked_for_its_versions(ray_cluster: str) -> None:
    address = ray.get_runtime_context().gcs_address
    start = [str(Path(sys.executable).parent / "ray"), "start", "--address", address, "--block"]
    with subprocess.Popen([*start, "--num-cpus=0"], stdout=subprocess.DEVNULL) as second:
        try:
            deadline = time.monotonic() + 60
            while sum(node["Alive"] for node in ray.nodes()) < 2:
                assert time.monotonic() < deadline, "the second node never joined"
                time.sleep(0.5)
            check = node_versions()
        finally:
            second.terminate()
    room = int(ray.cluster_resources()["object_store_memory"])
    assert object_store(room).verdict == "ok"
    assert object_store(2 * room).verdict == "fail"
    assert check.verdict == "ok"
    assert check.reason.startswith("2 nodes: python 3")


@pytest.mark.ray
def test_a_job_whose_budget_would_spill_is_refused(tmp_path: Path, ray_cluster: str) -> None:
    config = job(tmp_path, write_target(tmp_path / "target", "llama"))
    stream = config.stream.model_copy(update={"max_bytes_in_flight": 1 << 40})
    with pytest.raises(ValueError, match=r"object_store: .* bytes in the cluster's object store"):
        require(config.model_copy(update={"stream": stream}))


@pytest.fixture(scope="module")
def kimi_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi(tmp_path_factory.mktemp("kimi"), "cpu")


@pytest.fixture
def kimi(kimi_target: Path, tmp_path: Path) -> JobConfig:
    """A job on the Kimi-shaped target."""
    return job(tmp_path, kimi_target, attention="mla", aux_layers=AUX["mla"], draft_vocab_size=256)


def test_a_kimi_shaped_target_with_an_mla_drafter_passes(kimi: JobConfig) -> None:
    checks = live_checks(kimi, read_facts(kimi.target.path))
    assert failed(checks) == []
    names = [check.name for check in checks if check.verdict == "ok"]
    assert {"teacher_parity", "lossless", "draft_parity"} <= set(names)


def test_a_drafter_learns_from_a_kimi_shaped_target(kimi: JobConfig) -> None:
    facts = read_facts(kimi.target.path)
    answers, _, checks = captured_answers(kimi, capture_spec(kimi, facts))
    assert failed(checks) == []
    drafter, target = untrained_drafter(kimi, facts)
    masks = [np.arange(len(answer.ids)) >= answer.prompt_tokens for answer in answers]
    rows = plan_rows([np.array(answer.ids) for answer in answers], masks, ttt_steps=3)
    states = torch.cat([answer.states for answer in answers])
    batch = PackedBatch(rows, states[:, :-1].flatten(1), states[:, -1])
    optimizer, options = torch.optim.AdamW(drafter.parameters(), lr=3e-3), LossOptions("reverse_kl")
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        # A divergence: a random target's own entropy would hide the progress in a cross-entropy.
        loss = drafter(batch, target, options, float(rows.supervised_starts)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
