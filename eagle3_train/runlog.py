"""Logging, the metrics record and its copies (W&B, Ray's metrics), wall time per stage.

`metrics.jsonl` is the record; everything else is a copy and must never stop a run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_train.config import JobConfig
from eagle3_train.rundir import RunDir, write_atomic

log = logging.getLogger("eagle3_train")

RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception|Exit|Interrupt))(?:\(\w+\))?: ", re.M)
EXPLAINED = ("ValueError", "EngineError", "JobError")  # their messages say what to do


class JobError(RuntimeError):
    """What ended a job: one line for its user. The traceback is its cause's."""


def reason(error: BaseException) -> str:
    """What went wrong, without the tracebacks of other processes that Ray puts before what they said."""
    text = str(error).partition("\nThe above exception was")[0]  # what began it comes first
    if not (found := list(RAISED.finditer(text))):
        return text
    kind, said = found[-1][1], text[found[-1].end() :].strip()
    return said if kind in EXPLAINED else f"{kind}: {textwrap.shorten(said, 300)}"


def setup(config: JobConfig, role: str, rank: int = 0) -> None:
    """Log to the console at the configured level and, in full, to logs/<role>-<rank>.log."""
    path = RunDir(config.run_path).log(role, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = logging.Formatter(
        f"%(asctime)s {role}/{rank} %(levelname)-7s %(message)s", datefmt="%H:%M:%S"
    )
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(config.log.level)
    file = logging.FileHandler(path)
    file.setLevel(logging.DEBUG)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    for handler in (console, file):
        handler.setFormatter(line)
        log.addHandler(handler)


@contextmanager
def stage_timer(config: JobConfig, stage: str) -> Iterator[None]:
    """Log a stage's start and end; add its wall seconds, over all attempts, to timings.json."""
    log.info("stage %s: start", stage)
    started = time.monotonic()
    yield
    wall_s = time.monotonic() - started
    path = RunDir(config.run_path).timings
    timings = json.loads(path.read_text()) if path.exists() else {}
    timings[stage] = round(timings.get(stage, 0.0) + wall_s, 2)
    write_atomic(path, json.dumps(timings, indent=1))
    log.info("stage %s: done in %.1f s", stage, wall_s)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every object of metrics.jsonl, oldest first; a last line torn by a kill is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


class MetricsLog:
    """Appends one object per step to metrics.jsonl and copies it to W&B and Ray's metrics."""

    def __init__(self, config: JobConfig, resume_step: int) -> None:
        """Open the record; lines beyond `resume_step` belong to a lost attempt and are dropped."""
        self._run = RunDir(config.run_path)
        kept = [m for m in read_metrics(self._run.metrics) if m["step"] <= resume_step]
        write_atomic(self._run.metrics, "".join(json.dumps(m) + "\n" for m in kept))
        self._file = self._run.metrics.open("a", buffering=1)
        self._wandb = _start_wandb(config, self._run)
        self._gauges: dict[str, Any] = {}

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Record `values` of optimiser step `step`; lists are kept in the record only."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        scalars = {k: v for k, v in values.items() if isinstance(v, (int, float))}
        if self._wandb is not None:
            self._wandb.log({"train/step": step, **scalars})
        self._export(scalars)

    def _export(self, scalars: Mapping[str, float]) -> None:
        """Copy scalars to the Ray dashboard's metrics."""
        from ray.util.metrics import Gauge

        for name, value in scalars.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge("eagle3_" + name.replace("/", "_"), description=name)
            self._gauges[name].set(float(value))

    def close(self) -> None:
        """Flush and finish the W&B run."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(config: JobConfig, run: RunDir) -> Any:
    """Start or resume the run's one W&B run; None when disabled or unreachable."""
    if config.log.wandb_mode == "disabled":
        return None
    import wandb

    if not run.wandb_id.exists():
        write_atomic(run.wandb_id, os.urandom(4).hex())
    settings = wandb.Settings(console="off", x_disable_stats=True, silent=True)
    try:
        started = wandb.init(
            project=config.log.wandb_project,
            name=config.name,
            id=run.wandb_id.read_text().strip(),
            resume="allow",
            mode=config.log.wandb_mode,
            dir=str(run.root),
            config=config.model_dump(mode="json"),
            settings=settings,
        )
    except wandb.errors.Error as error:
        log.warning("W&B is not available (%s); metrics.jsonl still records everything", error)
        return None
    started.define_metric("*", step_metric="train/step")
    return started
