"""How hidden states leave vLLM: one shared-memory arena and one control channel, both without a name on disk.

  connector (vLLM's worker, TP rank 0)                     Handover (the process that owns the engine)
  request finished: states lie in KV blocks      <- grant   a region of the arena for request `key`
  copy blocks -> region, drop the blocks         done ->    verify, hand the region to the consumer
                                                            consumer done: region is free again

The arena is an anonymous memory file; the channel is an abstract Unix socket, over which the worker gets
the file. Both vanish with the process, so nothing can be left in /dev/shm, whatever dies.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.reduction import recv_handle, send_handle
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN = 4096


class Place(NamedTuple):
    """Where in the arena the states of so many tokens and their int32 ids go, bytes."""

    hidden: int
    ids: int
    tokens: int


def map_arena(fd: int) -> Tensor:
    """The arena's bytes, uint8; owner and worker hold one mapping each. `fd` stays the caller's."""
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)


def view(memory: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """View of `shape` at byte `offset` of the arena's memory."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + count].view(dtype).view(shape)


class Arena:
    """The owner's side: memory plus a first-fit allocator. One caller at a time waits for room, so that none starves."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _aligned(nbytes)
        self.fd = os.memfd_create("eagle3-hidden-states")
        os.ftruncate(self.fd, self.nbytes)
        self.memory = map_arena(self.fd)
        self._used: dict[int, int] = {}  # offset -> bytes
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._closed = False

    def allocate(self, nbytes: int) -> int:
        """Wait for a region; its offset. Raises ValueError when it could never fit, RuntimeError when closed."""
        with self._turn, self._changed:
            while (offset := self._take(nbytes)) is None:
                self._changed.wait()
            return offset

    def try_allocate(self, nbytes: int) -> int | None:
        """A region's offset, or None when there is no room now. Raises ValueError when it could never fit."""
        with self._changed:
            return self._take(nbytes)

    def free(self, offset: int) -> None:
        """Give the region at `offset` back."""
        with self._changed:
            del self._used[offset]
            self._changed.notify_all()

    def close(self) -> None:
        """Wake waiters and give the file back; views that still exist keep the memory alive."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        os.close(self.fd)

    def _take(self, nbytes: int) -> int | None:
        if self._closed:
            raise RuntimeError("the engine was closed while hidden states waited for room")
        if nbytes > self.nbytes:
            raise ValueError(
                f"{nbytes} bytes of hidden states do not fit the engine's arena of {self.nbytes} bytes; "
                "capture shorter samples or smaller packs, or raise EngineSpec.arena_bytes"
            )
        need, offset = _aligned(nbytes), 0
        for used in sorted(self._used):
            if used - offset >= need:
                break
            offset = used + self._used[used]
        if offset + need > self.nbytes:
            return None
        self._used[offset] = need
        return offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def connect(address: str, token: str) -> tuple[Connection, Tensor]:
    """The worker's end of the channel, and its mapping of the arena."""
    channel = _dial(address, token)
    fd = recv_handle(channel)
    try:
        return channel, map_arena(fd)
    finally:
        os.close(fd)


def _dial(address: str, token: str) -> Connection:
    return Client(f"\0{address}", "AF_UNIX", authkey=token.encode())


class Handover:
    """The owner's end: the arena, the channel and a thread that reports what the worker says."""

    def __init__(
        self,
        arena_bytes: int,
        on_states: Callable[[str, str], None],
        on_loss: Callable[[str], None],
    ) -> None:
        """Both run in the receiving thread.

        on_states: the states of a key are written, or what is wrong with them. on_loss: why the worker is gone.
        """
        self.arena = Arena(arena_bytes)
        self._on_states = on_states
        self._on_loss = on_loss
        self._token = secrets.token_hex(16)
        self._address = f"eagle3-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = Listener(f"\0{self._address}", "AF_UNIX", authkey=self._token.encode())
        self._channel: Connection | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._receive, name="handover", daemon=True)
        self._thread.start()

    @property
    def connector_config(self) -> dict[str, str]:
        """What the connector needs to find the arena and the channel."""
        return {"address": self._address, "token": self._token}

    def grant(self, key: str, place: Place | None) -> None:
        """Let the worker write the states of `key` there, or (None) drop them. One caller at a time."""
        assert self._channel is not None, "the connector has not connected"
        self._channel.send((key, place))

    def close(self) -> None:
        """Close both ends; the worker must be gone or idle."""
        self._closing = True
        if self._channel is None:  # nobody ever connected: release accept()
            with suppress(OSError):
                _dial(self._address, self._token).close()
        else:
            self._channel.close()
        self._listener.close()
        self.arena.close()

    def _receive(self) -> None:
        try:
            self._channel = self._listener.accept()
            send_handle(self._channel, self.arena.fd, 0)
            while True:
                self._on_states(*self._channel.recv())
        except (OSError, EOFError) as error:
            if not self._closing:
                self._on_loss(f"vLLM's worker closed the hand-over channel: {error!r}")
