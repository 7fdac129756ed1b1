"""The only module that knows a file name inside a run directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDir:
    """Layout of one run: a folder per stage, named like the stage."""

    root: Path

    @property
    def config(self) -> Path:
        """Resolved configuration, YAML."""
        return self.root / "config.yaml"

    @property
    def provenance(self) -> Path:
        """Versions, commit, machine."""
        return self.root / "provenance.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per optimiser step or evaluation: the record of training."""
        return self.root / "metrics.jsonl"

    @property
    def timings(self) -> Path:
        """Wall seconds of each stage."""
        return self.root / "timings.json"

    @property
    def wandb_id(self) -> Path:
        """The run's W&B id, kept across restarts."""
        return self.root / "train" / "wandb_id"

    @property
    def draft_vocab(self) -> Path:
        """d2t and token counts, safetensors."""
        return self.root / "rollout" / "draft_vocab.safetensors"

    @property
    def quarantine(self) -> Path:
        """Rows that were not used: source, reason."""
        return self.root / "rollout" / "quarantine.jsonl"

    @property
    def accounting(self) -> Path:
        """Rows in, rows out, drop reasons."""
        return self.root / "rollout" / "accounting.json"

    @property
    def samples(self) -> Path:
        """Folder of committed Parquet shards of answered samples."""
        return self.root / "rollout" / "samples"

    @property
    def synthesised(self) -> Path:
        """User turns the target wrote, one JSON string per line."""
        return self.root / "rollout" / "synthesised.jsonl"

    @property
    def rollout_state(self) -> Path:
        """Settings of the answers, counts, whether all prompts were asked."""
        return self.root / "rollout" / "state.json"

    @property
    def train_storage(self) -> Path:
        """Ray Train's storage: checkpoints and controller snapshot."""
        return self.root / "train"

    @property
    def initial_weights(self) -> Path:
        """The drafter before its first step, safetensors."""
        return self.root / "train" / "initial.safetensors"

    @property
    def train_result(self) -> Path:
        """Outcome of training: counts, bytes, best checkpoint."""
        return self.root / "train" / "result.json"

    @property
    def drafter(self) -> Path:
        """The exported drafter."""
        return self.root / "export" / "drafter"

    @property
    def untrained_drafter(self) -> Path:
        """The drafter before its first step, exported the same way."""
        return self.root / "export" / "untrained"

    @property
    def evaluation(self) -> Path:
        """Served measurements, JSON."""
        return self.root / "evaluate" / "evaluation.json"

    def measured(self, name: str = "") -> Path:
        """What one engine of an evaluation measured, JSON; the folder of all. Gone once `evaluation` is written."""
        return self.root / "evaluate" / "measured" / (name and f"{name}.json")

    @property
    def report(self) -> Path:
        """Folder of report.md, summary.json and figures."""
        return self.root / "report"

    @property
    def preflight(self) -> Path:
        """Preflight's verdict, JSON."""
        return self.root / "preflight" / "preflight.json"

    def log(self, role: str, rank: int) -> Path:
        """Full log of one process."""
        return self.root / "logs" / f"{role}-{rank}.log"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
