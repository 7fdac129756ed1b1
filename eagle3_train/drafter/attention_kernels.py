"""Triton attention over step-0 keys (causal, per document) plus the diagonal of later steps, both directions.

A tile holds ROWS query rows, neighbours by position, times the GROUP query heads that share a key head (LANES). Begin and
end of the visible keys both rise with position, so a tile's keys are one range, split into a masked head, an
unmasked middle and a masked tail. The diagonal adds one key per earlier step from the same query row: k dot
products inside the same softmax. Keys and values of all steps lie in one buffer (step 0 first), likewise
their fp32 gradients; a diagonal row belongs to one tile, so those gradients need no atomics.

What changes with every pack (counts, where `order` begins) is not specialised: Triton would compile a kernel again
for each mix of values that 16 divides, for seconds each, all through the first steps.
"""

# Triton functions are typed by Triton.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_train.drafter.attention import QueryRows, Saved, StepAttention

LOG2E = 1.4426950408889634


@triton.jit
def _key_head(store, HEADS, GROUP, DIM, VALUE_DIM):
    """This program's key head and value head in a store, and the distance between its rows."""
    kv_head = tl.program_id(1)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    values = store + KV_HEADS * DIM + kv_head * VALUE_DIM
    return store + kv_head * DIM, values, KV_HEADS * (DIM + VALUE_DIM)


@triton.jit
def _tile(order, begin, end, count, GROUP, LANES: tl.constexpr, ROWS: tl.constexpr, STEP):
    """Row and head of the tile's ROWS * LANES lines, the range of keys each sees, and the edges of the tile's.

    LANES is GROUP rounded up to a power of two; the lanes beyond GROUP are dead.
    """
    first = tl.program_id(0) * ROWS
    line = tl.arange(0, ROWS * LANES)
    at = first + line // LANES
    live = (at < count) & (line % LANES < GROUP)
    row = tl.load(order + at, mask=live, other=0).to(tl.int64)
    since = tl.load(begin + at, mask=live, other=0)
    until = tl.load(end + at, mask=live, other=0)
    last = tl.minimum(first + ROWS, count) - 1
    lo, hi = tl.load(begin + first), tl.load(end + last)
    full_lo, full_hi = tl.load(begin + last), tl.load(end + first)
    head = tl.program_id(1) * GROUP + line % LANES
    return row, head, live, since, until, _edges(lo, hi, full_lo, full_hi, STEP)


@triton.jit
def _edges(lo, hi, full_lo, full_hi, STEP: tl.constexpr):
    """lo, a, b, hi: the range [lo, hi) and its unmasked middle [a, b); a and b are multiples of STEP from lo."""
    a = tl.minimum(lo + tl.cdiv(tl.maximum(full_lo - lo, 0), STEP) * STEP, hi)
    b = tl.maximum(a + (full_hi - a) // STEP * STEP, a)
    return lo, a, tl.where(full_hi > a, b, a), hi


@triton.jit
def _forward_range(
    acc, top, total, q, keys, values, stride, start, stop, since, until, scale,
    DIM, VALUE_DIM, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    for j0 in range(start, stop, KEYS):
        j = j0 + tl.arange(0, KEYS)
        at = j.to(tl.int64)[:, None] * stride
        k_mask, v_mask = (d < DIM)[None], (dv < VALUE_DIM)[None]
        if MASKED:
            k_mask, v_mask = k_mask & (j < stop)[:, None], v_mask & (j < stop)[:, None]
        k = tl.load(keys + at + d[None], mask=k_mask, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        if MASKED:
            seen = (j[None] >= since[:, None]) & (j[None] < until[:, None])
            s = tl.where(seen, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher) if MASKED else higher
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + at + dv[None], mask=v_mask, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = higher
    return acc, top, total


@triton.jit(do_not_specialize=["order", "count", "context", "steps"])
def _forward(
    query, store, order, begin, end, offsets, out, lse, count, context, scale, steps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    keys, values, stride = _key_head(store, HEADS, GROUP, DIM, VALUE_DIM)
    row, head, live, since, until, edges = _tile(order, begin, end, count, GROUP, LANES, ROWS, KEYS)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q_at, out_at = row * (HEADS * DIM) + head * DIM, row * (HEADS * VALUE_DIM) + head * VALUE_DIM
    q_mask, out_mask = live[:, None] & (d < DIM)[None], live[:, None] & (dv < VALUE_DIM)[None]
    q = tl.load(query + q_at[:, None] + d[None], mask=q_mask, other=0.0)
    acc = tl.zeros((ROWS * LANES, BLOCK_V), tl.float32)
    top = tl.full((ROWS * LANES,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS * LANES,), tl.float32)
    for part in tl.static_range(3):
        acc, top, total = _forward_range(
            acc, top, total, q, keys, values, stride, edges[part], edges[part + 1], since, until, scale,
            DIM, VALUE_DIM, BLOCK_D, BLOCK_V, KEYS, part != 1,
        )  # fmt: skip
    for step in range(1, steps + 1):
        at = (context + tl.load(offsets + step) - tl.load(offsets + 1) + row) * stride
        k = tl.load(keys + at[:, None] + d[None], mask=q_mask, other=0.0)
        s = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        higher = tl.maximum(top, s)
        p, shrink = tl.exp2(s - higher), tl.exp2(top - higher)
        v = tl.load(values + at[:, None] + dv[None], mask=out_mask, other=0.0)
        acc = acc * shrink[:, None] + p[:, None] * v.to(tl.float32)
        total = total * shrink + p
        top = higher
    total = tl.where(live, total, 1.0)
    tl.store(out + out_at[:, None] + dv[None], acc / total[:, None], mask=out_mask)
    tl.store(lse + row * HEADS + head, top + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=["context", "steps"])
def _diagonal_gradient(
    query, store, offsets, out, lse, d_out, delta, d_query, d_store, context, scale, softmax_scale, steps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row and key head: delta = rowsum(out * d_out), the diagonal's share of dQ, and its dK and dV."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    stride = KV_HEADS * (DIM + VALUE_DIM)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    lane = tl.arange(0, LANES)
    head, live = kv_head * GROUP + lane, lane < GROUP
    q_at = (row * (HEADS * DIM) + head * DIM)[:, None] + d[None]
    out_at = (row * (HEADS * VALUE_DIM) + head * VALUE_DIM)[:, None] + dv[None]
    q_mask, out_mask = live[:, None] & (d < DIM)[None], live[:, None] & (dv < VALUE_DIM)[None]
    q = tl.load(query + q_at, mask=q_mask, other=0.0).to(tl.float32)
    do = tl.load(d_out + out_at, mask=out_mask, other=0.0).to(tl.float32)
    o = tl.load(out + out_at, mask=out_mask, other=0.0).to(tl.float32)
    norm = tl.load(lse + row * HEADS + head, mask=live, other=0.0)
    shift = tl.sum(o * do, 1)
    tl.store(delta + row * HEADS + head, shift, mask=live)
    d_q = tl.zeros((LANES, BLOCK_D), tl.float32)
    for step in range(1, steps + 1):
        at = (context + tl.load(offsets + step) - tl.load(offsets + 1) + row) * stride
        key_at, value_at = at + kv_head * DIM + d, at + KV_HEADS * DIM + kv_head * VALUE_DIM + dv
        k = tl.load(store + key_at, mask=d < DIM, other=0.0).to(tl.float32)
        v = tl.load(store + value_at, mask=dv < VALUE_DIM, other=0.0).to(tl.float32)
        p = tl.exp2(tl.sum(q * k[None], 1) * scale - norm)
        ds = p * (tl.sum(do * v[None], 1) - shift) * softmax_scale
        d_q += ds[:, None] * k[None]
        d_k = tl.load(d_store + key_at, mask=d < DIM, other=0.0)
        d_k += tl.sum(ds[:, None] * q, 0)
        d_v = tl.load(d_store + value_at, mask=dv < VALUE_DIM, other=0.0)
        d_v += tl.sum(p[:, None] * do, 0)
        tl.store(d_store + key_at, d_k, mask=d < DIM)
        tl.store(d_store + value_at, d_v, mask=dv < VALUE_DIM)
    tl.store(d_query + q_at, d_q, mask=q_mask)


@triton.jit(do_not_specialize=["order", "count"])
def _query_gradient(
    query, store, order, begin, end, lse, d_out, delta, d_query, count, scale, softmax_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds the step-0 keys' share of dQ to the diagonal's."""
    keys, values, stride = _key_head(store, HEADS, GROUP, DIM, VALUE_DIM)
    row, head, live, since, until, edges = _tile(order, begin, end, count, GROUP, LANES, ROWS, KEYS)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q_at = (row * (HEADS * DIM) + head * DIM)[:, None] + d[None]
    out_at = (row * (HEADS * VALUE_DIM) + head * VALUE_DIM)[:, None] + dv[None]
    q_mask, out_mask = live[:, None] & (d < DIM)[None], live[:, None] & (dv < VALUE_DIM)[None]
    q = tl.load(query + q_at, mask=q_mask, other=0.0)
    do = tl.load(d_out + out_at, mask=out_mask, other=0.0)
    shift = tl.load(delta + row * HEADS + head, mask=live, other=0.0)
    norm = tl.load(lse + row * HEADS + head, mask=live, other=0.0)
    d_q = tl.zeros((ROWS * LANES, BLOCK_D), tl.float32)
    for part in tl.static_range(3):
        for j0 in range(edges[part], edges[part + 1], KEYS):
            j = j0 + tl.arange(0, KEYS)
            at = j.to(tl.int64)[:, None] * stride
            k_mask, v_mask = (d < DIM)[None], (dv < VALUE_DIM)[None]
            if part != 1:
                inside = (j < edges[part + 1])[:, None]
                k_mask, v_mask = k_mask & inside, v_mask & inside
            k = tl.load(keys + at + d[None], mask=k_mask, other=0.0)
            v = tl.load(values + at + dv[None], mask=v_mask, other=0.0)
            p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - norm[:, None])
            if part != 1:
                seen = (j[None] >= since[:, None]) & (j[None] < until[:, None])
                p = tl.where(seen, p, 0.0)
            ds = p * (tl.dot(do, tl.trans(v)) - shift[:, None])
            d_q = tl.dot(ds.to(k.dtype), k, d_q)
    diagonal = tl.load(d_query + q_at, mask=q_mask, other=0.0).to(tl.float32)
    tl.store(d_query + q_at, d_q * softmax_scale + diagonal, mask=q_mask)


@triton.jit
def _key_range(
    d_k, d_v, k, v, query, d_out, lse, delta, order, begin, end, start, stop, j, kv_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    line = tl.arange(0, ROWS * LANES)
    head = kv_head * GROUP + line % LANES
    for first in range(start, stop, ROWS):
        at = first + line // LANES
        live = (at < stop) & (line % LANES < GROUP)
        row = tl.load(order + at, mask=live, other=0).to(tl.int64)
        q_mask, out_mask = (d < DIM)[None], (dv < VALUE_DIM)[None]
        if MASKED or LANES != GROUP:
            q_mask, out_mask = q_mask & live[:, None], out_mask & live[:, None]
        q_at = query + (row * (HEADS * DIM) + head * DIM)[:, None] + d[None]
        do_at = (row * (HEADS * VALUE_DIM) + head * VALUE_DIM)[:, None] + dv[None]
        q = tl.load(q_at, mask=q_mask, other=0.0)
        do = tl.load(d_out + do_at, mask=out_mask, other=0.0)
        norm = tl.load(lse + row * HEADS + head, mask=live, other=0.0)
        shift = tl.load(delta + row * HEADS + head, mask=live, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - norm[None])
        if MASKED:
            since = tl.load(begin + at, mask=live, other=0)
            until = tl.load(end + at, mask=live, other=0)
            seen = (j[:, None] >= since[None]) & (j[:, None] < until[None])
            p = tl.where(seen, p, 0.0)
        d_v = tl.dot(p.to(do.dtype), do, d_v)
        ds = p * (tl.dot(v, tl.trans(do)) - shift[None])
        d_k = tl.dot(ds.to(q.dtype), q, d_k)
    return d_k, d_v


@triton.jit(do_not_specialize=["order", "context", "tiles"])
def _key_gradient(
    query, store, order, begin, end, ranges, lse, d_out, delta, d_store, context, tiles, scale, softmax_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one step's dK and dV of the step-0 keys. `ranges` [4, tiles]: first query, last + 1, unmasked first, last + 1."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    keys, values, stride = _key_head(store, HEADS, GROUP, DIM, VALUE_DIM)
    d_keys, d_values, _ = _key_head(d_store, HEADS, GROUP, DIM, VALUE_DIM)
    lo, hi = tl.load(ranges + tile), tl.load(ranges + tiles + tile)
    full_lo, full_hi = tl.load(ranges + 2 * tiles + tile), tl.load(ranges + 3 * tiles + tile)
    if lo < hi:
        j = tile * KEYS + tl.arange(0, KEYS)
        d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        at, inside = (j.to(tl.int64) * stride)[:, None], (j < context)[:, None]
        key_mask, value_mask = inside & (d < DIM)[None], inside & (dv < VALUE_DIM)[None]
        k = tl.load(keys + at + d[None], mask=key_mask, other=0.0)
        v = tl.load(values + at + dv[None], mask=value_mask, other=0.0)
        d_k, d_v = tl.zeros((KEYS, BLOCK_D), tl.float32), tl.zeros((KEYS, BLOCK_V), tl.float32)
        edges = _edges(lo, hi, full_lo, full_hi, ROWS)
        for part in tl.static_range(3):
            d_k, d_v = _key_range(
                d_k, d_v, k, v, query, d_out, lse, delta, order, begin, end, edges[part], edges[part + 1], j, kv_head,
                scale, HEADS, GROUP, LANES, DIM, VALUE_DIM, BLOCK_D, BLOCK_V, ROWS, part != 1,
            )  # fmt: skip
        own_keys, own_values = d_keys + at + d[None], d_values + at + dv[None]
        d_k = d_k * softmax_scale + tl.load(own_keys, mask=key_mask, other=0.0)
        tl.store(own_keys, d_k, mask=key_mask)
        tl.store(own_values, d_v + tl.load(own_values, mask=value_mask, other=0.0), mask=value_mask)


TILES = {
    "forward": (128, 64, 8, 3),
    "query": (128, 64, 8, 3),
    "key": (64, 128, 8, 2),
    "forward-wide": (128, 64, 8, 2),
    "query-wide": (64, 64, 8, 2),
    "key-wide": (64, 64, 8, 2),
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
        "BLOCK_D": max(16, triton.next_power_of_2(state.qk_dim)),
        "BLOCK_V": max(16, triton.next_power_of_2(state.value_dim)),
    }


def _tile_of(kernel: str, shape: dict[str, int]) -> dict[str, int]:
    """Tile constants and launch options of one kernel."""
    lines, keys, warps, stages = TILES[kernel if shape["BLOCK_D"] <= 128 else f"{kernel}-wide"]
    tile = {"ROWS": max(1, lines // shape["LANES"]), "KEYS": keys}
    return {**tile, "num_warps": warps, "num_stages": stages}


def forward(query: Tensor, state: StepAttention, keys: QueryRows, out: Tensor, lse: Tensor) -> None:
    """Write out [rows, heads * value_dim] and lse [rows, heads] (base 2) of the last step's query [rows, heads, dim]."""
    rows, shape = len(query), _shape(state)
    tile = _tile_of("forward", shape)
    if rows:
        _forward[(triton.cdiv(rows, tile["ROWS"]), state.kv_heads)](
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
    _diagonal_gradient[(rows, kv_heads)](
        query, store, state.offsets, out, lse, d_out, delta, d_query, d_store, context, *scales, k, **shape, num_warps=1
    )  # fmt: skip
    tile = _tile_of("query", shape)
    _query_gradient[(triton.cdiv(rows, tile["ROWS"]), kv_heads)](
        query, store, *order, lse, d_out, delta, d_query, rows, *scales, **shape, **tile
    )
    tile = _tile_of("key", shape)
    tiles = triton.cdiv(context, tile["KEYS"])
    ranges = query_ranges(keys.begin, keys.end, context, tile["KEYS"])
    _key_gradient[(tiles, kv_heads)](
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
