"""Launches the kernels of attention_kernels: tiles, grids, and which queries see a tile of keys."""

import torch
import triton
from torch import Tensor

from eagle3_train.drafter import attention_kernels as kernels
from eagle3_train.drafter.attention import QueryRows, Saved, StepAttention

LOG2E = 1.4426950408889634

TILES = {
    "forward": (64, 64, 4, 3),
    "query": (128, 64, 8, 3),
    "key": (32, 64, 4, 2),
    "forward-wide": (128, 64, 8, 3),
    "query-wide": (128, 64, 8, 3),
    "key-wide": (32, 64, 4, 2),
}
"""(query lines, keys, warps, stages) of each kernel's tile; wide: heads of more than 128."""


def _shape(state: StepAttention) -> dict[str, int]:
    """Constants of the heads."""
    group = state.heads // state.kv_heads
    return {
        "HEADS": state.heads,
        "GROUP": group,
        "LANES": triton.next_power_of_2(group),
        "DIM": state.qk_dim,
        "VALUE_DIM": state.value_dim,
        "BLOCK_V": _block(state.value_dim),
    }


def _block(width: int) -> int:
    """The power of two that holds it and that a product takes."""
    return max(16, int(triton.next_power_of_2(width)))


def _tile_of(kernel: str, shape: dict[str, int]) -> dict[str, int]:
    """Tile constants and launch options of one kernel, and how it holds a head."""
    dim = shape["DIM"]
    lines, keys, warps, stages = TILES[kernel if dim <= 128 else f"{kernel}-wide"]
    whole = _block(dim)
    first, rest = whole // 2, _block(dim - whole // 2)
    split = first >= 16 and first + rest < whole
    return {
        "BLOCK_D": first if split else whole,
        "BLOCK_E": rest if split else 16,
        "SPLIT": split,
        "ROWS": max(1, lines // shape["LANES"]),
        "KEYS": keys,
        "num_warps": warps,
        "num_stages": stages,
    }


def forward(query: Tensor, state: StepAttention, keys: QueryRows, out: Tensor, lse: Tensor) -> None:
    """Write out [rows, heads * value_dim] and lse [rows, heads] (base 2) of the last step's query [rows, heads, dim]."""
    rows, shape = len(query), _shape(state)
    tile = _tile_of("forward", shape)
    if rows:
        kernels.forward[(triton.cdiv(rows, tile["ROWS"]), state.kv_heads)](
            query, state.store.whole(), keys.order, keys.begin, keys.end, state.offsets, out, lse, rows, state.context,
            state.scale * LOG2E, state.steps - 1, **shape, **tile,
        )  # fmt: skip


def backward(saved: Saved, state: StepAttention, keys: QueryRows, k: int, d_query: Tensor) -> None:
    """Write step k's d_query [rows, heads, dim] and add to the state's gradients."""
    query, out, lse, d_out = saved
    rows, kv_heads, context, shape = len(query), state.kv_heads, state.context, _shape(state)
    if not rows:
        return
    store, d_store, order = (
        state.store.whole(),
        state.grads.whole(),
        (keys.order, keys.begin, keys.end),
    )
    scales, delta = (state.scale * LOG2E, state.scale), torch.empty_like(lse)
    kernels.diagonal_gradient[(rows, kv_heads)](
        query, store, state.offsets, out, lse, d_out, delta, d_query, d_store, context, *scales, k, **shape, BLOCK_D=_block(shape["DIM"]), num_warps=1
    )  # fmt: skip
    tile = _tile_of("query", shape)
    kernels.query_gradient[(triton.cdiv(rows, tile["ROWS"]), kv_heads)](
        query, store, *order, lse, d_out, delta, d_query, rows, *scales, **shape, **tile
    )
    tile = _tile_of("key", shape)
    tiles = triton.cdiv(context, tile["KEYS"])
    ranges = query_ranges(keys.begin, keys.end, context, tile["KEYS"])
    kernels.key_gradient[(tiles, kv_heads)](
        query, store, *order, ranges, lse, d_out, delta, d_store, context, tiles, *scales, **shape, **tile
    )  # fmt: skip


def query_ranges(begin: Tensor, end: Tensor, context: int, keys: int) -> Tensor:
    """int32 [4, tiles]: for each tile of `keys` step-0 keys, the ordered queries that see any of it (first, last + 1)
    and those that see all of it (first, last + 1)."""
    first = torch.arange(0, context, keys, dtype=torch.int32, device=begin.device)
    last = (first + keys).clamp_(max=context)
    return torch.stack([
        torch.searchsorted(end, first, right=True, out_int32=True),
        torch.searchsorted(begin, last, out_int32=True),
        torch.searchsorted(end, last, out_int32=True),
        torch.searchsorted(begin, first, right=True, out_int32=True),
    ])  # fmt: skip
