"""Linear algebra shared by all TTT steps: one weight, many steps, ONE weight-gradient matmul.

Autograd would form a weight gradient per step and add them up in bf16. Here each step's backward only
records (input, output gradient); the backward of step 0, which autograd always runs last because every
step feeds the next through h, turns all records into a single matmul with an inner dimension of all rows
of all steps. Records that lie one after the other in a `Stack` are used in place, without a copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from eagle3_train.drafter.matmul import weight_ops


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

    def release(self) -> None:
        """Let the memory go; who still holds a step keeps it alive."""
        self._rows, self._views = None, ()


Place = tuple[Stack, int]
"""Where a function puts a result: step k of a Stack."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and norms of `dtype` values are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class StepLinear:
    """y_k = x_k W^T (+ add_k) at every step k of one forward pass.

    `output` places y_k in a Stack so that a consumer may overwrite it with its gradient in backward.
    """

    def __init__(self, weight: Tensor, output: Stack | None = None, fp8: bool = False) -> None:
        self.weight = weight
        self.ops = weight_ops(weight, fp8)
        self.output = output
        self.records: list[tuple[Tensor, Tensor]] = []
        """(input, output gradient) of each step so far, last step first."""

    def __call__(
        self, k: int, x: Float[Tensor, "rows in"], add: Float[Tensor, "rows out"] | None = None
    ) -> Float[Tensor, "rows out"]:
        """Apply at step k; `add` is only read."""
        return _StepLinear.apply(x, self.weight, add, self, k)  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, k: int, x: Tensor, add: Tensor | None) -> Tensor:
        """The product without autograd."""
        return self.ops.forward(x, add, self.output.step(k) if self.output else None)

    def record(self, k: int, x: Tensor, dy: Tensor) -> Tensor | None:
        """Note one step's pair; at step 0 return the weight gradient of all steps and let the buffers go."""
        self.records.append((x, dy))
        if k:
            return None
        gradient = self.ops.weight_gradient(self.records[::-1], None)
        self.records.clear()
        if self.output:
            self.output.release()
        return gradient


class _StepLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _weight: Tensor, add: Tensor | None, owner: StepLinear, k: int
    ) -> Tensor:
        ctx.x, ctx.owner, ctx.k = x.detach(), owner, k
        return owner.forward(k, x, add)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy = dy.contiguous()
        dx = ctx.owner.ops.input_gradient(dy, None) if ctx.needs_input_grad[0] else None
        dw = ctx.owner.record(ctx.k, ctx.x, dy)
        ctx.x = None
        return dx, dw, dy if ctx.needs_input_grad[2] else None, None, None


class StepGather:
    """table[indices[k]] at every step k; the table's gradient is summed in fp32 and returned once, at step 0.

    Indices None take all rows, in order. Within one step no index repeats, so the sum has a fixed order.
    """

    def __init__(
        self, table: Float[Tensor, "rows width"], indices: Sequence[Int[Tensor, " picked"] | None]
    ) -> None:
        self.table, self.indices = table, indices
        self.total: Tensor | None = None

    def __call__(self, k: int) -> Float[Tensor, "picked width"]:
        """Rows of the table at step k."""
        return _StepGather.apply(self.table, self, k)  # type: ignore[no-any-return, no-untyped-call]


class _StepGather(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, owner: StepGather, k: int) -> Tensor:
        ctx.owner, ctx.k = owner, k
        index = owner.indices[k]
        return table.clone() if index is None else table.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        owner, index = ctx.owner, ctx.owner.indices[ctx.k]
        total = owner.total
        if total is None:
            total = torch.zeros_like(owner.table, dtype=wide(dy.dtype))
            owner.total = total
        if dy.is_cuda:
            from eagle3_train.drafter import kernels

            kernels.add_rows_(total, index, dy)
        elif index is None:
            total.add_(dy)
        else:
            total.index_add_(0, index, dy.to(total.dtype))
        if ctx.k:
            return None, None, None
        owner.total = None
        return total.to(dy.dtype), None, None
