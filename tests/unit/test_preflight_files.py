"""A broken file fails a check that names it; none ends in a traceback."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle3_train.config import JobConfig
from eagle3_train.corpus.read import data_files
from eagle3_train.records import Sample
from eagle3_train.rundir import RunDir
from eagle3_train.stages import preflight
from eagle3_train.training.initial import write_initial
from tests.unit.test_preflight_static import LLAMA, TARGETS, WORDS, config, target, write_tokenizer

__all__ = ["target"]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n"


def static(folder, **sections):
    """Failed checks of the static depth, by name."""
    sections["preflight"] = {"vllm_version": "0.23.0", "sglang_version": "0.5.23"}
    report = preflight.run(config(folder, **sections), "static", folder)
    json.loads(report.json())
    assert report.text()
    return {check.name: check for check in report.checks if check.verdict == "fail"}


@pytest.mark.parametrize("file", TARGETS, ids=lambda file: file.stem)
def test_a_known_target_with_a_tokenizer_beside_it_gets_its_verdict(file, tmp_path):
    fixture = json.loads(file.read_text())
    write_tokenizer(tmp_path / "target", WORDS)
    (tmp_path / "target" / "config.json").write_text(json.dumps(fixture["config"]))
    found = static(tmp_path)
    assert sorted(set(found) - {"tokenizer"}) == sorted(fixture["expected"]["failed"])
    if file.stem == "kimi-k2":  # transformers knows no kimi_k2
        assert "configuration_deepseek" in found["tokenizer"].action
        assert "trust_remote_code=true" in found["tokenizer"].action


CONFIGS = {
    "a list": [],
    "null": None,
    "a string": "x",
    "a size that is a list": {**LLAMA, "hidden_size": [1]},
    "a negative size": {**LLAMA, "hidden_size": -16},
    "a quantisation that is a string": {**LLAMA, "quantization_config": "fp8"},
    "half an MLA": {**LLAMA, "kv_lora_rank": 8},
    "a RoPE factor in words": {**LLAMA, "rope_scaling": {"type": "linear", "factor": "two"}},
    "an architecture that is null": {**LLAMA, "architectures": [None]},
    "a RoPE theta in words": {**LLAMA, "rope_theta": "abc"},
    "a RoPE in words": {**LLAMA, "rope_scaling": "yarn"},
    "an auto_map that is a list": {**LLAMA, "auto_map": ["x"]},
}


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS)
def test_a_broken_config_is_named(content, target, tmp_path):
    (target / "config.json").write_text(json.dumps(content))
    found = static(tmp_path)
    assert list(found) == ["target"]
    assert str(target / "config.json") in found["target"].reason


@pytest.mark.parametrize("value", [None, ["modeling_mine.Mine", None], "modeling_mine.Mine"])
def test_odd_remote_code_is_judged_without_being_run(value, target, tmp_path):
    auto = {"AutoModelForCausalLM": value}
    content = {**LLAMA, "architectures": ["MineForCausalLM"], "auto_map": auto}
    (target / "config.json").write_text(json.dumps(content))
    (target / "modeling_mine.py").write_bytes(b"\xff\xfe")
    assert {"engine_class", "capture"} <= set(static(tmp_path))


@pytest.mark.parametrize("content", [POINTER, b"", b"\x08\0\0\0\0\0\0\0{"])
def test_broken_weights_are_named(content, target, tmp_path):
    (target / "model.safetensors").write_bytes(content)
    found = static(tmp_path)
    assert list(found) == ["weights"]
    assert "model.safetensors" in found["weights"].reason


INDICES = {
    "no JSON": ("{", "weights"),
    "a list": ("[]", "weights"),
    "no weight_map": ('{"metadata": {}}', "weights"),
    "null inside": ('{"metadata": null, "weight_map": null}', "weights"),
    "a size in words": ('{"metadata": {"total_size": "abc"}, "weight_map": {}}', "weights"),
    "an absent shard": (
        '{"weight_map": {"model.embed_tokens.weight": "no", "model.norm.weight": "no"}}',
        "weights",
    ),
    "a tensor its file lacks": (
        '{"weight_map": {"model.word_embeddings.weight": "model.safetensors", '
        '"model.norm.weight": "model.safetensors"}}',
        "weights",
    ),
}


@pytest.mark.parametrize(("content", "name"), INDICES.values(), ids=INDICES)
def test_a_broken_index_is_named(content, name, target, tmp_path):
    (target / "model.safetensors.index.json").write_text(content)
    found = static(tmp_path)
    assert list(found) == [name]
    assert str(target) in found[name].reason


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", POINTER),
        ("tokenizer.json", b'{"version": "1.0", "model": {}}'),
        ("generation_config.json", b'{"eos_token_id": 1,'),
        ("generation_config.json", b'{"eos_token_id": "</s>"}'),
        ("tokenizer_config.json", b"[]"),
    ],
)
def test_a_broken_tokenizer_is_named(name, content, target, tmp_path):
    (target / name).write_bytes(content)
    found = static(tmp_path)
    assert list(found) == ["tokenizer"]
    assert str(target) in found["tokenizer"].reason


def test_a_base_model_may_take_its_template_from_another_directory(target, tmp_path):
    write_tokenizer(tmp_path / "chat", WORDS)
    (target / "chat_template.jinja").unlink()
    assert list(static(tmp_path)) == ["tokenizer"]
    assert static(tmp_path, target={"tokenizer": str(tmp_path / "chat")}) == {}


def test_a_broken_tokenizer_that_another_is_compared_with_is_named(target, tmp_path):
    write_tokenizer(tmp_path / "chat", WORDS)
    (target / "tokenizer.json").write_bytes(POINTER)
    found = static(tmp_path, target={"tokenizer": str(tmp_path / "chat")})
    assert list(found) == ["tokenizer"]
    assert str(target) in found["tokenizer"].reason


def test_a_template_that_does_not_render_is_caught(target, tmp_path):
    (target / "chat_template.jinja").write_text("{% for m in %}")
    assert list(static(tmp_path)) == ["chat_template"]


def test_a_foreign_tokenizer_inside_the_target_is_caught(target, tmp_path):
    (target / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": [1, 11]}))
    assert "[11]" in static(tmp_path)["tokenizer"].reason


@pytest.mark.parametrize("metadata", [None, {"coverage": "{}"}])
def test_first_weights_without_metadata_are_caught(metadata, target, tmp_path):
    file = RunDir(config(tmp_path).run_path).initial_weights
    file.parent.mkdir(parents=True)
    save_file({"d2t": torch.zeros(4)}, file, metadata)
    found = static(tmp_path, drafter={"draft_vocab_size": 4})
    assert list(found) == ["draft_vocabulary"]
    assert str(file) in found["draft_vocabulary"].reason


def test_a_broken_warm_start_is_caught(target, tmp_path):
    (tmp_path / "drafter").mkdir()
    for content in (None, "[]", json.dumps(LLAMA)):
        if content:
            (tmp_path / "drafter" / "config.json").write_text(content)
        found = static(tmp_path, drafter={"init_from": str(tmp_path / "drafter")})
        assert list(found) == ["boundaries"]
        assert str(tmp_path / "drafter") in found["boundaries"].reason


def test_sources_that_do_not_exist_are_caught(target, tmp_path):
    (tmp_path / "here.jsonl").write_text("{}")
    assert len(data_files([str(tmp_path / "here.jsonl")])) == 1
    assert static(tmp_path, corpus={"sources": [str(tmp_path / "here.jsonl")]}) == {}
    found = static(tmp_path, corpus={"sources": [str(tmp_path / "absent.jsonl")]})
    assert list(found) == ["corpus"]
    assert "absent.jsonl" in found["corpus"].reason


def test_a_classifier_is_no_target(target, tmp_path):
    content = {**LLAMA, "architectures": "Qwen3ForSequenceClassification"}
    (target / "config.json").write_text(json.dumps(content))
    assert "writes no text" in static(tmp_path)["target"].reason


def test_a_missing_norm_is_told_apart_from_a_quantised_one(target, tmp_path):
    tensors = {"model.embed_tokens.weight": torch.zeros(12, 16)}
    save_file(tensors, target / "model.safetensors")
    assert "final norm weight, found none" in static(tmp_path)["weights"].reason


def test_a_new_draft_vocabulary_never_joins_weights_of_the_old_one(target, tmp_path):
    job = config(tmp_path, drafter={"draft_vocab_size": 8})
    run = RunDir(job.run_path)

    def samples(*ids):
        return [Sample("0", "d", np.array(ids, np.int32), np.ones(len(ids), np.bool_))]

    write_initial(job, samples(2, 3, 4, 5))
    write_initial(job, samples(2, 3, 4, 5))
    template = target / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    found = static(tmp_path, drafter={"draft_vocab_size": 8})["draft_vocabulary"]
    assert str(run.train_storage) in found.action
    with pytest.raises(ValueError, match="hash of tokenizer and template"):
        write_initial(job, samples(8, 9, 10, 11))
    (run.train_storage / "ray_train" / "checkpoint_1").mkdir(parents=True)
    run.initial_weights.unlink()
    with pytest.raises(ValueError, match="checkpoints"):
        write_initial(job, samples(8, 9, 10, 11))
    shutil.rmtree(run.train_storage)
    write_initial(job, samples(8, 9, 10, 11))
    assert static(tmp_path, drafter={"draft_vocab_size": 8}) == {}


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [("runs", "ok"), ("far/away/runs", "warn"), ("file/runs", "fail"), ("file", "fail")],
)
def test_where_runs_go_is_a_directory(runs, verdict, target, tmp_path):
    (tmp_path / "file").write_text("")
    job = JobConfig.model_validate(
        config(tmp_path).model_dump() | {"runs_dir": str(tmp_path / runs)}
    )
    checks = preflight.run(job, "plan", target).depths["plan"]
    (check,) = [check for check in checks if check.name == "disk"]
    assert check.verdict == verdict
    assert runs.partition("/")[0] in check.reason or verdict == "ok"


def test_one_measured_rate_predicts_its_own_hours(target, tmp_path):
    rates = {"train_tokens_per_s": 1000, "samples": 3600, "mean_tokens": 1000}
    checks = preflight.run(config(tmp_path, preflight=rates), "plan", target).depths["plan"]
    (check,) = [check for check in checks if check.name == "rates"]
    assert "training 1.00 h; " in check.reason
    assert "preflight.capture_tokens_per_s" in check.reason
    assert "preflight.train_tokens_per_s" not in check.reason
