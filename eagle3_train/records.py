"""The nouns that cross processes: plain, frozen, serialisable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Sample:
    """One tokenised conversation, ready to be captured.

    input_ids: int32 [tokens]; loss_mask: bool [tokens], True where the target produced the token
    (its stop token included). finish_reason: "stop", "length" (cut) or "given" (the answer came with the data).
    """

    id: str
    domain: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    finish_reason: str = "given"

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first one the target produced."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else len(self.loss_mask)

    @property
    def captured_tokens(self) -> int:
        """Positions whose hidden states are needed: every token but the last."""
        return len(self.input_ids) - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered by the target: token ids up to the assistant header."""

    id: str
    domain: str
    input_ids: npt.NDArray[np.int32]
    messages_json: str


class PackKey(NamedTuple):
    """Name of one captured pack; attempt counts starts of the worker group."""

    attempt: int
    window: int
    rank: int
    micro: int


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward/backward of one rank: which samples, for which optimiser window.

    window: 0-based optimiser window; rank and micro say who trains it and when. Samples are
    (epoch, row number in the sample table) pairs. An empty pack keeps ranks in step.
    """

    window: int
    rank: int
    micro: int
    entries: tuple[tuple[int, int], ...]
    tokens: int

    def key(self, attempt: int) -> PackKey:
        """Name of the pack's hidden states while they are in flight."""
        return PackKey(attempt, self.window, self.rank, self.micro)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a started engine says of itself: vLLM's version, the target's class there, compute type, seconds to start."""

    engine: str
    resolved_class: str
    dtype: str
    start_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer of the engine."""

    id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str
    text: str
