"""How hidden states leave vLLM: one shared-memory arena and one control channel, both without a name on disk.

  connector (vLLM's worker, TP rank 0)                     Handover (the process that owns the engine)
  request finished: states lie in KV blocks      <- grant   a region of the arena for request `key`
  copy blocks -> region, drop the blocks         done ->    verify, hand the region to the consumer
                                                            consumer done: region is free again

The arena is an anonymous memory file; the channel is an abstract Unix socket, over which the worker gets
the file. Both vanish with the process, so nothing can be left in /dev/shm, whatever dies.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

ALIGN = 4096


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the arena, bytes."""

    offset: int
    nbytes: int


class ArenaMemory:
    """A mapping of the arena; owner and worker hold one each."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """`fd` stays the caller's."""
        self.bytes = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """View of `shape` at byte `offset`."""
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[offset : offset + count].view(dtype).view(shape)


class Arena:
    """The owner's side: memory plus a first-fit allocator. Waiters are served in order of arrival."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _aligned(nbytes)
        self.fd = os.memfd_create("eagle3-hidden-states")
        os.ftruncate(self.fd, self.nbytes)
        self.memory = ArenaMemory(self.fd, self.nbytes)
        self._free: list[Region] = [Region(0, self.nbytes)]  # sorted by offset, never adjacent
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._closed = False

    def allocate(self, nbytes: int) -> Region:
        """Wait for a region. Raises ValueError when it could never fit, RuntimeError when closed."""
        self.check_fits(nbytes)
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                while True:
                    if self._closed:
                        raise RuntimeError(
                            "the engine was closed while hidden states waited for room"
                        )
                    if self._queue[0] is ticket and (region := self._take(nbytes)) is not None:
                        return region
                    self._changed.wait()
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def try_allocate(self, nbytes: int) -> Region | None:
        """A region, or None when there is no room now."""
        with self._changed:
            return self._take(nbytes)

    def check_fits(self, nbytes: int) -> None:
        """Raise ValueError when a region of `nbytes` can never be had."""
        if nbytes > self.nbytes:
            raise ValueError(
                f"{nbytes} bytes of hidden states do not fit the engine's arena of {self.nbytes} bytes; "
                "capture shorter samples or smaller packs, or raise EngineSpec.arena_bytes"
            )

    def free(self, region: Region) -> None:
        """Give a region back."""
        with self._changed:
            merged: list[Region] = []
            for part in sorted([*self._free, region], key=lambda r: r.offset):
                if merged and merged[-1].offset + merged[-1].nbytes == part.offset:
                    last = merged.pop()
                    part = Region(last.offset, last.nbytes + part.nbytes)
                merged.append(part)
            self._free = merged
            self._changed.notify_all()

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out."""
        with self._changed:
            return sum(region.nbytes for region in self._free)

    def close(self) -> None:
        """Wake waiters and give the file back; views that still exist keep the memory alive."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        os.close(self.fd)

    def _take(self, nbytes: int) -> Region | None:
        need = _aligned(max(nbytes, 1))
        for index, region in enumerate(self._free):
            if region.nbytes >= need:
                rest = Region(region.offset + need, region.nbytes - need)
                self._free[index : index + 1] = [rest] if rest.nbytes else []
                return Region(region.offset, need)
        return None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Channel:
    """Small JSON messages over one connection; sends may come from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message."""
        with self._lock:
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """Wait for one message. Raises EOFError when the other side is gone."""
        message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return message

    def pending(self) -> list[dict[str, Any]]:
        """Every message that has arrived, without waiting."""
        messages = []
        while self._connection.poll():
            messages.append(self.receive())
        return messages

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def connect(address: str, token: str, arena_bytes: int) -> tuple[Channel, ArenaMemory]:
    """The worker's end of the channel, and its mapping of the arena."""
    connection = _dial(address, token)
    fd = recv_handle(connection)
    try:
        return Channel(connection), ArenaMemory(fd, arena_bytes)
    finally:
        os.close(fd)


def _dial(address: str, token: str) -> Connection:
    return Client(f"\0{address}", "AF_UNIX", authkey=token.encode())


class Handover:
    """The owner's end: the arena, the channel and a thread that reports what the worker says."""

    def __init__(self, arena_bytes: int, on_message: Callable[[dict[str, Any]], None]) -> None:
        """`on_message` runs in the receiving thread; {"lost": reason} says the worker is gone."""
        self.arena = Arena(arena_bytes)
        self._on_message = on_message
        self._token = secrets.token_hex(16)
        self._address = f"eagle3-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = Listener(f"\0{self._address}", "AF_UNIX", authkey=self._token.encode())
        self._channel: Channel | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._receive, name="handover", daemon=True)
        self._thread.start()

    @property
    def connector_config(self) -> dict[str, Any]:
        """What the connector needs to find the arena and the channel."""
        return {
            "address": self._address,
            "token": self._token,
            "arena_bytes": self.arena.nbytes,
        }

    def grant(self, key: str, hidden: int, ids: int, tokens: int) -> None:
        """Let the worker write the states of `key` at byte `hidden` and its int32 ids at byte `ids`."""
        self._send(grant=key, hidden=hidden, ids=ids, tokens=tokens)

    def refuse(self, key: str) -> None:
        """Tell the worker to drop the states of `key`."""
        self._send(refuse=key)

    def close(self) -> None:
        """Close both ends; the worker must be gone or idle."""
        if self._closing:
            return
        self._closing = True
        if self._channel is None:  # nobody ever connected: release accept()
            with suppress(OSError):
                _dial(self._address, self._token).close()
        else:
            self._channel.close()
        self._listener.close()
        self.arena.close()

    def _send(self, **message: Any) -> None:
        assert self._channel is not None, "the connector has not connected"
        self._channel.send(**message)

    def _receive(self) -> None:
        try:
            connection = self._listener.accept()
            self._channel = Channel(connection)
            send_handle(connection, self.arena.fd, 0)
            while True:
                self._on_message(self._channel.receive())
        except (OSError, EOFError) as error:
            if not self._closing:
                self._on_message({"lost": f"vLLM's worker closed the hand-over channel: {error!r}"})
