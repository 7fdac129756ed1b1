"""One fused AdamW pass over a bf16 parameter, its bf16 gradient and its fp32 master and moments (CUDA)."""

# Triton functions are typed by Triton.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _adamw(
    parameter, grad, master, exp_avg, exp_avg_sq, step, inverse, skip,
    lr, beta1, beta2, eps, weight_decay, total, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.where(tl.load(skip) == 0, total, 0)
    count = tl.load(step)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) / tl.load(inverse)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    w = tl.load(master + at, mask=inside, other=0.0)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    correction1 = 1 - tl.exp(count * tl.log(beta1))
    correction2 = 1 - tl.exp(count * tl.log(beta2))
    w = w * (1 - lr * weight_decay) - lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(master + at, w, mask=inside)
    tl.store(parameter + at, w, mask=inside)


def adamw_(
    parameter: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    inverse: Tensor,
    skip: Tensor,
) -> None:
    """Update parameter and state (master, exp_avg, exp_avg_sq; `step` is read) in place; the gradient is divided by
    `inverse`, nothing happens where `skip` is not 0."""
    assert parameter.is_contiguous()
    assert grad.is_contiguous()
    total = parameter.numel()
    if total:
        _adamw[(triton.cdiv(total, 2048),)](
            parameter, grad, state["master"], state["exp_avg"], state["exp_avg_sq"], state["step"], inverse, skip,
            group["lr"], *group["betas"], group["eps"], group["weight_decay"], total, BLOCK=2048, num_warps=8,
        )  # fmt: skip
