"""Answers from a pool at full speed: many requests in flight, dead replicas survived, order free.

Requests travel in chunks, a few dozen chunks per replica at a time, so that every engine always has more
waiting than it decodes together. A chunk whose replica died is asked again, then request by request.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from eagle3_train.config import EngineConfig
from eagle3_train.engines.launch import EngineError
from eagle3_train.engines.spec import Request
from eagle3_train.records import Generation

log = logging.getLogger("eagle3_train")

CHUNKS_PER_REPLICA = 32
QUEUE_FACTOR = 2
MAX_TRIES = 3
"""How often a request may be in flight when its replica dies before it counts as the cause."""


class Answers:
    """Feed with `ask`, consume with `completed`; both on one thread."""

    def __init__(self, pool: Any, engine: EngineConfig) -> None:
        self._pool = pool
        self._limit = CHUNKS_PER_REPLICA * engine.replicas
        self._chunk = math.ceil(QUEUE_FACTOR * engine.max_num_seqs / CHUNKS_PER_REPLICA)
        self._waiting: deque[Request] = deque()
        self._suspects: deque[Request] = deque()  # were in flight when a replica died
        self._tries: dict[str, int] = {}
        self._flying: dict[Any, tuple[int, int, list[Request]]] = {}

    def ask(self, requests: Sequence[Request]) -> None:
        """Queue requests; ids must be unique among those not yet answered."""
        self._waiting.extend(requests)

    def completed(self, timeout_s: float) -> list[Generation]:
        """What finished within `timeout_s`, in any order; a refused one has finish_reason "error"."""
        self._fill()
        if not self._flying:
            return []
        done, _ = ray.wait(list(self._flying), timeout=timeout_s)
        answers: list[Generation] = []
        for reference in done:
            replica, cost, chunk = self._flying.pop(reference)
            try:
                answers += ray.get(reference)
            except RayActorError as error:
                log.warning(
                    "engine replica %d died with %d requests: %s", replica, len(chunk), error
                )
                ray.get(self._pool.failed.remote(replica))
                answers += self._retry(chunk)
            self._pool.release.remote(replica, cost)
        for answer in answers:
            self._tries.pop(answer.id, None)
        return answers

    def all(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer `requests`, in their order; nothing else may be asked meanwhile."""
        self.ask(requests)
        found: dict[str, Generation] = {}
        while len(found) < len(requests):
            found.update((answer.id, answer) for answer in self.completed(timeout_s=5))
        return [found[request.id] for request in requests]

    def _fill(self) -> None:
        """Send chunks while there is room; suspects travel alone, so that a poisonous one is found.

        Raises EngineError when the pool has given up.
        """
        while len(self._flying) < self._limit and (self._suspects or self._waiting):
            if self._suspects:
                chunk = [self._suspects.popleft()]
            else:
                count = min(self._chunk, len(self._waiting))
                chunk = [self._waiting.popleft() for _ in range(count)]
            cost = sum(len(r.prompt_ids) + r.max_new_tokens for r in chunk)
            try:
                replica, handle = ray.get(self._pool.lease.remote(cost))
            except RayTaskError as error:
                raise EngineError(str(error.cause)) from error
            self._flying[handle.generate.remote(chunk)] = (replica, cost, chunk)

    def _retry(self, chunk: list[Request]) -> Iterator[Generation]:
        """Queue a dead replica's requests again; give up on those that were there too often."""
        for request in chunk:
            tries = self._tries[request.id] = self._tries.get(request.id, 0) + 1
            if tries < MAX_TRIES:
                self._suspects.append(request)
            else:
                reason = f"engine_died: {tries} replicas died while answering it"
                yield Generation(request.id, request.prompt_ids, (), "error", reason)
