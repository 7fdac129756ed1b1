"""From the stream to the training device, one pack ahead of the step that uses it.

  captured packs -> (thread) rows planned, states into pinned memory -> (side stream) device -> next()

Everything here runs in a thread of its own while the device computes, so a step waits only when the
stream itself is late. On CUDA two pinned buffers per rank, each of the largest pack seen, are reused.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_train.drafter.rows import PackedBatch, plan_rows
from eagle3_train.records import Pack, Sample
from eagle3_train.stream.pipeline import CapturedPack
from eagle3_train.stream.states import decode

cuda: Any = torch.cuda  # untyped in torch


@dataclass(frozen=True, slots=True)
class FedPack:
    """A pack on the training device; `bad`: samples that supervise nothing, index in pack: reason."""

    pack: Pack
    batch: PackedBatch
    bad: dict[int, str]


@dataclass(frozen=True, slots=True)
class FeedShape:
    """What a feed makes of a pack. aux, hidden: columns of the states that feed the drafter, and the rest."""

    device: torch.device
    dtype: torch.dtype
    aux: int
    hidden: int


def feed(
    packs: Iterator[CapturedPack],
    documents: Callable[[Pack], tuple[list[Sample], int]],
    shape: FeedShape,
) -> Iterator[FedPack]:
    """The rank's packs on its device, in order. `documents`: a pack's samples and unroll depth.

    An error of the stream is raised here. Nothing of a pack but its device copy is kept by the feed.
    """
    stage = _Stage(shape)
    ready: queue.SimpleQueue[tuple[FedPack, Any] | BaseException | None] = queue.SimpleQueue()
    ahead = threading.Semaphore()  # one pack beside the one in use, never two

    def work() -> None:
        try:
            for captured in packs:
                ahead.acquire()
                ready.put(stage.load(captured, *documents(captured.pack)))
                del captured  # its arrays are views of the object store
            ready.put(None)
        except BaseException as error:  # noqa: BLE001 - raised by the consumer
            ready.put(error)

    threading.Thread(target=work, name="feed", daemon=True).start()
    pace = stage.passed()
    while held := _receive(ready):
        ahead.release()
        yield held.pop()  # not kept here: the step frees it
        # The host stays one pack ahead of the device: further ahead, batches would pile up in its memory.
        before, pace = pace, stage.passed()
        if before is not None:
            before.synchronize()


def _receive(ready: queue.SimpleQueue[Any]) -> list[FedPack]:
    """Wait for the next pack; in a list, so that whoever pops it holds the only reference. Empty at the end."""
    item = ready.get()
    if item is None:
        return []
    if isinstance(item, BaseException):
        raise item
    fed, event = item
    if event is not None:
        _hand_over(fed.batch, event)
    return [fed]


def _hand_over(batch: PackedBatch, event: Any) -> None:
    """Make the current stream wait for the copies, and the allocator for the current stream."""
    current = cuda.current_stream()
    current.wait_event(event)
    planned = [getattr(batch.rows, field.name) for field in fields(batch.rows)]
    for tensor in (batch.aux_hidden_states, batch.last_hidden_states, *planned):
        if isinstance(tensor, Tensor):
            tensor.record_stream(current)


class _Stage:
    """Copies packs to the device; used by one thread."""

    def __init__(self, shape: FeedShape) -> None:
        self._shape = shape
        self._stream = cuda.Stream(shape.device) if shape.device.type == "cuda" else None
        self._pinned: list[tuple[Tensor, Any]] = []  # buffer, event after which it is free

    def load(
        self, captured: CapturedPack, samples: list[Sample], steps: int
    ) -> tuple[FedPack, Any]:
        """The pack on the device, and the CUDA event after which it is there (None on CPU)."""
        shape = self._shape
        masks = [s.loss_mask & (index not in captured.bad) for index, s in enumerate(samples)]
        rows = plan_rows([s.input_ids for s in samples], masks, steps)
        with cuda.stream(self._stream):  # changes nothing on CPU
            rows = rows.to(shape.device)
            states = decode(self._states(captured, samples), shape.hidden, shape.dtype)
            event = self.passed()
        batch = PackedBatch(rows, states[:, : shape.aux], states[:, shape.aux :])
        return FedPack(captured.pack, batch, captured.bad), event

    def passed(self) -> Any:
        """CUDA event after everything the current stream has been given so far (None on CPU)."""
        if self._stream is None:
            return None
        event = cuda.Event()
        event.record()
        return event

    def _states(self, captured: CapturedPack, samples: list[Sample]) -> Tensor:
        """States of all samples in pack order, on the device: CUDA's through a pinned buffer, on the side stream."""
        shape, tokens = self._shape, captured.pack.tokens
        if not captured.parts:
            return torch.zeros(0, shape.aux + shape.hidden, device=shape.device)
        parts = [(_tensor(array), indices) for array, indices in captured.parts]
        dtype, columns = parts[0][0].dtype, parts[0][0].shape[1]
        size = tokens * columns * dtype.itemsize
        buffer = self._buffer(size)
        staged = buffer[:size].view(dtype).view(tokens, columns)
        places = staged.split([sample.captured_tokens for sample in samples])
        for states, indices in parts:
            pieces = states.split([len(places[index]) for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                places[index].copy_(piece)
        if self._stream is None:
            return staged
        moved = staged.to(shape.device, non_blocking=True)
        self._pinned.append((buffer, self.passed()))
        return moved

    def _buffer(self, size: int) -> Tensor:
        """A free buffer of at least `size` bytes, pinned for CUDA."""
        if len(self._pinned) == 2:
            buffer, done = self._pinned.pop(0)
            done.synchronize()
            if len(buffer) >= size:
                return buffer
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """View of an array of the object store; int16 is bf16, uint8 is FP8 with its scales."""
    with warnings.catch_warnings():  # the array is read-only, and only read
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.int16 else tensor
