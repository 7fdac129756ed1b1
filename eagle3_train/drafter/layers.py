"""The elementwise halves of a decoder layer as autograd functions with their own backward passes.

`norm_fork` and `GatedDown` fuse what eager PyTorch would spread over many passes through memory; on CUDA each
is one or two Triton kernels, elsewhere plain tensor code with the same formulas.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from eagle3_train.drafter.stepwise import Place, Stack, StepLinear, wide


def _room(place: Place | None) -> Tensor | None:
    return None if place is None else place[0].step(place[1])


class _NormFork(Function):
    """x -> (x[:rows], rms(x[:rows]) * w_a, rms(x) * w_b); the gradient of the fork is summed in one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_a: Tensor,
        w_b: Tensor | None,
        eps: float,
        rows: int,
        place_a: Place | None,
        place_b: Place | None,
        consume: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        out_a, out_b = _room(place_a), _room(place_b)
        if x.is_cuda:
            from eagle3_train.drafter import kernels

            a, b, rstd = kernels.norm_fork(x, w_a, w_b, eps, rows, out_a, out_b)
        else:
            high = x.to(wide(x.dtype))
            rstd = torch.rsqrt(high.square().mean(-1, keepdim=True) + eps)
            unit = high * rstd
            a = (unit[:rows] * w_a).to(x.dtype)
            b = None if w_b is None else (unit * w_b).to(x.dtype)
            a = a if out_a is None else out_a.copy_(a)
            b = b if out_b is None or b is None else out_b.copy_(b)
        ctx.x, ctx.rstd, ctx.rows, ctx.consume = x.detach(), rstd, rows, consume
        ctx.w_a, ctx.w_b = w_a.detach(), None if w_b is None else w_b.detach()
        return x[:rows].detach(), a, b

    @staticmethod
    def backward(
        ctx: Any, d_residual: Tensor | None, d_a: Tensor | None, d_b: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, rows = ctx.x, ctx.rows
        out = x if ctx.consume else None
        nothing = (None,) * 5  # eps, rows, places, consume
        if x.is_cuda:
            from eagle3_train.drafter import kernels

            grads = kernels.norm_fork_backward(
                x, ctx.rstd, ctx.w_a, ctx.w_b, d_residual, d_a, d_b, out
            )
            return *grads, *nothing
        unit = x.to(wide(x.dtype)) * ctx.rstd
        d_unit = torch.zeros_like(unit)
        dw_a = dw_b = None
        if d_a is not None:
            d_unit[:rows] += d_a * ctx.w_a
            dw_a = (d_a * unit[:rows]).sum(0).to(x.dtype)
        if d_b is not None:
            d_unit += d_b * ctx.w_b
            dw_b = (d_b * unit).sum(0).to(x.dtype)
        dx = ctx.rstd * (d_unit - unit * (d_unit * unit).mean(-1, keepdim=True))
        if d_residual is not None:
            dx[:rows] += d_residual
        dx = dx.to(x.dtype) if out is None else out.copy_(dx)
        return dx, dw_a, dw_b, *nothing


def rms_norm(
    x: Float[Tensor, "rows width"], weight: Float[Tensor, " width"], eps: float
) -> Float[Tensor, "rows width"]:
    """rms(x) * weight, in fp32 inside."""
    out: Tensor = _NormFork.apply(x, weight, None, eps, len(x), None, None, False)[1]  # type: ignore[no-untyped-call]
    return out


def norm_fork(
    x: Float[Tensor, "rows width"],
    weight: Float[Tensor, " width"],
    eps: float,
    out: Place | None = None,
    consume: bool = False,
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, "rows width"]]:
    """(x, rms(x) * weight): a residual branch and a normed one, which `out` places.

    consume: backward writes x's gradient over x, which nothing else may read by then.
    """
    residual, normed, _ = _NormFork.apply(x, weight, None, eps, len(x), out, None, consume)  # type: ignore[no-untyped-call]
    return residual, normed


def norm_fork_two(
    x: Float[Tensor, "rows width"],
    weight_a: Float[Tensor, " width"],
    weight_b: Float[Tensor, " width"],
    eps: float,
    rows_a: int,
    out_a: Place,
    out_b: Place,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x[:rows_a], rms(x[:rows_a]) * weight_a, rms(x) * weight_b): next step's two inputs and the head's.

    Consumes x (see `norm_fork`).
    """
    out: tuple[Tensor, Tensor, Tensor] = _NormFork.apply(  # type: ignore[no-untyped-call]
        x, weight_a, weight_b, eps, rows_a, out_a, out_b, True
    )
    return out


class _GatedDown(Function):
    """residual + (silu(gate) * up) W^T. The activation is recomputed in backward, into a Stack made there."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        _weight: Tensor,
        residual: Tensor,
        owner: "GatedDown",
        k: int,
    ) -> Tensor:
        ctx.gate, ctx.up, ctx.owner, ctx.k = gate.detach(), up.detach(), owner, k
        if gate.is_cuda:
            from eagle3_train.drafter import kernels

            return owner.linear.forward(k, kernels.swiglu(gate, up), residual)
        return owner.linear.forward(k, F.silu(gate) * up, residual)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy, gate, up = dy.contiguous(), ctx.gate, ctx.up
        product = ctx.owner.product.step(ctx.k)
        ctx.owner.linear.ops.input_gradient(dy, product)
        if gate.is_cuda:
            from eagle3_train.drafter import kernels

            kernels.swiglu_backward(gate, up, product)
        else:
            d_product = product.clone()
            sigmoid = torch.sigmoid(gate)
            silu = gate * sigmoid
            torch.mul(silu, up, out=product)
            slope = sigmoid + silu * (1 - sigmoid)
            gate.copy_(d_product * up * slope)
            up.copy_(d_product * silu)
        dw = ctx.owner.linear.record(ctx.k, product, dy)
        if ctx.k == 0:
            ctx.owner.product.release()
        ctx.gate = ctx.up = None
        return gate, up, dw, dy, None, None


class GatedDown:
    """The second half of the MLP at every step. Overwrites gate and up with their gradients in backward."""

    def __init__(self, linear: StepLinear, counts: Sequence[int]) -> None:
        self.linear = linear
        self.product = Stack(counts, linear.weight.shape[1], linear.weight)
        """silu(gate) * up of all steps, made in backward."""

    def __call__(
        self,
        k: int,
        gate: Float[Tensor, "rows inner"],
        up: Float[Tensor, "rows inner"],
        residual: Float[Tensor, "rows width"],
    ) -> Float[Tensor, "rows width"]:
        """Apply at step k; gate and up must not be used elsewhere."""
        return _GatedDown.apply(gate, up, self.linear.weight, residual, self, k)  # type: ignore[no-any-return, no-untyped-call]
