"""Layout of a run directory: which stage writes what, where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunDir:
    """Layout of one run: a folder per stage, named like the stage."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"  # resolved configuration
        self.provenance = root / "provenance.json"  # versions, commit, machine
        self.metrics = root / "metrics.jsonl"  # the record: an object per step
        self.timings = root / "timings.json"  # wall seconds of each stage
        self.preflight = root / "preflight" / "preflight.json"  # preflight's verdict
        self.quarantine = root / "rollout" / "quarantine.jsonl"  # rows not used: where, why
        self.accounting = root / "rollout" / "accounting.json"  # rows in, rows out, drop reasons
        self.samples = root / "rollout" / "samples"  # committed Parquet shards
        self.synthesised = root / "rollout" / "synthesised.jsonl"  # user turns, JSON strings
        self.rollout_state = root / "rollout" / "state.json"  # settings, counts
        self.train_storage = root / "train"  # Ray Train's checkpoints and snapshot
        self.checkpoints = root / "train" / "ray_train"  # Ray Train's own folder
        self.registered = self.checkpoints / "checkpoint_manager_snapshot.json"  # which it knows
        self.registered_before = root / "train" / "registered.json"  # its copy, one save old
        self.initial_weights = root / "train" / "initial.safetensors"  # before step 1, with d2t
        self.saving = root / "train" / ".saving"  # checkpoints being written
        self.train_result = root / "train" / "result.json"  # counts, bytes, best checkpoint
        self.wandb_id = root / "train" / "wandb_id"  # the run's W&B id, kept across restarts
        self.drafter = root / "export" / "drafter"  # the exported drafter
        self.untrained_drafter = root / "export" / "untrained"  # as it was before its first step
        self.evaluation = root / "evaluate" / "evaluation.json"  # served measurements
        self.report = root / "report"  # folder of index.html, report.md, summary.json and figures

    def measured(self, name: str = "") -> Path:
        """What one engine of an evaluation measured, JSON; the folder of all. Gone once `evaluation` is written."""
        return self.root / "evaluate" / "measured" / (name and f"{name}.json")

    def log(self, role: str, rank: int) -> Path:
        """Full log of one process."""
        return self.root / "logs" / f"{role}-{rank}.log"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in the block, then at `path`: a crash leaves the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # of a full disk, say


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all (`replacing`)."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever a broken file makes its parser raise becomes a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path} cannot be used: {kind}{error}; restore it") from error
