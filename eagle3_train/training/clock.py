"""How long steps take on the training device, read only when a log line needs it.

On CUDA the host runs ahead of the device, so a wall clock would time the launches; marks are events in the order
of the device's work there.
"""

from __future__ import annotations

import time
from typing import Any

import torch

cuda: Any = torch.cuda  # untyped in torch

Span = tuple[Any, Any]
"""Two marks."""


class StepClock:
    """Tokens and times of the steps since the last look."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: list[Span] = []
        self._waits: list[Span] = []
        self._tokens = 0

    def mark(self) -> Any:
        """This moment; does not wait for the device."""
        if not self._on_gpu:
            return time.monotonic()
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, tokens: int, step: Span, waits: list[Span]) -> None:
        """Count a step and the waits for data within it."""
        self._steps.append(step)
        self._waits += waits
        self._tokens += tokens

    def read(self) -> tuple[int, float, float, float]:
        """Tokens, seconds, seconds waited for data, mean seconds of a step since the last call.

        The device must have passed the last mark.
        """
        seconds, waited = (
            sum(self._seconds(*span) for span in spans) for spans in (self._steps, self._waits)
        )
        found = self._tokens, seconds, waited, seconds / len(self._steps)
        self._steps, self._waits, self._tokens = [], [], 0
        return found

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3 if self._on_gpu else end - start)
