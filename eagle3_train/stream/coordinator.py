"""The stream's coordinator: one actor that owns hidden states in flight and their byte budget.

  call        who                     waits for                          unblocked by
  capture     capture client          earlier windows reserved, bytes,   ack of older windows,
                                      a replica or the cache             the replica, the disk
  take        training worker         the pack's capture                 capture
  ack         training worker         nothing                            -

Bytes are reserved one whole window at a time, in plan order, so no rank can starve behind another
rank's queue. The coordinator calls the engines itself: the caller of an actor method owns what it returns,
so hidden states outlive the engine that made them, and it drops them when every rank has acknowledged
the window's optimiser step. An attempt is one start of the worker group: calls of an older attempt are
answered with StaleAttemptError and hold nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from eagle3_train.records import PackKey, Sample
from eagle3_train.stream.cache import EpochCache, start_files
from eagle3_train.stream.flight import Delivery, Flight, Part, StreamCounters
from eagle3_train.stream.nodes import here
from eagle3_train.stream.store import Spill, frees_after_s

log = logging.getLogger("eagle3_train")

Entries = list[tuple[int, int]]
"""(epoch, row of the samples) of a pack's samples, in order."""
SPILL_CHECK_S = 5.0


@contextmanager
def coordinating(
    pool: ActorHandle[Any],
    samples: list[Sample],
    pinned: npt.NDArray[np.bool_],
    cache_dir: str | None,
    max_bytes: int,
    ranks: int,
    max_tries: int,
) -> Iterator[ActorHandle[Any]]:
    """A coordinator while the block runs; states in flight and cached ones go with it, whatever ends it.

    `samples` are the rows of the plan; the first len(pinned) are trained on, the others held out.
    """
    files = start_files(cache_dir) if pinned.any() else []
    coordinator = (
        ray.remote(StreamCoordinator)
        .options(**here())
        .remote(pool, ray.put(samples), files, pinned, max_bytes, ranks, max_tries)
    )
    try:
        yield coordinator
    finally:
        for actor in (coordinator, *files):
            ray.kill(actor)


class StreamCoordinator:
    """Async Ray actor; see `coordinating`."""

    def __init__(
        self,
        pool: ActorHandle[Any],
        samples: list[Sample],
        files: list[ActorHandle[Any]],
        pinned: npt.NDArray[np.bool_],
        max_bytes: int,
        ranks: int,
        max_tries: int,
    ) -> None:
        self._pool = pool
        self._samples = samples
        self._max_tries = max_tries
        self._cache = EpochCache(files, pinned)
        self._flight = Flight(max_bytes, ranks, frees_after_s())
        self._spill, self._spill_read_at = Spill(), time.monotonic()
        self._captured: set[tuple[int, int]] = set()
        self._asked, self._asked_since = 0, 0.0

    async def begin(self) -> int:
        """Start an attempt and return its number; everything in flight for older ones is dropped."""
        return await self._flight.begin()

    async def capture(self, key: PackKey, window_bytes: int, entries: Entries) -> None:
        """Have one pack captured, or read from the cache, and keep its hidden states.

        window_bytes is the whole window's, so that the first pack of a window reserves for all.
        """
        async with self._flight.capturing(key.attempt, key.window, window_bytes):
            if not entries:
                return
            delivery = Delivery()
            pending = list(range(len(entries)))
            # Where two epochs meet a pack may hold a sample twice: the second is cached.
            while pending:
                once = list({entries[index][1]: index for index in reversed(pending)}.values())
                await self._fill(delivery, key, entries, sorted(once))
                pending = [index for index in pending if index not in once]
            await self._flight.keep(key, delivery)

    async def take(self, key: PackKey) -> Delivery:
        """Wait for a captured pack; its parts hold references."""
        return await self._flight.take(key)

    async def ack(self, attempt: int, window: int, rank: int) -> None:
        """The rank has finished with `window`; the last rank's ack frees its bytes."""
        await self._flight.ack(attempt, window, rank)

    async def spilled(self) -> int:
        """Bytes that Ray's object store has written to disk since the run began."""
        self._spill_read_at = time.monotonic()
        return await asyncio.to_thread(self._spill.read)

    async def counters(self) -> StreamCounters:
        """What has flowed so far; the spilled bytes are a few seconds old."""
        if time.monotonic() > self._spill_read_at + SPILL_CHECK_S:
            await self.spilled()
        counters = self._flight.counters
        running_s = time.monotonic() - self._asked_since if self._asked else 0.0
        return replace(
            counters,
            capture_busy_s=counters.capture_busy_s + running_s,
            spilled=self._spill.nbytes,
        )

    async def _fill(
        self, delivery: Delivery, key: PackKey, entries: Entries, indices: list[int]
    ) -> None:
        """Add the samples at `indices` to the delivery: what is cached from there, the rest captured."""
        index_of = {entries[index][1]: index for index in indices}
        async with self._cache.exclusive(list(index_of)):
            for states, nbytes, rows in await self._cache.load(list(index_of)):
                delivery.parts.append(Part(states, nbytes, [index_of.pop(row) for row in rows]))
                self._flight.counters.cache_hits += len(rows)
            rest = list(index_of.values())
            if rest:
                await self._capture(delivery, key, entries, rest)

    async def _capture(
        self, delivery: Delivery, key: PackKey, entries: Entries, indices: list[int]
    ) -> None:
        """Have engines read the samples at `indices`; the pinned ones are stored on the way."""
        rows = [entries[index][1] for index in indices]
        ids = [self._samples[row].input_ids[:-1] for row in rows]
        with self._asking():
            states, nbytes, bad = await self._ask(key, ids)
        delivery.parts.append(Part(states, nbytes, indices))
        delivery.bad.update({indices[number]: reason for number, reason in bad.items()})
        ends = np.cumsum([len(sample) for sample in ids]).tolist()
        pieces = list(zip(rows, [0, *ends], ends, strict=False))
        self._flight.counters.captured_tokens += ends[-1]
        self._count([entries[index] for index in indices])
        await self._cache.store(states, [p for n, p in enumerate(pieces) if n not in bad])

    async def _ask(
        self, key: PackKey, ids: list[npt.NDArray[Any]]
    ) -> tuple[Any, int, dict[int, str]]:
        """Reference to the samples' states, bytes, bad samples: index, reason.

        A failed replica is reported to the pool and the pack asked for again.
        """
        cost = sum(map(len, ids))
        for number in range(1, self._max_tries + 1):
            replica, handle = await self._pool.lease.remote(cost)
            try:
                states, meta = handle.capture.options(num_returns=2).remote(ids)
                nbytes, bad = await meta
            except (RayActorError, RayTaskError) as error:
                log.warning(
                    "capture of %s on replica %s failed, try %d: %s", key, replica, number, error
                )
                if isinstance(error, RayActorError):
                    await self._pool.failed.remote(replica)
                if number == self._max_tries:
                    raise
            else:
                return states, nbytes, bad
            finally:
                self._pool.release.remote(replica, cost)
        raise AssertionError("max_tries is at least 1")

    def _count(self, entries: Entries) -> None:
        """A pinned training sample needs one capture, any other one per epoch; what goes beyond is a recapture."""
        counters, pinned = self._flight.counters, self._cache.pinned
        for epoch, row in entries:
            if row >= len(pinned):
                continue
            needed = (0 if pinned[row] else epoch, row)
            counters.captures += 1
            counters.recaptures += needed in self._captured
            self._captured.add(needed)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Count the time during which at least one capture is asked for."""
        if not self._asked:
            self._asked_since = time.monotonic()
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1
            if not self._asked:
                self._flight.counters.capture_busy_s += time.monotonic() - self._asked_since
