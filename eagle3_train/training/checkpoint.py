"""Checkpoints: torch DCP (each rank its own files) beside a plain copy any process can read.

One directory holds DCP files, `drafter.safetensors` (full weights, for export) and `state.json` (step,
ledger, metrics). Ranks write to their own folders; Ray Train merges them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

WEIGHTS = "drafter.safetensors"
STATE = "state.json"


def save(
    folder: Path, drafter: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Write this rank's part of a checkpoint; every rank must call it. Rank 0 adds the plain copy."""
    model, optim = get_state_dict(drafter, optimizer)
    save_distributed({"model": model, "optim": optim}, checkpoint_id=str(folder))
    full = get_model_state_dict(
        drafter, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if state["rank"] == 0:
        weights = {name: t.contiguous() for name, t in full.items() if isinstance(t, torch.Tensor)}
        save_file(weights, folder / WEIGHTS)
        (folder / STATE).write_text(json.dumps(state))


def restore(folder: Path, drafter: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load weights and optimiser state in place; returns the saved state."""
    model, optim = get_state_dict(drafter, optimizer)
    content: dict[str, Any] = {"model": model, "optim": optim}
    load_distributed(content, checkpoint_id=str(folder))
    set_state_dict(
        drafter, optimizer, model_state_dict=content["model"], optim_state_dict=content["optim"]
    )
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    return state
