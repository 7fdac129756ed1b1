"""Rotary embedding, numerically as vLLM serves it: inverse frequencies, cos/sin tables, softmax scale.

The formulas follow the papers (Llama-3 and YaRN scaling) and the conventions of vLLM's `get_rope` and
`DeepseekV2MLAAttention`: a Llama drafter with YaRN scales cos/sin by the attention factor, an MLA drafter
scales the softmax instead.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_train.drafter.spec import DrafterSpec, RopeSpec


def _yarn_gain(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(
    rope: RopeSpec, dim: int, device: torch.device | None = None
) -> Float[Tensor, " half_dim"]:
    """Radians per position of each rotated pair, float32, computed on `device` (a copy there would wait for it)."""
    pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
    plain = 1.0 / rope.theta ** (pairs / dim)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, dim)
    return plain


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, the band between is blended."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    width = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / width).clamp(0, 1)
    return plain * (keep + (1 - keep) / rope.factor)


def _yarn(rope: RopeSpec, plain: Tensor, dim: int) -> Tensor:
    """Pairs turning more than `beta_fast` times over the original context are kept, slow ones stretched."""
    original = rope.original_max_position_embeddings

    def pair_turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    stretch = (
        (torch.arange(dim // 2, dtype=torch.float32, device=plain.device) - low) / (high - low)
    ).clamp(0, 1)
    return plain * (1 - stretch) + plain / rope.factor * stretch


def table_gain(spec: DrafterSpec) -> float:
    """Factor on cos and sin."""
    rope = spec.rope
    if rope.rope_type != "yarn":
        return 1.0
    if spec.attention == "mla":
        mscale = 1.0 if rope.mscale is None else rope.mscale
        return _yarn_gain(rope.factor, mscale) / _yarn_gain(rope.factor, rope.mscale_all_dim or 0.0)
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_gain(rope.factor, rope.mscale) / _yarn_gain(rope.factor, rope.mscale_all_dim)
    return _yarn_gain(rope.factor)


def softmax_scale(spec: DrafterSpec) -> float:
    """Factor on q.k before the softmax."""
    scale: float = spec.head_dim**-0.5
    rope = spec.rope
    if spec.attention == "mla" and rope.rope_type == "yarn" and rope.attention_factor != 1.0:
        scale *= _yarn_gain(rope.factor, rope.mscale_all_dim or 0.0) ** 2
    return scale


def rope_tables(
    spec: DrafterSpec, positions: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "positions half_dim"], Float[Tensor, "positions half_dim"]]:
    """Cos and sin for positions 0 .. positions-1, computed in float32, returned as `dtype`."""
    frequencies = inverse_frequencies(spec.rope, spec.rope_dim, device)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequencies
    gain = table_gain(spec)
    return (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)


def rotate(
    x: Float[Tensor, "rows heads dim"],
    cos: Float[Tensor, "rows half_dim"],
    sin: Float[Tensor, "rows half_dim"],
    interleaved: bool,
) -> Float[Tensor, "rows heads dim"]:
    """Rotate each pair of every head by its row's angle; a new tensor of x's dtype."""
    cos, sin = cos[:, None], sin[:, None]
    wide = x.to(cos.dtype)
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return out.to(x.dtype)
