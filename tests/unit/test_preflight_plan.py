"""What a run costs is arithmetic; what cannot fit is caught before it is started."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_train.config import JobConfig
from eagle3_train.config_file import load_config
from eagle3_train.preflight import plan
from eagle3_train.preflight.placement import Cluster, check, place
from eagle3_train.preflight.plan import (
    Plan,
    estimated_weight_bytes,
    package_bytes,
    plan_checks,
)
from eagle3_train.target.facts import facts_from

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "targets"


def facts(name, tmp_path):
    return facts_from(json.loads((FIXTURES / f"{name}.json").read_text())["config"], tmp_path)


def config(tmp_path, **sections):
    base = {
        "name": "t",
        "runs_dir": str(tmp_path),
        "target": {"path": "unused"},
        "stream": {"max_bytes_in_flight": 1 << 33},
        "train": {"gpus_per_worker": 1.0},
        "engine": {"gpus_per_worker": 1.0},
        "preflight": {"gpus_per_node": 8, "gpu_memory_bytes": 141_000_000_000},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return JobConfig.model_validate(base)


def verdicts(job, target, package):
    return {check.name: check for check in plan_checks(job, target, Plan(job, target), package)}


def test_the_dump_that_started_this_project_weighs_828_gb(tmp_path):
    job = config(tmp_path, preflight={"samples": 10_000, "mean_tokens": 1444})
    plan = Plan(job, facts("kimi-k2.5", tmp_path))
    assert plan.bytes_per_token == 57_344
    assert round(plan.dump_bytes / 1e9) == 828


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("kimi-k2.5", 595e9),
        ("llama-3.1-8b", 16.1e9),
        ("qwen3-30b-a3b", 61.1e9),
        ("deepseek-v3", 688e9),
    ],
)
def test_estimated_weights_are_the_published_checkpoints(name, published, tmp_path):
    assert estimated_weight_bytes(facts(name, tmp_path)) == pytest.approx(published, rel=0.06)


def test_a_store_smaller_than_one_window_is_caught(tmp_path):
    target = facts("llama-3.1-8b", tmp_path)
    window = Plan(config(tmp_path), target).window_bytes
    job = config(tmp_path, stream={"max_bytes_in_flight": window - 1})
    check = verdicts(job, target, tmp_path)["stream_budget"]
    assert check.verdict == "fail"
    assert str(window) in check.action


def test_a_package_over_the_upload_limit_is_caught(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "dump.bin").write_bytes(b"0" * 2000)
    assert package_bytes(package) == 2000
    monkeypatch.setattr(plan, "UPLOAD_LIMIT", 1999)
    check = verdicts(config(tmp_path), facts("llama-3.1-8b", tmp_path), package)["package_size"]
    assert check.verdict == "fail"
    inside_a_job = verdicts(config(tmp_path), facts("llama-3.1-8b", tmp_path), None)
    assert "package_size" not in inside_a_job


def test_a_package_is_weighed_as_ray_packs_it(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights.bin").write_bytes(b"0" * 5000)
    package = tmp_path / "package"
    for folder, size in (("nested/.git", 7), ("nested", 300), (".venv", 11), ("runs", 13)):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "file.bin").write_bytes(b"0" * size)
    (package / "linked").symlink_to(tmp_path / "elsewhere")
    (package / ".gitignore").write_text("/runs/\n")
    assert package_bytes(package) == 5000 + 300 + len("/runs/\n")


def test_an_unknown_number_of_samples_is_said_and_not_invented(tmp_path):
    rates = {"capture_tokens_per_s": 1000, "train_tokens_per_s": 500}
    job = config(tmp_path, preflight=rates)
    target = facts("llama-3.1-8b", tmp_path)
    assert Plan(job, target).dump_bytes is None
    found = verdicts(job, target, tmp_path)
    assert "not known" in found["bytes_per_token"].reason
    assert "preflight.samples" in found["rates"].reason
    limited = config(tmp_path, preflight=rates, corpus={"limit": 10})
    assert "samples" not in verdicts(limited, target, tmp_path)["rates"].reason


def test_checkpoints_and_cache_on_one_disk_are_added_up(tmp_path, monkeypatch):
    job, target = config(tmp_path), facts("llama-3.1-8b", tmp_path)
    need = Plan(job, target).checkpoint_bytes
    usage = shutil._ntuple_diskusage(3 * need, 0, int(1.5 * need))
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: usage)
    assert verdicts(job, target, tmp_path)["disk"].verdict == "ok"
    stream = {"cache_bytes": need, "cache_dir": str(tmp_path)}
    both = verdicts(config(tmp_path, stream=stream), target, tmp_path)["disk"]
    assert both.verdict == "fail", both.reason


def test_weights_weigh_what_the_engine_makes_of_them(tmp_path):
    target = facts("llama-3.1-8b", tmp_path)
    stored = replace(target, weight_bytes=16_100_000_000)
    for dtype, size in (("auto", 16.1e9), ("float32", 32.2e9)):
        job = config(tmp_path, engine={"dtype": dtype})
        for known in (target, stored):
            assert Plan(job, known).weights_per_gpu == pytest.approx(size, rel=0.01)
    raw = json.loads((FIXTURES / "llama-3.1-8b.json").read_text())["config"]
    for quantised, size in (({"quant_method": "gptq", "bits": 8}, 9.5e9),
                            ({"quant_method": "gptq", "bits": 4}, 6.0e9)):  # fmt: skip
        packed = facts_from(raw | {"quantization_config": quantised}, tmp_path)
        assert estimated_weight_bytes(packed) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("verdict", "engine", "train", "cluster"),
    [
        ("fail", {}, {"workers": 8}, {}),
        ("fail", {"tensor_parallel": 16}, {}, {"nodes": 4}),
        ("ok", {"tensor_parallel": 8, "gpus_per_worker": 0.7}, {"workers": 8, "gpus_per_worker": 0.3}, {}),
        ("fail", {"tensor_parallel": 8, "gpus_per_worker": 0.7}, {"workers": 4, "gpus_per_worker": 0.6}, {}),
        ("fail", {"tensor_parallel": 8, "gpus_per_worker": 0.5}, {"gpus_per_worker": 0.3}, {}),
        ("fail", {"gpus_per_worker": 1.5}, {}, {}),
        ("fail", {}, {"gpus_per_worker": 1.5}, {}),
        ("ok", {"gpus_per_worker": 2}, {}, {}),
        # four shares of 0.6 need four GPUs
        ("fail", {"tensor_parallel": 5}, {"workers": 4, "gpus_per_worker": 0.6}, {}),
        ("ok", {"tensor_parallel": 4}, {"workers": 4, "gpus_per_worker": 0.6}, {}),
        # one replica of eight fits on a node of twelve
        ("fail", {"tensor_parallel": 8, "replicas": 4}, {}, {"nodes": 3, "gpus_per_node": 12}),
        ("ok", {"tensor_parallel": 8, "replicas": 3}, {}, {"nodes": 3, "gpus_per_node": 12}),
        # engines start first: two of 0.4 share a GPU, and the second trainer of 0.6 finds none
        ("fail", {"replicas": 2, "gpus_per_worker": 0.4}, {"workers": 2, "gpus_per_worker": 0.6},
         {"gpus_per_node": 2}),
        ("ok", {"replicas": 2, "gpus_per_worker": 0.6}, {"workers": 2, "gpus_per_worker": 0.4},
         {"gpus_per_node": 2}),
    ],
)  # fmt: skip
def test_whole_replicas_fit_on_nodes_and_shares_on_gpus(verdict, engine, train, cluster, tmp_path):
    job = config(tmp_path, engine=engine, train=train, preflight=cluster)
    check = verdicts(job, facts("llama-3.1-8b", tmp_path), tmp_path)["placement"]
    assert check.verdict == verdict


def test_cpus_are_compared_where_they_are_known_and_a_head_without_gpus_is_no_obstacle(tmp_path):
    cluster = Cluster(((0, 4.0), (2, 16.0)), 141_000_000_000)
    fits = config(tmp_path, engine={"cpus": 8})
    assert place(fits, cluster).waiting == (0, 0)
    greedy = config(tmp_path, engine={"cpus": 500})
    assert place(greedy, cluster).waiting == (1, 0)
    assert check(greedy, cluster, place(greedy, cluster)).verdict == "fail"
    on_cpu = config(tmp_path, engine={"gpus_per_worker": 0}, train={"gpus_per_worker": 0})
    assert place(on_cpu, Cluster(((0, 2.0),), None)).waiting == (0, 0)


def test_several_processes_on_a_gpu_share_its_memory(tmp_path):
    target = facts("llama-3.1-8b", tmp_path)
    engine = {"replicas": 2, "gpus_per_worker": 0.4, "gpu_memory_utilization": 0.9}
    two = config(tmp_path, engine=engine, preflight={"gpus_per_node": 2})
    assert verdicts(two, target, tmp_path)["engine_memory"].verdict == "fail"
    two = config(
        tmp_path, engine={**engine, "gpu_memory_utilization": 0.4}, preflight={"gpus_per_node": 2}
    )
    assert verdicts(two, target, tmp_path)["engine_memory"].verdict == "ok"
    small = {"gpus_per_node": 2, "gpu_memory_bytes": 40_000_000_000}
    for share, verdict in ((0.25, "fail"), (0.5, "ok")):
        job = config(tmp_path, train={"workers": int(1 / share), "gpus_per_worker": share})
        job = job.model_copy(update={"preflight": job.preflight.model_copy(update=small)})
        assert verdicts(job, target, tmp_path)["trainer_memory"].verdict == verdict


def test_an_unknown_cluster_is_asked_for_and_not_judged(tmp_path):
    job = config(tmp_path, preflight={"gpus_per_node": None, "gpu_memory_bytes": None})
    found = verdicts(job, facts("llama-3.1-8b", tmp_path), tmp_path)
    for name in ("placement", "engine_memory", "trainer_memory"):
        assert found[name].verdict == "warn"
        assert "gpu_memory_bytes" in found[name].action


def test_a_target_that_leaves_no_room_is_caught_and_tp_makes_room(tmp_path):
    target = facts("kimi-k2.5", tmp_path)
    job = config(tmp_path, engine={"tensor_parallel": 4}, preflight={"gpus_per_node": 8})
    assert verdicts(job, target, tmp_path)["engine_memory"].verdict == "fail"
    job = config(tmp_path, engine={"tensor_parallel": 8}, preflight={"nodes": 2})
    assert verdicts(job, target, tmp_path)["engine_memory"].verdict == "ok"


def test_latent_attention_is_replicated_and_heads_are_divided(tmp_path):
    for name, per_token in (("kimi-k2.5", 61 * 576 * 2), ("llama-3.1-8b", 32 * 2 * 1 * 128 * 2)):
        job = config(tmp_path, engine={"tensor_parallel": 8}, preflight={"nodes": 2})
        assert Plan(job, facts(name, tmp_path)).kv_per_token == per_token


def test_hours_follow_from_measured_rates_and_name_the_bottleneck(tmp_path):
    rates = {
        "capture_tokens_per_s": 1000,
        "train_tokens_per_s": 500,
        "samples": 3600,
        "mean_tokens": 1000,
    }
    job = config(tmp_path, preflight=rates, train={"epochs": 2})
    plan = Plan(job, facts("llama-3.1-8b", tmp_path))
    assert (plan.capture_hours, plan.train_hours) == (2.0, 4.0)
    check = verdicts(job, facts("llama-3.1-8b", tmp_path), tmp_path)["rates"]
    assert "training is the bottleneck" in check.reason


def test_a_cache_saves_captures_but_not_training(tmp_path):
    target = facts("llama-3.1-8b", tmp_path)
    rates = {
        "capture_tokens_per_s": 1000,
        "train_tokens_per_s": 1000,
        "samples": 3600,
        "mean_tokens": 1000,
    }
    bytes_all = 3600 * 1000 * 4096 * 4 * 2
    job = config(tmp_path, preflight=rates, train={"epochs": 3}, stream={"cache_bytes": bytes_all})
    plan = Plan(job, target)
    assert (plan.capture_hours, plan.train_hours) == (1.0, 3.0)


def test_colocation_leaves_the_trainer_what_the_engine_does_not_take(tmp_path):
    target = facts("llama-3.1-8b", tmp_path)
    shared = {"gpus_per_worker": 0.5}
    engine = {**shared, "gpu_memory_utilization": 0.97}
    job = config(tmp_path, engine=engine, train=shared)
    assert verdicts(job, target, tmp_path)["trainer_memory"].verdict == "fail"
    job = config(tmp_path, engine={**engine, "gpu_memory_utilization": 0.4}, train=shared)
    assert verdicts(job, target, tmp_path)["trainer_memory"].verdict == "ok"


def test_kimi_fits_one_node_and_two(tmp_path):
    for name in ("kimi-k2.5", "kimi-k2.5-two-node"):
        job = load_config([ROOT / "configs" / f"{name}.yaml"], [f"runs_dir={tmp_path}"])
        target = facts("kimi-k2.5", tmp_path)
        plan = Plan(job, target)
        plan.checkpoint_bytes = 0  # the cluster's disk is not this machine's
        stream = job.stream.model_copy(update={"cache_bytes": 0})
        checks = plan_checks(job.model_copy(update={"stream": stream}), target, plan, tmp_path)
        assert [check.name for check in checks if check.verdict == "fail"] == []
