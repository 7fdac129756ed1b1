"""Command line of every job: `-c FILE... [section.field=value ...]`, one clear line per user error."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eagle3_train.config import JobConfig
from eagle3_train.config_file import load_config


def parse(description: str) -> JobConfig:
    """Configuration named on the command line; exits with status 2 when unusable."""
    parser = argparse.ArgumentParser(description=description)
    _, files, overrides = arguments(parser)
    try:
        return load_config(files, overrides)
    except ValueError as error:
        return parser.exit(2, f"error: {error}\n")


def arguments(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Path], list[str]]:
    """The parser's own options, the configuration files and the overrides, unread."""
    parser.add_argument("-c", "--config", nargs="+", required=True, metavar="FILE")
    options, more = parser.parse_known_args()
    files = [Path(text) for text in options.config if "=" not in text]
    overrides = [text for text in options.config if "=" in text]  # -c takes what follows it
    return options, files, overrides + [text.lstrip("-") for text in more]


def run(description: str, job: Callable[[JobConfig], object]) -> None:
    """Parse, record provenance, run `job`; user errors end in one line, status 1."""
    from ray.exceptions import RayError

    from eagle3_train import provenance, runlog
    from eagle3_train.engines.launch import EngineError
    from eagle3_train.target.facts import locate

    config = parse(description)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `ray job stop`: run the clean-up
    try:
        if not config.run_path.exists():
            locate(config.target.path)  # a mistyped target leaves no run directory behind
        runlog.setup(config, "driver")
        provenance.record(config)
        job(config)
    except (ValueError, EngineError, OSError, RayError, runlog.JobError) as error:
        runlog.log.debug("failed", exc_info=True)
        raise SystemExit(f"error: {runlog.reason(error)}") from error


def connect() -> None:
    """Join the running cluster (inside `ray job submit`), or start a local one."""
    import ray

    from eagle3_train.stream.store import FREE_AT_ONCE

    if ray.is_initialized():
        return
    environment = {"env_vars": {"VLLM_NO_USAGE_STATS": "1", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(runtime_env=environment, log_to_driver=True)
        return
    # Logical CPUs: the demo's engine, trainers and actors share few cores, and mostly wait.
    ray.init(
        "local",
        num_cpus=max(4, os.cpu_count() or 1),
        runtime_env=environment,
        _system_config=FREE_AT_ONCE,
    )


def engines(config: JobConfig, capture: bool) -> AbstractContextManager[Any]:
    """Pool of engines for as long as the block runs: they answer prompts and, if asked, hand states over."""
    from eagle3_train.engines.pool import engine_pool, spec_for

    return engine_pool(spec_for(config, "capture" if capture else "plain"))
