"""Live depth: an engine is booted as the job will boot it and its states are held against its own words.

Up to three engines, one after the other: capture, capture with chunked prefill and prefix hits, and serving an
untrained drafter. What is checked is in states.py.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle3_train.config import JobConfig
from eagle3_train.corpus.render import Renderer
from eagle3_train.drafter.checkpoint import write_checkpoint
from eagle3_train.drafter.checkpoint_format import ServedTarget
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.model import Eagle3Drafter, init_from_target
from eagle3_train.engines.capture import StatesError
from eagle3_train.engines.engine import Engine
from eagle3_train.engines.launch import EngineError
from eagle3_train.engines.pool import spec_for
from eagle3_train.engines.spec import EngineSpec, Request
from eagle3_train.preflight.check import Check
from eagle3_train.preflight.states import (
    EXACT,
    ROUNDED,
    Answer,
    Rounding,
    agreement,
    common_tokens,
    draft_parity,
    lossless,
    prefix_hit,
    teacher_parity,
)
from eagle3_train.target.derive import drafter_spec
from eagle3_train.target.facts import TargetFacts
from eagle3_train.target.weights import FrozenWeights, read_frozen

log = logging.getLogger(__name__)

QUESTIONS = (
    "Why does the moon seem larger near the horizon?",
    "Write a Python function that returns the n-th Fibonacci number, and explain every line of it.",
    "List five countries in South America with their capitals.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "Translate to French: The library closes at six, but the cafe next door stays open until midnight.",
    "Continue: one, two, three, one, two, three, one, two,",
)
ANSWER_TOKENS = 48
# Small enough that every question is read in several parts.
CHUNK_TOKENS = 32


def live_checks(config: JobConfig, facts: TargetFacts) -> list[Check]:
    """Boot, capture, serve, compare; each check is logged as soon as it is known."""
    checks = []
    for check in _checks(config, facts):
        log.info("preflight: %s %s: %s", check.verdict, check.name, check.reason)
        checks.append(check)
    return checks


def _checks(config: JobConfig, facts: TargetFacts) -> Iterator[Check]:
    """Engines start and stop one after the other."""
    started, stage = time.monotonic(), "engine_start"
    try:
        spec = capture_spec(config, facts)
        answers, alone, found = captured_answers(config, spec)
        yield from found
        stage = "teacher_parity"
        weights = read_frozen(facts.path)
        yield teacher_parity(answers, weights, facts.rms_norm_eps, _rounding(spec))
        stage = "chunked_prefill"
        yield from _stressed(spec, answers, alone, facts.mla is not None)
        stage = "drafter_start"
        yield from _served(config, facts, spec, answers, weights)
    except Exception as error:
        log.debug("preflight: %s failed", stage, exc_info=True)
        yield failure(stage, error)
    yield Check("live_time", "ok", f"{time.monotonic() - started:.0f} s")


def failure(stage: str, error: Exception) -> Check:
    """What an engine raised, as a failed check: `states` when they came back wrong, else the stage it ended."""
    if isinstance(error, StatesError):
        fix = "turn off prefix caching; check the engine version"
        return Check("states", "fail", str(error), fix)
    told = isinstance(error, (EngineError, ValueError))
    reason = str(error) if told else f"{type(error).__name__}: {error}"
    return Check(stage, "fail", reason, "see the log above, and docs/preflight.md")


def capture_spec(config: JobConfig, facts: TargetFacts) -> EngineSpec:
    """The job's capture engine; an engine that computes in float32 is compared in float32."""
    return replace(
        spec_for(config, "capture"),
        target=config.target.model_copy(update={"path": str(facts.path)}),
        capture_dtype="float32" if config.engine.dtype == "float32" else "bfloat16",
        v1_runner=True,
    )


def _rounding(spec: EngineSpec) -> Rounding:
    return EXACT if spec.capture_dtype == "float32" else ROUNDED


def captured_answers(
    config: JobConfig, spec: EngineSpec
) -> tuple[list[Answer], list[Tensor], list[Check]]:
    """Answers with their states, the same samples prefilled alone, and what can be said of both."""
    target, arguments = spec.target, config.corpus.template_kwargs
    tokenizer = target.tokenizer or target.path
    renderer = Renderer.load(tokenizer, target.trust_remote_code, arguments)
    with closing(Engine(spec)) as engine:
        requests = []
        for index, question in enumerate(QUESTIONS):
            ids = tuple(renderer.prompt_ids([{"role": "user", "content": question}]))
            room = min(ANSWER_TOKENS, spec.engine.max_model_len - len(ids))
            requests.append(Request(str(index), ids, room, capture=True))
        answers = []
        for future in [engine.submit(request) for request in requests]:
            done = future.result()
            assert done.captured is not None
            states = done.captured.hidden.float().clone()
            done.captured.release()
            prompt = done.generation.prompt_ids
            answers.append(Answer(prompt + done.generation.output_ids, len(prompt), states))
        alone = _alone(engine, answers)
        started, positions = engine.facts, sum(map(len, alone))
        checks = [
            Check("engine_start", "ok", f"{started.resolved_class} in {started.start_s:.0f} s"),
            # The engine verifies what it hands over, and raises StatesError.
            Check("states", "ok", f"{positions} positions: complete, finite, ids echoed"),
            agreement("batched", alone, _prefill(engine, answers), _rounding(spec)),
            agreement("decoded", alone, [answer.states for answer in answers], _rounding(spec)),
        ]
    return answers, alone, checks


def untrained_drafter(config: JobConfig, facts: TargetFacts) -> tuple[Eagle3Drafter, FrozenTarget]:
    """The configured drafter before its first step, float32; a reduced vocabulary takes every n-th token."""
    shape = drafter_spec(facts, config.drafter)
    weights = read_frozen(facts.path, torch.float32)
    chosen = torch.arange(shape.draft_vocab_size) * shape.vocab_size // shape.draft_vocab_size
    d2t = None if shape.full_vocab else chosen - torch.arange(shape.draft_vocab_size)
    target = FrozenTarget(*weights, norm_eps=facts.rms_norm_eps, d2t=d2t)
    drafter = Eagle3Drafter(shape)
    init_from_target(drafter, target, torch.Generator().manual_seed(config.train.seed))
    return drafter, target


def _prefill(engine: Engine, answers: Sequence[Answer]) -> list[Tensor]:
    """States of the answers' tokens, read in one go. Raises StatesError when any came back wrong."""
    pack = engine.capture([np.asarray(answer.ids[:-1], dtype=np.int32) for answer in answers])
    whole, wrong = pack.hidden.float().clone(), list(pack.bad.values())
    pack.release()
    if wrong:
        raise StatesError(wrong[0])
    return list(torch.split(whole, [len(answer.ids) - 1 for answer in answers]))


def _alone(engine: Engine, answers: Sequence[Answer]) -> list[Tensor]:
    return [states for answer in answers for states in _prefill(engine, [answer])]


def _stressed(
    spec: EngineSpec, answers: list[Answer], alone: list[Tensor], mla: bool
) -> list[Check]:
    """The same samples read in small parts, then again from the prefix cache."""
    if mla and not torch.cuda.is_available():
        reason = "not run: vLLM's CPU backend never finishes a chunked MLA prompt"
        return [Check("chunked_prefill", "warn", reason), Check("prefix_hit", "warn", reason)]
    small = replace(
        spec.with_engine(
            prefix_caching=True,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_num_seqs=min(spec.engine.max_num_seqs, 8),
        ),
        chunked_prefill=True,
        # The CPU backend's blocks of 128 tokens are longer than a sample, so nothing would hit.
        block_size=None if torch.cuda.is_available() else 32,
    )
    with closing(Engine(small)) as engine:
        chunked = _alone(engine, answers)
        before = engine.cached_tokens
        hit = _alone(engine, answers)
        cached = engine.cached_tokens - before
    return [
        agreement("chunked_prefill", alone, chunked, _rounding(spec)),
        prefix_hit(alone, hit, cached, _rounding(spec)),
    ]


def _served(
    config: JobConfig,
    facts: TargetFacts,
    spec: EngineSpec,
    answers: list[Answer],
    weights: FrozenWeights,
) -> list[Check]:
    """An untrained drafter, exported and served: the same answers, and the drafts we compute ourselves."""
    drafter, target = untrained_drafter(config, facts)
    exact = spec.capture_dtype == "float32"
    if not exact:
        drafter.bfloat16().float()  # what the engine will read
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "drafter"
        write_checkpoint(
            directory,
            drafter.spec,
            drafter.state_dict(),
            target.d2t,
            spec.boundaries[:-1],
            ServedTarget(num_layers=facts.num_layers),
            "float32" if exact else "bfloat16",
        )
        serve = replace(
            spec,
            purpose="serve",
            boundaries=(),
            drafter=str(directory),
            num_speculative_tokens=config.evaluate.num_speculative_tokens,
        )
        spoken, drafted = [], []
        with closing(Engine(serve)) as engine:
            engine.record_drafts()
            for answer in answers:
                prompt = answer.ids[: answer.prompt_tokens]
                room = min(ANSWER_TOKENS, spec.engine.max_model_len - len(prompt))
                (generation,) = engine.generate([Request("draft", prompt, room)])
                spoken.append(prompt + generation.output_ids)
                alike = common_tokens(answer.ids, spoken[-1])
                lists = [one for one in engine.take_drafts() if one.position + 1 < alike]
                drafted.append((answer, lists))
    return [
        lossless(answers, spoken, weights, facts.rms_norm_eps, _rounding(spec)),
        draft_parity(drafted, drafter, target, _rounding(spec)),
    ]
