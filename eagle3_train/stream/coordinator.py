"""The stream's coordinator: one actor that owns hidden states in flight and their byte budget.

  call        who                     waits for                          unblocked by
  capture     capture client          earlier windows reserved, bytes,   ack of older windows,
                                      a replica, the capture             the replica
  take        training worker         the pack's capture                 capture
  ack         training worker         nothing                            -

Bytes are reserved one whole window at a time, in plan order, so no rank can starve behind another
rank's queue. The coordinator calls the engines itself: the caller of an actor method owns what it returns,
so hidden states outlive the engine that made them, and it drops them when every rank has acknowledged
the window's optimiser step. An attempt is one start of the worker group: calls of an older attempt are
answered with StaleAttemptError and hold nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from eagle3_train.records import PackKey
from eagle3_train.stream.flight import Delivery, Flight, StreamCounters

log = logging.getLogger("eagle3_train")


class StreamCoordinator:
    """Async Ray actor; wrap with `ray.remote(StreamCoordinator)` at the call site."""

    def __init__(
        self,
        pool: ActorHandle[Any],
        tokens: Mapping[str, npt.NDArray[Any]],
        max_bytes: int,
        ranks: int,
        max_tries: int,
    ) -> None:
        """`tokens` is stream.pipeline.token_table's."""
        self._pool = pool
        self._ids, self._offsets = tokens["ids"], tokens["offsets"]
        self._max_tries = max_tries
        self._flight = Flight(max_bytes, ranks)
        self._attempts = 0

    async def begin(self) -> int:
        """Start an attempt and return its number; everything in flight for older ones is dropped."""
        self._attempts += 1
        await self._flight.begin(self._attempts)
        return self._attempts

    async def capture(self, key: PackKey, window_bytes: int, rows: list[int]) -> None:
        """Have one pack captured (`rows` of the token table, in order) and keep its hidden states.

        window_bytes is the whole window's, so that the first pack of a window reserves for all. A
        failed replica is reported to the pool and the pack asked for again.
        """
        await self._flight.reserve(key.attempt, key.window, window_bytes)
        if not rows:
            return
        ids = [self._ids[self._offsets[row] : self._offsets[row + 1] - 1] for row in rows]
        cost = sum(map(len, ids))
        for number in range(1, self._max_tries + 1):
            replica, handle = await self._pool.lease.remote(cost)
            try:
                states, meta = handle.capture.options(num_returns=2).remote(ids)
                nbytes, bad = await meta
                break
            except (RayActorError, RayTaskError) as error:
                log.warning(
                    "capture of %s on replica %s failed, try %d: %s", key, replica, number, error
                )
                if isinstance(error, RayActorError):
                    await self._pool.failed.remote(replica)
                if number == self._max_tries:
                    raise
            finally:
                self._pool.release.remote(replica, cost)
        await self._flight.keep(key, Delivery(states, nbytes, bad))

    async def take(self, key: PackKey) -> tuple[list[Any], dict[int, str]]:
        """Reference (in a list, so unresolved) of a captured pack; bad samples: index in pack, reason."""
        delivery = await self._flight.take(key)
        return [delivery.states], delivery.bad

    async def ack(self, attempt: int, window: int, rank: int) -> None:
        """The rank has finished with `window`; the last rank's ack frees its bytes."""
        await self._flight.ack(attempt, window, rank)

    async def counters(self) -> StreamCounters:
        """What has flowed so far."""
        return self._flight.counters
