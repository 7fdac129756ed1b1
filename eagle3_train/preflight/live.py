"""Live depth: an engine is booted as the job will boot it and its states are held against its own words.

The checks are functions of captured tensors; `live_checks` feeds them from up to three engines, one after the
other: capture, capture with chunked prefill and prefix hits, and serving an untrained drafter.

Two runs of one model in bfloat16 differ by a few parts in a thousand, which decides between tokens whose logits are
closer than that. So "the engine's token" means one whose logit, computed here, is the highest or within rounding of it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3_train.config import JobConfig
from eagle3_train.corpus.render import Renderer
from eagle3_train.drafter.checkpoint import write_checkpoint
from eagle3_train.drafter.checkpoint_format import ServedTarget
from eagle3_train.drafter.drafting import draft_logits
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.model import Eagle3Drafter, init_from_target
from eagle3_train.engines.engine import Engine
from eagle3_train.engines.launch import EngineError
from eagle3_train.engines.pool import spec_for
from eagle3_train.engines.spec import EngineSpec, Request
from eagle3_train.engines.worker import Drafted
from eagle3_train.preflight.check import Check
from eagle3_train.target.derive import drafter_spec
from eagle3_train.target.facts import TargetFacts, resolve_boundaries
from eagle3_train.target.weights import FrozenWeights, read_frozen

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
PARITY, COSINE = 0.99, 0.999


class Rounding(NamedTuple):
    """What the engine's arithmetic allows. slack: distance to the highest logit, in parts of the largest
    magnitude; share: of rows and draft lists that must agree (an expert chosen otherwise moves a whole row)."""

    slack: float
    share: float


EXACT, ROUNDED = Rounding(1e-4, 1.0), Rounding(2**-5, 0.99)


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer and its states: ids [n], states [n-1, boundaries, hidden] float32."""

    ids: tuple[int, ...]
    prompt_tokens: int
    states: Tensor


def states_complete(answers: Sequence[Answer], hidden_size: int, num_boundaries: int) -> Check:
    """Whether every position but the last has finite states of the right shape."""
    for answer in answers:
        expected = (len(answer.ids) - 1, num_boundaries, hidden_size)
        if tuple(answer.states.shape) != expected:
            reason = f"truncated states: got {tuple(answer.states.shape)} for {len(answer.ids)} tokens, expected {expected}"
            return Check(
                "states", "fail", reason, "turn off prefix caching; check the engine version"
            )
        if not answer.states.isfinite().all():
            return Check("states", "fail", "states are not finite", "check engine.dtype")
    tokens = sum(len(answer.states) for answer in answers)
    return Check("states", "ok", f"{tokens} positions: complete, finite, ids echoed")


def leads(logits: Tensor, said: Tensor, slack: float) -> Tensor:
    """Per row of logits [n, vocab], whether token said[n] has the highest one, or one within `slack` of it."""
    chosen = logits.gather(-1, said[:, None])[:, 0]
    return chosen >= logits.amax(-1) - slack * logits.abs().amax(-1)


def teacher_logits(states: Tensor, weights: FrozenWeights, eps: float) -> Tensor:
    """The target's logits [n, vocab] from states [n, boundaries, hidden], float32."""
    last = states[:, -1].float()
    normed = F.rms_norm(last, last.shape[-1:], weights.norm_weight.float(), eps)
    return (normed.to(weights.lm_head.dtype) @ weights.lm_head.T).float()


def teacher_parity(
    answers: Sequence[Answer], weights: FrozenWeights, eps: float, rounding: Rounding
) -> Check:
    """Whether final norm and head, on the last captured boundary, choose the tokens the engine chose."""
    exact = near = total = 0
    for answer in answers:
        logits = teacher_logits(answer.states[answer.prompt_tokens - 1 :], weights, eps)
        said = torch.tensor(answer.ids[answer.prompt_tokens :])
        exact += int((logits.argmax(-1) == said).sum())
        near += int(leads(logits, said, rounding.slack).sum())
        total += len(said)
    ties = f" ({near - exact} of them within rounding of another)" if near > exact else ""
    reason = f"final norm and head on captured states choose the engine's token at {near} of {total} positions{ties}"
    if near < PARITY * total:
        fix = "the last boundary is another layer than assumed, or the final norm or head is read wrongly"
        return Check("teacher_parity", "fail", reason, fix)
    return Check("teacher_parity", "ok", reason)


def agreement(
    name: str, first: Sequence[Tensor], second: Sequence[Tensor], rounding: Rounding
) -> Check:
    """Whether two captures of the same samples agree, row by row (a row: one position, one boundary)."""
    rows = torch.cat(
        [
            F.cosine_similarity(a.float(), b.float(), dim=-1).flatten()
            for a, b in zip(first, second, strict=True)
        ]
    )
    alike = int((rows > COSINE).sum())
    reason = f"{alike} of {len(rows)} rows as in the plain capture, lowest cosine {rows.min():.6f}"
    if alike < rounding.share * len(rows):
        return Check(name, "fail", reason, f"do not rely on {name} with this engine version")
    return Check(name, "ok", reason)


def draft_parity(
    drafted: Sequence[tuple[Answer, Sequence[Drafted]]],
    drafter: Eagle3Drafter,
    target: FrozenTarget,
    rounding: Rounding,
) -> Check:
    """Whether the engine's draft tokens are those computed from the captured states."""
    same = total = 0
    for answer, lists in drafted:
        ids, aux = torch.tensor(answer.ids), answer.states[:, :-1].flatten(1)
        for one in lists:
            known = one.position + 1 < len(answer.ids)
            if not known or answer.ids[one.position + 1] != one.next_token:
                continue
            tokens = torch.tensor(one.draft_ids)
            _, logits = draft_logits(drafter, target, ids, aux, one.position, len(tokens), tokens)
            drafts = torch.searchsorted(target.draft_ids, tokens).clamp(max=logits.shape[-1] - 1)
            found = target.draft_ids[drafts] == tokens
            same += bool((found & leads(logits, drafts, rounding.slack)).all())
            total += 1
    reason = f"{same} of {total} draft lists are those computed from captured states"
    if not total or same < rounding.share * total:
        fix = (
            "the drafter is fed other layers, positions or tokens while serving than while training"
        )
        return Check("draft_parity", "fail", reason, fix)
    return Check("draft_parity", "ok", reason)


def lossless(
    plain: Sequence[Answer],
    served: Sequence[tuple[int, ...]],
    weights: FrozenWeights,
    eps: float,
    rounding: Rounding,
) -> Check:
    """Whether greedy answers with a drafter are those without, or part only where two tokens tie."""
    same, ties = 0, []
    for answer, ids in zip(plain, served, strict=True):
        if answer.ids == ids:
            same += 1
            continue
        at = next(
            (i for i, pair in enumerate(zip(answer.ids, ids, strict=False)) if len(set(pair)) > 1),
            0,
        )
        logits = teacher_logits(answer.states[at - 1 : at], weights, eps)
        ties.append(at > 0 and bool(leads(logits, torch.tensor([ids[at]]), rounding.slack)))
    reason = f"{same} of {len(plain)} greedy answers are the same with a drafter as without"
    if not all(ties):
        return Check("lossless", "fail", reason, "compare in float32")
    if ties:
        reason += f"; {len(ties)} part where two tokens are within rounding"
    return Check("lossless", "ok", reason)


def live_checks(config: JobConfig, facts: TargetFacts) -> list[Check]:
    """Boot, capture, serve, compare. Engines start and stop one after the other."""
    started = time.monotonic()
    checks: list[Check] = []
    try:
        spec = capture_spec(config, facts)
        answers, alone, more = captured_answers(config, facts, spec)
        checks += more
        if alone:
            weights, allowed = read_frozen(facts.path), _rounding(spec)
            checks.append(teacher_parity(answers, weights, facts.rms_norm_eps, allowed))
            checks += _stressed(spec, answers, alone, facts.mla is not None)
            checks += _served(config, facts, spec, answers, weights)
    except EngineError as error:
        checks.append(Check("engine_start", "fail", str(error), "see docs/preflight.md"))
    checks.append(Check("live_time", "ok", f"{time.monotonic() - started:.0f} s"))
    return checks


@contextmanager
def _engine(spec: EngineSpec) -> Iterator[Engine]:
    engine = Engine(spec)
    try:
        yield engine
    finally:
        engine.close()


def capture_spec(config: JobConfig, facts: TargetFacts) -> EngineSpec:
    """The job's capture engine; an engine that computes in float32 is compared in float32."""
    boundaries = resolve_boundaries(config.drafter.aux_layers, facts.num_layers)
    return replace(
        spec_for(config, "capture", boundaries),
        model=str(facts.path),
        tokenizer=config.target.tokenizer or str(facts.path),
        capture_dtype="float32" if config.engine.dtype == "float32" else "bfloat16",
        v1_runner=True,
    )


def _rounding(spec: EngineSpec) -> Rounding:
    return EXACT if spec.capture_dtype == "float32" else ROUNDED


def captured_answers(
    config: JobConfig, facts: TargetFacts, spec: EngineSpec
) -> tuple[list[Answer], list[Tensor], list[Check]]:
    """Answers with their states, the same samples prefilled alone, and what can be said of both."""
    renderer = Renderer.load(spec.tokenizer, spec.trust_remote_code, config.corpus.template_kwargs)
    with _engine(spec) as engine:
        requests = []
        for index, question in enumerate(QUESTIONS[: config.preflight.live_samples]):
            ids = tuple(renderer.prompt_ids([{"role": "user", "content": question}]))
            room = min(ANSWER_TOKENS, spec.max_model_len - len(ids))
            requests.append(Request(str(index), ids, room, capture=True))
        answers = []
        for future in [engine.submit(request) for request in requests]:
            done = future.result()
            assert done.captured is not None
            states = done.captured.hidden.float().clone()
            done.captured.release()
            prompt = done.generation.prompt_ids
            answers.append(Answer(prompt + done.generation.output_ids, len(prompt), states))
        complete = states_complete(answers, facts.hidden_size, len(spec.boundaries))
        if complete.verdict == "fail":
            return answers, [], [complete]
        alone = [states for answer in answers for states in _prefill(engine, [answer])]
        started = engine.facts()
        checks = [
            Check("engine_start", "ok", f"{started.resolved_class} in {started.start_s:.0f} s"),
            complete,
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
    """States of the answers' tokens, read in one go."""
    pack = engine.capture([np.asarray(answer.ids[:-1], dtype=np.int32) for answer in answers])
    whole = pack.hidden.float().clone()
    pack.release()
    return list(torch.split(whole, [len(answer.ids) - 1 for answer in answers]))


def _stressed(
    spec: EngineSpec, answers: list[Answer], alone: list[Tensor], mla: bool
) -> list[Check]:
    """The same samples read in small parts, then again from the prefix cache."""
    if mla and not torch.cuda.is_available():
        reason = "not run: vLLM's CPU backend never finishes a chunked MLA prompt"
        return [Check("chunked_prefill", "warn", reason), Check("prefix_hit", "warn", reason)]
    small = replace(
        spec,
        prefix_caching=True,
        chunked_prefill=True,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=min(spec.max_num_seqs, 8),
        # The CPU backend's blocks of 128 tokens are longer than a sample, so nothing would hit.
        block_size=None if torch.cuda.is_available() else 32,
    )
    with _engine(small) as engine:
        chunked = [states for answer in answers for states in _prefill(engine, [answer])]
        hit = [states for answer in answers for states in _prefill(engine, [answer])]
    return [
        agreement("chunked_prefill", alone, chunked, _rounding(spec)),
        agreement("prefix_hit", alone, hit, _rounding(spec)),
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
        served = ServedTarget(
            vocab_size=facts.vocab_size,
            hidden_size=facts.hidden_size,
            num_layers=facts.num_layers,
            serving_len=spec.max_model_len,
        )
        write_checkpoint(
            directory,
            drafter.spec,
            drafter.state_dict(),
            target.d2t,
            spec.boundaries[:-1],
            served,
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
        with _engine(serve) as engine:
            engine.record_drafts()
            for answer in answers:
                prompt = answer.ids[: answer.prompt_tokens]
                room = min(ANSWER_TOKENS, spec.max_model_len - len(prompt))
                (generation,) = engine.generate([Request("draft", prompt, room)])
                spoken.append(prompt + generation.output_ids)
                drafted.append((answer, engine.take_drafts()))
    return [
        lossless(answers, spoken, weights, facts.rms_norm_eps, _rounding(spec)),
        draft_parity(drafted, drafter, target, _rounding(spec)),
    ]
