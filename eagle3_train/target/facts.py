"""What a target's config.json says of it: sizes, attention, RoPE, head. No torch, no transformers, no network.

One layer unit everywhere: boundary k (0..L) is the residual stream after k decoder layers; boundary L is
the last layer's output before the final norm. This is vLLM's numbering.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from eagle3_train.config import StateType
from eagle3_train.drafter.spec import MlaShape
from eagle3_train.rundir import reading

Config = Mapping[str, Any]
INDEX = "model.safetensors.index.json"

# Wrapper configs keep the language model's sizes one or two levels down.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
# Sparse hub configs leave these to the classes of transformers.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "gemma2": {"tie_word_embeddings": True},
    "gemma": {"tie_word_embeddings": True},
}
# These store w and multiply by (1 + w).
_PLUS_ONE_NORMS = (
    *("gemma", "gemma2", "gemma3_text"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
# When the config does not say; a group of weights shares a scale.
_QUANTISED_BITS = {
    **{"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25},
    **dict.fromkeys(("awq", "gptq", "bitsandbytes", "compressed-tensors"), 4.5),
}
# Llama-4 calls the expert width intermediate_size and the dense one intermediate_size_mlp.
_DENSE_WIDTHS = (
    *("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size"),
    *("moe_intermediate_size", "moe_ffn_hidden_size"),
)


@dataclass(frozen=True, slots=True)
class MoeFacts:
    """Mixture of experts: routed experts, how many a token visits, their width, always-on experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared_experts: int


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target as its config.json describes it.

    intermediate_size is the dense MLP's width. rope: rope_parameters of transformers 5 for full attention, as if they
    turned all of each head. logit_scale multiplies the logits, logit_softcap squashes
    them, norm_kind is the final norm ("rms", "rms_plus_one" = (1 + w), "layer"). quantised_bits: of a quantised
    weight with its scales; None for a kind this project cannot size; quantised_block: width of the blocks that share a
    scale, 0 without. weight_bytes is None when the directory holds no
    safetensors. special_ids: BOS and EOS.
    """

    path: Path
    architectures: tuple[str, ...]
    text_architectures: tuple[str, ...]
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool
    mla: MlaShape | None
    moe: MoeFacts | None
    quantisation: str | None
    quantised_bits: float | None
    quantised_block: int
    auto_map: dict[str, str]
    is_multimodal: bool
    dtype: str
    logit_scale: float
    logit_softcap: float | None
    norm_kind: str
    special_ids: tuple[int, ...]
    weight_bytes: int | None


def locate(path: str | Path) -> Path:
    """Directory of a target given as a directory or as a hub id whose config.json is cached locally."""
    directory = Path(path).expanduser()
    if (directory / "config.json").is_file():
        return directory
    if directory.is_dir():
        raise ValueError(f"{directory} holds no config.json: not a model directory")
    with suppress(HFValidationError):
        cached = try_to_load_from_cache(str(path), "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
    raise ValueError(
        f"target.path={str(path)!r} is no directory and no hub id with a locally cached config.json; "
        "download the model first, or give its directory"
    )


def read_facts(path: str | Path) -> TargetFacts:
    """Facts of the target at `path` (see `locate`). Raises ValueError naming what is missing."""
    directory = locate(path)
    with reading(directory / "config.json"):
        config = json.loads((directory / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}, not the settings of a model")
        return facts_from(config, directory)


def facts_from(config: Config, directory: Path) -> TargetFacts:
    """Facts of an already parsed config.json that lies in `directory`. Raises ValueError, among others."""
    text = _text_config(config)
    kind = str(text.get("model_type") or config.get("model_type") or "")
    values = {**_FAMILY_DEFAULTS.get(kind, {}), **{k: v for k, v in text.items() if v is not None}}
    hidden = _size(values, directory, "hidden_size", "n_embd", "d_model")
    heads = _size(values, directory, "num_attention_heads", "n_head", "num_heads")
    num_layers = _size(values, directory, "num_hidden_layers", "n_layer", "num_layers")
    head_dim = _first(values, "head_dim") or hidden // heads
    tied = values.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    quantised = _section(values, "quantization_config") or _section(config, "quantization_config")
    return TargetFacts(
        path=directory,
        architectures=_names(config.get("architectures")),
        text_architectures=_names(text.get("architectures")) if text is not config else (),
        hidden_size=hidden,
        num_layers=num_layers,
        vocab_size=_size(values, directory, "vocab_size"),
        num_heads=heads,
        num_kv_heads=_first(values, "num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate_size=_size(values, directory, *_DENSE_WIDTHS),
        rms_norm_eps=float(values.get("rms_norm_eps") or values.get("layer_norm_eps") or 1e-6),
        rope=_rope(values),
        max_position_embeddings=_size(values, directory, "max_position_embeddings", "n_positions"),
        tie_word_embeddings=bool(tied),
        mla=_mla(values, directory),
        moe=_moe(values),
        quantisation=str(quantised.get("quant_method") or "unnamed") if quantised else None,
        quantised_bits=_quantised_bits(quantised),
        quantised_block=max(quantised.get("weight_block_size") or [0]),
        auto_map=code_map(config),
        is_multimodal=text is not config,
        dtype=str(
            values.get("dtype") or values.get("torch_dtype") or config.get("torch_dtype") or ""
        ),
        logit_scale=_logit_scale(values, hidden),
        logit_softcap=values.get("final_logit_softcapping"),
        norm_kind=_norm_kind(values, kind),
        special_ids=_special_ids(values),
        weight_bytes=weight_bytes(directory),
    )


def resolve_boundaries(aux: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Boundaries to capture: the aux ones, and then L. Raises ValueError if unusable.

    None: those both engines use when told nothing, which may collide for L < 7.
    """
    chosen = (2, num_layers // 2, num_layers - 3) if aux is None else aux
    usable = bool(chosen) and list(chosen) == sorted(set(chosen))
    if not usable or chosen[0] < 0 or chosen[-1] >= num_layers:
        source = "the default (2, L//2, L-3)" if aux is None else "drafter.aux_layers"
        raise ValueError(
            f"{source} gives boundaries {chosen} for a target of {num_layers} layers; they must rise strictly "
            f"within 0..{num_layers - 1}: set drafter.aux_layers"
        )
    return (*chosen, num_layers)


def bytes_per_token(hidden_size: int, num_boundaries: int, dtype: StateType = "bfloat16") -> int:
    """Bytes of captured states per token; num_boundaries counts L too. FP8 rows carry a 4-byte scale each."""
    row = {
        "float32": 4 * hidden_size,
        "bfloat16": 2 * hidden_size,
        "float8_e4m3fn": hidden_size + 4,
    }
    return row[dtype] * num_boundaries


def weight_bytes(directory: Path) -> int | None:
    """Bytes of the safetensors weights, from the index or the files; None when there are none."""
    index = directory / INDEX
    if index.is_file():
        with suppress(ValueError), reading(index):  # whoever reads the weights says what is wrong
            if total := _first(_section(json.loads(index.read_text()), "metadata"), "total_size"):
                return total
    sizes = [file.stat().st_size for file in directory.glob("*.safetensors")]
    return sum(sizes) if sizes else None


def _text_config(config: Config) -> Config:
    for key in _TEXT_KEYS:
        inner = config.get(key)
        if isinstance(inner, dict):
            return _text_config(inner)
    return config


def code_map(config: Config) -> dict[str, str]:
    """A config's auto_map: Auto class -> "file.Class" of the model's own Python; the first of several."""
    found = _section(config, "auto_map").items()
    several = {key: [value] if isinstance(value, str) else value or [] for key, value in found}
    first = {key: next(filter(None, values), None) for key, values in several.items()}
    return {key: str(value) for key, value in first.items() if value}


def _section(config: Config, key: str) -> Config:
    """A mapping inside a config, empty when absent. Raises ValueError for anything else."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{key} should be a mapping, got {found!r:.80}")
    return found


def _names(value: str | list[str] | None) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else list(value or [])
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures should be names, got {names}")
    return tuple(names)


def _special_ids(values: Config) -> tuple[int, ...]:
    found = [values.get("bos_token_id"), values.get("eos_token_id")]
    flat = [id for ids in found for id in (ids if isinstance(ids, list) else [ids])]
    return tuple(id for id in flat if isinstance(id, int))


def _quantised_bits(quantised: Config) -> float | None:
    """Bits of a quantised weight, scales included; None when its kind does not say."""
    groups = _section(quantised, "config_groups").values()
    named = [_first(_section(group, "weights"), "num_bits") for group in groups]
    bits = 8 if quantised.get("load_in_8bit") else _first(quantised, "bits", "w_bit")
    bits = bits or max(named, default=0)
    return bits + 0.5 if bits else _QUANTISED_BITS.get(str(quantised.get("quant_method")))


def _size(values: Config, directory: Path, *names: str) -> int:
    size = _first(values, *names)
    if size <= 0:
        raise ValueError(
            f"{directory}/config.json names no {names[0]}: not a decoder-only language model this project knows"
        )
    return size


def _rope(values: Config) -> dict[str, Any]:
    """RoPE of full attention, from transformers 5's rope_parameters or the legacy rope_scaling and rope_theta."""
    raw = _section(values, "rope_parameters") or _section(values, "rope_scaling")
    per_type = raw.get("full_attention")
    raw = per_type if isinstance(per_type, dict) else raw
    rope = {k: v for k, v in raw.items() if v is not None and k != "partial_rotary_factor"}
    rope.setdefault("rope_theta", values.get("rope_theta") or 10_000.0)
    words = [k for k, v in rope.items() if isinstance(v, str) and k not in ("type", "rope_type")]
    if words:
        raise ValueError(f"RoPE: {words[0]} should be a number, got {rope[words[0]]!r}")
    return rope


def _mla(values: Config, directory: Path) -> MlaShape | None:
    if not values.get("kv_lora_rank"):
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: _size(values, directory, name) for name in names}
    return MlaShape(q_lora_rank=_first(values, "q_lora_rank") or None, **sizes)


def _moe(values: Config) -> MoeFacts | None:
    experts = _first(
        values, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_primary_experts"
    )
    if experts < 2:
        return None
    per_token = _first(
        values, "num_experts_per_tok", "experts_per_token", "moe_num_active_primary_experts"
    )
    width = _first(values, "moe_intermediate_size", "moe_ffn_hidden_size", "intermediate_size")
    return MoeFacts(experts, per_token or 1, width, _first(values, "n_shared_experts"))


def _first(values: Config, *names: str) -> int:
    """The first size that is named and not zero; 0 when none is. Raises ValueError for what is no number."""
    name = next((name for name in names if values.get(name)), None)
    if name is None:
        return 0
    if isinstance(values[name], (int, float)):
        return int(values[name])
    raise ValueError(f"{name} should be a number, got {values[name]!r:.80}")


def _logit_scale(values: Config, hidden: int) -> float:
    if values.get("logits_scaling"):  # Granite divides
        return 1.0 / float(values["logits_scaling"])
    if values.get("dim_model_base"):  # MiniCPM divides the state
        return float(values["dim_model_base"]) / hidden
    return float(values.get("logit_scale") or values.get("lm_head_multiplier") or 1.0)


def _norm_kind(values: Config, kind: str) -> str:
    if kind in _PLUS_ONE_NORMS or values.get("use_gemma_norm"):
        return "rms_plus_one"
    layer_norm = any(key.startswith("layer_norm_eps") or key == "norm_epsilon" for key in values)
    return "layer" if layer_norm and "rms_norm_eps" not in values else "rms"
