"""A drafter takes every size it is not told from its target."""

import pytest

from eagle3_train.config import DrafterConfig
from eagle3_train.target.derive import drafter_spec
from eagle3_train.target.facts import facts_from

YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_slow": 1.0}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": YARN,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}


def test_a_mla_drafter_copies_the_latent_sizes(tmp_path):
    spec = drafter_spec(facts_from(KIMI, tmp_path), DrafterConfig(attention="mla"))
    assert spec.mla is not None
    assert (spec.num_heads, spec.mla.kv_lora_rank, spec.head_dim) == (64, 512, 192)
    assert (spec.rope.theta, spec.rope.factor) == (50000.0, 64.0)
    assert spec.max_position_embeddings == 262144


def test_a_llama_drafter_of_a_mla_target_gets_a_head_width_kernels_know(tmp_path):
    spec = drafter_spec(facts_from(KIMI, tmp_path), DrafterConfig(num_kv_heads=8))
    assert (spec.head_dim, spec.num_kv_heads) == (128, 8)
    assert (spec.intermediate_size, spec.draft_vocab_size) == (18432, 163840)


def test_what_the_configuration_names_wins(tmp_path):
    config = DrafterConfig(
        intermediate_size=64, draft_vocab_size=100, aux_layers=(1, 2), max_position_embeddings=32
    )
    spec = drafter_spec(facts_from(KIMI, tmp_path), config)
    assert (spec.intermediate_size, spec.draft_vocab_size, spec.num_aux) == (64, 100, 2)
    assert spec.max_position_embeddings == 32


def test_a_mla_drafter_needs_a_mla_target(tmp_path):
    text = {k: v for k, v in KIMI["text_config"].items() if k != "kv_lora_rank"}
    with pytest.raises(ValueError, match="attention=llama"):
        drafter_spec(facts_from(text, tmp_path), DrafterConfig(attention="mla"))
