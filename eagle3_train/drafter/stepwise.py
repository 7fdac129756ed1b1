"""Linear algebra shared by all TTT steps: one weight, many steps, ONE weight-gradient matmul.

Autograd would form a weight gradient per step and add them up in bf16. Here each step's backward only
records (input, output gradient); the backward of step 0, which autograd always runs last because every
step feeds the next through h, turns all records into a single matmul with an inner dimension of all rows
of all steps. Records that lie one after the other in a `Stack` are used in place, without a copy.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function


class Stack:
    """Buffer of all steps' rows, one step after the other; allocated (and zeroed if `zero`) when first used."""

    def __init__(self, counts: Sequence[int], width: int, like: Tensor, zero: bool = False) -> None:
        self._counts, self._width, self._zero = list(counts), width, zero
        self._like = like.detach()[:0]
        self._rows: Tensor | None = None
        self._views: tuple[Tensor, ...] = ()

    def whole(self) -> Float[Tensor, "all_rows width"]:
        """All steps' rows."""
        if self._rows is None:
            make = self._like.new_zeros if self._zero else self._like.new_empty
            self._rows = make(sum(self._counts), self._width)
            self._views = self._rows.split(self._counts)
        return self._rows

    def step(self, k: int) -> Float[Tensor, "rows width"]:
        """The rows of step k, to be written."""
        self.whole()
        # A new plain alias each time: a kept one would get a grad_fn when a function returns it (a leak), and an
        # autograd view would be invalidated by writing another step.
        return self._views[k].detach()


Place = tuple[Stack, int]
"""Where a function puts a result: step k of a Stack."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and norms of `dtype` values are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _continues(run: Tensor, rows: int, piece: Tensor) -> bool:
    return (
        run.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
        and run.stride() == piece.stride()
        and run.storage_offset() + rows * run.stride(0) == piece.storage_offset()
    )


def _runs(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Merge neighbouring pieces that continue each other in memory, on both sides."""
    pairs = [pair for pair in pairs if len(pair[0])]
    i = 0
    while i < len(pairs):
        (x, dy), rows, j = pairs[i], len(pairs[i][0]), i + 1
        while j < len(pairs) and all(
            _continues(a, rows, b) for a, b in zip((x, dy), pairs[j], strict=True)
        ):
            rows += len(pairs[j][0])
            j += 1
        yield tuple(
            t.as_strided((rows, t.shape[1]), t.stride(), t.storage_offset()) for t in (x, dy)
        )  # type: ignore[misc]
        i = j


def weight_gradient(pairs: Sequence[tuple[Tensor, Tensor]], weight: Tensor) -> Tensor:
    """Sum of dy^T x over (x, dy) pairs, shaped like `weight`."""
    total: Tensor | None = None
    for x, dy in _runs(pairs):
        total = torch.mm(dy.t(), x) if total is None else total.addmm_(dy.t(), x)
    return torch.zeros_like(weight) if total is None else total


class StepLinear:
    """y_k = x_k W^T (+ add_k) at every step k of one forward pass.

    `output` places y_k in a Stack so that a consumer may overwrite it with its gradient in backward.
    """

    def __init__(self, weight: Tensor, steps: int, output: Stack | None = None) -> None:
        self.weight = weight
        self.output = output
        self.records: list[tuple[Tensor, Tensor] | None] = [None] * steps

    def __call__(
        self, k: int, x: Float[Tensor, "rows in"], add: Float[Tensor, "rows out"] | None = None
    ) -> Float[Tensor, "rows out"]:
        """Apply at step k; `add` is only read."""
        return _StepLinear.apply(x, self.weight, add, self, k)  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, k: int, x: Tensor, add: Tensor | None) -> Tensor:
        """The product without autograd."""
        out = self.output.step(k) if self.output else x.new_empty(len(x), len(self.weight))
        if add is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(add, x, self.weight.t(), out=out)

    def record(self, k: int, x: Tensor, dy: Tensor) -> Tensor | None:
        """Note one step's pair; at step 0 return the weight gradient of all steps."""
        self.records[k] = (x, dy)
        if k:
            return None
        pairs = [pair for pair in self.records if pair is not None]
        self.records = []
        return weight_gradient(pairs, self.weight)


class _StepLinear(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, add: Tensor | None, owner: StepLinear, k: int
    ) -> Tensor:
        ctx.x, ctx.owner, ctx.k, ctx.weight = x.detach(), owner, k, weight.detach()
        return owner.forward(k, x, add)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dy = dy.contiguous()
        dx = torch.mm(dy, ctx.weight) if ctx.needs_input_grad[0] else None
        dw = ctx.owner.record(ctx.k, ctx.x, dy)
        ctx.x = ctx.weight = None
        return dx, dw, dy if ctx.needs_input_grad[2] else None, None, None


class StepGather:
    """table[index_k] at every step k; the table's gradient is summed in fp32 and returned once, at step 0.

    Within one step no index repeats, so the sum has a fixed order.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def __call__(
        self, k: int, table: Float[Tensor, "rows width"], index: Int[Tensor, " picked"] | None
    ) -> Float[Tensor, "picked width"]:
        """Rows of the table at step k; index None takes them all, in order."""
        return _StepGather.apply(table, index, self, k)  # type: ignore[no-any-return, no-untyped-call]

    def add(self, like: Tensor, index: Tensor | None, dy: Tensor) -> Tensor:
        """Add one step's gradient to the running total."""
        if self.total is None:
            self.total = torch.zeros_like(like, dtype=wide(like.dtype))
        if dy.is_cuda:
            from eagle3_train.drafter import kernels

            return kernels.add_rows_(self.total, index, dy)
        dy = dy.to(self.total.dtype)
        return self.total.add_(dy) if index is None else self.total.index_add_(0, index, dy)


class _StepGather(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor | None, owner: StepGather, k: int) -> Tensor:  # type: ignore[override]
        ctx.like, ctx.index, ctx.owner, ctx.k = table.detach(), index, owner, k
        return table.clone() if index is None else table.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        total = ctx.owner.add(ctx.like, ctx.index, dy)
        if ctx.k:
            return None, None, None, None
        ctx.owner.total = None
        return total.to(ctx.like.dtype), None, None, None
