"""Triton kernels of the elementwise parts: RMS norm with fork, SwiGLU, RoPE. CUDA only; bf16 or fp32 tensors.

Each reads and writes every element once. Sums are fp32. The formulas are those of `layers.py`.
"""

# Triton functions are typed by Triton.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows_a"])
def _norm_fork(
    x, w_a, w_b, a, b, rstd, width, eps, rows_a, HAS_B: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    values = tl.load(x + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    tl.store(rstd + row, scale)
    unit = values * scale
    if row < rows_a:
        weight = tl.load(w_a + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(a + row * width + cols, unit * weight, mask=inside)
    if HAS_B:
        weight = tl.load(w_b + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(b + row * width + cols, unit * weight, mask=inside)


@triton.jit(do_not_specialize=["rows", "rows_a"])
def _norm_fork_backward(
    x, rstd, w_a, w_b, d_res, d_a, d_b, dx, dw_a, dw_b, rows, rows_a, width,
    HAS_RES: tl.constexpr, HAS_A: tl.constexpr, HAS_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    weight_a = tl.load(w_a + cols, mask=inside, other=0.0).to(tl.float32)
    weight_b = tl.load(w_b + cols, mask=inside, other=0.0).to(tl.float32)
    sum_a = tl.zeros((BLOCK,), tl.float32)
    sum_b = tl.zeros((BLOCK,), tl.float32)
    for r in range(program, rows, tl.num_programs(0)):
        at = r * width + cols
        scale = tl.load(rstd + r)
        unit = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        d_unit = tl.zeros((BLOCK,), tl.float32)
        first = inside & (cols * 0 + r < rows_a)
        if HAS_A:
            grad = tl.load(d_a + at, mask=first, other=0.0).to(tl.float32)
            sum_a += grad * unit
            d_unit += grad * weight_a
        if HAS_B:
            grad = tl.load(d_b + at, mask=inside, other=0.0).to(tl.float32)
            sum_b += grad * unit
            d_unit += grad * weight_b
        out = scale * (d_unit - unit * (tl.sum(d_unit * unit, 0) / width))
        if HAS_RES:
            out += tl.load(d_res + at, mask=first, other=0.0).to(tl.float32)
        tl.store(dx + at, out, mask=inside)
    tl.store(dw_a + program * width + cols, sum_a, mask=inside)
    if HAS_B:
        tl.store(dw_b + program * width + cols, sum_b, mask=inside)


def norm_fork(
    x: Tensor,
    w_a: Tensor,
    w_b: Tensor | None,
    eps: float,
    rows_a: int,
    out_a: Tensor | None,
    out_b: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """rms(x[:rows_a]) * w_a, rms(x) * w_b (None without w_b), and 1/rms of each row."""
    assert x.is_contiguous()
    rows, width = x.shape
    a = x.new_empty(rows_a, width) if out_a is None else out_a
    b = None if w_b is None else x.new_empty(rows, width) if out_b is None else out_b
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _norm_fork[(rows,)](
            x, w_a, w_a if w_b is None else w_b, a, a if b is None else b, rstd, width, eps, rows_a,
            HAS_B=b is not None, BLOCK=block, num_warps=8 if block >= 4096 else 4,
        )  # fmt: skip
    return a, b, rstd


def norm_fork_backward(
    x: Tensor,
    rstd: Tensor,
    w_a: Tensor,
    w_b: Tensor | None,
    d_res: Tensor | None,
    d_a: Tensor | None,
    d_b: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, w_a and w_b; missing output gradients count as zero."""
    rows, width = x.shape
    given = [None if g is None else g.contiguous() for g in (d_res, d_a, d_b)]
    rows_a = max((len(g) for g in given[:2] if g is not None), default=0)
    dx = torch.empty_like(x) if out is None else out
    if not rows:
        return dx, torch.zeros_like(w_a), None if w_b is None else torch.zeros_like(w_b)
    programs = min(rows, 4 * torch.cuda.get_device_properties(x.device).multi_processor_count)
    dw_a = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    dw_b = torch.empty_like(dw_a) if given[2] is not None else dw_a
    block = triton.next_power_of_2(width)
    _norm_fork_backward[(programs,)](
        x, rstd, w_a, w_a if w_b is None else w_b, *(x if g is None else g for g in given), dx, dw_a, dw_b,
        rows, rows_a, width, HAS_RES=given[0] is not None, HAS_A=given[1] is not None,
        HAS_B=given[2] is not None, BLOCK=block, num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    summed_a = dw_a.sum(0).to(w_a.dtype) if given[1] is not None else None
    summed_b = dw_b.sum(0).to(x.dtype) if given[2] is not None else None
    return dx, summed_a, summed_b


@triton.jit
def _swiglu(gate, up, out, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _swiglu_backward(gate, up, product, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(gate + at, d * u * (sigmoid + silu * (1 - sigmoid)), mask=inside)
    tl.store(up + at, d * silu, mask=inside)
    tl.store(product + at, silu * u, mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of contiguous tensors."""
    out = torch.empty_like(gate)
    if gate.numel():
        _swiglu[(triton.cdiv(gate.numel(), 4096),)](
            gate, up, out, gate.numel(), BLOCK=4096, num_warps=8
        )
    return out


def swiglu_backward(gate: Tensor, up: Tensor, product: Tensor) -> None:
    """`product` comes in as the gradient of silu(gate) * up and goes out as its value; gate and up become
    their gradients."""
    if gate.numel():
        grid = (triton.cdiv(gate.numel(), 4096),)
        _swiglu_backward[grid](gate, up, product, gate.numel(), BLOCK=4096, num_warps=8)


@triton.jit
def _rotate(
    x, cos, sin, row_stride, head_stride, first, heads, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF_BLOCK)[None]
    inside = (head < heads) & (pair < HALF)
    c = tl.load(cos + row * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + row * HALF + pair, mask=pair < HALF, other=0.0) * sign
    base = x + row * row_stride + head * head_stride + first
    low = base + (2 * pair if INTERLEAVED else pair)
    high = low + (1 if INTERLEAVED else HALF)
    a = tl.load(low, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(high, mask=inside, other=0.0).to(tl.float32)
    tl.store(low, a * c - b * s, mask=inside)
    tl.store(high, b * c + a * s, mask=inside)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Rotate the last 2 * half dims of every head of x [rows, heads, dim] in place; rows may be strided."""
    rows, heads, dim = x.shape
    half = cos.shape[1]
    assert x.stride(2) == 1
    assert cos.is_contiguous()
    if rows:
        _rotate[(rows,)](
            x, cos, sin, x.stride(0), x.stride(1), dim - 2 * half, heads, -1.0 if back else 1.0,
            HEADS=triton.next_power_of_2(heads), HALF=half, HALF_BLOCK=triton.next_power_of_2(half),
            INTERLEAVED=interleaved, num_warps=4,
        )  # fmt: skip
    return x


@triton.jit(do_not_specialize=["index"])
def _add_rows(total, index, rows, width, HAS_INDEX: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    to = tl.load(index + row).to(tl.int64) if HAS_INDEX else row
    at = total + to * width + cols
    value = tl.load(rows + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, tl.load(at, mask=inside, other=0.0) + value, mask=inside)


def add_rows_(total: Tensor, index: Tensor | None, rows: Tensor) -> Tensor:
    """total[index] += rows, fp32 += bf16; no index repeats. None: all rows in order."""
    count, width = rows.shape
    rows = rows.contiguous()
    if count:
        block = min(4096, triton.next_power_of_2(width))
        _add_rows[(count, triton.cdiv(width, block))](
            total, rows if index is None else index, rows, width,
            HAS_INDEX=index is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return total


@triton.jit
def _scale(values, scale, total, BLOCK: tl.constexpr):
    factor = tl.load(scale)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < total
        value = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(values + at, value * factor, mask=inside)


def scale_(values: Tensor, scale: Tensor) -> Tensor:
    """values *= scale (an fp32 scalar on the device), in fp32 inside; free when the scale is 1."""
    assert values.is_contiguous()
    if values.numel():
        _scale[(triton.cdiv(values.numel(), 8192),)](
            values, scale, values.numel(), BLOCK=8192, num_warps=8
        )
    return values
