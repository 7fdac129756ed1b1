"""Hidden states in flight and their byte budget: reserve, keep, take, acknowledge. No Ray here.

Bytes are reserved one whole window at a time, in plan order, so no rank can starve behind another
rank's queue. An attempt is one start of the worker group: calls of an older attempt raise
StaleAttemptError and hold nothing. Bytes are given back when the memory is free: Ray may keep it for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from eagle3_train.records import PackKey


@dataclass(frozen=True, slots=True)
class Part:
    """Some samples of a pack: reference to their states, bytes, their indices in the pack, in order."""

    states: Any
    nbytes: int
    indices: list[int]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The hidden states of a pack, every sample in one part; bad samples (index in pack: reason)."""

    parts: list[Part] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


@dataclass(slots=True)
class StreamCounters:
    """What has flowed so far; bytes unless said otherwise.

    captures: training samples engines captured; of these, recaptures had been captured before (their
    worker group died, or the cache lost them). capture_busy_s: time during which engines were asked for
    something.
    """

    reserved: int = 0
    in_flight: int = 0
    peak_in_flight: int = 0
    delivered_total: int = 0
    captures: int = 0
    recaptures: int = 0
    cache_hits: int = 0
    captured_tokens: int = 0
    capture_busy_s: float = 0.0
    bad_samples: int = 0
    spilled: int = 0


class StaleAttemptError(RuntimeError):
    """The worker group this call belongs to has been replaced."""


@dataclass(slots=True)
class _Attempt:
    """State of one start of the worker group."""

    number: int
    next_window: int = 0
    reserved: dict[int, int] = field(default_factory=dict)  # window -> bytes
    deliveries: dict[PackKey, Delivery] = field(default_factory=dict)
    acks: dict[int, set[int]] = field(default_factory=dict)  # window -> ranks


class Flight:
    """All awaiting methods must run on one event loop."""

    def __init__(self, max_bytes: int, ranks: int, frees_after_s: float = 0.0) -> None:
        """`frees_after_s`: how long memory is held after nobody refers to it any more."""
        self._max_bytes = max_bytes
        self._ranks = ranks
        self._frees_after_s = frees_after_s
        self._changed = asyncio.Condition()
        self._attempt = _Attempt(number=-1)
        self._capturing = 0
        self.counters = StreamCounters()

    async def begin(self) -> int:
        """Start an attempt: its number. What is in flight for older ones is dropped, what is being captured awaited."""
        async with self._changed:
            state = self._attempt = _Attempt(self._attempt.number + 1)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: not self._capturing)
        await self._give_back(state, self.counters.reserved, self.counters.in_flight)
        return state.number

    @asynccontextmanager
    async def capturing(self, attempt: int, window: int, window_bytes: int) -> AsyncIterator[None]:
        """A pack of `window` is captured while the block runs, which begins once its bytes are reserved."""
        await self.reserve(attempt, window, window_bytes)
        self._capturing += 1
        try:
            yield
        finally:
            self._capturing -= 1
            async with self._changed:
                self._changed.notify_all()

    async def reserve(self, attempt: int, window: int, window_bytes: int) -> None:
        """Wait until all packs of `window` may be captured. Raises ValueError when that can never be."""
        if window_bytes > self._max_bytes:
            raise ValueError(
                f"window {window} needs {window_bytes} bytes, stream.max_bytes_in_flight={self._max_bytes}; raise it, "
                "or lower stream.tokens_per_pack or train.accumulation"
            )
        async with self._changed:

            def ready() -> bool:
                state = self._attempt
                return (
                    state.number != attempt
                    or window < state.next_window
                    or (
                        window == state.next_window
                        and self.counters.reserved + window_bytes <= self._max_bytes
                    )
                )

            await self._changed.wait_for(ready)
            state = self._current(attempt)
            if window == state.next_window:
                state.next_window += 1
                state.reserved[window] = window_bytes
                self.counters.reserved += window_bytes
                self._changed.notify_all()

    async def keep(self, key: PackKey, delivery: Delivery) -> None:
        """Own a captured pack until its window is acknowledged; a repeated one replaces nothing."""
        async with self._changed:
            state, counters = self._attempt, self.counters
            if state.number != key.attempt or key in state.deliveries:
                return
            state.deliveries[key] = delivery
            counters.in_flight += delivery.nbytes
            counters.peak_in_flight = max(counters.peak_in_flight, counters.in_flight)
            counters.delivered_total += delivery.nbytes
            counters.bad_samples += len(delivery.bad)
            self._changed.notify_all()

    async def take(self, key: PackKey) -> Delivery:
        """Wait for a captured pack."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._attempt.number != key.attempt or key in self._attempt.deliveries
            )
            return self._current(key.attempt).deliveries[key]

    async def ack(self, attempt: int, window: int, rank: int) -> None:
        """The rank's optimiser step on `window` is done; the last rank's ack frees the bytes."""
        async with self._changed:
            state = self._current(attempt)
            acks = state.acks.setdefault(window, set())
            acks.add(rank)
            if len(acks) < self._ranks:
                return
            del state.acks[window]
            reserved = state.reserved.pop(window)
            keys = [key for key in state.deliveries if key.window == window]
            in_flight = sum(state.deliveries.pop(key).nbytes for key in keys)
        await self._give_back(state, reserved, in_flight)

    async def _give_back(self, state: _Attempt, reserved: int, in_flight: int) -> None:
        """Others may have these bytes once the memory is free, unless a new attempt has taken all."""
        await asyncio.sleep(self._frees_after_s)
        async with self._changed:
            if self._attempt is state:
                self.counters.reserved -= reserved
                self.counters.in_flight -= in_flight
                self._changed.notify_all()

    def _current(self, attempt: int) -> _Attempt:
        if self._attempt.number != attempt:
            raise StaleAttemptError(f"attempt {attempt} was replaced by {self._attempt.number}")
        return self._attempt
