"""Expected acceptance length: walk each held-out greedy rollout as the engine would, and count.

The engine drafts K tokens at start t, keeps the a leading hits, adds the target's own token and drafts again at
t + a + 1. Averaging over all starts instead over-counts the starts inside long accepted runs.
"""

from dataclasses import dataclass

import numpy as np
import torch

from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.losses import LossOptions
from eagle3_train.drafter.model import Eagle3Drafter
from eagle3_train.drafter.rows import PackedBatch
from eagle3_train.drafter.ttt import StepOutput


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Totals of a walk, for K = 1 .. max drafts (entry K-1). Sum the records of several packs with `+`.

    Of rounds[K-1] drafting rounds, position[K-1, j] accepted draft j.
    """

    rounds: np.ndarray
    position: np.ndarray

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(self.rounds + other.rounds, self.position + other.position)

    @property
    def accepted(self) -> np.ndarray:
        """Drafts accepted in all rounds."""
        total: np.ndarray = self.position.sum(1)
        return total

    @property
    def expected_length(self) -> np.ndarray:
        """1 + accepted / rounds for K = 1 .. max drafts, bonus token included; 1 where nothing was walked."""
        length: np.ndarray = 1 + self.accepted / np.maximum(self.rounds, 1)
        return length


def walk_answers(
    accepted: np.ndarray, starts: np.ndarray, begin: np.ndarray, max_drafts: int
) -> Acceptance:
    """Walk every answer of a pack, for every K = 1 .. max_drafts at once.

    accepted int[N] is the number of leading hits of each start; starts and begin (int[N]) are its context row
    and its document's first context row. Any order; one answer's starts are consecutive rows of one document,
    and a walk ends where no start is left.
    """
    order = np.argsort(starts, kind="stable")
    accepted, starts, begin = accepted[order], starts[order], begin[order]
    breaks = (np.diff(starts) != 1) | (np.diff(begin) != 0)
    first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    last = np.concatenate([first[1:], [len(starts)]])
    depths = np.arange(1, max_drafts + 1)[:, None]
    at = np.repeat(first[None], max_drafts, 0)  # [K, answers]
    rounds = np.zeros(max_drafts, np.int64)
    position = np.zeros((max_drafts, max_drafts), np.int64)
    while (alive := at < last).any():
        hits = np.minimum(accepted[np.minimum(at, len(accepted) - 1)], depths)
        rounds += alive.sum(1)
        for j in range(max_drafts):
            position[:, j] += ((hits > j) & alive).sum(1)
        at = np.where(alive, at + hits + 1, at)
    return Acceptance(rounds, position)


@torch.no_grad()
def walk_batch(
    drafter: Eagle3Drafter,
    target: FrozenTarget,
    batch: PackedBatch,
    options: LossOptions | None = None,
    normaliser: float = 1.0,
) -> tuple[StepOutput, Acceptance]:
    """The training step's own forward pass over a pack, and the walk of its answers, as deep as its rows are planned."""
    out = drafter(batch, target, options or LossOptions(), normaliser, True)
    assert out.metrics is not None
    starts = batch.rows.starts.cpu().numpy()
    accepted, begin = out.metrics.accepted.cpu().numpy(), batch.rows.begin.cpu().numpy()
    return out, walk_answers(accepted, starts, begin[starts], len(batch.rows.counts))
