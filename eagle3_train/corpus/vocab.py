"""The draft vocabulary: which target tokens the drafter may propose, and how much text they cover."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from eagle3_train.records import Sample


def most_supervised(
    samples: Iterable[Sample], size: int, vocab_size: int, always: Iterable[int]
) -> tuple[npt.NDArray[np.int64], dict[str, float]]:
    """The `size` tokens supervised most often, all of `always` (Renderer.always_drafted) among them.

    Returns their target ids, int64 [size], increasing, and domain -> share of its supervised tokens that they
    are, with "all". vocab_size: rows of the target's head. Ties and unseen tokens are taken by lowest id. Raises
    ValueError when the sizes cannot be met or nothing is supervised.
    """
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for sample in samples:
        domain = counts.setdefault(sample.domain, np.zeros(vocab_size, dtype=np.int64))
        np.add.at(domain, sample.input_ids[sample.loss_mask], 1)
    total = sum(counts.values(), np.zeros(vocab_size, dtype=np.int64))
    forced = np.array(sorted(set(always)), dtype=np.int64)
    if not total.any():
        raise ValueError("no supervised token in the samples: nothing to count")
    if not len(forced) <= size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size={size} must hold the {len(forced)} special tokens and not exceed "
            f"the target's {vocab_size}"
        )
    rank = total.copy()
    rank[forced] = np.iinfo(np.int64).max
    chosen = np.sort(np.argsort(-rank, kind="stable")[:size])
    coverage = {
        name: float(c[chosen].sum() / c.sum()) for name, c in sorted(counts.items()) if c.any()
    }
    coverage["all"] = float(total[chosen].sum() / total.sum())
    return chosen, coverage
