"""The stream's coordinator: one actor that owns hidden states in flight and their byte budget.

  call        who                     waits for                          unblocked by
  reserve     capture client          earlier windows reserved, bytes    ack of older windows
  delivered   engine replica          nothing                            -
  take        training worker         the pack's delivery                delivered
  ack         training worker         nothing                            -

Bytes are reserved one whole window at a time, in plan order, so no rank can starve behind another
rank's queue. The coordinator owns the objects (they outlive the engine that made them) and drops them
when every rank has acknowledged the window's optimiser step. An attempt is one start of the worker
group: calls of an older attempt are answered as stale and hold nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3_train.records import PackKey


@dataclass(slots=True)
class _Delivery:
    refs: list[Any]
    nbytes: int
    bad: list[tuple[int, str]]


@dataclass(slots=True)
class StreamCounters:
    """What has flowed so far; bytes unless said otherwise."""

    reserved: int = 0
    in_flight: int = 0
    peak_reserved: int = 0
    peak_in_flight: int = 0
    delivered_total: int = 0
    captures: int = 0
    bad_samples: int = 0
    stale: int = 0
    reserve_wait_s: float = 0.0


class StaleAttemptError(RuntimeError):
    """The worker group this call belongs to has been replaced."""


@dataclass(slots=True)
class _Attempt:
    """State of one start of the worker group."""

    number: int
    next_window: int = 0
    reserved: dict[int, int] = field(default_factory=dict)
    deliveries: dict[PackKey, _Delivery] = field(default_factory=dict)
    keys_of_window: dict[int, list[PackKey]] = field(default_factory=dict)
    acks: dict[int, set[int]] = field(default_factory=dict)


class StreamCoordinator:
    """Async Ray actor; wrap with `ray.remote(StreamCoordinator)` at the call site."""

    def __init__(self, max_bytes: int, ranks: int) -> None:
        self._max_bytes = max_bytes
        self._ranks = ranks
        self._changed = asyncio.Condition()
        self._attempt = _Attempt(number=-1)
        self._counters = StreamCounters()

    async def begin(self, attempt: int) -> None:
        """Start an attempt (idempotent): everything in flight for older ones is dropped."""
        async with self._changed:
            if attempt > self._attempt.number:
                self._attempt = _Attempt(number=attempt)
                self._counters.reserved = self._counters.in_flight = 0
                self._changed.notify_all()

    async def reserve(self, attempt: int, window: int, window_bytes: int) -> None:
        """Wait until all packs of `window` may be captured."""
        started = asyncio.get_running_loop().time()
        async with self._changed:

            def ready() -> bool:
                state = self._attempt
                return (
                    state.number != attempt
                    or window < state.next_window
                    or (
                        window == state.next_window
                        and self._counters.reserved + window_bytes <= self._max_bytes
                    )
                )

            await self._changed.wait_for(ready)
            state = self._current(attempt)
            counters = self._counters
            counters.reserve_wait_s += asyncio.get_running_loop().time() - started
            if window == state.next_window:
                state.next_window += 1
                state.reserved[window] = window_bytes
                counters.reserved += window_bytes
                counters.peak_reserved = max(counters.peak_reserved, counters.reserved)
                self._changed.notify_all()

    async def delivered(
        self,
        key: PackKey,
        refs: Sequence[Any],
        nbytes: int,
        bad: list[tuple[int, str]],
    ) -> None:
        """Take ownership of a captured pack; a repeated delivery replaces nothing."""
        async with self._changed:
            state = self._attempt
            if state.number != key.attempt or key.window not in state.reserved:
                self._counters.stale += 1
                return
            counters = self._counters
            counters.captures += 1
            if key in state.deliveries:
                return
            state.deliveries[key] = _Delivery(list(refs), nbytes, bad)
            state.keys_of_window.setdefault(key.window, []).append(key)
            counters.in_flight += nbytes
            counters.peak_in_flight = max(counters.peak_in_flight, counters.in_flight)
            counters.delivered_total += nbytes
            counters.bad_samples += len(bad)
            self._changed.notify_all()

    async def take(self, key: PackKey) -> tuple[list[Any], list[tuple[int, str]]]:
        """References of a delivered pack and its bad samples (index in pack, reason)."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._attempt.number != key.attempt or key in self._attempt.deliveries
            )
            delivery = self._current(key.attempt).deliveries[key]
            return delivery.refs, delivery.bad

    async def ack(self, attempt: int, window: int, rank: int) -> None:
        """The rank's optimiser step on `window` is done; the last rank's ack frees the bytes."""
        async with self._changed:
            state = self._current(attempt)
            acks = state.acks.setdefault(window, set())
            acks.add(rank)
            if len(acks) < self._ranks:
                return
            del state.acks[window]
            self._counters.reserved -= state.reserved.pop(window)
            for key in state.keys_of_window.pop(window, []):
                self._counters.in_flight -= state.deliveries.pop(key).nbytes
            self._changed.notify_all()

    async def counters(self) -> StreamCounters:
        """What has flowed so far."""
        return self._counters

    def _current(self, attempt: int) -> _Attempt:
        if self._attempt.number != attempt:
            raise StaleAttemptError(f"attempt {attempt} was replaced by {self._attempt.number}")
        return self._attempt
