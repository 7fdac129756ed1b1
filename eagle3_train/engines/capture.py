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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_train.engines.handover import Handover, Region
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
class Slot:
    """Where the states of one request go: byte offsets of its rows and of its int32 ids."""

    hidden: int
    ids: int
    tokens: int


@dataclass(eq=False)
class CapturedPack(Captured):
    """The states of several samples, concatenated; `bad`: index in pack -> reason."""

    slots: list[Slot]
    bad: dict[int, str] = field(default_factory=dict)

    def spoil(self, index: int, reason: str) -> None:
        """Zero the rows of a sample that came back wrong."""
        first = sum(slot.tokens for slot in self.slots[:index])
        self.hidden[first : first + self.slots[index].tokens].zero_()
        self.bad[index] = reason


@dataclass(slots=True)
class _Expected:
    """One request whose states are on their way."""

    future: Future[Any]
    slot: Slot | None
    region: Region | None = None  # owned by this request, not by a pack
    expected_ids: tuple[int, ...] | None = None
    finish: Callable[[Captured | None], Any] | None = None
    arrived: dict[str, Any] | None = None


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
        region = self._arena.allocate(self._bytes(total))
        hidden, ids = self._views(region, total)
        slots, position = [], 0
        for length in lengths:
            slots.append(self._slot(region, total, position, length))
            position += length
        return CapturedPack(hidden, ids, partial(self._give_back, region), slots)

    def expect(self, key: str, future: Future[Any], slot: Slot | None) -> None:
        """Announce a request; with a slot its states may be written as soon as they exist."""
        with self._lock:
            self._expected[key] = _Expected(future, slot)
            if slot is not None:
                self.handover.grant(key, slot.hidden, slot.ids, slot.tokens)

    def forget(self, key: str) -> None:
        """The request never started."""
        with self._lock:
            if self._expected.pop(key).slot is not None:
                self.handover.refuse(key)

    def generated(
        self,
        key: str,
        ids: tuple[int, ...],
        captured_tokens: int | None,
        finish: Callable[[Captured | None], Any],
    ) -> None:
        """The request's tokens are known; `ids` are those whose states are expected."""
        with self._lock:
            entry = self._expected[key]
            entry.expected_ids, entry.finish = ids, finish
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
            assert entry.expected_ids is not None
            tokens = len(entry.expected_ids)
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
            entry.region = region
            entry.slot = self._slot(region, tokens, 0, tokens)
            self.handover.grant(key, entry.slot.hidden, entry.slot.ids, tokens)

    def _complete(self, key: str) -> None:
        """Verify and deliver once both the tokens and the states are here."""
        entry = self._expected[key]
        if entry.arrived is None or entry.expected_ids is None:
            return
        assert entry.slot is not None
        assert entry.finish is not None
        if wrong := self._verify(entry.arrived, entry.expected_ids, entry.slot):
            self._fail(key, wrong)
            return
        del self._expected[key]
        captured = None
        if entry.region is not None:
            hidden, ids = self._views(entry.region, entry.slot.tokens)
            captured = Captured(hidden, ids, partial(self._give_back, entry.region))
        entry.future.set_result(entry.finish(captured))

    def _verify(self, message: dict[str, Any], expected: tuple[int, ...], slot: Slot) -> str | None:
        """What is wrong with the states, or None."""
        if "failed" in message:
            return str(message["reason"])
        if message["tokens"] != len(expected):
            return f"{message['tokens']} tokens captured, {len(expected)} expected"
        echoed = self._arena.memory.tensor(slot.ids, (slot.tokens,), torch.int32)
        if not np.array_equal(echoed.numpy(), np.asarray(expected, dtype=np.int32)):
            return "the engine computed other tokens than it was asked to"
        if not message["finite"]:
            return "hidden states are not finite"
        return None

    def _fail(self, key: str, reason: str) -> None:
        entry = self._expected.pop(key)
        if entry.region is not None:
            self._give_back(entry.region)
        entry.future.set_exception(StatesError(reason))

    def _give_back(self, region: Region) -> None:
        with self._lock:
            self._arena.free(region)
            self._grant_waiting()

    def _bytes(self, tokens: int) -> int:
        return tokens * (self._row_bytes + 4) + 4  # rows, int32 ids, their alignment

    def _ids_offset(self, region: Region, tokens: int) -> int:
        return -(-(region.offset + tokens * self._row_bytes) // 4) * 4

    def _slot(self, region: Region, total: int, position: int, tokens: int) -> Slot:
        return Slot(
            region.offset + position * self._row_bytes,
            self._ids_offset(region, total) + 4 * position,
            tokens,
        )

    def _views(self, region: Region, tokens: int) -> tuple[Tensor, Tensor]:
        memory = self._arena.memory
        hidden = memory.tensor(region.offset, (tokens, *self._row), self._dtype)
        return hidden, memory.tensor(self._ids_offset(region, tokens), (tokens,), torch.int32)
