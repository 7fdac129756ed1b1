"""Only three tensors of the target are read, whatever its layout calls them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from eagle3_train.target.weights import read_frozen

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 6,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}
EMBED, HEAD, NORM = torch.randn(6, 4), torch.randn(6, 4), torch.rand(4)


def target(path, tensors, **config):
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    return path


def layout(prefix, head):
    return {
        f"{prefix}embed_tokens.weight": EMBED.clone(),
        f"{prefix}norm.weight": NORM.clone(),
        head: HEAD.clone(),
    }


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ],
)
def test_wrapper_prefixes_are_seen_through(tmp_path, prefix, head):
    embed, lm_head, norm = read_frozen(target(tmp_path, layout(prefix, head)))
    assert torch.equal(embed, EMBED)
    assert torch.equal(lm_head, HEAD)
    assert torch.equal(norm, NORM)


def test_a_norm_wider_than_the_vocabulary_is_read_whole(tmp_path):
    tensors = {
        "model.embed_tokens.weight": EMBED[:3],
        "lm_head.weight": HEAD,
        "model.norm.weight": NORM,
    }
    embed, lm_head, norm = read_frozen(target(tmp_path, tensors, vocab_size=3))
    assert torch.equal(norm, NORM)
    assert len(embed) == len(lm_head) == 3


def test_layers_towers_and_mtp_modules_are_not_mistaken_for_the_model(tmp_path):
    tensors = layout("model.", "lm_head.weight")
    for decoy in (
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.shared_head.norm.weight",
        "visual.norm.weight",
        "mtp.norm.weight",
    ):
        tensors[decoy] = torch.zeros(4)
    assert torch.equal(read_frozen(target(tmp_path, tensors)).norm_weight, NORM)


def test_tied_embeddings_serve_as_the_head(tmp_path):
    tensors = layout("model.", "lm_head.weight")
    del tensors["lm_head.weight"]
    read = read_frozen(target(tmp_path, tensors, tie_word_embeddings=True))
    assert torch.equal(read.lm_head, EMBED)


def test_padded_rows_are_dropped(tmp_path):
    tensors = layout("model.", "lm_head.weight")
    tensors["lm_head.weight"] = torch.cat([HEAD, torch.zeros(2, 4)])
    assert torch.equal(read_frozen(target(tmp_path, tensors)).lm_head, HEAD)


def test_logits_are_a_plain_rms_norm_and_matmul_of_what_is_returned(tmp_path):
    tensors = layout("model.", "lm_head.weight")
    read = read_frozen(target(tmp_path, tensors, logits_scaling=8.0, use_gemma_norm=True))
    assert torch.allclose(read.lm_head, HEAD / 8)
    assert torch.allclose(read.norm_weight, NORM + 1)
    assert torch.equal(read.embed, EMBED)


def test_only_the_files_that_hold_them_are_opened(tmp_path):
    target(tmp_path, layout("model.", "lm_head.weight"))
    weight_map = dict.fromkeys(layout("model.", "lm_head.weight"), "model.safetensors")
    weight_map["model.layers.0.mlp.weight"] = "not-downloaded.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(read_frozen(tmp_path).embed, EMBED)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("lm_head.qweight", torch.zeros(6, 4, dtype=torch.int32)),
        ("lm_head.weight", torch.zeros(6, 4, dtype=torch.int8)),
        ("lm_head.weight", torch.zeros(6, 4).to(torch.float8_e4m3fn)),
    ],
)
def test_a_quantised_head_is_refused_by_name(tmp_path, name, tensor):
    tensors = layout("model.", "x")
    del tensors["x"]
    with pytest.raises(ValueError, match=r"lm_head.*quantised"):
        read_frozen(target(tmp_path, {**tensors, name: tensor}))


def test_too_few_rows_and_no_weights_are_refused(tmp_path):
    tensors = {**layout("model.", "lm_head.weight"), "lm_head.weight": HEAD[:5]}
    with pytest.raises(ValueError, match=r"\(5, 4\)"):
        read_frozen(target(tmp_path, tensors))
    tensors = {**layout("model.", "lm_head.weight"), "model.norm.weight": torch.ones(5)}
    with pytest.raises(ValueError, match=r"\(5,\)"):
        read_frozen(target(tmp_path, tensors))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no safetensors"):
        read_frozen(tmp_path)


def test_a_head_that_is_not_linear_is_refused(tmp_path):
    with pytest.raises(ValueError, match="soft-capped"):
        read_frozen(
            target(tmp_path, layout("model.", "lm_head.weight"), final_logit_softcapping=30.0)
        )
