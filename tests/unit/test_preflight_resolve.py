"""Engine source is read, not trusted and not imported."""

import json
import sys
from pathlib import Path

import pytest

from eagle3_train.engines.resolve import engine_index, generate_table, resolve_target
from eagle3_train.target.facts import facts_from

TARGETS = sorted((Path(__file__).parents[1] / "fixtures" / "targets").glob("*.json"))
ENGINES = ("vllm 0.23.0", "vllm 0.32.0", "sglang 0.5.23")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("file", TARGETS, ids=lambda file: file.stem)
def test_every_known_target_resolves_as_recorded(file, engine, tmp_path):
    fixture = json.loads(file.read_text())
    name, version = engine.split()
    found = resolve_target(facts_from(fixture["config"], tmp_path), engine_index(name, version))
    expected = fixture["expected"][engine]
    assert found.resolved_class.rpartition(".")[2] == expected["class"]
    assert (found.backend, found.supports_eagle3) == (expected["backend"], expected["eagle3"])


def test_the_installed_vllm_says_what_its_shipped_table_says():
    loaded = "vllm" in sys.modules
    installed = engine_index("vllm")
    if installed is None or installed.origin != "installed":
        pytest.skip("vLLM is not installed")
    shipped = json.loads(
        (
            Path(sys.modules[engine_index.__module__].__file__).parent
            / f"vllm-{installed.version}.json"
        ).read_text()
    )["architectures"]
    for name in ("LlamaForCausalLM", "KimiK25ForConditionalGeneration", "Glm4MoeForCausalLM"):
        found = installed.find(name)
        assert (found.resolved_class, found.layer_ids) == (
            shipped[name]["resolved_class"],
            shipped[name]["layer_ids"],
        )
    assert ("vllm" in sys.modules) == loaded, "the answer comes from source, without importing it"


def test_an_unknown_architecture_is_unsupported_and_remote_code_needs_its_code(tmp_path):
    index = engine_index("vllm", "0.23.0")
    config = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "vocab_size": 8,
        "max_position_embeddings": 8,
        "architectures": ["MadeUpForCausalLM"],
    }
    assert resolve_target(facts_from(config, tmp_path), index).backend == "unsupported"
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_made_up.MadeUpForCausalLM"}
    remote = resolve_target(facts_from(config, tmp_path), index)
    assert (remote.backend, remote.needs_code, remote.supports_eagle3) == (
        "transformers",
        True,
        True,
    )
    (tmp_path / "modeling_made_up.py").write_text("class MadeUpForCausalLM: ...")
    assert resolve_target(facts_from(config, tmp_path), index).backend == "unsupported"


def test_a_wrapper_promises_only_what_its_language_model_keeps(tmp_path):
    kimi = json.loads((TARGETS[0].parent / "kimi-k2.5.json").read_text())["config"]
    index = engine_index("vllm", "0.23.0")
    assert resolve_target(facts_from(kimi, tmp_path), index).supports_eagle3
    kimi["text_config"]["architectures"] = ["MixtralForCausalLM"]
    assert not resolve_target(facts_from(kimi, tmp_path), index).supports_eagle3


def test_a_hand_patched_install_is_seen_as_it_is(tmp_path):
    root = tmp_path / "vllm"
    models = root / "model_executor" / "models"
    models.mkdir(parents=True)
    (root / "_version.py").write_text("__version__ = version = '9.9.9+patched'\n")
    (models / "registry.py").write_text(
        '_MODELS = {"TinyForCausalLM": ("tiny", "TinyForCausalLM")}\n'
    )
    (models / "interfaces.py").write_text("class SupportsEagle3: ...\n")
    base = "from .interfaces import SupportsEagle3\nclass Base(SupportsEagle3): ...\n"
    (models / "base.py").write_text(base)
    (models / "tiny.py").write_text("from .base import Base as B\nclass TinyForCausalLM(B): ...\n")
    file = generate_table(root, tmp_path)
    assert file.name == "vllm-9.9.9.json"
    row = json.loads(file.read_text())["architectures"]["TinyForCausalLM"]
    assert row["resolved_class"] == "vllm.model_executor.models.tiny.TinyForCausalLM"
    assert row["layer_ids"] == "boundary"
    (models / "base.py").write_text("class Base: ...\n")
    table = json.loads(generate_table(root, tmp_path).read_text())
    assert table["architectures"]["TinyForCausalLM"]["layer_ids"] == ""
