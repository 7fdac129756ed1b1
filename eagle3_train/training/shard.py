"""FSDP2 over the drafter: parameters, gradients and optimiser state split over the ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(drafter: nn.Module, ranks: int, device: torch.device, dtype: torch.dtype) -> None:
    """Shard `drafter` in place over all ranks; a single rank is left as it is.

    Parameters stay gathered between forward and backward (a drafter is small, its activations are
    not); gradients are averaged in float32.
    """
    if ranks == 1:
        return
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fully_shard(drafter, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
