"""Query, key and value of one layer at every step, Llama-style or MLA.

Layer 0 reads [embedding norm of x[t+1+k], hidden norm of h_k[t]]. The first half depends on the token alone, so
its share of every product is computed once per token ("table") and gathered per step; only the second half
is multiplied at each step. Deeper layers read the residual stream only and have no table.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from eagle3_train.drafter.layers import rms_norm
from eagle3_train.drafter.modules import LlamaAttention, MlaAttention
from eagle3_train.drafter.rows import RowPlan
from eagle3_train.drafter.spec import DrafterSpec
from eagle3_train.drafter.stepwise import StepGather, StepLinear


@runtime_checkable
class Projections(Protocol):
    """What a layer's attention needs at step k."""

    def query(self, k: int, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows q_width"]:
        """Query heads, before RoPE."""

    def key_value(self, k: int, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows kv_width"]:
        """Key heads, then value heads, before RoPE."""


class InputLinear:
    """x W^T at every step, plus the token's share of the product when the layer reads the embedding."""

    def __init__(
        self,
        weight: Tensor,
        steps: int,
        embedded: Float[Tensor, "rows hidden"] | None,
        index: list[Int[Tensor, "_"] | None],
        fp8: bool,
    ) -> None:
        self._gather, self._table, self._index = StepGather(), None, index
        if embedded is not None:
            of_token, weight = weight.split(embedded.shape[1], dim=1)
            self._table = F.linear(embedded, of_token)
        self._linear = StepLinear(weight, steps, fp8=fp8)

    def __call__(self, k: int, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows out"]:
        """Apply at step k."""
        if self._table is None:
            return self._linear(k, x)
        return self._linear(k, x, self._gather(k, self._table, self._index[k]))


def _inputs(
    rows: RowPlan, embedded: Tensor | None, only_starts: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Rows whose token share is needed, and per step which of them (None: all, in order)."""
    later = [rows.at(rows.slots, k) for k in range(1, rows.steps)]
    if only_starts:
        picked = None if embedded is None else embedded.index_select(0, rows.starts)
        return picked, [None, *later]
    return embedded, [None, *(rows.starts.index_select(0, slots) for slots in later)]


class _LlamaProjections:
    def __init__(
        self,
        attention: LlamaAttention,
        rows: RowPlan,
        embedded: Tensor | None,
        only_starts: bool,
        fp8: bool,
    ) -> None:
        keys = torch.cat([attention.k_proj.weight, attention.v_proj.weight])
        self._query = InputLinear(
            attention.q_proj.weight, rows.steps, *_inputs(rows, embedded, only_starts), fp8
        )
        self._key_value = InputLinear(keys, rows.steps, *_inputs(rows, embedded, False), fp8)

    def query(self, k: int, x: Tensor) -> Tensor:
        return self._query(k, x)

    def key_value(self, k: int, x: Tensor) -> Tensor:
        return self._key_value(k, x)


class _MlaProjections:
    def __init__(
        self,
        spec: DrafterSpec,
        attention: MlaAttention,
        rows: RowPlan,
        embedded: Tensor | None,
        only_starts: bool,
        fp8: bool,
    ) -> None:
        assert spec.kv_lora_rank is not None
        assert spec.qk_nope_head_dim is not None
        self._spec, self._attention = spec, attention
        self._rank, self._nope = spec.kv_lora_rank, spec.qk_nope_head_dim
        compressed = spec.q_lora_rank is not None
        first = attention.q_a_proj.weight if compressed else attention.q_proj.weight
        self._query_a = InputLinear(first, rows.steps, *_inputs(rows, embedded, only_starts), fp8)
        self._query_b = (
            StepLinear(attention.q_b_proj.weight, rows.steps, fp8=fp8) if compressed else None
        )
        down = attention.kv_a_proj_with_mqa.weight
        self._kv_a = InputLinear(down, rows.steps, *_inputs(rows, embedded, False), fp8)
        self._kv_b = StepLinear(attention.kv_b_proj.weight, rows.steps, fp8=fp8)

    def query(self, k: int, x: Tensor) -> Tensor:
        low = self._query_a(k, x)
        if self._query_b is None:
            return low
        norm = self._attention.q_a_layernorm.weight
        return self._query_b(k, rms_norm(low, norm, self._spec.rms_norm_eps))

    def key_value(self, k: int, x: Tensor) -> Tensor:
        spec = self._spec
        low = self._kv_a(k, x)
        latent, rotated = low[:, : self._rank].contiguous(), low[:, self._rank :]
        latent = rms_norm(latent, self._attention.kv_a_layernorm.weight, spec.rms_norm_eps)
        heads = self._kv_b(k, latent).unflatten(1, (spec.num_heads, -1))
        shared = rotated[:, None].expand(-1, spec.num_heads, -1)
        key = torch.cat([heads[..., : self._nope], shared], -1)
        return torch.cat([key.flatten(1), heads[..., self._nope :].flatten(1)], -1)


def project(
    spec: DrafterSpec,
    attention: LlamaAttention | MlaAttention,
    rows: RowPlan,
    embedded: Float[Tensor, "context hidden"] | None,
    fp8: bool,
) -> Projections:
    """The projections of one layer for one pass; `embedded` are layer 0's normed token embeddings."""
    only_starts = spec.num_layers == 1  # deeper drafters query every context row at step 0
    if isinstance(attention, LlamaAttention):
        return _LlamaProjections(attention, rows, embedded, only_starts, fp8)
    return _MlaProjections(spec, attention, rows, embedded, only_starts, fp8)
