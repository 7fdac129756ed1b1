"""What Ray's object store says of itself, by Ray's private interfaces."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

log = logging.getLogger("eagle3_train")

FREES_AFTER = "free_objects_period_milliseconds"
FREE_AT_ONCE = {FREES_AFTER: 0}
"""Ray's setting, the whole cluster's, under which memory is free as soon as nobody refers to it."""


def store_stats() -> Any:
    """Counters of all nodes' stores, bytes: object_store_bytes_used, spilled_bytes_total. Takes 5 ms."""
    return get_memory_info_reply(_state()).store_stats


def frees_after_s() -> float:
    """How long the cluster may keep what nobody refers to any more; Ray's default is a second."""
    return float(_state().get_system_config().get(FREES_AFTER, 1000)) / 1000


def _state() -> Any:
    return get_state_from_address(ray.get_runtime_context().gcs_address)


@dataclass(slots=True)
class Spill:
    """Bytes that the stores wrote to disk since this object was made."""

    nbytes: int = 0
    _before: int = field(default_factory=lambda: int(store_stats().spilled_bytes_total))

    def read(self) -> int:
        """The bytes by now; says so, loudly, when there are more than at the last look."""
        last, now = self.nbytes, int(store_stats().spilled_bytes_total) - self._before
        self.nbytes = max(last, now)  # a node that dies takes its count with it
        if now > last:
            log.warning(
                "SPILLED: Ray's object store has written %d bytes to disk since this run began, which slows the stream to "
                "the disk's speed; raise object_store_memory (ray start --object-store-memory), or lower "
                "stream.max_bytes_in_flight",
                self.nbytes,
            )
        return self.nbytes
