"""The draft vocabulary: which target tokens the drafter may propose, and how much text they cover."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from eagle3_train.records import Sample
from eagle3_train.rundir import reading, write_atomic


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """d2t: int64 [draft_vocab] OFFSETS, target id = draft id + d2t[draft id]. t2d: bool [vocab] mask.

    coverage: domain -> share of its supervised tokens that the drafter can propose. tokenizer: fingerprint of
    the Renderer whose ids these are.
    """

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    coverage: dict[str, float]
    tokenizer: str

    def __post_init__(self) -> None:
        if not len(self.d2t) or not np.array_equal(np.flatnonzero(self.t2d), self.target_ids):
            raise ValueError(
                "d2t does not name the tokens that t2d marks, in order; build it again"
            )

    @property
    def target_ids(self) -> npt.NDArray[np.int64]:
        """Target token of each draft token, int64 [draft_vocab], increasing."""
        return self.d2t + np.arange(len(self.d2t))

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens; weights carry that of the vocabulary they belong to."""
        return hashlib.sha256(self.target_ids.tobytes()).hexdigest()[:16]

    def check_weights(self, path: Path) -> None:
        """Raise ValueError unless the drafter weights in `path` say that they belong to this vocabulary."""
        with reading(path), safetensors.safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get("vocabulary") != self.fingerprint:
                raise ValueError(
                    f"{path} belongs to another draft vocabulary than this run's, or to none; give the run a new name, or "
                    f"delete {path.parent} too and train again"
                )

    @staticmethod
    def build(
        samples: Iterable[Sample],
        size: int,
        vocab_size: int,
        always: Iterable[int],
        tokenizer: str,
    ) -> DraftVocab:
        """Keep the `size` tokens supervised most often, and all of `always` (Renderer.always_drafted).

        vocab_size: rows of the target's head. Ties and unseen tokens are taken by lowest id. Raises
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
        t2d = np.zeros(vocab_size, dtype=np.bool_)
        t2d[chosen] = True
        coverage = {
            name: float(c[chosen].sum() / c.sum()) for name, c in sorted(counts.items()) if c.any()
        }
        coverage["all"] = float(total[chosen].sum() / total.sum())
        return DraftVocab(chosen - np.arange(size), t2d, coverage, tokenizer)

    def save(self, path: Path) -> None:
        """Write safetensors: d2t, t2d, and the rest as metadata."""
        metadata = {"coverage": json.dumps(self.coverage), "tokenizer": self.tokenizer}
        write_atomic(path, safetensors.numpy.save({"d2t": self.d2t, "t2d": self.t2d}, metadata))

    @staticmethod
    def load(path: Path, tokenizer: str) -> DraftVocab:
        """Read and validate. Raises ValueError when it is invalid or was built for another tokenizer."""
        with reading(path), safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            if metadata["tokenizer"] != tokenizer:
                raise ValueError(
                    f"{path} was built for tokenizer and template {metadata['tokenizer']}, not {tokenizer}; put "
                    "those back, or give the run a new name"
                )
            coverage = json.loads(metadata["coverage"])
            return DraftVocab(file.get_tensor("d2t"), file.get_tensor("t2d"), coverage, tokenizer)
