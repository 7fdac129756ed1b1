"""A job is `defaults <- YAML files, left to right <- section.field=value overrides`, checked by one strict schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from eagle3_train.config import JobConfig


def load_config(files: list[Path], overrides: list[str] | None = None) -> JobConfig:
    """Compose YAML `files` left to right, apply `section.field=value` overrides, validate.

    Raises ValueError naming every offending key.
    """
    merged: dict[str, Any] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"no configuration file {file}; see configs/ for examples")
        try:
            content = yaml.safe_load(file.read_text()) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not valid YAML: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(
                f"{file} must hold a mapping of sections, got {type(content).__name__}"
            )
        _merge(merged, content)
    for override in overrides or []:
        _apply(merged, override)
    try:
        config = JobConfig.model_validate(merged)
    except ValidationError as error:
        raise ValueError(_explain(error, files)) from error
    _check_sections_fit(config)
    return config


def _check_sections_fit(config: JobConfig) -> None:
    longest, train, stream = config.corpus.max_len, config.train, config.stream
    if longest > config.engine.max_model_len:
        raise ValueError(
            f"corpus.max_len={longest} exceeds engine.max_model_len={config.engine.max_model_len}; "
            "lower the first or raise the second"
        )
    if longest > stream.tokens_per_pack:
        raise ValueError(
            f"corpus.max_len={longest} exceeds stream.tokens_per_pack={stream.tokens_per_pack}: "
            "a sample of full length fits in no pack; raise stream.tokens_per_pack"
        )
    if train.eval_every % train.checkpoint_every and train.checkpoint_every % train.eval_every:
        raise ValueError(
            f"train.eval_every={train.eval_every} and train.checkpoint_every={train.checkpoint_every}: one must be "
            "a multiple of the other, or the best checkpoint is chosen among few that were evaluated"
        )
    counts = train.model_dump(include={"epochs", "eval_every", "checkpoint_every"})
    for name, count in counts.items():
        if count % stream.replay:
            raise ValueError(
                f"train.{name}={count} is no multiple of stream.replay={stream.replay}: a window is "
                f"trained {stream.replay} times while it is in memory; change one of them"
            )


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    """Merge mappings recursively; lists and scalars replace."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _apply(merged: dict[str, Any], override: str) -> None:
    """Apply one `section.field=value`; the value is YAML."""
    dotted, separator, text = override.partition("=")
    if not separator:
        raise ValueError(f"override {override!r} is not of the form section.field=value")
    *parents, leaf = dotted.split(".")
    node = merged
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ValueError(f"override {override!r}: {parent} is not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not valid YAML: {error}") from error


def _explain(error: ValidationError, files: list[Path]) -> str:
    """One line per problem: dotted key, what is wrong, what was given."""
    lines = [f"invalid configuration ({', '.join(map(str, files))}):"]
    for problem in error.errors():
        key = ".".join(map(str, problem["loc"])) or "(whole file)"
        if problem["type"] == "missing":
            lines.append(f"  {key}: required, not given")
        elif problem["type"] == "extra_forbidden":
            lines.append(f"  {key}: unknown key; see docs/config.md for the known ones")
        else:
            lines.append(f"  {key}: {problem['msg']} (got {problem['input']!r:.80})")
    return "\n".join(lines)
