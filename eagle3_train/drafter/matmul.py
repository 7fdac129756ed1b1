"""The three matrix products of a trained weight: forward, input gradient, weight gradient.

`PlainWeight` multiplies in the tensors' own dtype. `Fp8Weight` rounds both operands to e4m3 with one scale per row of
the first and per column of the second (`torch._scaled_mm`, bf16 out), each product along its own inner dimension.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(x, dy) of each use of a weight."""


def _continues(run: Tensor, rows: int, piece: Tensor) -> bool:
    return (
        run.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
        and run.stride() == piece.stride()
        and run.storage_offset() + rows * run.stride(0) == piece.storage_offset()
    )


def merged_runs(pieces: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Merge neighbouring pieces (tensors of as many rows) whose tensors all continue each other in memory."""
    pieces = [piece for piece in pieces if len(piece[0])]
    i = 0
    while i < len(pieces):
        run, rows, j = pieces[i], len(pieces[i][0]), i + 1
        while j < len(pieces) and all(
            _continues(a, rows, b) for a, b in zip(run, pieces[j], strict=True)
        ):
            rows += len(pieces[j][0])
            j += 1
        yield tuple(t.as_strided((rows, t.shape[1]), t.stride(), t.storage_offset()) for t in run)
        i = j


class PlainWeight:
    """Products with one weight [out, in], in its own dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()

    def forward(self, x: Tensor, add: Tensor | None, out: Tensor | None) -> Tensor:
        """x W^T (+ add), into `out` if given."""
        out = x.new_empty(len(x), len(self.weight)) if out is None else out
        if add is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(add, x, self.weight.t(), out=out)

    def input_gradient(self, dy: Tensor, out: Tensor | None) -> Tensor:
        """dy W, into `out` if given."""
        return torch.mm(dy, self.weight) if out is None else torch.mm(dy, self.weight, out=out)

    def weight_gradient(self, pairs: Pairs, total: Tensor | None) -> Tensor:
        """Sum of dy^T x, one product per run of memory, added to `total` (in place) if given."""
        for x, dy in merged_runs(pairs):
            total = self._add(total, dy, x)
        return torch.zeros_like(self.weight) if total is None else total

    def _add(self, total: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
        return torch.mm(dy.t(), x) if total is None else total.addmm_(dy.t(), x)


class Fp8Weight(PlainWeight):
    """The same products in fp8. The weight is rounded once per direction and forward pass."""

    fast = frozenset({"forward"})
    """Which of the forward, input and weight (gradient) products may sum in short registers (`_scaled`)."""

    def __init__(self, weight: Tensor) -> None:
        if any(size % 16 for size in weight.shape):
            raise ValueError(
                f"fp8 needs weight sizes that are multiples of 16, got {tuple(weight.shape)}."
            )
        super().__init__(weight)

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        return round_rows(self.weight)

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        return round_columns(self.weight)

    def forward(self, x: Tensor, add: Tensor | None, out: Tensor | None) -> Tensor:
        """x W^T (+ add), into `out` if given."""
        place = None if add is not None else out
        y = _scaled(round_rows(x), self._rows, x.dtype, "forward" in self.fast, place)
        return y if add is None else torch.add(y, add, out=out)

    def input_gradient(self, dy: Tensor, out: Tensor | None) -> Tensor:
        """dy W, into `out` if given."""
        return _scaled(round_rows(dy), self._columns, dy.dtype, "input" in self.fast, out)

    def _add(self, total: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
        part = _scaled(round_columns(dy), round_columns(x), dy.dtype, "weight" in self.fast)
        return part if total is None else total.add_(part)


def weight_ops(weight: Float[Tensor, "out in"], fp8: bool) -> PlainWeight:
    """The products of a weight in its own dtype, or in fp8."""
    return Fp8Weight(weight) if fp8 else PlainWeight(weight)


E4M3_MAX = 448.0


def _scaled(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    fast: bool,
    out: Tensor | None = None,
) -> Tensor:
    """a b^T of rounded operands [rows, inner] with scales [rows, 1], into `out` if given.

    Off CUDA the same rounding, multiplied in fp32.

    Hopper's fp8 products keep about 14 bits of a sum; without `fast` partial sums go to fp32 registers. Input gradients need
    that, weight gradients over 11,000 rows did not show it (docs/log.md, tenth session). Transformer Engine and torchao are
    fast in the forward pass only, too.
    """
    if a[0].is_cuda:
        return torch._scaled_mm(
            a[0], b[0].t(), a[1], b[1].t(), out_dtype=dtype, use_fast_accum=fast, out=out
        )
    y = ((a[0].float() * a[1]) @ (b[0].float() * b[1]).t()).to(dtype)
    return y if out is None else out.copy_(y)


def round_rows(x: Float[Tensor, "rows inner"]) -> tuple[Tensor, Float[Tensor, "rows 1"]]:
    """x in e4m3, and the scale of each row."""
    if x.is_cuda:
        from eagle3_train.drafter import fp8_kernels

        return fp8_kernels.round_rows(x)
    scale = x.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / E4M3_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def round_columns(x: Float[Tensor, "inner columns"]) -> tuple[Tensor, Float[Tensor, "columns 1"]]:
    """x^T in e4m3, and the scale of each column of x; rows are padded with zeros to a multiple of 16."""
    if x.is_cuda:
        from eagle3_train.drafter import fp8_kernels

        return fp8_kernels.round_columns(x)
    padded = torch.cat([x, x.new_zeros(-len(x) % 16, x.shape[1])])
    return round_rows(padded.t().contiguous())
