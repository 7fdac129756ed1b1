"""The whole thread on a tiny target: prompts to report, directly, resumed after kills, and as a submitted job."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.tiny import write_drafter, write_target

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.ray, pytest.mark.vllm]


def write_prompts(path: Path, count: int) -> None:
    rows = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": f"say number {i * 37 % 101} {i}"}]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tiny_config(folder: Path, name: str, prompts: int = 40) -> dict[str, Any]:
    target = folder / "target"
    if not target.exists():
        write_target(target, "llama")
    write_prompts(folder / "prompts.jsonl", prompts)
    return {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "target": {"path": str(target)},
        "drafter": {"draft_vocab_size": 256},
        "corpus": {
            "sources": [str(folder / "prompts.jsonl")],
            "max_len": 96,
            "held_out_fraction": 0.2,
        },
        "rollout": {"sampling": {"max_new_tokens": 32}},
        "engine": {
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "kv_cache_bytes": 33554432,
            "enforce_eager": True,
        },
        "stream": {"max_bytes_in_flight": 600_000, "tokens_per_pack": 256},
        "train": {
            "epochs": 3,
            "workers": 2,
            "cpus_per_worker": 0.5,
            "lr": 0.003,
            "ttt_steps": 3,
            "dtype": "float32",
            "eval_every": 4,
            "checkpoint_every": 4,
        },
        "export": {"dtype": "float32"},
        "evaluate": {
            "num_prompts": 6,
            "sampling": {"max_new_tokens": 32},
            "concurrency": [1, 4],
            "seconds": 0.5,
        },
    }


def submit(cluster: str, file: Path) -> subprocess.CompletedProcess[str]:
    """A whole pipeline by `ray job submit`."""
    return subprocess.run(
        [
            *("ray", "job", "submit", "--address", cluster, "--working-dir", str(ROOT)),
            *("--", sys.executable, "ray_jobs/pipeline.py", "-c", str(file)),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, ray_cluster: str) -> Path:
    """Run directory of a pipeline that died in its last serving engine and was submitted again."""
    folder = tmp_path_factory.mktemp("pipeline")
    file = folder / "tiny.yaml"
    config = tiny_config(folder, "tiny")
    other = write_drafter(folder / "other", folder / "target", "llama", seed=1)
    config["evaluate"] |= {"against": str(other), "sampled_answers": 8}
    file.write_text(yaml.safe_dump(config))
    weights = load_file(other / "model.safetensors")
    wrapped = {f"draft_model.{name}": tensor for name, tensor in weights.items()}
    save_file(wrapped, other / "model.safetensors")  # we read such names, vLLM does not
    died = submit(ray_cluster, file)
    kept = folder / "runs" / "tiny" / "evaluate" / "measured"
    assert died.returncode != 0
    assert sorted(file.stem for file in kept.iterdir()) == ["plain", "trained", "untrained"], (
        died.stdout[-6000:] + died.stderr[-2000:]
    )
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    submitted = submit(ray_cluster, file)
    assert submitted.returncode == 0, submitted.stdout[-6000:] + submitted.stderr[-2000:]
    return folder / "runs" / "tiny"


def test_an_evaluation_that_died_asks_no_engine_twice(finished: Path) -> None:
    log = (finished / "logs" / "driver-0.log").read_text()
    drafters = (finished / "export" / "drafter", finished / "export" / "untrained")
    for drafter in (*drafters, finished.parents[1] / "other"):
        assert log.count(f"evaluate: serving {drafter}\n") == 1
    started = log.count("engines: 1 x ")
    assert started == 5, "rollout and train, plain, ours, the other one, walk"
    assert not (finished / "evaluate" / "measured").exists()


def test_a_submitted_pipeline_ends_in_a_summary_with_every_promised_number(finished: Path) -> None:
    summary = json.loads((finished / "report" / "summary.json").read_text())
    promised = {
        "acceptance_length",
        "acceptance_length_untrained",
        "num_speculative_tokens",
        "expected_acceptance_length",
        "per_position_acceptance",
        "distinct_bigram",
        "lossless",
        "samples_expected",
        "samples_trained",
        "peak_bytes_in_flight",
        "max_bytes_in_flight",
        "hidden_state_bytes_total",
        "wall_s",
        "versions",
        "commit",
    }
    assert promised <= set(summary)
    assert summary["lossless"] is True
    assert summary["samples_trained"] == summary["samples_expected"] > 0
    assert 0 < summary["peak_bytes_in_flight"] <= summary["max_bytes_in_flight"]


def test_the_walk_predicts_every_drafting_round_of_the_engine(finished: Path) -> None:
    evaluation = json.loads((finished / "evaluate" / "evaluation.json").read_text())
    assert all(walked == served for walked, served in evaluation["rounds"])
    assert len(evaluation["rounds"]) == evaluation["trained"]["requests"] > 0
    trained = evaluation["trained"]
    assert len(trained["expected_by_k"]) == 7 > trained["num_speculative_tokens"]


def test_sampled_answers_with_and_without_drafter_are_of_one_distribution(finished: Path) -> None:
    evaluation = json.loads((finished / "evaluate" / "evaluation.json").read_text())
    assert evaluation["sampled_agreement"] > 0.001


def test_every_concurrency_gets_a_speedup_with_its_interval(finished: Path) -> None:
    evaluation = json.loads((finished / "evaluate" / "evaluation.json").read_text())
    rows = [row for row in evaluation["rows"] if row["drafter"] == "trained"]
    assert {row["concurrency"] for row in rows} == {1, 4}
    for row in rows:
        low, high = row["speedup_interval"]
        assert low <= row["speedup"] <= high
        assert row["lossless"] is True


def test_a_drafter_of_another_shape_is_measured_on_the_same_prompts(finished: Path) -> None:
    evaluation = json.loads((finished / "evaluate" / "evaluation.json").read_text())
    against = evaluation["difference_to_other"][-1]
    assert against["dataset"] == "all"
    assert against["interval"][0] > 0  # the other one is random
    difference = (
        evaluation["trained"]["acceptance_length"] - evaluation["other"]["acceptance_length"]
    )
    assert against["difference"] == pytest.approx(difference)


def test_the_drafter_learns(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    lengths = [
        line["eval/expected_acceptance_length"]
        for line in lines
        if "eval/expected_acceptance_length" in line
    ]
    assert losses[-1] < losses[0]
    assert lengths[-1] > lengths[0]
    steps = [line["step"] for line in lines if "train/loss" in line]
    assert steps == list(range(1, len(steps) + 1))


def test_no_hidden_state_is_left_on_disk_or_in_shared_memory(finished: Path) -> None:
    big = [file for file in finished.rglob("*") if file.is_file() and "hidden" in file.name.lower()]
    assert big == []
    assert [f for f in Path("/dev/shm").iterdir() if f.name.startswith("eagle3")] == []


def test_the_wandb_run_is_written_offline_and_holds_no_secret(finished: Path) -> None:
    runs = list((finished / "wandb").glob("offline-run-*"))
    assert runs
    identity = (finished / "train" / "wandb_id").read_text().strip()
    assert any(run.name.endswith(identity) for run in runs)


def test_running_again_completes_at_once(finished: Path) -> None:
    before = (finished / "train" / "result.json").stat().st_mtime_ns
    again = subprocess.run(
        [sys.executable, "ray_jobs/train.py", "-c", str(finished.parents[1] / "tiny.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert again.returncode == 0, again.stderr[-3000:]
    assert "already complete" in again.stderr
    assert (finished / "train" / "result.json").stat().st_mtime_ns == before
