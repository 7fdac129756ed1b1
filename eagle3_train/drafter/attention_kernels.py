"""Triton attention over step-0 keys (causal, per document) plus the diagonal of later steps, both directions.

A tile holds ROWS query rows, neighbours by position, times the GROUP query heads that share a key head (LANES). Begin and
end of the visible keys both rise with position, so a tile's keys are one range, split into a masked head, an
unmasked middle and a masked tail. The diagonal adds one key per earlier step from the same query row: k dot
products inside the same softmax. Keys and values of all steps lie in one buffer (step 0 first), likewise
their fp32 gradients; a diagonal row belongs to one tile, so those gradients need no atomics.

A head is as wide as a power of two, or is held in two parts of such widths, BLOCK_D and BLOCK_E (MLA's 192 = 128 + 64): padded to
one, its products with queries and keys would be a third larger. Where it is not SPLIT the second part is a stub.

What changes with every pack (counts, where `order` begins) is not specialised: Triton would compile a kernel again
for each mix of values that 16 divides, for seconds each, all through the first steps.
"""

# Triton functions are typed by Triton.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False

import triton
import triton.language as tl


@triton.jit
def _key_head(store, HEADS, GROUP, DIM, VALUE_DIM):
    """This program's key head and value head in a store, and the distance between its rows."""
    kv_head = tl.program_id(1)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    values = store + KV_HEADS * DIM + kv_head * VALUE_DIM
    return store + kv_head * DIM, values, KV_HEADS * (DIM + VALUE_DIM)


@triton.jit
def _part(heads, inside, start, width, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """BLOCK elements from `start` on of the heads that begin at `heads`; zero beyond `width` and where not `inside`."""
    d = start + tl.arange(0, BLOCK)[None]
    mask = d < width
    if MASKED:
        mask = mask & inside[:, None]
    return tl.load(heads[:, None] + d, mask=mask, other=0.0)


@triton.jit
def _parts(
    heads,
    inside,
    DIM,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Both parts of the heads that begin at `heads`."""
    first = _part(heads, inside, 0, DIM, BLOCK_D, MASKED)
    second = first
    if SPLIT:
        second = _part(heads, inside, BLOCK_D, DIM, BLOCK_E, MASKED)
    return first, second


@triton.jit
def _add(heads, inside, start, width, part, BLOCK: tl.constexpr):
    """Adds `part` to what `_part` loads."""
    d = start + tl.arange(0, BLOCK)[None]
    mask = inside[:, None] & (d < width)
    own = tl.load(heads[:, None] + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(heads[:, None] + d, part + own, mask=mask)


@triton.jit
def _scores(a, a2, b, b2, SPLIT: tl.constexpr):
    """Products of every head of a with every head of b."""
    s = tl.dot(a, tl.trans(b))
    if SPLIT:
        s = tl.dot(a2, tl.trans(b2), s)
    return s


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
    acc, top, total, q, q2, keys, values, stride, start, stop, since, until, scale,
    DIM, VALUE_DIM, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    for j0 in range(start, stop, KEYS):
        j = j0 + tl.arange(0, KEYS)
        at = j.to(tl.int64) * stride
        k, k2 = _parts(keys + at, j < stop, DIM, BLOCK_D, BLOCK_E, MASKED, SPLIT)
        s = _scores(q, q2, k, k2, SPLIT) * scale
        if MASKED:
            seen = (j[None] >= since[:, None]) & (j[None] < until[:, None])
            s = tl.where(seen, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher) if MASKED else higher
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v = _part(values + at, j < stop, 0, VALUE_DIM, BLOCK_V, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = higher
    return acc, top, total


@triton.jit(do_not_specialize=["order", "count", "context", "steps"])
def forward(
    query, store, order, begin, end, offsets, out, lse, count, context, scale, steps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """out and lse (base 2) of a tile of queries."""
    keys, values, stride = _key_head(store, HEADS, GROUP, DIM, VALUE_DIM)
    row, head, live, since, until, edges = _tile(order, begin, end, count, GROUP, LANES, ROWS, KEYS)
    dv = tl.arange(0, BLOCK_V)
    out_at = row * (HEADS * VALUE_DIM) + head * VALUE_DIM
    q, q2 = _parts(
        query + row * (HEADS * DIM) + head * DIM, live, DIM, BLOCK_D, BLOCK_E, True, SPLIT
    )
    acc = tl.zeros((ROWS * LANES, BLOCK_V), tl.float32)
    top = tl.full((ROWS * LANES,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS * LANES,), tl.float32)
    for part in tl.static_range(3):
        acc, top, total = _forward_range(
            acc, top, total, q, q2, keys, values, stride, edges[part], edges[part + 1], since, until, scale,
            DIM, VALUE_DIM, BLOCK_D, BLOCK_E, BLOCK_V, KEYS, part != 1, SPLIT,
        )  # fmt: skip
    for step in range(1, steps + 1):
        at = (context + tl.load(offsets + step) - tl.load(offsets + 1) + row) * stride
        k, k2 = _parts(keys + at, live, DIM, BLOCK_D, BLOCK_E, True, SPLIT)
        s = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        if SPLIT:
            s += tl.sum(q2.to(tl.float32) * k2.to(tl.float32), 1)
        s *= scale
        higher = tl.maximum(top, s)
        p, shrink = tl.exp2(s - higher), tl.exp2(top - higher)
        v = _part(values + at, live, 0, VALUE_DIM, BLOCK_V, True)
        acc = acc * shrink[:, None] + p[:, None] * v.to(tl.float32)
        total = total * shrink + p
        top = higher
    total = tl.where(live, total, 1.0)
    out_mask = live[:, None] & (dv < VALUE_DIM)[None]
    tl.store(out + out_at[:, None] + dv[None], acc / total[:, None], mask=out_mask)
    tl.store(lse + row * HEADS + head, top + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=["context", "steps"])
def diagonal_gradient(
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
def query_gradient(
    query, store, order, begin, end, lse, d_out, delta, d_query, count, scale, softmax_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds the step-0 keys' share of dQ to the diagonal's."""
    keys, values, stride = _key_head(store, HEADS, GROUP, DIM, VALUE_DIM)
    row, head, live, since, until, edges = _tile(order, begin, end, count, GROUP, LANES, ROWS, KEYS)
    q_at = row * (HEADS * DIM) + head * DIM
    q, q2 = _parts(query + q_at, live, DIM, BLOCK_D, BLOCK_E, True, SPLIT)
    do_at = d_out + row * (HEADS * VALUE_DIM) + head * VALUE_DIM
    do = _part(do_at, live, 0, VALUE_DIM, BLOCK_V, True)
    shift = tl.load(delta + row * HEADS + head, mask=live, other=0.0)
    norm = tl.load(lse + row * HEADS + head, mask=live, other=0.0)
    d_q = tl.zeros((ROWS * LANES, BLOCK_D), tl.float32)
    d_q2 = tl.zeros((ROWS * LANES, BLOCK_E), tl.float32)
    for part in tl.static_range(3):
        for j0 in range(edges[part], edges[part + 1], KEYS):
            j = j0 + tl.arange(0, KEYS)
            at, inside = j.to(tl.int64) * stride, j < edges[part + 1]
            k, k2 = _parts(keys + at, inside, DIM, BLOCK_D, BLOCK_E, part != 1, SPLIT)
            v = _part(values + at, inside, 0, VALUE_DIM, BLOCK_V, part != 1)
            p = tl.exp2(_scores(q, q2, k, k2, SPLIT) * scale - norm[:, None])
            if part != 1:
                seen = (j[None] >= since[:, None]) & (j[None] < until[:, None])
                p = tl.where(seen, p, 0.0)
            ds = (p * (tl.dot(do, tl.trans(v)) - shift[:, None])).to(k.dtype)
            d_q = tl.dot(ds, k, d_q)
            if SPLIT:
                d_q2 = tl.dot(ds, k2, d_q2)
    _add(d_query + q_at, live, 0, DIM, d_q * softmax_scale, BLOCK_D)
    if SPLIT:
        _add(d_query + q_at, live, BLOCK_D, DIM, d_q2 * softmax_scale, BLOCK_E)


@triton.jit
def _key_range(
    d_k, d_k2, d_v, k, k2, v, query, d_out, lse, delta, order, begin, end, start, stop, j, kv_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    line = tl.arange(0, ROWS * LANES)
    head = kv_head * GROUP + line % LANES
    for first in range(start, stop, ROWS):
        at = first + line // LANES
        live = (at < stop) & (line % LANES < GROUP)
        row = tl.load(order + at, mask=live, other=0).to(tl.int64)
        dead: tl.constexpr = MASKED or LANES != GROUP
        q_at = query + row * (HEADS * DIM) + head * DIM
        q, q2 = _parts(q_at, live, DIM, BLOCK_D, BLOCK_E, dead, SPLIT)
        do_at = d_out + row * (HEADS * VALUE_DIM) + head * VALUE_DIM
        do = _part(do_at, live, 0, VALUE_DIM, BLOCK_V, dead)
        norm = tl.load(lse + row * HEADS + head, mask=live, other=0.0)
        shift = tl.load(delta + row * HEADS + head, mask=live, other=0.0)
        p = tl.exp2(_scores(k, k2, q, q2, SPLIT) * scale - norm[None])
        if MASKED:
            since = tl.load(begin + at, mask=live, other=0)
            until = tl.load(end + at, mask=live, other=0)
            seen = (j[:, None] >= since[None]) & (j[:, None] < until[None])
            p = tl.where(seen, p, 0.0)
        d_v = tl.dot(p.to(do.dtype), do, d_v)
        ds = (p * (tl.dot(v, tl.trans(do)) - shift[None])).to(q.dtype)
        d_k = tl.dot(ds, q, d_k)
        if SPLIT:
            d_k2 = tl.dot(ds, q2, d_k2)
    return d_k, d_k2, d_v


@triton.jit(do_not_specialize=["order", "context", "tiles"])
def key_gradient(
    query, store, order, begin, end, ranges, lse, d_out, delta, d_store, context, tiles, scale, softmax_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one step's dK and dV of the step-0 keys. `ranges` [4, tiles]: first query, last + 1, unmasked first, last + 1."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    keys, values, stride = _key_head(store, HEADS, GROUP, DIM, VALUE_DIM)
    d_keys, d_values, _ = _key_head(d_store, HEADS, GROUP, DIM, VALUE_DIM)
    lo, hi = tl.load(ranges + tile), tl.load(ranges + tiles + tile)
    full_lo, full_hi = tl.load(ranges + 2 * tiles + tile), tl.load(ranges + 3 * tiles + tile)
    if lo < hi:
        j = tile * KEYS + tl.arange(0, KEYS)
        at, inside = j.to(tl.int64) * stride, j < context
        k, k2 = _parts(keys + at, inside, DIM, BLOCK_D, BLOCK_E, True, SPLIT)
        v = _part(values + at, inside, 0, VALUE_DIM, BLOCK_V, True)
        d_k, d_v = tl.zeros((KEYS, BLOCK_D), tl.float32), tl.zeros((KEYS, BLOCK_V), tl.float32)
        d_k2 = tl.zeros((KEYS, BLOCK_E), tl.float32)
        edges = _edges(lo, hi, full_lo, full_hi, ROWS)
        for part in tl.static_range(3):
            d_k, d_k2, d_v = _key_range(
                d_k, d_k2, d_v, k, k2, v, query, d_out, lse, delta, order, begin, end, edges[part], edges[part + 1], j,
                kv_head, scale, HEADS, GROUP, LANES, DIM, VALUE_DIM, BLOCK_D, BLOCK_E, BLOCK_V, SPLIT, ROWS, part != 1,
            )  # fmt: skip
        _add(d_keys + at, inside, 0, DIM, d_k * softmax_scale, BLOCK_D)
        if SPLIT:
            _add(d_keys + at, inside, BLOCK_D, DIM, d_k2 * softmax_scale, BLOCK_E)
        _add(d_values + at, inside, 0, VALUE_DIM, d_v, BLOCK_V)
