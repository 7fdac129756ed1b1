"""Every known target gets its verdict from files alone, and every planted fault is caught by name."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from eagle3_train.config import JobConfig
from eagle3_train.engines.resolve import engine_index
from eagle3_train.preflight.check import failed
from eagle3_train.preflight.static import static_checks
from eagle3_train.rundir import RunDir
from eagle3_train.stages import preflight
from eagle3_train.target.facts import read_facts

TARGETS = sorted((Path(__file__).parents[1] / "fixtures" / "targets").glob("*.json"))
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 12,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
WORDS = ("<s>", "</s>", "user", "assistant", "a", "b", "c", "d")


def config(path, **sections):
    base = {
        "name": "t",
        "runs_dir": str(path / "runs"),
        "target": {"path": str(path / "target")},
        "stream": {"max_bytes_in_flight": 1 << 30},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return JobConfig.model_validate(base)


def write_tokenizer(directory, words):
    directory.mkdir(parents=True, exist_ok=True)
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} </s>{% endfor %}"
    fast.save_pretrained(directory)


@pytest.fixture
def target(tmp_path):
    """A complete tiny target directory."""
    directory = tmp_path / "target"
    write_tokenizer(directory, WORDS)
    (directory / "config.json").write_text(json.dumps(LLAMA))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(12, 16),
        "model.norm.weight": torch.ones(16),
        "lm_head.weight": torch.zeros(12, 16),
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def checks(job):
    engines = [engine_index("vllm", "0.23.0"), engine_index("sglang", "0.5.23")]
    return static_checks(job, read_facts(job.target.path), engines)


def only_failure(job):
    found = [check for check in checks(job) if check.verdict == "fail"]
    assert len(found) == 1, found
    assert found[0].action
    return found[0]


@pytest.mark.parametrize("version", ["0.23.0", "0.32.0"])
@pytest.mark.parametrize("file", TARGETS, ids=lambda file: file.stem)
def test_every_known_target_gets_its_verdict_within_ten_seconds(file, version, tmp_path):
    fixture = json.loads(file.read_text())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(fixture["config"]))
    job = config(tmp_path, preflight={"vllm_version": version, "sglang_version": "0.5.23"})
    started = time.monotonic()
    report = preflight.run(job, "static", tmp_path)
    assert time.monotonic() - started < 10
    assert failed(report.checks) == fixture["expected"]["failed"]


def test_a_complete_target_fails_nothing_and_is_never_executed(target, tmp_path):
    (target / "modeling_llama.py").write_text("raise SystemExit('executed')")
    assert failed(checks(config(tmp_path))) == []


def test_a_target_vllm_cannot_tap_is_told_who_could_serve_it(target, tmp_path):
    glm = {**LLAMA, "architectures": ["Glm4MoeForCausalLM"]}
    (target / "config.json").write_text(json.dumps(glm))
    check = only_failure(config(tmp_path))
    assert check.name == "capture"
    assert "Glm4MoeForCausalLM" in check.reason
    assert "sglang 0.5.23 could serve" in check.reason


def test_layers_are_read_by_hooks_only_by_consent_and_uncompiled(target, tmp_path):
    glm = {**LLAMA, "architectures": ["Glm4MoeForCausalLM"]}
    (target / "config.json").write_text(json.dumps(glm))
    named = {"tap_by_hooks": "Glm4MoeForCausalLM"}
    check = only_failure(config(tmp_path, target=named))
    assert (check.name, "enforce_eager" in check.action) == ("capture", True)
    assert failed(checks(config(tmp_path, target=named, engine={"enforce_eager": True}))) == []
    other = {"tap_by_hooks": "MixtralForCausalLM"}
    assert only_failure(config(tmp_path, target=other)).name == "capture"


def test_remote_code_needs_consent_by_name(target, tmp_path):
    code = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    mine = {**LLAMA, "architectures": ["MineForCausalLM"], "auto_map": code}
    (target / "config.json").write_text(json.dumps(mine))
    check = only_failure(config(tmp_path))
    assert (check.name, "trust_remote_code" in check.action) == ("remote_code", True)
    agreed = checks(config(tmp_path, target={"trust_remote_code": True}))
    assert failed(agreed) == []


def test_a_wrong_tokenizer_is_caught(target, tmp_path):
    write_tokenizer(tmp_path / "bigger", [*WORDS, *(f"w{i}" for i in range(9))])
    write_tokenizer(tmp_path / "other", [*WORDS[:4], "d", "c", "b", "a"])
    for name in ("bigger", "other"):
        check = only_failure(config(tmp_path, target={"tokenizer": str(tmp_path / name)}))
        assert check.name == "tokenizer"
        assert "wrong tokenizer" in check.reason


def test_a_stale_d2t_is_caught(target, tmp_path):
    job = config(tmp_path, drafter={"draft_vocab_size": 4})
    renderer_names = [check.name for check in checks(job) if check.verdict == "ok"]
    assert "draft_vocabulary" in renderer_names
    made_for = {
        "drafter.init_from": "",
        "drafter.draft_vocab_size": "4",
        "the hash of tokenizer and template": "another tokenizer",
        "coverage": "{}",
    }
    file = RunDir(job.run_path).initial_weights
    file.parent.mkdir(parents=True)
    save_file({"d2t": torch.arange(4)}, file, made_for)
    check = only_failure(job)
    assert check.name == "draft_vocabulary"
    assert "another tokenizer" in check.reason


def test_a_drafter_with_2048_positions_is_caught(target, tmp_path):
    check = only_failure(config(tmp_path, drafter={"max_position_embeddings": 2048}))
    assert check.name == "positions"
    assert "2048" in check.reason


def test_tp_that_does_not_divide_the_heads_is_caught(target, tmp_path):
    check = only_failure(config(tmp_path, engine={"tensor_parallel": 3}))
    assert check.name == "tensor_parallel"
    assert "[1, 2, 4]" in check.action


def test_boundaries_no_engine_or_target_has_are_caught(target, tmp_path):
    job = config(tmp_path, drafter={"aux_layers": (2, 4, 8)})
    assert "boundaries" in failed(checks(job))
    deepseek = {
        **LLAMA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    (target / "config.json").write_text(json.dumps(deepseek))
    check = only_failure(config(tmp_path, drafter={"aux_layers": (1, 3, 5)}))
    assert check.name == "boundaries"
    assert failed(checks(config(tmp_path, drafter={"aux_layers": (3, 4, 5)}))) == []


def test_switches_an_engine_does_not_serve_are_caught(target, tmp_path):
    deepseek = json.loads((TARGETS[0].parent / "deepseek-v3.json").read_text())["config"]
    (target / "config.json").write_text(json.dumps(deepseek))
    job = config(tmp_path, drafter={"attention": "mla", "norm_before_fc": True})
    assert "drafter" in failed(checks(job))
    mla = config(tmp_path, drafter={"attention": "mla"})
    assert "drafter" not in failed(checks(mla))
    (target / "config.json").write_text(json.dumps({**deepseek, "rope_scaling": None}))
    (check,) = [check for check in checks(mla) if check.name == "drafter"]
    assert (check.verdict, "YaRN only" in check.reason) == ("fail", True)


def test_a_missing_or_foreign_directory_is_one_failed_check(tmp_path):
    report = preflight.run(config(tmp_path), "plan", tmp_path)
    assert failed(report.checks) == ["target"]
    assert json.loads(report.json())["supports_eagle3"] is False


def test_a_job_stops_at_a_failure_unless_it_is_skipped_by_name(target, tmp_path):
    job = config(tmp_path, engine={"tensor_parallel": 3})
    with pytest.raises(ValueError, match="tensor_parallel"):
        preflight.require(job)
    skip = {"skip": ("tensor_parallel", "placement", "engine_memory")}
    preflight.require(config(tmp_path, engine={"tensor_parallel": 3}, preflight=skip))


@pytest.mark.parametrize(
    ("drafter", "tensor_parallel", "named"),
    [
        ({"num_kv_heads": 1}, 4, ""),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "drafter's 3 key/value heads"),
        ({"num_heads": 12, "num_kv_heads": 3}, 4, "drafter's 3 key/value heads"),
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "drafter's 6 heads"),
    ],
)
def test_key_value_heads_of_target_and_drafter_divide_or_are_divided(
    drafter, tensor_parallel, named, target, tmp_path
):
    job = config(tmp_path, drafter=drafter, engine={"tensor_parallel": tensor_parallel})
    found = [check.reason for check in checks(job) if check.name == "tensor_parallel"]
    assert named in found[0]
    assert ("tensor_parallel" in failed(checks(job))) == bool(named)


def test_blocks_of_a_quantised_mlp_do_not_straddle_gpus(target, tmp_path):
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (target / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": fp8}))
    assert failed(checks(config(tmp_path, engine={"tensor_parallel": 2}))) == []
    check = only_failure(config(tmp_path, engine={"tensor_parallel": 4}))
    assert (check.name, "[1, 2]" in check.action) == ("tensor_parallel", True)


def test_fp8_without_a_gpu_is_called_an_emulation(target, tmp_path):
    model = {**LLAMA, "vocab_size": 16}
    (target / "config.json").write_text(json.dumps(model))
    sizes = {"draft_vocab_size": 16}

    def found(**train):
        job = config(tmp_path, drafter=sizes, train={"fp8": True, **train})
        return [(c.verdict, c.reason) for c in checks(job) if c.name == "fp8"]

    [(verdict, reason)] = found()
    assert (verdict, "emulate" in reason) == ("warn", True)
    assert found(gpus_per_worker=1) == []


def test_the_embeddings_are_not_tapped_on_a_gpu_nor_by_hooks(target, tmp_path):
    aux = {"aux_layers": (0, 4, 5)}
    vllm = [engine_index("vllm", "0.23.0")]
    on_cpu = config(tmp_path, drafter=aux)
    assert failed(static_checks(on_cpu, read_facts(on_cpu.target.path), vllm)) == []
    for architecture, engine, named in (
        ("LlamaForCausalLM", {"gpus_per_worker": 1}, "on a GPU"),
        ("MixtralForCausalLM", {"enforce_eager": True}, "by forward hooks"),
    ):
        (target / "config.json").write_text(json.dumps({**LLAMA, "architectures": [architecture]}))
        hooks = {"tap_by_hooks": architecture}
        job = config(tmp_path, drafter=aux, engine=engine, target=hooks)
        found = static_checks(job, read_facts(job.target.path), vllm)
        (check,) = [check for check in found if check.verdict == "fail"]
        assert (check.name, named in check.reason) == ("boundaries", True)
