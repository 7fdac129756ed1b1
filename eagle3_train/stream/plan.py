"""The whole run as one planned stream: which samples each rank trains in which optimiser window.

Sample lengths are known before capture, so every epoch (in its own seeded order) is laid out as
windows of ranks x accumulation packs before anything is captured. Filling is greedy and forgets
everything at a window's end; therefore the plan of the pairs that are not yet trained equals the rest
of the original plan, and resuming is the same as never having stopped. Numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from eagle3_train.records import Pack, Sample


@dataclass(frozen=True, slots=True)
class Window:
    """All packs between two optimiser steps ("train"), or of one held-out evaluation ("eval").

    index counts windows of both kinds; step is the 1-based optimiser step a train window ends with (it
    makes `replay` of them), or the last one made before an evaluation; closes is False for all but an
    evaluation's last window. starts: supervised starts (k = 0) of the window, all ranks.
    """

    index: int
    kind: Literal["train", "eval"]
    step: int
    closes: bool
    packs: tuple[Pack, ...]
    tokens: int
    starts: int


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What the layout depends on, beside the samples and the ledger.

    replay: passes over each window while it is resident. An entry's epoch is that of its first pass.
    """

    ranks: int
    accumulation: int
    tokens_per_pack: int
    epochs: int
    seed: int
    eval_every: int
    replay: int = 1


def supervised_starts(loss_mask: npt.NDArray[np.bool_]) -> int:
    """Starts t supervised at k = 0: tokens t+1 and t+2 both produced by the target."""
    return int(np.count_nonzero(loss_mask[1:-1] & loss_mask[2:]))


def plan_run(
    train: list[Sample],
    held_out: list[Sample],
    shape: PlanShape,
    trained: npt.NDArray[np.bool_],
    done_steps: int,
) -> list[Window]:
    """Windows still to do. `trained` is the ledger, bool [epochs, len(train)].

    `done_steps` optimiser steps have been made. Evaluations stand before the first step, after every
    `eval_every` steps and after the last one. Row numbers in packs index train + held_out. Raises
    ValueError when there are fewer samples than packs in a window, or `trained` comes of another replay.
    """
    slots = shape.ranks * shape.accumulation
    if len(train) < slots:
        raise ValueError(
            f"{len(train)} training samples cannot fill a window of {shape.ranks} workers x "
            f"{shape.accumulation} packs; provide at least {slots} samples, or lower train.workers "
            "or train.accumulation"
        )
    passes = trained.reshape(-1, shape.replay, len(train))
    if done_steps % shape.replay or (passes.any(axis=1) != passes.all(axis=1)).any():
        raise ValueError(
            f"stream.replay={shape.replay} is not what this run was trained with so far: some samples have had a part "
            "of their passes; finish with the old value, or start a new run name"
        )
    rows = [*train, *held_out]
    todo = _fill(_pairs(len(train), shape, trained), rows, shape)
    check = [(0, len(train) + row) for row in range(len(held_out))]
    evaluation = _fill(check, rows, replace(shape, accumulation=1))
    windows: list[Window] = []

    def evaluate(step: int) -> None:
        for number, entries in enumerate(evaluation, start=1):
            closes = number == len(evaluation)
            windows.append(_window(len(windows), "eval", step, closes, entries, rows, shape.ranks))

    if done_steps == 0:
        evaluate(0)
    last = done_steps + shape.replay * len(todo)
    for number, entries in enumerate(todo, start=1):
        step = done_steps + number * shape.replay
        windows.append(_window(len(windows), "train", step, True, entries, rows, shape.ranks))
        if step % shape.eval_every == 0 or step == last:
            evaluate(step)
    return windows


Entries = list[list[tuple[int, int]]]
"""(epoch, row) pairs of each of a window's ranks x accumulation packs."""


def _pairs(samples: int, shape: PlanShape, trained: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Every (epoch, row) still to train, in order; with replay, its first epoch stands for all passes."""
    pairs: list[tuple[int, int]] = []
    for epoch in range(0, shape.epochs, shape.replay):
        order = np.random.default_rng((shape.seed, epoch)).permutation(samples)
        pairs.extend((epoch, int(row)) for row in order if not trained[epoch, row])
    return pairs


def _fill(pairs: list[tuple[int, int]], rows: list[Sample], shape: PlanShape) -> list[Entries]:
    """Fill windows in order: each sample to the emptiest pack; close when it fits in none."""
    slots = shape.ranks * shape.accumulation
    windows: list[Entries] = []
    packs: Entries = [[] for _ in range(slots)]
    loads = [0] * slots
    for pair in pairs:
        length = rows[pair[1]].captured_tokens
        slot = loads.index(min(loads))
        if loads[slot] + length > shape.tokens_per_pack and loads[slot] > 0:
            windows.append(packs)
            packs, loads, slot = [[] for _ in range(slots)], [0] * slots, 0
        packs[slot].append(pair)
        loads[slot] += length
    if pairs:
        windows.append(packs)
    return windows


def _window(
    index: int,
    kind: Literal["train", "eval"],
    step: int,
    closes: bool,
    entries: Entries,
    rows: list[Sample],
    ranks: int,
) -> Window:
    """Number the packs: slot s is rank s % ranks, micro-step s // ranks."""
    packs = tuple(
        Pack(
            window=index,
            rank=slot % ranks,
            micro=slot // ranks,
            entries=tuple(pairs),
            tokens=sum(rows[row].captured_tokens for _, row in pairs),
        )
        for slot, pairs in enumerate(entries)
    )
    starts = sum(supervised_starts(rows[row].loss_mask) for pairs in entries for _, row in pairs)
    tokens = sum(pack.tokens for pack in packs)
    return Window(index, kind, step, closes, packs, tokens, starts)
