"""How hidden states are stored on their way from the engine to the drafter.

bfloat16, float32   [tokens, boundaries, hidden]
float8_e4m3fn       bytes, [tokens, boundaries, hidden + 4]: values in e4m3, then the float32 that scales them
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


def storage(dtype: str, hidden: int) -> tuple[torch.dtype, int]:
    """(type, columns) that hold `hidden` values of `dtype`."""
    if dtype == "float8_e4m3fn":
        return torch.uint8, hidden + SCALE_BYTES
    return getattr(torch, dtype), hidden


def encode(states: Tensor, out: Tensor) -> None:
    """Write states [..., hidden] of any float type into `out` [..., columns]."""
    if out.dtype != torch.uint8:
        out.copy_(states)
        return
    hidden = states.shape[-1]
    scale = states.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / E4M3_MAX
    out[..., :hidden] = (states / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    out[..., hidden:] = scale.view(torch.uint8)


def checksum(stored: Tensor) -> Tensor:
    """float32 sum of what decides whether stored states [..., columns] are finite: scales, or the states themselves."""
    if stored.dtype == torch.uint8:
        stored = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return stored.sum(dtype=torch.float32)


def decode(stored: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """Rows [tokens, boundaries * columns] as [tokens, boundaries * hidden] of `dtype`."""
    if stored.dtype != torch.uint8:
        return stored.to(dtype)
    stored = stored.view(len(stored), -1, hidden + SCALE_BYTES)
    values = stored[..., :hidden].view(torch.float8_e4m3fn).to(dtype)
    scale = stored[..., hidden:].contiguous().view(torch.float32)
    return torch.mul(values, scale, out=values).flatten(1)
