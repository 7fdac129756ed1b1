"""Specs survive JSON, refuse the impossible, and rotate as the HF formulas say."""

import pytest
import torch

from eagle3_train.drafter.model import Eagle3Drafter, init_from_target
from eagle3_train.drafter.rope import (
    inverse_frequencies,
    rope_tables,
    rotate,
    softmax_scale,
    table_gain,
)
from eagle3_train.drafter.spec import RopeSpec
from tests.unit.drafter_cases import llama_spec, make_target, mla_spec

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KIMI = {
    "type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def test_rope_parameters_round_trip():
    for parameters in (
        LLAMA3,
        {**KIMI, "rope_type": "yarn"},
        {"rope_type": "default", "rope_theta": 1e6},
    ):
        spec = RopeSpec.from_parameters(parameters)
        assert RopeSpec.from_parameters(spec.parameters()) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "at least 1"),
        ({"draft_vocab_size": 49}, "exceeds vocab_size"),
        ({"num_kv_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "must be even"),
    ],
)
def test_an_impossible_spec_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        llama_spec(**changes)


def test_an_mla_spec_must_be_served_as_vllm_serves_it():
    with pytest.raises(ValueError, match="norm_before_fc"):
        mla_spec(norm_before_fc=True)
    with pytest.raises(ValueError, match=r"at least 1, got .'v_head_dim': 0"):
        mla_spec(v_head_dim=0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "longrope"}, "longrope"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 3.0}, "alpha"),
    ],
)
def test_a_rope_that_cannot_be_trained_is_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        RopeSpec.from_parameters(parameters)


def test_scaled_frequencies_equal_transformers():
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    config_type = pytest.importorskip("transformers").LlamaConfig
    for parameters in (
        LLAMA3,
        {**KIMI, "rope_type": "yarn"},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ):
        parameters = {key: value for key, value in parameters.items() if key != "type"}
        spec = llama_spec(head_dim=64, rope=RopeSpec.from_parameters(parameters))
        config = config_type(
            hidden_size=256,
            num_attention_heads=4,
            head_dim=64,
            rope_parameters=dict(parameters),
            max_position_embeddings=262144,
        )
        expected, gain = rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
            config, torch.device("cpu")
        )
        torch.testing.assert_close(inverse_frequencies(spec.rope, 64), expected, rtol=2e-6, atol=0)
        assert table_gain(spec) == pytest.approx(gain)


def test_kimi_mla_scales_the_softmax_and_not_the_table():
    spec = mla_spec(rope=RopeSpec.from_parameters(KIMI))
    gain = 0.1 * torch.log(torch.tensor(64.0)).item() + 1
    assert table_gain(spec) == pytest.approx(1.0)
    assert softmax_scale(spec) == pytest.approx(10**-0.5 * gain**2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_depends_on_relative_position_only(interleaved):
    spec = llama_spec(head_dim=8)
    cos, sin = rope_tables(spec, 40, torch.device("cpu"), torch.float64)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    near = (
        rotate(q, cos[7:8], sin[7:8], interleaved) * rotate(k, cos[3:4], sin[3:4], interleaved)
    ).sum()
    far = (
        rotate(q, cos[37:38], sin[37:38], interleaved)
        * rotate(k, cos[33:34], sin[33:34], interleaved)
    ).sum()
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)


def test_initialisation_copies_head_and_norm_from_the_target():
    spec = llama_spec()
    target, drafter = make_target(spec), Eagle3Drafter(spec, dtype=torch.float64)
    init_from_target(drafter, target, torch.Generator().manual_seed(0))
    assert torch.equal(drafter.lm_head.weight, target.lm_head[torch.arange(20) + target.d2t])
    assert torch.equal(drafter.norm.weight, target.norm_weight)
    assert all(p.isfinite().all() for p in drafter.parameters())
    again = Eagle3Drafter(spec, dtype=torch.float64)
    init_from_target(again, target, torch.Generator().manual_seed(0))
    assert torch.equal(again.fc.weight, drafter.fc.weight)
