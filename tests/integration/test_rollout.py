"""A rollout on a Ray cluster: killed, robbed of a replica, resumed - and every prompt answered exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from eagle3_train.config import JobConfig
from eagle3_train.corpus.table import read_samples
from eagle3_train.engines.pool import engine_pool, spec_for
from eagle3_train.rundir import RunDir
from eagle3_train.stages import rollout
from tests import tiny

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(280)]

PROMPTS = 160
BOUNDARIES = (2, 4, 5, 8)
KILLED_JOB = """
import sys
import ray
from eagle3_train.config import JobConfig
from eagle3_train.engines.pool import engine_pool, spec_for
from eagle3_train.stages import rollout

config = JobConfig.model_validate_json(sys.argv[1])
ray.init(address="auto", log_to_driver=False)
with engine_pool(spec_for(config, "capture", (2, 4, 5, 8))) as pool:
    rollout.run(config, pool)
"""


def config(folder: Path, target: Path, name: str, **sections: dict[str, Any]) -> JobConfig:
    content: dict[str, Any] = {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "target": {"path": str(target)},
        "corpus": {"sources": [str(folder / "prompts.jsonl")], "max_len": 96},
        "rollout": {"sampling": {"max_new_tokens": 40}, "shard_rows": 8},
        "engine": {
            "replicas": 2,
            "cpus": 0.5,
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "kv_cache_bytes": 32 << 20,
            "enforce_eager": True,
            "request_timeout_s": 60,
        },
        "stream": {"max_bytes_in_flight": 1_000_000, "tokens_per_pack": 128},
    }
    for section, values in sections.items():
        content[section] |= values
    return JobConfig.model_validate(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rollout")
    rows = [
        {"messages": [{"role": "user", "content": f"say {i * 37 % 1009}"}]} for i in range(PROMPTS)
    ]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def pool(ray_cluster: None, tiny_models: Path, folder: Path) -> Iterator[Any]:
    job = config(folder, tiny_models / "llama", "pool")
    with engine_pool(spec_for(job, "capture", BOUNDARIES)) as handle:
        yield handle


def kill_driver_after_first_shards(job: JobConfig) -> None:
    """Run the stage in a driver of its own and kill it between two commits."""
    driver = subprocess.Popen([sys.executable, "-c", KILLED_JOB, job.model_dump_json()])
    deadline = time.monotonic() + 150
    while len(list(RunDir(job.run_path).samples.glob("*.parquet"))) < 3:
        assert driver.poll() is None, "the driver ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()


def test_a_killed_rollout_resumes_and_answers_every_prompt_exactly_once(
    pool: Any, folder: Path, tiny_models: Path
) -> None:
    job = config(folder, tiny_models / "llama", "killed")
    kill_driver_after_first_shards(job)
    before = {sample.id: sample for sample in read_samples(RunDir(job.run_path).samples)}
    assert 24 <= len(before) < PROMPTS
    assert not rollout.is_complete(job)

    victim = next(iter(ray.get(pool.handles.remote()).values()))
    pid = ray.get(victim.__ray_call__.remote(lambda _: os.getpid()))
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {pid}"])
    counts = rollout.run(job, pool)
    killer.wait()

    samples = read_samples(RunDir(job.run_path).samples)  # refuses a repeated id
    assert len(samples) == PROMPTS == counts["prompts"] == counts["answered"]
    assert counts["failed"] == {}
    assert ray.get(pool.replacements.remote()) == 1
    for sample in samples:
        answer = sample.input_ids[sample.loss_mask]
        assert sample.loss_mask[sample.prompt_tokens :].all()
        assert sample.finish_reason == ("stop" if answer[-1] == tiny.EOS else "length")
        if sample.id in before:
            np.testing.assert_array_equal(sample.input_ids, before[sample.id].input_ids)
    assert rollout.is_complete(job)
    assert rollout.run(job, pool) == json.loads(RunDir(job.run_path).rollout_state.read_text())
    prompts = Path(job.corpus.sources[0])
    away = prompts.rename(prompts.with_suffix(".away"))
    rollout.check(job)  # answers outlive the data they were asked with
    away.rename(prompts)


def test_settings_that_changed_under_committed_answers_are_refused(
    pool: Any, folder: Path, tiny_models: Path
) -> None:
    job = config(folder, tiny_models / "llama", "killed", rollout={"seed": 7})
    assert not rollout.is_complete(job)
    with pytest.raises(ValueError, match=r"other settings \(rollout\.seed\)"):
        rollout.run(job, pool)


def test_every_turn_is_answered_with_its_domains_sampling_and_a_mute_target_writes_no_prompts(
    pool: Any, folder: Path, tiny_models: Path
) -> None:
    source = folder / "turns.jsonl"
    source.write_text(json.dumps({"turns": ["one", "two", "three"], "domain": "chat"}) + "\n")
    job = config(
        folder,
        tiny_models / "llama",
        "turns",
        corpus={"sources": [str(source)]},
        rollout={
            "self_synthesised": 2,  # the tiny target writes bytes, not words
            "synthesis": {"temperature": 1.5, "max_new_tokens": 20},
            "domain_sampling": {"chat": {"max_new_tokens": 6, "temperature": 0.7}},
        },
    )
    counts = rollout.run(job, pool)
    samples = read_samples(RunDir(job.run_path).samples)
    assert (counts["prompts"], counts["answered"], counts["failed"]) == (1, 1, {})
    assert {s.domain for s in samples} == {"chat"}
    assert samples[0].loss_mask.sum() <= 6 * 3
    assert RunDir(job.run_path).synthesised.read_text() == ""


def test_a_replica_is_gone_when_its_driver_was_killed(ray_cluster: None) -> None:
    """The killed driver of the first test left no process and no reserved resource behind."""
    deadline = time.monotonic() + 30
    while ray.available_resources()["CPU"] < 4 - 2 * 0.5:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.5)
