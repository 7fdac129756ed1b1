"""Which (epoch, sample) pairs have been trained: the record a resumed run is planned from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class Ledger:
    """One bit per (epoch, sample)."""

    def __init__(self, epochs: int, samples: int) -> None:
        self.trained: npt.NDArray[np.bool_] = np.zeros((epochs, samples), dtype=np.bool_)

    def mark(self, entries: Iterable[tuple[int, int]]) -> None:
        """Record trained pairs; training one twice is a programmer's error."""
        for epoch, row in entries:
            assert not self.trained[epoch, row], f"sample {row} trained twice in epoch {epoch}"
            self.trained[epoch, row] = True

    @property
    def count(self) -> int:
        """Pairs trained."""
        return int(self.trained.sum())

    def to_hex(self) -> str:
        """Compact text form for a checkpoint's JSON."""
        return np.packbits(self.trained).tobytes().hex()

    @classmethod
    def from_hex(cls, text: str, epochs: int, samples: int) -> Ledger:
        """Inverse of to_hex. Raises ValueError when the data has changed since the checkpoint."""
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))
        if not epochs * samples <= bits.size < epochs * samples + 8:
            raise ValueError(
                f"the checkpoint's ledger does not hold {epochs} epochs x {samples} samples: the data "
                "or train.epochs changed since; start a new run name, or warm-start with drafter.init_from"
            )
        ledger = cls(epochs, samples)
        ledger.trained[:] = bits[: epochs * samples].reshape(epochs, samples).astype(np.bool_)
        return ledger
