"""What SGLang 0.5.23 would do with an exported directory, from the released source of its two drafter classes.

Not its code: the parameters of models/llama_eagle3.py and models/kimi_k25_eagle3.py, and the renaming their
`load_weights` applies, restated. SGLang skips names it does not know, so a wrong one would go unnoticed there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_train.drafter.checkpoint_format import read_config, read_tensors
from eagle3_train.drafter.spec import DrafterSpec
from tests.unit.test_export_checkpoint import BOUNDARIES, D2T, LLAMA_SPEC, MLA_SPEC, VARIANTS, write

Shapes = dict[str, tuple[int, ...]]


def llama_parameters(config: dict[str, Any]) -> Shapes:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    states = hidden * config["num_aux_hidden_states"]
    shapes: Shapes = {
        "model.fc.weight": (hidden, states),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    if config["norm_before_fc"]:
        shapes["model.input_norm.weight"] = (states,)
    if config["fc_norm"]:
        shapes |= {f"model.fc_norm.{i}.weight": (hidden,) for i in range(3)}
    for layer in range(config["num_hidden_layers"]):
        inner = {
            "self_attn.qkv_proj": (heads + 2 * keys, hidden if layer else 2 * hidden),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_up_proj": (2 * wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "hidden_norm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
    return shapes


def mla_parameters(config: dict[str, Any]) -> Shapes:
    hidden, wide, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rotated, value = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    # kimi_k25_eagle3.py counts the ids, not num_aux_hidden_states
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    states = hidden * len(nested or config["eagle_aux_hidden_state_layer_ids"])
    inner = {
        "self_attn.fused_qkv_a_proj_with_mqa": (query + latent + rotated, 2 * hidden),
        "self_attn.q_a_layernorm": (query,),
        "self_attn.q_b_proj": (heads * (nope + rotated), query),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (heads * (nope + value), latent),
        "self_attn.o_proj": (hidden, heads * value),
        "mlp.gate_up_proj": (2 * wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "hidden_norm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {
        "model.fc.weight": (hidden, states),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        **{f"model.midlayer.{name}.weight": shape for name, shape in inner.items()},
    }


FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def loaded(directory: Path, mla: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Parameter -> value, and hot_token_id, after SGLang's renaming and fusing."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    hot = None
    for name, tensor in read_tensors(directory).items():
        if name == "d2t":
            hot = tensor + torch.arange(len(tensor))
            continue
        if name == "t2d":
            continue
        name = (
            re.sub(r"^layers\.0\.", "midlayer.", name)
            if mla
            else name.replace("midlayer", "layers.0")
        )
        name = name if name.startswith("lm_head") else f"model.{name}"
        piece = name.split(".")[-2]
        fused = next(
            (f for f, pieces in FUSED.items() if piece in pieces and (mla or f[0] != "f")), piece
        )
        parts.setdefault(name.replace(f".{piece}.", f".{fused}."), {})[piece] = tensor
    whole = {
        name: torch.cat([pieces[p] for p in FUSED.get(name.split(".")[-2], tuple(pieces))])
        for name, pieces in parts.items()
    }
    return whole, hot


@pytest.mark.parametrize("spec", [s for s in VARIANTS if s.attention == "llama"])
def test_every_parameter_of_the_llama_class_is_filled_and_nothing_is_skipped(
    tmp_path: Path, spec: DrafterSpec
) -> None:
    directory = write(tmp_path / "drafter", spec)
    values, hot = loaded(directory, mla=False)
    assert {n: tuple(v.shape) for n, v in values.items()} == llama_parameters(
        read_config(directory)
    )
    assert (hot is None) if spec.full_vocab else torch.equal(hot, D2T + torch.arange(32))  # type: ignore[arg-type]


def test_every_parameter_of_the_mla_class_is_filled_and_nothing_is_skipped(tmp_path: Path) -> None:
    directory = write(tmp_path / "drafter", MLA_SPEC)
    config = read_config(directory)
    values, _ = loaded(directory, mla=True)
    assert {n: tuple(v.shape) for n, v in values.items()} == mla_parameters(config)
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]


def test_a_deeper_layer_norms_its_state_alike_in_both_engines(tmp_path: Path) -> None:
    directory = write(tmp_path / "drafter", next(s for s in VARIANTS if s.num_layers == 2))
    tensors = read_tensors(directory)
    assert torch.equal(
        tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"]
    )


@pytest.mark.parametrize("spec", [LLAMA_SPEC, MLA_SPEC], ids=["llama3", "yarn"])
def test_both_rope_spellings_mean_what_was_trained(tmp_path: Path, spec: DrafterSpec) -> None:
    config = json.loads((write(tmp_path / "drafter", spec) / "config.json").read_text())
    modern, legacy = config["rope_parameters"], config["rope_scaling"]
    assert (modern["rope_type"], modern["rope_theta"]) == (spec.rope.rope_type, spec.rope.theta)
    assert (legacy["type"], config["rope_theta"]) == (spec.rope.rope_type, spec.rope.theta)
    for key, value in legacy.items():
        if key not in ("type", "rope_type"):
            assert modern[key] == value == getattr(spec.rope, key), key


def test_default_boundaries_are_left_to_sglangs_own_default(tmp_path: Path) -> None:
    config = read_config(write(tmp_path / "drafter"))
    assert tuple(config["eagle_aux_hidden_state_layer_ids"]) == BOUNDARIES  # vLLM's, always there
    assert "eagle_config" not in config
