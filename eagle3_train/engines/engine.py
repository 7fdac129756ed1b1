"""One vLLM engine: continuous batching over everything its callers submit, hidden states on request.

A single thread owns vLLM: it builds the engine, admits requests between steps and steps while there is
work. Callers on any thread get futures. States arrive through the hand-over arena and are checked on
arrival: the ids the engine computed equal the ids that were asked for, nothing is missing, all is finite.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from eagle3_train.engines import versions
from eagle3_train.engines.capture import Captured, CapturedPack, Captures, Completion
from eagle3_train.engines.guard import guarded
from eagle3_train.engines.launch import EngineError, arena_bytes, check, launch, sampling_params
from eagle3_train.engines.spec import Acceptance, Drafted, EngineSpec, Request
from eagle3_train.records import EngineFacts, Generation
from eagle3_train.target.facts import read_facts

log = logging.getLogger(__name__)

T = TypeVar("T")

# Pause between steps that only wait for a copy to finish.
IDLE_STEP_S = 0.001

_ALIVE = threading.Lock()  # vLLM keeps its parallel state and its KV connector in globals


class Engine:
    """Wraps vLLM's LLMEngine; a process holds one at a time."""

    def __init__(
        self, spec: EngineSpec, on_death: Callable[[EngineError], None] = lambda _: None
    ) -> None:
        """Start the engine; returns when it can serve. Raises ValueError or EngineError.

        on_death: called on the engine's thread when a started engine dies, before what it was asked for fails.
        """
        self.spec = spec
        self._target = read_facts(spec.target.path)
        check(spec, self._target)
        versions.prepare_environment(spec.own_process, spec.v1_runner)
        if not _ALIVE.acquire(blocking=False):
            raise EngineError("a process holds one engine at a time; close the other one first")
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[tuple[Future[Any], Callable[[], None]]] = queue.SimpleQueue()
        self._running: dict[str, tuple[Request, Future[Completion]]] = {}  # inside vLLM
        self._numbers = itertools.count()
        self.cached_tokens = 0  # prompt tokens of finished requests that came from the prefix cache
        self._gate = threading.Lock()  # nothing is queued once everything has been failed
        self._death: EngineError | None = None
        self._closing = False
        self._heartbeat = time.monotonic()
        self._captures: Captures | None = None
        if spec.purpose == "capture":
            self._captures = Captures(
                (len(spec.boundaries), self._target.hidden_size),
                spec.capture_dtype,
                arena_bytes(spec, self._target.hidden_size),
                self._lost,
            )
        ready: Future[EngineFacts] = Future()
        self._thread = threading.Thread(
            target=self._serve, args=(ready,), name="engine", daemon=True
        )
        self._thread.start()
        try:
            self.facts = ready.result()
        except BaseException:
            self.close()
            raise

    # What callers use.

    def submit(self, request: Request, into: Captured | None = None) -> Future[Completion]:
        """Queue one request. A request vLLM refuses fails its own future with ValueError.

        into: where its states go, if not into a region of their own.
        """
        future: Future[Completion] = Future()
        key = str(next(self._numbers))
        if request.capture:
            self._expect_captures().expect(key, future, into)
        self._queue(future, partial(self._start, key, request, future))
        return future

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer all, in order of `requests`; raises the first failure."""
        futures = [self.submit(request) for request in requests]
        return [future.result().generation for future in futures]

    def capture(self, samples: Sequence[npt.NDArray[np.int32]]) -> CapturedPack:
        """Prefill each sample; one contiguous block of states, samples in order. Release it.

        Samples that came back wrong are listed in `bad` and their rows are zero. Waits for room in the arena.
        """
        pack = self._expect_captures().open_pack([len(sample) for sample in samples])
        futures = [
            self.submit(Request(str(i), tuple(sample.tolist()), capture=True), into)
            for i, (sample, into) in enumerate(zip(samples, pack.samples, strict=True))
        ]
        for index, future in enumerate(futures):
            try:
                future.result()
            except ValueError as error:
                pack.spoil(index, str(error))
            except EngineError:
                pack.release()
                raise
        return pack

    def acceptance(self) -> Acceptance:
        """Speculative counters since the engine started."""
        if self.spec.purpose != "serve":
            return Acceptance(0, ())
        return self._call(lambda: versions.acceptance(self._llm))

    def load_drafter(self, directory: str) -> None:
        """Swap in the weights and d2t of another drafter of the same shape. The engine must be idle."""

        def swap() -> None:
            if self._running:
                raise ValueError("a drafter can only be swapped while no request is running")
            self._llm.collective_rpc("load_drafter", args=(directory,))
            self._llm.reset_prefix_cache()

        self._call(swap)

    def record_drafts(self) -> None:
        """Keep every list of draft tokens from now on; needs EngineSpec.v1_runner."""
        self._call(lambda: self._llm.collective_rpc("record_drafts"))

    def take_drafts(self) -> list[Drafted]:
        """Lists of draft tokens recorded since the last call, in order."""
        drafts = self._call(lambda: self._llm.collective_rpc("take_drafts")[0])
        return [Drafted(key, at, token, tuple(ids)) for key, at, token, ids in drafts]

    @property
    def stalled_s(self) -> float:
        """Seconds for which the running requests have waited for one engine step."""
        return time.monotonic() - self._heartbeat if self._running else 0.0

    def close(self) -> None:
        """Stop vLLM and give everything back; unfinished requests fail."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        if self._captures is not None:
            self._captures.handover.close()
        _ALIVE.release()

    # The engine thread.

    def _serve(self, ready: Future[EngineFacts]) -> None:
        """Build vLLM, then admit and step until closed or dead."""
        started = time.monotonic()
        try:
            connector = (
                self._captures.handover.connector_config if self._captures is not None else {}
            )
            self._llm = launch(self.spec, self._target, connector)
            self._tokenizer = self._llm.get_tokenizer()
            facts = self._read_facts(time.monotonic() - started)
        except BaseException as error:  # noqa: BLE001 - raised by the constructor
            self._fail_all(EngineError(str(error)))
            ready.set_exception(error)
            return
        with guarded():
            ready.set_result(facts)
            try:
                while not self._closing and self._death is None:
                    self._admit()
                    self._step()
            except Exception as error:
                log.exception("the engine died")
                self._death = EngineError(f"{versions.name()} died: {error!r}")
            if self._death is not None:
                self._on_death(self._death)
            self._fail_all(self._death or EngineError("the engine was closed"))
            inside = versions.core_is_inside(self._llm)
            self._llm.engine_core.shutdown()
        del self._llm
        if inside:
            versions.forget_engine()

    def _admit(self) -> None:
        """Run what callers queued; when there is nothing else to do, wait for it."""
        idle = not self._has_work()
        while idle or not self._inbox.empty():
            _, job = self._inbox.get()
            job()
            idle = False

    def _step(self) -> None:
        if not self._has_work():
            return
        if not self._llm.has_unfinished_requests():
            time.sleep(IDLE_STEP_S)
        outputs = self._llm.step()
        self._heartbeat = time.monotonic()
        for output in outputs:
            if output.finished:
                self._finish(output)

    def _has_work(self) -> bool:
        return self._llm.has_unfinished_requests() or versions.core_is_busy(self._llm)

    def _finish(self, output: Any) -> None:
        """Complete a request's future, or hand it to the captures."""
        request, future = self._running.pop(output.request_id)
        self.cached_tokens += output.num_cached_tokens or 0
        answer = output.outputs[0]
        output_ids = tuple(answer.token_ids)
        generation = Generation(
            id=request.id,
            prompt_ids=request.prompt_ids,
            output_ids=output_ids,
            finish_reason=str(answer.finish_reason),
            text=self._tokenizer.decode(list(output_ids), skip_special_tokens=True),
        )
        if not request.capture:
            future.set_result(Completion(generation, None))
            return
        is_captured = "is_captured" in (output.kv_transfer_params or {})
        self._expect_captures().generated(output.request_id, generation, is_captured)

    def _start(self, key: str, request: Request, future: Future[Completion]) -> None:
        """Give one request to vLLM."""
        self._heartbeat = time.monotonic()
        self._running[key] = (request, future)
        try:
            self._llm.add_request(
                key, {"prompt_token_ids": list(request.prompt_ids)}, sampling_params(key, request)
            )
        except versions.refusals() as error:
            if request.capture:
                self._expect_captures().forget(key)
            del self._running[key]
            future.set_exception(ValueError(f"request {request.id}: {error}"))

    def _fail_all(self, error: EngineError) -> None:
        """Fail everything that waits, now and later."""
        with self._gate:
            self._death = error
        if self._captures is not None:
            self._captures.fail_all(error)
        for _, future in self._running.values():
            _fail(future, error)
        self._running.clear()
        while not self._inbox.empty():
            _fail(self._inbox.get()[0], error)

    # Details.

    def _lost(self, reason: str) -> None:
        """The worker has left the hand-over; runs on its thread."""
        if not self._closing:
            self._death = self._death or EngineError(reason)
            self._wake()

    def _wake(self) -> None:
        """Have the engine's thread look whether it should end."""
        self._inbox.put((Future(), lambda: None))

    def _queue(self, future: Future[Any], job: Callable[[], None]) -> None:
        """Run `job` on the engine's thread between two steps; `future` fails when that has ended."""
        with self._gate:
            if self._death is None:
                self._inbox.put((future, job))
                return
        _fail(future, self._death)

    def _call(self, function: Callable[[], T]) -> T:
        """Result of `function`, run on the engine's thread between two steps."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)

        self._queue(future, job)
        return future.result()

    def _expect_captures(self) -> Captures:
        if self._captures is None:
            raise ValueError(
                f"a {self.spec.purpose} engine captures nothing; start a capture engine"
            )
        return self._captures

    def _read_facts(self, start_s: float) -> EngineFacts:
        return EngineFacts(
            engine=versions.name(),
            resolved_class=self._llm.collective_rpc("target_class")[0],
            dtype=str(self._llm.vllm_config.model_config.dtype).removeprefix("torch."),
            start_s=round(start_s, 2),
        )


def _fail(future: Future[Any], error: Exception) -> None:
    with suppress(InvalidStateError):  # it has been told already
        future.set_exception(error)
