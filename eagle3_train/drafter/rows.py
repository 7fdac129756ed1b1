"""Which rows each training step computes: index lists for one pack of documents, built in the loader.

Consumes token ids and loss masks (numpy, CPU); produces a `RowPlan` of int32 tensors. Nothing here looks at
hidden states, and nothing on the device ever calls `nonzero()`.

A document with ids x[0..n) and mask m has captured states for x[:-1], so a pack has sum(n-1) state rows.

  start t         supervised at step k iff m[t+1..t+2+k] are all true; the condition is prefix-closed in k
  context         the state rows t <= last start of their document, in pack order: the keys of step 0
  starts          sorted by how many steps they are supervised (longest first), so the rows active at step k
                  are simply the first counts[k]: no gather between steps
  flat rows       all (k, row) pairs, step after step: offset(k) + row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Index lists of one pack. Shapes: C context rows, N starts, R = sum(counts) flat rows; all int32.

    counts            rows active at step k, for k < ttt_steps (Python ints; zeros included)
    context [C]       state row of each context row
    context_ids [C]   token x[t+1], whose embedding is paired with the state of t at step 0
    positions [C]     t within its document
    begin [C]         first context row of the same document
    starts [N]        context row of each start
    target_rows [N]   state row of L[t+1], the teacher of (k=0, t); (k, t) uses the slot of start t+k
    slots [R]         start index of t+k: embedding, teacher and answer of flat row (k, t)
    order [R]         rows of each step by position (attention walks them in this order)
    offsets [K+1]     flat index of the first row of each step, and R
    weights [R]       loss weight of each flat row, or None for all ones
    """

    counts: tuple[int, ...]
    max_position: int
    context: Tensor
    context_ids: Tensor
    positions: Tensor
    begin: Tensor
    starts: Tensor
    target_rows: Tensor
    slots: Tensor
    order: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    @property
    def steps(self) -> int:
        """TTT steps that have at least one row."""
        return sum(count > 0 for count in self.counts)

    @property
    def supervised_starts(self) -> int:
        """Starts supervised at step 0: this pack's share of the loss normaliser."""
        return self.counts[0]

    def at(self, flat: Tensor, step: int) -> Tensor:
        """The part of a flat array that belongs to one step."""
        first = sum(self.counts[:step])
        return flat[first : first + self.counts[step]]

    def to(self, device: torch.device | str) -> RowPlan:
        """Copy every tensor to a device (asynchronously from pinned memory)."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One pack: its rows and its captured states.

    aux_hidden_states [T, num_aux * hidden] and last_hidden_states [T, hidden] (before the final norm), T state
    rows: for each document the states of x[:-1], one document after the other.
    """

    rows: RowPlan
    aux_hidden_states: Tensor
    last_hidden_states: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> PackedBatch:
        """Copy to a device; floating-point states take `dtype` when given."""
        return PackedBatch(
            self.rows.to(device),
            self.aux_hidden_states.to(device, dtype, non_blocking=True),
            self.last_hidden_states.to(device, dtype, non_blocking=True),
        )


def supervised_steps(mask: np.ndarray, ttt_steps: int) -> np.ndarray:
    """For each state row t of one document: at how many steps it is supervised, 0..ttt_steps.

    mask is bool[n], true where the token was produced by the target; the result is int64[n-1].
    """
    n = len(mask)
    index = np.arange(n)
    next_false = np.minimum.accumulate(np.where(mask, n, index)[::-1])[::-1]
    run = next_false - index  # trues in a row from here
    steps: np.ndarray = np.clip(run[1:] - 1, 0, ttt_steps)
    return steps


def plan_rows(ids: Sequence[np.ndarray], masks: Sequence[np.ndarray], ttt_steps: int) -> RowPlan:
    """Index lists of a pack from each document's token ids and loss mask (same lengths, n >= 1).

    Raises ValueError when a document's ids and mask differ in length.
    """
    for number, (x, m) in enumerate(zip(ids, masks, strict=True)):
        if len(x) != len(m) or len(x) == 0:
            raise ValueError(f"document {number} has {len(x)} ids and a mask of {len(m)}.")
    steps = [supervised_steps(np.asarray(m, dtype=bool), ttt_steps) for m in masks]
    kept = [int(np.flatnonzero(s)[-1]) + 1 if s.any() else 0 for s in steps]  # context per document
    first_row = np.concatenate([[0], np.cumsum([len(s) for s in steps])])
    first_context = np.concatenate([[0], np.cumsum(kept)])
    positions = np.concatenate([np.arange(c) for c in kept] or [np.zeros(0, int)])
    begin = np.repeat(first_context[:-1], kept)
    context = positions + np.repeat(first_row[:-1], kept)
    depth = np.concatenate([s[:c] for s, c in zip(steps, kept, strict=True)] or [positions])
    next_ids = [np.asarray(x)[1 : c + 1] for x, c in zip(ids, kept, strict=True)] or [positions]
    return assemble_plan(
        depth, ttt_steps, context, np.concatenate(next_ids), positions.astype(np.int64), begin
    )


def assemble_plan(
    depth: np.ndarray,
    ttt_steps: int,
    context: np.ndarray,
    context_ids: np.ndarray,
    positions: np.ndarray,
    begin: np.ndarray,
) -> RowPlan:
    """A plan from the context rows and, for each, at how many steps it is active (`depth`, int[C])."""
    by_position = np.flatnonzero(depth)
    starts = by_position[np.argsort(-depth[by_position], kind="stable")]
    start_of = np.full(len(depth), -1)
    start_of[starts] = np.arange(len(starts))
    counts = tuple(int((depth > k).sum()) for k in range(ttt_steps))
    slots = [start_of[starts[:n] + k] for k, n in enumerate(counts)]
    order = [np.argsort(starts[:n], kind="stable") for n in counts]
    assert all((slot >= 0).all() for slot in slots), "a chain left its answer"

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))

    return RowPlan(
        counts=counts,
        max_position=int(positions.max()) + ttt_steps if len(positions) else 0,
        context=tensor(context),
        context_ids=tensor(context_ids),
        positions=tensor(positions),
        begin=tensor(begin),
        starts=tensor(starts),
        target_rows=tensor(context[starts] + 1),
        slots=tensor(np.concatenate(slots)),
        order=tensor(np.concatenate(order)),
        offsets=tensor(np.concatenate([[0], np.cumsum(counts)])),
    )
