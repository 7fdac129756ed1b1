"""Tiny random targets and drafters that behave like the real families; built in a second, never committed.

python -m tests.tiny DIRECTORY      writes a target in Kimi-K2.5's shape, of sizes that CUDA kernels accept
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_train.config import EngineConfig, TargetConfig
from eagle3_train.engines.spec import EngineSpec, Purpose, Request

Family = Literal["llama", "qwen3", "mla", "glm"]
Device = Literal["cpu", "cuda"]

VOCAB = 512
HIDDEN = 64
LAYERS = {"llama": 8, "qwen3": 6, "mla": 6, "glm": 6}
AUX = {"llama": (2, 4, 5), "qwen3": (1, 3, 4), "mla": (2, 3, 4), "glm": (1, 3, 4)}
BOS, EOS, PAD, USER, ASSISTANT = range(5)
# Kimi-K2.5's attention and rotary embedding; everything else is smaller.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
KIMI: dict[Device, dict[str, Any]] = {
    "cpu": {
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
    "cuda": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "moe_intermediate_size": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
    },
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}"
    "{{ eos_token }}{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


VOCABULARY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "dtype": torch.float32,
}


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer with a two-role chat template; unused ids are filler words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *alphabet]
    words += [f"w{number}" for number in range(VOCAB - len(words))]
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=special[3:],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


def _model(family: Family) -> Any:
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS[family],
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        **VOCABULARY,
    }
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, head_dim=32))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32))
    experts: dict[str, Any] = {
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    if family == "glm":
        return Glm4MoeForCausalLM(
            Glm4MoeConfig(**sizes, **experts, num_key_value_heads=2, head_dim=32, use_qk_norm=True)
        )
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **sizes,
            **experts,
            num_key_value_heads=4,
            n_group=2,
            topk_group=1,
            q_lora_rank=32,
            kv_lora_rank=512,  # the CPU MLA kernel knows only Kimi's and DeepSeek's sizes
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
        )
    )


def write_target(directory: Path, family: Family) -> Path:
    """A random target whose layers visibly change the residual stream; float32."""
    torch.manual_seed(0)
    model = _model(family).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0 if family == "mla" else 6.0)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.05)
    return _save(directory, model, "float32")


def write_deepseek(directory: Path, device: Device) -> Path:
    """A random target with Kimi-K2.5's language model: MLA, YaRN, one dense layer, then experts.

    Weights keep every activation near 1 and the experts quiet: bfloat16 then moves a row by a few parts in a
    thousand, also where it decides a near-tie between two experts. float32 for "cpu", bfloat16 for "cuda".
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    shape = DeepseekV3Config(
        **KIMI[device],
        **VOCABULARY,
        num_hidden_layers=LAYERS["mla"],
        max_position_embeddings=4096,
        rope_parameters=YARN,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        routed_scaling_factor=2.827,
        norm_topk_prob=True,
    )
    model = DeepseekV3ForCausalLM(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                gain = 0.1 if ".experts." in name and "down_proj" in name else 1.0
                parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
        model.get_input_embeddings().weight.normal_()
    return _save(directory, model, {"cpu": "float32", "cuda": "bfloat16"}[device])


def _save(directory: Path, model: Any, dtype: str) -> Path:
    """Write weights, configuration and tokenizer.

    Not through save_pretrained: once vLLM has loaded experts in this process, that names them otherwise. It also
    renames DeepSeek's configuration class to kimi_k2 when it serves an MLA drafter.
    """
    tensors = {
        name: tensor if "correction_bias" in name else tensor.to(getattr(torch, dtype))
        for name, tensor in _single_experts(model.state_dict()).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_tokenizer(directory)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config |= {"architectures": [type(model).__name__], "dtype": dtype}
    if type(model).__name__ == "DeepseekV3ForCausalLM":
        config |= {"model_type": "deepseek_v3"}
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _single_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's names: transformers 5 holds a layer's experts in two tensors, engines load them one by one."""
    single = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":  # [experts, 2 * width, hidden]
            gates, ups = tensor.chunk(2, dim=1)
            for i, (gate, up) in enumerate(zip(gates, ups, strict=True)):
                single[f"{layer}.experts.{i}.gate_proj.weight"] = gate.contiguous()
                single[f"{layer}.experts.{i}.up_proj.weight"] = up.contiguous()
        elif kind == "down_proj":
            for i, down in enumerate(tensor):
                single[f"{layer}.experts.{i}.down_proj.weight"] = down.contiguous()
        else:
            single[name] = tensor.contiguous()
    return single


def write_kimi(directory: Path, device: Device) -> Path:
    """`write_deepseek` inside Kimi-K2.5's wrapper; the vision tower is never built."""
    write_deepseek(directory, device)
    text = json.loads((directory / "config.json").read_text())
    vision = {
        "model_type": "kimi_k25_vision",
        "patch_size": 14,
        "vt_hidden_size": 64,
        "vt_intermediate_size": 128,
        "vt_num_attention_heads": 4,
        "vt_num_hidden_layers": 2,
        "mm_hidden_size": 64,
        "text_hidden_size": text["hidden_size"],
        "merge_kernel_size": [2, 2],
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "projector_hidden_act": "gelu",
        "video_attn_type": "spatial_temporal",
    }
    wrapper: dict[str, Any] = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": text["dtype"],
        "text_config": text | {"model_type": "kimi_k2"},
        "vision_config": vision,
        "media_placeholder_token_id": 500,
        "ignore_index": -100,
        "pad_token_id": PAD,
    }
    (directory / "config.json").write_text(json.dumps(wrapper))
    images = {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 64,
        "in_patch_limit_each_frame": 64,
        "in_patch_limit_video": 64,
        "patch_limit_on_one_side": 8,
        "fixed_output_tokens": None,
    }
    # Like the published model, an image processor of its own, which vLLM 0.23 asks for even when it reads only text.
    processor = {"media_proc_cfg": images, "auto_map": {"AutoImageProcessor": "media.Media"}}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    (directory / "media.py").write_text(MEDIA)
    file = directory / "model.safetensors"
    save_file({f"language_model.{name}": t for name, t in load_file(file).items()}, file)
    return directory


def write_drafter(
    directory: Path,
    target: Path,
    family: Family,
    seed: int = 0,
    attention: Literal["llama", "mla"] = "llama",
) -> Path:
    """A random drafter of `target` over a quarter of its vocabulary, in the exported form; float32."""
    from eagle3_train.config import DrafterConfig
    from eagle3_train.drafter.checkpoint import write_checkpoint
    from eagle3_train.drafter.checkpoint_format import ServedTarget
    from eagle3_train.drafter.model import Eagle3Drafter
    from eagle3_train.target.derive import drafter_spec
    from eagle3_train.target.facts import read_facts

    facts = read_facts(target)
    config = DrafterConfig(
        attention=attention,
        aux_layers=AUX[family],
        draft_vocab_size=VOCAB // 4,
        intermediate_size=128,
    )
    spec = drafter_spec(facts, config)
    generator = torch.Generator().manual_seed(seed)
    drafter = Eagle3Drafter(spec)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=2 * parameter.shape[1] ** -0.5, generator=generator)
    kept = torch.randperm(VOCAB, generator=generator)[: spec.draft_vocab_size].sort().values
    served = ServedTarget(num_layers=LAYERS[family])
    d2t = kept - torch.arange(len(kept))
    write_checkpoint(
        directory, spec, drafter.state_dict(), d2t, AUX[family], served, dtype="float32"
    )
    return directory


MEDIA = """from transformers.image_processing_utils import BaseImageProcessor


class Media(BaseImageProcessor):
    num_frames_per_chunk = 4

    def media_tokens_calculator(self, media):
        return 1
"""


def token_ids(count: int, seed: int) -> npt.NDArray[np.int32]:
    """A prompt of ordinary tokens."""
    random = np.random.default_rng(seed)
    ids = random.integers(5, VOCAB, count).astype(np.int32)
    ids[:2] = (BOS, USER)[:count]
    return ids


def engine_spec(
    target: Path, purpose: Purpose, boundaries: tuple[int, ...] = (), **values: Any
) -> EngineSpec:
    """A small engine for a tiny target; hands states over in float32."""
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_cache_bytes": 64 << 20,
        "enforce_eager": True,
        "capture_dtype": "float32",
    }
    return spec_of(target, purpose, boundaries, **(settings | values))


def spec_of(
    target: Path, purpose: Purpose, boundaries: tuple[int, ...] = (), **values: Any
) -> EngineSpec:
    """An engine of these settings, whichever section they belong to."""
    hooks = values.pop("tap_by_hooks", None)
    engine = {name: values.pop(name) for name in EngineConfig.model_fields if name in values}
    return EngineSpec(
        TargetConfig(path=str(target), tap_by_hooks=hooks),
        EngineConfig(**engine),
        purpose,
        boundaries,
        **values,
    )


def ask(ids: npt.NDArray[np.int32], **values: Any) -> Request:
    """A request for an answer and the states of everything that is read."""
    return Request("r", tuple(ids.tolist()), capture=True, **values)


if __name__ == "__main__":
    write_kimi(Path(sys.argv[1]), "cuda")
