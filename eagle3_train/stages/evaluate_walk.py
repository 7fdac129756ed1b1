"""What acceptance should be on the very answers that are measured, at every k: one capture, no engine per k.

The target reads its own greedy answers once more with its layers tapped; then each drafter is walked over
the states as the engine drafts. All states of the evaluated answers exist at once, in the object store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch

from eagle3_train.config import JobConfig
from eagle3_train.drafter.checkpoint import read_checkpoint
from eagle3_train.drafter.rows import PackedBatch, plan_rows
from eagle3_train.drafter.walk import Acceptance, walk_batch
from eagle3_train.engines.pool import spec_for
from eagle3_train.runlog import log
from eagle3_train.stages.evaluate_engine import serving
from eagle3_train.stages.evaluate_statistics import Answer
from eagle3_train.target.facts import read_facts, resolve_boundaries
from eagle3_train.training.initial import read_drafter

# Largest k whose acceptance is estimated, however many tokens are drafted.
WALKED_K = 7
Walks = dict[str, list[Acceptance]]
"""Dataset -> the walk of each answer, in order."""


def walk_answers_of(
    config: JobConfig,
    drafters: dict[str, Path],
    answers: Mapping[str, Sequence[Answer]],
    dtype: str,
) -> dict[str, Walks]:
    """Drafter -> its walks of every dataset's answers; dtype is the engine's."""
    layers = read_facts(config.target.path).num_layers
    taps = {
        name: resolve_boundaries(read_checkpoint(directory).boundaries, layers)
        for name, directory in drafters.items()
    }
    everything = [answer for group in answers.values() for answer in group]
    boundaries = tuple(sorted(set().union(*taps.values())))
    states = capture(config, everything, boundaries, dtype)
    gpus = min(1.0, config.engine.gpus_per_worker)
    task = ray.remote(walk).options(num_cpus=1, num_gpus=gpus)
    log.info("evaluate: walking %d drafters over %d answers", len(drafters), len(everything))
    jobs = {
        name: task.remote(
            config,
            directory,
            [boundaries.index(tap) for tap in taps[name]],
            everything,
            states,
            dtype,
        )
        for name, directory in drafters.items()
    }
    found: dict[str, Walks] = {}
    for name, job in jobs.items():
        rest = iter(ray.get(job))
        found[name] = {dataset: [next(rest) for _ in group] for dataset, group in answers.items()}
    return found


def capture(
    config: JobConfig, answers: Sequence[Answer], boundaries: tuple[int, ...], dtype: str
) -> list[Any]:
    """References to the states [tokens, boundaries * hidden] of prompt and answer, the last token of each left out."""
    spec = replace(
        spec_for(config, "capture", boundaries).with_engine(enforce_eager=True),
        capture_dtype="float32" if dtype == "float32" else "bfloat16",
    )
    with serving(spec) as replica:
        read = replica.capture.options(num_returns=2)
        captured = [read.remote([_ids(answer)[:-1]]) for answer in answers]
        bad = [said for _, meta in captured for said in ray.get(meta)[1].values()]
    if bad:
        raise ValueError(f"the engine did not capture {len(bad)} answers: {bad[0]}")
    return [states for states, _ in captured]


def walk(
    config: JobConfig,
    directory: Path,
    columns: list[int],
    answers: Sequence[Answer],
    references: Sequence[Any],
    dtype: str,
) -> list[Acceptance]:
    """Walk one drafter, which reads `columns` of the captured boundaries; runs as a Ray task."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = getattr(torch, dtype)
    drafter, frozen = read_drafter(config, directory, own)
    drafter, frozen = drafter.to(device), frozen.to(device, own)
    depth = max(WALKED_K, config.evaluate.num_speculative_tokens)
    found = []
    for answer, reference in zip(answers, references, strict=True):
        array = torch.from_numpy(ray.get(reference).copy())
        rows = array.view(torch.bfloat16) if array.dtype == torch.int16 else array
        hidden = drafter.spec.hidden_size
        states = rows.view(len(rows), -1, hidden)[:, columns].to(device, own)
        ids = _ids(answer)
        mask = np.arange(len(ids)) >= len(answer.prompt_ids)
        plan = plan_rows([ids], [mask], depth).to(device)
        batch = PackedBatch(plan, states[:, :-1].flatten(1), states[:, -1])
        found.append(walk_batch(drafter, frozen, batch)[1])
    return found


def _ids(answer: Answer) -> npt.NDArray[np.int32]:
    return np.array([*answer.prompt_ids, *answer.output_ids], dtype=np.int32)
