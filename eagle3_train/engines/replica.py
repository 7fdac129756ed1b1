"""An engine as a Ray actor: wrap with `ray.remote(EngineReplica)` at the call site (see pool.py).

Requests that fail do not hurt the replica; a dead or stalled engine ends the process, so that callers get
RayActorError and ask for another replica.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eagle3_train.engines.capture import Completion
from eagle3_train.engines.engine import Engine
from eagle3_train.engines.launch import EngineError
from eagle3_train.engines.spec import Acceptance, EngineSpec, Request
from eagle3_train.records import EngineFacts, Generation

log = logging.getLogger(__name__)

PROGRESS_CHECK_S = 5.0


class EngineReplica:
    """Thread-safe; give the actor as many threads as callers that wait at once."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start the engine; when one of its steps takes longer than engine.request_timeout_s, it counts as dead."""
        self._engine = Engine(spec, on_death=_die)
        threading.Thread(target=self._watch, daemon=True).start()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer all, in order; a refused request comes back with finish_reason "error", the reason as text."""
        futures = [self._engine.submit(request) for request in requests]
        return [_answer(request, future) for request, future in zip(requests, futures, strict=True)]

    def capture(
        self, samples: Sequence[npt.NDArray[np.int32]]
    ) -> Iterator[npt.NDArray[Any] | tuple[int, dict[int, str]]]:
        """Prefill the samples; call with num_returns=2 for references to (states, (bytes, bad)).

        The states are one array [tokens, boundaries * columns] as stored (stream/states.py), samples in order, bf16
        viewed as int16. Ray stores it as it is yielded, then the engine's memory is free again. The
        caller owns it, so it outlives this process. `bad`: index in pack -> reason; its rows are zero.
        """
        pack = self._engine.capture(samples)
        rows = pack.hidden.flatten(1)
        array = (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()
        try:
            yield array
        finally:
            pack.release()
        yield int(array.nbytes), pack.bad

    def facts(self) -> EngineFacts:
        """What the engine says of itself."""
        return self._engine.facts

    def acceptance(self) -> Acceptance:
        """Speculative counters since the engine started."""
        return self._engine.acceptance()

    def load_drafter(self, directory: str) -> None:
        """Serve another drafter of the same shape from now on."""
        self._engine.load_drafter(directory)

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        self._engine.close()

    def _watch(self) -> None:
        """Notice an engine that hangs: its callers would wait for ever."""
        while True:
            time.sleep(PROGRESS_CHECK_S)
            if (stalled_s := self._engine.stalled_s) > self._engine.spec.engine.request_timeout_s:
                _die(EngineError(f"one engine step has taken {stalled_s:.0f} s"))


def _answer(request: Request, future: Future[Completion]) -> Generation:
    try:
        completion = future.result()
    except ValueError as error:
        return Generation(request.id, request.prompt_ids, (), "error", str(error))
    if completion.captured is not None:
        completion.captured.release()
    return completion.generation


def _die(error: EngineError) -> None:
    """End the process: only a fresh one can serve again."""
    log.error("engine replica exits: %s", error)
    logging.shutdown()
    os._exit(1)
