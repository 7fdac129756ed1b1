"""AdamW with fp32 masters for bf16 parameters, clipping without a host sync, and the learning-rate schedule.

One optimiser serves plain tensors, FSDP2 shards (DTensors) and CPU. Nothing here reads a value back from the
device: the gradient norm is a tensor, and an update with a non-finite norm changes nothing, on device.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw


def learning_rate(done: float, *, peak: float, warmup: float, total: float, floor: float) -> float:
    """Learning rate after `done` of `total` steps.

    Rises linearly over `warmup` steps, then falls along a cosine to floor * peak at `total`.
    """
    if done < warmup:
        return peak * done / warmup
    progress = min(1.0, (done - warmup) / max(total - warmup, 1e-9))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, gradient or state."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamW(torch.optim.Optimizer):
    """Decoupled-weight-decay Adam. Matrices decay, vectors (norm scales) do not.

    State per parameter: step, exp_avg, exp_avg_sq and, for parameters below fp32, `master`; the tensors are
    sharded like their parameter, so a distributed checkpoint can reshard them.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        parameters = list(parameters)
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8})

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Global 2-norm of all gradients (fp32 scalar on device), summed over the ranks that hold shards."""
        grads = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norms = torch._foreach_norm([_local(g) for g in grads], 2, dtype=torch.float32)
        squares = torch.stack(norms).square().sum()
        sharded = next((g for g in grads if isinstance(g, DTensor)), None)
        if sharded is not None:
            dist.all_reduce(squares, group=sharded.device_mesh.get_group())
        return squares.sqrt()

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next step."""
        for group in self.param_groups:
            group["lr"] = lr

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore; the fp32 state stays fp32 (torch would cast it to the parameters' dtype)."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, own, strict=True):
            state = state_dict["state"].get(index, {})
            self.state[parameter] = {
                name: value.to(parameter.device, copy=True) for name, value in state.items()
            }

    @torch.no_grad()
    def step(self, closure: None = None) -> Tensor:  # type: ignore[override]
        """Clip, update, and return the norm before clipping. A non-finite norm leaves everything as it was."""
        assert closure is None  # torch's distributed checkpoints pass one
        norm = self.grad_norm()
        inverse = torch.clamp((norm + 1e-6) / self.max_grad_norm, min=1.0)  # divides gradients
        skip = (~norm.isfinite()).float()
        for group in self.param_groups:
            kept = [p for p in group["params"] if p.grad is not None]
            if kept:
                states = [{name: _local(t) for name, t in self._state(p).items()} for p in kept]
                gradients = [_local(p.grad) for p in kept]
                _update([_local(p) for p in kept], gradients, states, group, inverse, skip)
        return norm

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            device = _local(parameter).device
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype != torch.float32:
                state["master"] = parameter.detach().to(torch.float32)
        return state


def _update(
    parameters: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
    inverse: Tensor,
    skip: Tensor,
) -> None:
    """One AdamW step of local tensors; gradients are divided by `inverse`, nothing happens where `skip` is not 0."""
    if parameters[0].is_cuda and parameters[0].dtype == torch.bfloat16:
        from eagle3_train.training import optim_kernels

        # alpha picks the tensor overload; the one with a number would wait for the device
        torch._foreach_add_([state["step"] for state in states], 1 - skip, alpha=1)
        for parameter, grad, state in zip(parameters, grads, states, strict=True):
            optim_kernels.adamw_(parameter, grad, state, group, inverse, skip)
        return
    masters = [state.get("master", p) for p, state in zip(parameters, states, strict=True)]
    adamw(
        masters,
        [grad.float() for grad in grads],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        grad_scale=inverse,
        found_inf=skip,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for parameter, master in zip(parameters, masters, strict=True):
        if master is not parameter:
            parameter.copy_(master)
