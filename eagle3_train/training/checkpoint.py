"""Checkpoints: torch DCP (each rank its own files) beside a plain copy any process can read.

One directory holds DCP files, `drafter.safetensors` (full weights, for export) and `state.json` (step,
ledger, bad samples, evaluations). Ranks write to their own folders; Ray Train merges them.
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

from eagle3_train.rundir import RunDir, reading, write_atomic
from eagle3_train.runlog import log

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


def copy_registered(paths: RunDir) -> None:
    """Copy Ray Train's list of checkpoints, which it writes in place: a kill within that leaves a part of one."""
    try:
        known = paths.registered.read_text()
        json.loads(known)
    except (FileNotFoundError, json.JSONDecodeError):  # none yet, or being written
        return
    write_atomic(paths.registered_before, known)


def registered(paths: RunDir) -> list[Path]:
    """Checkpoints that Ray Train knows; last the one it resumes from.

    A list that cannot be read is replaced by its copy, if that names nothing that is gone. Raises ValueError.
    """
    if not paths.registered.exists():
        return []
    try:
        return _listed(paths.registered, paths.checkpoints)
    except ValueError:
        if not paths.registered_before.exists():
            raise
        known = _listed(paths.registered_before, paths.checkpoints)
        if not all(folder.exists() for folder in known):
            raise
    log.warning(
        "%s cannot be read: its copy from before the last checkpoint is used", paths.registered
    )
    write_atomic(paths.registered, paths.registered_before.read_text())
    return known


def _listed(file: Path, checkpoints: Path) -> list[Path]:
    with reading(file):
        snapshot = json.loads(file.read_text())
        known = [*snapshot["checkpoint_results"], snapshot["latest_checkpoint_result"]]
        return [checkpoints / result["checkpoint_dir_name"] for result in known]
