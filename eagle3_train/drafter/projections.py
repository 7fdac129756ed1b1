"""Query, key and value of one layer at every step, Llama-style or MLA.

Layer 0 reads [embedding norm of x[t+1+k], hidden norm of h_k[t]]. The first half depends on the token alone, so
its share of every product is computed once per token ("table") and gathered per step; only the second half
is multiplied at each step. Deeper layers read the residual stream only and have no table.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from eagle3_train.drafter.layers import rms_norm
from eagle3_train.drafter.modules import LlamaAttention, MlaAttention
from eagle3_train.drafter.rows import RowPlan
from eagle3_train.drafter.spec import DrafterSpec
from eagle3_train.drafter.stepwise import StepGather, StepLinear

Projection = Callable[[int, Tensor], Tensor]
"""(k, [rows, hidden]) -> [rows, width]."""


def _input_linear(
    weight: Tensor, rows: RowPlan, embedded: Tensor | None, only_starts: bool, fp8: bool
) -> Projection:
    """x W^T at every step, plus the token's share of the product when the layer reads the embedding.

    embedded [context, hidden] are the layer's normed token embeddings. only_starts: step 0 multiplies the rows of the
    starts only, not those of every context row.
    """
    if embedded is None:
        return StepLinear(weight, fp8=fp8)
    of_token, of_state = weight.split(embedded.shape[1], dim=1)
    table = F.linear(embedded.index_select(0, rows.starts) if only_starts else embedded, of_token)
    later = [rows.at(rows.slots, k) for k in range(1, rows.steps)]
    if not only_starts:
        later = [rows.starts.index_select(0, slots) for slots in later]
    gather, linear = StepGather(table, [None, *later]), StepLinear(of_state, fp8=fp8)
    return lambda k, x: linear(k, x, gather(k))


def project(
    spec: DrafterSpec,
    attention: LlamaAttention | MlaAttention,
    rows: RowPlan,
    embedded: Float[Tensor, "context hidden"] | None,
    fp8: bool,
) -> tuple[Projection, Projection]:
    """Query heads, and key heads followed by value heads, before RoPE, of one layer for one pass."""
    of_starts = spec.num_layers == 1  # deeper drafters query every context row at step 0

    def linear(weight: Tensor, only_starts: bool = False) -> Projection:
        return _input_linear(weight, rows, embedded, only_starts, fp8)

    if isinstance(attention, LlamaAttention):
        keys = torch.cat([attention.k_proj.weight, attention.v_proj.weight])
        return linear(attention.q_proj.weight, of_starts), linear(keys)
    latent = linear(attention.kv_a_proj_with_mqa.weight)
    key_value = _mla_key_value(spec, attention, latent, fp8)
    if attention.mla.q_lora_rank is None:
        return linear(attention.q_proj.weight, of_starts), key_value
    down = linear(attention.q_a_proj.weight, of_starts)
    up = StepLinear(attention.q_b_proj.weight, fp8=fp8)
    norm = attention.q_a_layernorm.weight
    return lambda k, x: up(k, rms_norm(down(k, x), norm, spec.rms_norm_eps)), key_value


def _mla_key_value(
    spec: DrafterSpec, attention: MlaAttention, down: Projection, fp8: bool
) -> Projection:
    norm, mla = attention.kv_a_layernorm.weight, attention.mla
    up = StepLinear(attention.kv_b_proj.weight, fp8=fp8)

    def key_value(k: int, x: Tensor) -> Tensor:
        latent, rotated = down(k, x).split([mla.kv_lora_rank, mla.qk_rope_head_dim], 1)
        latent = rms_norm(latent.contiguous(), norm, spec.rms_norm_eps)
        heads = up(k, latent).unflatten(1, (spec.num_heads, -1))
        shared = rotated[:, None].expand(-1, spec.num_heads, -1)
        nope, value = heads.split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
        key = torch.cat([nope, shared], -1)
        return torch.cat([key.flatten(1), value.flatten(1)], -1)

    return key_value
