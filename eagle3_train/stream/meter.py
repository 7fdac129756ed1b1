"""Rates of the stream between two looks at its counters, and which side is the bottleneck."""

from __future__ import annotations

import time

from eagle3_train.stream.flight import StreamCounters

WAIT = 0.05  # a step that waits longer than this share of its time is waiting for the stream
BUSY = 0.9


class StreamMeter:
    """Metrics per second since the last look."""

    def __init__(self) -> None:
        self._last = StreamCounters()
        self._at = time.monotonic()

    def read(self, now: StreamCounters) -> dict[str, float]:
        """Totals since the stream began, and rates since the last call."""
        seconds, last = max(time.monotonic() - self._at, 1e-9), self._last
        self._at, self._last = time.monotonic(), now
        return {
            "stream/capture_tokens_per_s": (now.captured_tokens - last.captured_tokens) / seconds,
            "stream/capture_busy_frac": (now.capture_busy_s - last.capture_busy_s) / seconds,
            "stream/bytes_per_s": (now.delivered_total - last.delivered_total) / seconds,
            "stream/bytes_in_flight": now.in_flight,
            "stream/spilled_bytes": now.spilled,
            "stream/captures": now.captures,
            "stream/recaptures": now.recaptures,
            "stream/cache_hits": now.cache_hits,
            "stream/drops": now.bad_samples,
        }


def bottleneck(wait_frac: float, busy_frac: float) -> str:
    """What limits the run, and what to change: shares of time the step waits, and engines have work."""
    if wait_frac <= WAIT:
        return "trainer (more train.workers)"
    if busy_frac >= BUSY:
        return "engines (more engine.replicas, or stream.cache_bytes, stream.replay)"
    return "budget (raise stream.max_bytes_in_flight or stream.lookahead_packs)"
