"""What a rollout's answers were made with, and whether it still holds: settings and the contents of the sources.

rollout/state.json: {inputs, data: hash of the sources, complete, and the counts once it is}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from eagle3_train.config import JobConfig
from eagle3_train.corpus.account import CorpusError
from eagle3_train.corpus.read import fingerprint
from eagle3_train.corpus.table import committed_ids
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.runlog import log

Json = dict[str, Any]


def is_complete(config: JobConfig) -> bool:
    """Whether every prompt has been asked with these settings and this data."""
    state = recorded(config)
    return bool(state) and state["complete"] and not _changes(config, state)


def check_unchanged(config: JobConfig) -> None:
    """Refuse to mix answers of different settings or data; before anything is committed, they may change."""
    paths, state = RunDir(config.run_path), recorded(config)
    changed = _changes(config, state) if state else []
    if changed and (committed_ids(paths.samples) or paths.synthesised.is_file()):
        raise ValueError(
            f"{paths.samples.parent} holds answers made with other {', '.join(changed)}; "
            "give the run another name, or delete that folder"
        )


def record_start(config: JobConfig) -> None:
    """Remember, before anything is committed, what the answers are made with."""
    data = fingerprint(config.corpus.sources)
    record(config, {"inputs": _inputs(config), "data": data, "complete": False})


def record(config: JobConfig, facts: Json) -> Json:
    """Add `facts` to what was recorded; the whole state."""
    state = recorded(config) | facts
    write_atomic(RunDir(config.run_path).rollout_state, json.dumps(state, indent=1))
    return state


def recorded(config: JobConfig) -> Json:
    """What was recorded; empty before the start."""
    path = RunDir(config.run_path).rollout_state
    state: Json = json.loads(path.read_text()) if path.is_file() else {}
    return state


def _inputs(config: JobConfig) -> Json:
    """The settings that decide what the answers are."""
    return config.model_dump(
        mode="json",
        include={"target": {"path"}, "corpus": True, "rollout": True},
        exclude={"corpus": {"min_yield"}, "rollout": {"shard_rows", "max_failures"}},
    )


def _changes(config: JobConfig, state: Json) -> list[str]:
    """Names of the settings that differ from the recorded ones, and the data if its files were edited."""
    settings = set(_flat(state["inputs"])) ^ set(_flat(_inputs(config)))
    names = sorted({f"settings ({name})" for name, _ in settings})
    try:
        data = fingerprint(config.corpus.sources)
    except CorpusError as error:  # moved away since: the answers stay valid
        log.warning("rollout: the data is taken as unchanged: %s", error)
        return names
    return names if state["data"] == data else [*names, "contents of corpus.sources"]


def _flat(inputs: Json, prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in inputs.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)
