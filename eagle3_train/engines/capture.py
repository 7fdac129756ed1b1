"""Hidden states on their way from the arena to whoever asked for them.

Two kinds of requests: a pack reserves one region up front (lengths are known) and its samples are written
side by side; an answer gets its region when its length is known. Both are verified here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eagle3_train.engines.handover import Handover, Place, view
from eagle3_train.records import Generation
from eagle3_train.stream.states import storage


class StatesError(ValueError):
    """The states of one request are missing or wrong; others are not affected."""


@dataclass(eq=False)
class Captured:
    """Hidden states [tokens, boundaries, columns] as stored (stream/states.py) and their int32 ids, views of the arena.

    Valid until `release`, which does nothing for one sample of a pack. A token's states are those of the position
    that read it.
    """

    hidden: Tensor
    token_ids: Tensor
    _release: Callable[[], None] | None

    def release(self) -> None:
        """Give the memory back; the views must not be used any more."""
        if self._release is not None:
            self._release()
            self._release = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request; `captured` when its states were asked for (release them)."""

    generation: Generation
    captured: Captured | None


@dataclass(eq=False)
class CapturedPack(Captured):
    """The states of several samples, concatenated; `bad`: index in pack -> reason."""

    samples: list[Captured]
    bad: dict[int, str] = field(default_factory=dict)

    def spoil(self, index: int, reason: str) -> None:
        """Zero the rows of a sample that came back wrong."""
        self.samples[index].hidden.zero_()
        self.bad[index] = reason


@dataclass(slots=True)
class _Expected:
    """One request whose states are on their way."""

    future: Future[Completion]
    captured: Captured | None  # of an answer once its length is known
    generation: Generation | None = None
    wrong: str | None = None  # "" when they have arrived and are well

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens whose states are expected."""
        assert self.generation is not None
        return (*self.generation.prompt_ids, *self.generation.output_ids)[:-1]


class Captures:
    """Grants regions, receives states, verifies them, completes futures."""

    def __init__(
        self,
        row: tuple[int, int],
        dtype: str,
        arena_bytes: int,
        lost: Callable[[str], None],
    ) -> None:
        """row: (boundaries, hidden size); `lost` is told why, when the worker is gone."""
        self._dtype, columns = storage(dtype, row[1])
        self._row = (row[0], columns)
        self._row_bytes = row[0] * columns * self._dtype.itemsize
        self._lock = threading.RLock()
        self._expected: dict[str, _Expected] = {}
        self._waiting: deque[str] = deque()  # answers whose region was not available yet
        self.handover = Handover(arena_bytes, self._received, lost)
        self._arena = self.handover.arena

    def open_pack(self, lengths: Sequence[int]) -> CapturedPack:
        """Reserve room for samples of these lengths; waits for it."""
        total = sum(lengths)
        assert all(lengths), "a pack has samples of at least one token"
        hidden, ids, release = self._layout(self._arena.allocate(self._bytes(total)), total)
        samples = [
            Captured(*rows, None)
            for rows in zip(hidden.split(lengths), ids.split(lengths), strict=True)
        ]
        return CapturedPack(hidden, ids, release, samples)

    def expect(self, key: str, future: Future[Completion], into: Captured | None) -> None:
        """Announce a request; with a place for them its states may be written as soon as they exist."""
        with self._lock:
            self._expected[key] = _Expected(future, into)
            if into is not None:
                self._grant(key, into)

    def forget(self, key: str) -> None:
        """The request never started."""
        with self._lock:
            del self._expected[key]
            self.handover.grant(key, None)

    def generated(self, key: str, generation: Generation, is_captured: bool) -> None:
        """The request's tokens are known, and whether all their states were computed."""
        with self._lock:
            entry = self._expected[key]
            entry.generation = generation
            if not is_captured:
                self.handover.grant(key, None)
                self._fail(key, "the engine ended the request before all its tokens were read")
            elif entry.captured is None:
                self._waiting.append(key)
                self._grant_waiting()
            else:
                self._complete(key)

    def fail_all(self, error: Exception) -> None:
        """The engine is gone."""
        with self._lock:
            for entry in self._expected.values():
                if not entry.future.done():
                    entry.future.set_exception(error)
            self._expected.clear()
            self._waiting.clear()

    def _received(self, key: str, wrong: str) -> None:
        """The worker is done with the states of a request; runs on the hand-over's thread."""
        with self._lock:
            if key in self._expected:
                self._expected[key].wrong = wrong
                self._complete(key)

    def _grant_waiting(self) -> None:
        """Grant finished answers their regions, oldest first."""
        while self._waiting:
            key = self._waiting[0]
            entry = self._expected[key]
            tokens = len(entry.ids)
            try:
                offset = self._arena.try_allocate(self._bytes(tokens))
            except ValueError as error:
                self._waiting.popleft()
                self.handover.grant(key, None)
                self._fail(key, str(error))
                continue
            if offset is None:
                return
            self._waiting.popleft()
            entry.captured = Captured(*self._layout(offset, tokens))
            self._grant(key, entry.captured)

    def _grant(self, key: str, into: Captured) -> None:
        start = self._arena.memory.data_ptr()
        hidden, ids = (rows.data_ptr() - start for rows in (into.hidden, into.token_ids))
        self.handover.grant(key, Place(hidden, ids, len(into.token_ids)))

    def _complete(self, key: str) -> None:
        """Verify and deliver once both the tokens and the states are here."""
        entry = self._expected[key]
        if entry.wrong is None or entry.generation is None:
            return
        assert entry.captured is not None
        if entry.wrong:
            self._fail(key, entry.wrong)
        elif not np.array_equal(entry.captured.token_ids.numpy(), entry.ids):
            self._fail(key, "the engine computed other tokens than it was asked to")
        else:
            del self._expected[key]
            entry.future.set_result(Completion(entry.generation, entry.captured))

    def _fail(self, key: str, reason: str) -> None:
        entry = self._expected.pop(key)
        if entry.captured is not None:
            entry.captured.release()
        entry.future.set_exception(StatesError(reason))

    def _give_back(self, offset: int) -> None:
        with self._lock:
            self._arena.free(offset)
            self._grant_waiting()

    def _bytes(self, tokens: int) -> int:
        return tokens * (self._row_bytes + 4) + 4  # rows, int32 ids, their alignment

    def _layout(self, offset: int, tokens: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Rows and ids of so many tokens in the region at `offset`, and what gives it back."""
        memory = self._arena.memory
        hidden = view(memory, offset, (tokens, *self._row), self._dtype)
        ids_offset = -(-(offset + hidden.nbytes) // 4) * 4
        ids = view(memory, ids_offset, (tokens,), torch.int32)
        return hidden, ids, partial(self._give_back, offset)
