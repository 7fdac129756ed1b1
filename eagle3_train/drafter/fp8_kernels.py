"""Triton kernels that round bf16 matrices to e4m3, with a scale per row, or transposed with a scale per column."""

# Triton functions are typed by Triton.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _round_rows(x, out, scales, width, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = 0.0
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(value), 0))
    scale = tl.maximum(top, 1e-12) / 448.0
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        tl.store(out + row * width + cols, (value / scale).to(tl.float8e4nv), mask=cols < width)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, width] in e4m3, contiguous, and fp32 scales [rows, 1]."""
    assert x.stride(1) == 1
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = min(8192, triton.next_power_of_2(width))
        _round_rows[(rows,)](
            x, out, scales, width, x.stride(0), BLOCK=block, num_warps=8 if block > 2048 else 4
        )
    return out, scales


@triton.jit(do_not_specialize=["rows"])
def _column_tops(
    x, tops, rows, columns, row_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REPEAT: tl.constexpr
):  # fmt: skip
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.zeros((ROWS, COLUMNS), tl.float32)  # kept per place of the tile, reduced once
    for i in range(REPEAT):
        at = (tl.program_id(0) * REPEAT + i) * ROWS + tl.arange(0, ROWS)
        inside = (at < rows)[:, None] & (cols < columns)[None]
        value = tl.load(
            x + at.to(tl.int64)[:, None] * row_stride + cols[None], mask=inside, other=0.0
        )
        top = tl.maximum(top, tl.abs(value.to(tl.float32)))
    tl.atomic_max(tops + cols, tl.max(top, 0), mask=cols < columns)


@triton.jit(do_not_specialize=["rows"])
def _round_columns(
    x, tops, out, scales, rows, columns, row_stride, padded, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    scale = tl.maximum(tl.load(tops + cols, mask=cols < columns, other=1.0), 1e-12) / 448.0
    if tl.program_id(0) == 0:
        tl.store(scales + cols, scale, mask=cols < columns)
    inside = (at < rows)[:, None] & (cols < columns)[None]
    value = tl.load(x + at.to(tl.int64)[:, None] * row_stride + cols[None], mask=inside, other=0.0)
    rounded = tl.trans((value.to(tl.float32) / scale[None]).to(tl.float8e4nv))
    to = out + cols.to(tl.int64)[:, None] * padded + at[None]
    tl.store(to, rounded, mask=(cols < columns)[:, None] & (at < padded)[None])


def round_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """x^T in e4m3 [columns, rows padded to 16], and the fp32 scale of each column of x [columns, 1]."""
    assert x.stride(1) == 1
    rows, columns = x.shape
    padded = -(-rows // 16) * 16
    out = torch.empty(columns, padded, dtype=torch.float8_e4m3fn, device=x.device)
    tops = torch.zeros(columns, dtype=torch.float32, device=x.device)
    scales = torch.empty(columns, 1, dtype=torch.float32, device=x.device)
    if rows:
        _column_tops[(triton.cdiv(rows, 64 * 16), triton.cdiv(columns, 128))](
            x, tops, rows, columns, x.stride(0), ROWS=64, COLUMNS=128, REPEAT=16, num_warps=8
        )
        _round_columns[(triton.cdiv(padded, 128), triton.cdiv(columns, 64))](
            x, tops, out, scales, rows, columns, x.stride(0), padded, ROWS=128, COLUMNS=64, num_warps=8
        )  # fmt: skip
    return out, scales
