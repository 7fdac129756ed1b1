"""What a target's config.json says of it: sizes, attention, RoPE, head. No torch, no transformers, no network.

One layer unit everywhere: boundary k (0..L) is the residual stream after k decoder layers; boundary L is
the last layer's output before the final norm. This is vLLM's numbering.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from eagle3_train.config import StateType

Config = Mapping[str, Any]

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
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
}
# These store w and multiply by (1 + w).
_PLUS_ONE_NORMS = (
    *("gemma", "gemma2", "gemma3_text"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
# Llama-4 calls the expert width intermediate_size and the dense one intermediate_size_mlp.
_DENSE_WIDTHS = (
    *("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size"),
    *("moe_intermediate_size", "moe_ffn_hidden_size"),
)


@dataclass(frozen=True, slots=True)
class MlaFacts:
    """Multi-head latent attention; q_lora_rank is None when queries are not compressed."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


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

    intermediate_size is the dense MLP's width. rope: rope_parameters of transformers 5 for full attention, which
    turn a share partial_rotary_factor of each head. logit_scale multiplies the logits, logit_softcap squashes
    them, norm_kind is the final norm ("rms", "rms_plus_one" = (1 + w), "layer"). weight_bytes is None when the
    directory holds no safetensors.
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
    partial_rotary_factor: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    mla: MlaFacts | None
    moe: MoeFacts | None
    quantisation: str | None
    auto_map: Config
    is_multimodal: bool
    dtype: str
    logit_scale: float
    logit_softcap: float | None
    norm_kind: str
    weight_bytes: int | None


def locate(path: str | Path) -> Path:
    """Directory of a target given as a directory or as a hub id whose config.json is cached locally."""
    directory = Path(path).expanduser()
    if (directory / "config.json").is_file():
        return directory
    if directory.is_dir():
        raise ValueError(f"{directory} holds no config.json: not a model directory")
    if len(directory.parts) == 2 and not directory.is_absolute():
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
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{directory}/config.json is not valid JSON: {error}") from error
    return facts_from(config, directory)


def facts_from(config: Config, directory: Path) -> TargetFacts:
    """Facts of an already parsed config.json that lies in `directory`."""
    text = _text_config(config)
    kind = str(text.get("model_type") or config.get("model_type") or "")
    values = {**_FAMILY_DEFAULTS.get(kind, {}), **{k: v for k, v in text.items() if v is not None}}
    hidden = _size(values, directory, "hidden_size", "n_embd", "d_model")
    heads = _size(values, directory, "num_attention_heads", "n_head", "num_heads")
    num_layers = _size(values, directory, "num_hidden_layers", "n_layer", "num_layers")
    head_dim = int(values.get("head_dim") or hidden // heads)
    tied = values.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    quantisation = values.get("quantization_config") or config.get("quantization_config") or {}
    return TargetFacts(
        path=directory,
        architectures=tuple(config.get("architectures") or ()),
        text_architectures=tuple(text.get("architectures") or ()) if text is not config else (),
        hidden_size=hidden,
        num_layers=num_layers,
        vocab_size=_size(values, directory, "vocab_size"),
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=_size(values, directory, *_DENSE_WIDTHS),
        rms_norm_eps=float(values.get("rms_norm_eps") or values.get("layer_norm_eps") or 1e-6),
        rope=_rope(values),
        partial_rotary_factor=_partial_rotary_factor(values, head_dim),
        max_position_embeddings=_size(values, directory, "max_position_embeddings", "n_positions"),
        tie_word_embeddings=bool(tied),
        mla=_mla(values),
        moe=_moe(values),
        quantisation=quantisation.get("quant_method"),
        auto_map=dict(config.get("auto_map") or {}),
        is_multimodal=text is not config,
        dtype=str(
            values.get("dtype") or values.get("torch_dtype") or config.get("torch_dtype") or ""
        ),
        logit_scale=_logit_scale(values, hidden),
        logit_softcap=values.get("final_logit_softcapping"),
        norm_kind=_norm_kind(values, kind),
        weight_bytes=weight_bytes(directory),
    )


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """The aux boundaries both engines use when told nothing: (2, L//2, L-3); may collide for L < 7."""
    return (2, num_layers // 2, num_layers - 3)


def resolve_boundaries(aux: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Boundaries to capture: the aux ones (None: the default) and then L. Raises ValueError if unusable."""
    chosen = default_boundaries(num_layers) if aux is None else tuple(aux)
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
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        total = json.loads(index.read_text()).get("metadata", {}).get("total_size")
        if total:
            return int(total)
    sizes = [file.stat().st_size for file in directory.glob("*.safetensors")]
    return sum(sizes) if sizes else None


def _text_config(config: Config) -> Config:
    for key in _TEXT_KEYS:
        inner = config.get(key)
        if isinstance(inner, dict):
            return _text_config(inner)
    return config


def _size(values: Config, directory: Path, *names: str) -> int:
    size = _first(values, *names)
    if not size:
        raise ValueError(
            f"{directory}/config.json names no {names[0]}: not a decoder-only language model this project knows"
        )
    return size


def _raw_rope(values: Config) -> Config:
    """RoPE of full attention, from transformers 5's rope_parameters or the legacy rope_scaling."""
    raw: Config = values.get("rope_parameters") or values.get("rope_scaling") or {}
    per_type = raw.get("full_attention")
    return per_type if isinstance(per_type, dict) else raw


def _rope(values: Config) -> dict[str, Any]:
    raw = _raw_rope(values)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    known = {
        "rope_type": "default" if kind == "mrope" else str(kind),
        "rope_theta": float(raw.get("rope_theta") or values.get("rope_theta") or 10_000.0),
    }
    # The drafter reads text: the image axes of mRoPE collapse onto one position.
    left_out = ("type", "partial_rotary_factor", *(key for key in raw if key.startswith("mrope")))
    own = {k: v for k, v in raw.items() if k not in left_out and v is not None}
    return own | known


def _partial_rotary_factor(values: Config, head_dim: int) -> float:
    share = _raw_rope(values).get("partial_rotary_factor") or values.get("partial_rotary_factor")
    rotary = 0 if values.get("kv_lora_rank") else values.get("rotary_dim")
    return float(share or (rotary or head_dim) / head_dim)


def _mla(values: Config) -> MlaFacts | None:
    if not values.get("kv_lora_rank"):
        return None
    return MlaFacts(
        q_lora_rank=values.get("q_lora_rank"),
        kv_lora_rank=int(values["kv_lora_rank"]),
        qk_nope_head_dim=int(values["qk_nope_head_dim"]),
        qk_rope_head_dim=int(values["qk_rope_head_dim"]),
        v_head_dim=int(values["v_head_dim"]),
    )


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
    """The first size that is named and not zero; 0 when none is."""
    return next((int(values[name]) for name in names if values.get(name)), 0)


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
