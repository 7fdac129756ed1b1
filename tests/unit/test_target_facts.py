"""What a target's config.json means, in the forms seen in the wild."""

import json

import pytest

from eagle3_train.drafter.spec import RopeSpec
from eagle3_train.target.facts import (
    bytes_per_token,
    facts_from,
    read_facts,
    resolve_boundaries,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def facts(tmp_path, **changes):
    return facts_from({**LLAMA, **changes}, tmp_path)


def test_default_boundaries_are_the_engines():
    assert resolve_boundaries(None, 61) == (2, 30, 58, 61)
    assert resolve_boundaries(None, 32) == (2, 16, 29, 32)


@pytest.mark.parametrize("aux", [(3, 2), (1, 1, 2), (0, 8), ()])
def test_boundaries_that_an_engine_would_sort_drop_or_refuse_are_refused(aux):
    with pytest.raises(ValueError, match=r"drafter\.aux_layers"):
        resolve_boundaries(aux, 8)


def test_a_shallow_target_must_choose_its_boundaries():
    with pytest.raises(ValueError, match="6 layers"):
        resolve_boundaries(None, 6)
    assert resolve_boundaries((1, 2, 4), 6) == (1, 2, 4, 6)


def test_kimi_costs_56_kib_per_token():
    assert bytes_per_token(7168, 4) == 56 * 1024


def test_a_wrapper_delegates_to_its_text_config(tmp_path):
    wrapper = {
        "architectures": ["W"],
        "text_config": {**LLAMA, "vocab_size": 99},
        "vision_config": {},
    }
    read = facts_from(wrapper, tmp_path)
    assert (read.architectures, read.text_architectures) == (("W",), ("LlamaForCausalLM",))
    assert (read.vocab_size, read.is_multimodal) == (99, True)


def test_experts_are_found_under_every_family_s_names(tmp_path):
    deepseek = {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 96}
    smallthinker = {"moe_num_primary_experts": 64, "moe_num_active_primary_experts": 6}
    smallthinker["moe_ffn_hidden_size"] = 96
    assert facts(tmp_path, **deepseek).moe == facts(tmp_path, **smallthinker).moe
    assert facts(tmp_path, num_local_experts=8, experts_per_token=2).moe.intermediate_size == 128


def test_both_rope_schemas_mean_the_same(tmp_path):
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    legacy = facts(tmp_path, rope_theta=5e4, rope_scaling={"type": "yarn", **scaling})
    new = facts(
        tmp_path,
        rope_parameters={"rope_type": "yarn", "rope_theta": 5e4, "mrope_section": [1], **scaling},
    )
    yarn = RopeSpec("yarn", theta=5e4, **scaling)
    assert RopeSpec.from_parameters(legacy.rope) == RopeSpec.from_parameters(new.rope) == yarn


def test_rope_per_attention_type_reads_full_attention(tmp_path):
    per_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    rope = facts(tmp_path, rope_parameters=per_type).rope
    assert rope == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}


def test_whatever_touches_the_logits_is_a_fact(tmp_path):
    gemma = facts(tmp_path, model_type="gemma2", final_logit_softcapping=30.0)
    assert (gemma.logit_softcap, gemma.norm_kind) == (30.0, "rms_plus_one")
    assert gemma.tie_word_embeddings
    assert facts(tmp_path, logits_scaling=8.0).logit_scale == 0.125
    cohere = {k: v for k, v in LLAMA.items() if k != "rms_norm_eps"}
    cohere.update(layer_norm_eps=1e-5, logit_scale=0.0625)
    assert facts_from(cohere, tmp_path).norm_kind == "layer"


def test_a_missing_directory_and_a_non_model_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="download the model first"):
        read_facts(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ValueError, match="hidden_size"):
        read_facts(tmp_path)
