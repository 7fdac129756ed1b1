"""How much arithmetic and memory one training step needs, from the rows it has to compute.

Matrix work counts 2 FLOPs per multiply-add: forward, input gradient and weight gradient of every trained matrix,
forward and input gradient where only a norm in front is trained, forward alone for the teacher. "Needed" is
what exact row compaction leaves, with everything that depends on a token alone done once per token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle3_train.drafter.checkpoint_format import expected_tensors
from eagle3_train.drafter.rows import RowPlan
from eagle3_train.drafter.spec import DrafterSpec

H200_BF16_FLOPS = 790e12  # measured: 8192^3 product on random data
H200_BYTES = 4.3e12  # measured: device-to-device copy, read plus written


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of one step, by part."""

    trunk: float
    head: float
    attention: float
    context: float
    teacher: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.trunk + self.head + self.attention + self.context + self.teacher


def needed(spec: DrafterSpec, rows: RowPlan) -> Work:
    """FLOPs that one step on these rows needs (one-layer drafter)."""
    hidden, flat, context = spec.hidden_size, sum(rows.counts), len(rows.context)
    starts, later = len(rows.starts), sum(rows.counts) - rows.counts[0]
    (query, query_up), (keys, keys_up) = _projections(spec)
    out, mlp = hidden * spec.num_heads * spec.value_dim, 3 * hidden * spec.intermediate_size
    pairs = 0.0
    for k, count in enumerate(rows.counts):
        own = rows.starts[:count]
        pairs += float((own - rows.begin[own] + 1).double().sum()) + k * count
    return Work(
        trunk=6.0 * (flat * (query + query_up + out + mlp) + (context + later) * (keys + keys_up)),
        head=6.0 * flat * hidden * spec.draft_vocab_size,
        attention=spec.num_heads * (8.0 * spec.head_dim + 6.0 * spec.value_dim) * pairs,
        context=6.0 * (starts * query + context * keys) + 4.0 * context * spec.num_aux * hidden**2,
        teacher=2.0 * starts * hidden * spec.draft_vocab_size,
    )


def _projections(spec: DrafterSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """Multiply-adds per row of the (query, key and value) products with the layer's input, and of those after them."""
    queries = spec.num_heads * spec.head_dim
    if (mla := spec.mla) is None:
        return (spec.hidden_size * queries, 0), (
            2 * spec.hidden_size * spec.num_kv_heads * spec.head_dim,
            0,
        )
    rank = mla.q_lora_rank
    query = (
        (spec.hidden_size * queries, 0)
        if rank is None
        else (spec.hidden_size * rank, rank * queries)
    )
    keys = spec.hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    values = mla.qk_nope_head_dim + mla.v_head_dim
    return query, (keys, mla.kv_lora_rank * spec.num_heads * values)


def without_token_sharing(spec: DrafterSpec, rows: RowPlan) -> float:
    """The same with the embedding half of the input products multiplied at every step, as a plain compacted step would."""
    (query, _), (keys, _) = _projections(spec)
    return needed(spec, rows).total + 6.0 * (sum(rows.counts) - rows.counts[0]) * (query + keys)


def products_done(step: Callable[[], object]) -> float:
    """FLOPs of the matrix products that one step runs, counted; attention (bmm, or Triton's on CUDA) apart."""
    aten = torch.ops.aten

    def added(_: Any, a: Any, b: Any, **__: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    with FlopCounterMode(display=False, custom_mapping={aten.addmm_: added}) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    return float(sum(flops for product, flops in counts.items() if product != aten.bmm))


def row_bytes(spec: DrafterSpec, rows: RowPlan) -> float:
    """Bytes that elementwise passes over the rows' activations have to move in bf16, one read or write each."""
    kv = spec.num_kv_heads * (spec.head_dim + spec.value_dim)
    per_row = 2 * (
        12 * spec.hidden_size
        + 4 * spec.num_heads * spec.head_dim
        + 6 * kv
        + 8 * spec.intermediate_size
    )
    return float(sum(rows.counts)) * (per_row + 2 * 3 * spec.draft_vocab_size)


def optimizer_bytes(spec: DrafterSpec) -> float:
    """Bytes one update has to move: fp32 masters and moments, bf16 weights and gradients."""
    return 28.0 * _parameters(spec)


def resident_bytes(spec: DrafterSpec) -> float:
    """Bytes that have to stay: weights, gradients, optimiser state; embedding and draft head of the target."""
    return 16.0 * _parameters(spec) + 2.0 * spec.hidden_size * (
        spec.vocab_size + spec.draft_vocab_size
    )


def _parameters(spec: DrafterSpec) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(spec).values())
