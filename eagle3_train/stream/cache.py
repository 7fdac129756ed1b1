"""The epoch cache: the hidden states of the same samples kept on local disk for every later epoch.

  pin          which samples, chosen once: a cyclic scan gains nothing from evicting
  ShardFile    one node's disk: a safetensors shard per sample, with its checksum; an actor
  EpochCache   the coordinator's view: what is stored where, and who may capture what is not yet

The shards of a node lie in one file that has no name. It vanishes with the process that holds it, so
nothing is left on disk after success, failure, Ctrl-C or SIGKILL; a run that is started again fills
its cache again. A shard that cannot be read as it was written counts as absent: capture again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from safetensors.numpy import load, save

from eagle3_train.records import Sample
from eagle3_train.stream.nodes import on

log = logging.getLogger("eagle3_train")

HEADER_BYTES = 128  # of a shard, at most
FILE_THREADS = 4


def pin(
    samples: Sequence[Sample], token_bytes: int, cache_bytes: int, seed: int
) -> npt.NDArray[np.bool_]:
    """Which samples are cached, bool [samples]: in a seeded order, each that still fits.

    Random, so that cached and recaptured samples alternate evenly in every epoch's order and engines
    work at a steady rate.
    """
    pinned = np.zeros(len(samples), dtype=np.bool_)
    left = cache_bytes
    for row in np.random.default_rng((seed, len(samples))).permutation(len(samples)):
        nbytes = samples[row].captured_tokens * token_bytes + HEADER_BYTES
        if nbytes <= left:
            pinned[row] = True
            left -= nbytes
    return pinned


def planned_captures(pinned: npt.NDArray[np.bool_], rounds: int) -> int:
    """Samples an undisturbed run captures for training: N x (1 + (rounds - 1) x (1 - cached fraction)).

    rounds: times every window is asked for, epochs / replay.
    """
    return len(pinned) + (rounds - 1) * int(np.count_nonzero(~pinned))


class ShardFile:
    """One node's shards; thread-safe. Wrap with `ray.remote(ShardFile)`: see `start_files`."""

    def __init__(self, folder: str | None) -> None:
        """`folder` is on a local disk; null is the system's temporary directory."""
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - held for life
        self._lock = threading.Lock()
        self._shards: dict[int, tuple[int, int, int]] = {}  # row -> offset, bytes, checksum
        self._end = 0

    def store(self, states: npt.NDArray[Any], pieces: list[tuple[int, int, int]]) -> None:
        """Keep samples of a pack: (row, first token, end). OSError when the disk is full."""
        for row, first, end in pieces:
            data = save({"states": states[first:end]})
            with self._lock:
                offset, _, _ = self._shards.pop(row, (self._end, 0, 0))
                self._end = max(self._end, offset + len(data))
            written = 0
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], offset + written)
            self._shards[row] = (offset, len(data), zlib.crc32(data))

    def load(self, rows: list[int]) -> Iterator[npt.NDArray[Any] | tuple[int, list[int]]]:
        """Read samples; call with num_returns=2 for references to (states, (bytes, rows that were good))."""
        found = {row: states for row in rows if (states := self._read(row)) is not None}
        states = np.concatenate(list(found.values())) if found else np.zeros((0, 0))
        yield states
        yield int(states.nbytes), list(found)

    def _read(self, row: int) -> npt.NDArray[Any] | None:
        if row not in self._shards:
            return None
        offset, size, checksum = self._shards[row]
        data = os.pread(self._file.fileno(), size, offset)
        if zlib.crc32(data) != checksum:
            log.warning("cached sample %d is not what was written; it is captured again", row)
            return None
        states: npt.NDArray[Any] = load(data)["states"]
        return states


def start_files(folder: str | None) -> list[ActorHandle[Any]]:
    """One ShardFile on every node of the cluster."""
    nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]
    return [
        ray.remote(ShardFile).options(**on(node), max_concurrency=FILE_THREADS).remote(folder)
        for node in nodes
    ]


class EpochCache:
    """Lives in the coordinator's event loop; samples are dealt to the nodes' files by row number."""

    def __init__(self, files: list[ActorHandle[Any]], pinned: npt.NDArray[np.bool_]) -> None:
        self.pinned = pinned
        self._files = files
        self._stored: set[int] = set()
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def exclusive(self, rows: list[int]) -> AsyncIterator[None]:
        """Let nobody else capture those of `rows` that the cache will hold: they are captured once."""
        async with AsyncExitStack() as stack:
            for row in sorted(rows):
                if self._is_pinned(row) and row not in self._stored:
                    await stack.enter_async_context(self._locks[row])
            yield

    async def load(self, rows: list[int]) -> list[tuple[Any, int, list[int]]]:
        """What is stored of `rows`, one part per file: reference, bytes, rows in the part's order."""
        parts = []
        for file, mine in self._by_file([row for row in rows if row in self._stored]):
            try:
                states, meta = file.load.options(num_returns=2).remote(mine)
                nbytes, found = await meta
            except RayError as error:
                log.warning("a node's cache cannot be read: %s", error)
                nbytes, found = 0, []
            self._stored -= set(mine) - set(found)
            if found:
                parts.append((states, nbytes, found))
        return parts

    async def store(self, states: Any, pieces: list[tuple[int, int, int]]) -> None:
        """Store the pinned ones of a pack's pieces: (row, first token, end) of `states`, a reference."""
        bounds = {row: (row, first, end) for row, first, end in pieces if self._is_pinned(row)}
        for file, mine in self._by_file(list(bounds)):
            try:
                await file.store.remote(states, [bounds[row] for row in mine])
            except RayError as error:
                log.warning("a node's cache cannot be written: %s", error)
            else:
                self._stored.update(mine)

    def _is_pinned(self, row: int) -> bool:
        return row < len(self.pinned) and bool(self.pinned[row])

    def _by_file(self, rows: list[int]) -> Iterator[tuple[ActorHandle[Any], list[int]]]:
        """(file, its share of `rows`) for every file that has any."""
        for number, file in enumerate(self._files):
            if mine := [row for row in rows if row % len(self._files) == number]:
                yield file, mine
