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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle3_train.engines.handover import Handover, Region
from eagle3_train.records import Generation
from eagle3_train.stream.states import storage


class StatesError(ValueError):
    """The states of one request are missing or wrong; others are not affected."""


@dataclass(eq=False)
class Captured:
    """Hidden states [tokens, boundaries, columns] as stored (stream/states.py) and their ids, views of the arena.

    Valid until `release`; a token's states are those of the position that read it.
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


class Slot(NamedTuple):
    """Where the states of one request go: rows [tokens, boundaries, columns] and int32 ids, views of the arena."""

    hidden: Tensor
    ids: Tensor


@dataclass(eq=False)
class CapturedPack(Captured):
    """The states of several samples, concatenated; `bad`: index in pack -> reason."""

    slots: list[Slot]
    bad: dict[int, str] = field(default_factory=dict)

    def spoil(self, index: int, reason: str) -> None:
        """Zero the rows of a sample that came back wrong."""
        self.slots[index].hidden.zero_()
        self.bad[index] = reason


@dataclass(slots=True)
class _Expected:
    """One request whose states are on their way."""

    future: Future[Completion]
    slot: Slot | None
    captured: Captured | None = None  # of an answer; a pack's slots are the pack's
    generation: Generation | None = None
    arrived: dict[str, Any] | None = None

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
        self._lost = lost
        self._lock = threading.RLock()
        self._expected: dict[str, _Expected] = {}
        self._waiting: deque[str] = deque()  # answers whose region was not available yet
        self.handover = Handover(arena_bytes, self._received)
        self._arena = self.handover.arena

    def open_pack(self, lengths: Sequence[int]) -> CapturedPack:
        """Reserve room for samples of these lengths; waits for it."""
        total = sum(lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a pack needs samples of at least one token, got lengths {lengths}")
        hidden, ids, release = self._layout(self._arena.allocate(self._bytes(total)), total)
        slots = list(map(Slot, hidden.split(lengths), ids.split(lengths)))
        return CapturedPack(hidden, ids, release, slots)

    def expect(self, key: str, future: Future[Completion], slot: Slot | None) -> None:
        """Announce a request; with a slot its states may be written as soon as they exist."""
        with self._lock:
            self._expected[key] = _Expected(future, slot)
            if slot is not None:
                self._grant(key, slot)

    def forget(self, key: str) -> None:
        """The request never started."""
        with self._lock:
            if self._expected.pop(key).slot is not None:
                self.handover.refuse(key)

    def generated(self, key: str, generation: Generation, captured_tokens: int | None) -> None:
        """The request's tokens are known."""
        with self._lock:
            entry = self._expected[key]
            entry.generation = generation
            if captured_tokens is None:
                self.handover.refuse(key)
                self._fail(key, "the engine ended the request before all its tokens were read")
            elif entry.slot is None:
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

    def _received(self, message: dict[str, Any]) -> None:
        """A message of the worker; runs on the hand-over's thread."""
        if "lost" in message:
            self._lost(message["lost"])
            return
        with self._lock:
            key = message["done"] if "done" in message else message["failed"]
            if key in self._expected:
                self._expected[key].arrived = message
                self._complete(key)

    def _grant_waiting(self) -> None:
        """Grant finished answers their regions, oldest first."""
        while self._waiting:
            key = self._waiting[0]
            entry = self._expected[key]
            tokens = len(entry.ids)
            try:
                self._arena.check_fits(self._bytes(tokens))
            except ValueError as error:
                self._waiting.popleft()
                self.handover.refuse(key)
                self._fail(key, str(error))
                continue
            region = self._arena.try_allocate(self._bytes(tokens))
            if region is None:
                return
            self._waiting.popleft()
            entry.captured = Captured(*self._layout(region, tokens))
            entry.slot = Slot(entry.captured.hidden, entry.captured.token_ids)
            self._grant(key, entry.slot)

    def _grant(self, key: str, slot: Slot) -> None:
        start = self._arena.memory.bytes.data_ptr()
        hidden, ids = (tensor.data_ptr() - start for tensor in slot)
        self.handover.grant(key, hidden, ids, len(slot.ids))

    def _complete(self, key: str) -> None:
        """Verify and deliver once both the tokens and the states are here."""
        entry = self._expected[key]
        if entry.arrived is None or entry.generation is None:
            return
        assert entry.slot is not None
        if wrong := self._verify(entry.arrived, entry.ids, entry.slot):
            self._fail(key, wrong)
            return
        del self._expected[key]
        entry.future.set_result(Completion(entry.generation, entry.captured))

    def _verify(self, message: dict[str, Any], expected: tuple[int, ...], slot: Slot) -> str | None:
        """What is wrong with the states, or None."""
        if "failed" in message:
            return str(message["reason"])
        if message["tokens"] != len(expected):
            return f"{message['tokens']} tokens captured, {len(expected)} expected"
        if not np.array_equal(slot.ids.numpy(), np.asarray(expected, dtype=np.int32)):
            return "the engine computed other tokens than it was asked to"
        if not message["finite"]:
            return "hidden states are not finite"
        return None

    def _fail(self, key: str, reason: str) -> None:
        entry = self._expected.pop(key)
        if entry.captured is not None:
            entry.captured.release()
        entry.future.set_exception(StatesError(reason))

    def _give_back(self, region: Region) -> None:
        with self._lock:
            self._arena.free(region)
            self._grant_waiting()

    def _bytes(self, tokens: int) -> int:
        return tokens * (self._row_bytes + 4) + 4  # rows, int32 ids, their alignment

    def _layout(self, region: Region, tokens: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Rows and ids of so many tokens in `region`, and what gives it back."""
        memory = self._arena.memory
        hidden = memory.tensor(region.offset, (tokens, *self._row), self._dtype)
        ids_offset = -(-(region.offset + hidden.nbytes) // 4) * 4
        ids = memory.tensor(ids_offset, (tokens,), torch.int32)
        return hidden, ids, partial(self._give_back, region)
