"""The engines of an evaluation: asked, timed and counted; one without drafter, one for each shape of drafter.

What each measured is kept as JSON in evaluate/measured/, so that an evaluation that dies goes on from there.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import ray
from pydantic import TypeAdapter

from eagle3_train.config import JobConfig
from eagle3_train.corpus.benchmark import HELD_OUT
from eagle3_train.corpus.read import fingerprint
from eagle3_train.drafter.checkpoint_format import read_config
from eagle3_train.engines.pool import engine_pool, spec_for
from eagle3_train.engines.spec import Acceptance, EngineSpec, Request
from eagle3_train.provenance import digests
from eagle3_train.records import EngineFacts, Generation, Prompt
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.runlog import log
from eagle3_train.stages.evaluate_prompts import Prompts, requests, with_followups
from eagle3_train.stages.evaluate_statistics import Answer, Measurement, Timed, Tokens

Datasets = dict[str, Measurement]
"""Dataset -> its measurement."""
Passes = dict[int, Datasets]
"""Concurrency -> one pass over every dataset."""
Sampled = list[list[Tokens]]
"""For each prompt, its sampled answers."""

WARM_UP_TOKENS = 32
SLICES = 10  # a pass is timed in
PASS_ROUNDS = 4  # requests of a pass, in multiples of the concurrency, at least
SAMPLED_TOKENS = 16
MOST_CONCURRENT = 56  # a replica answers 64 callers at once
# The untrained drafter is slow and only its acceptance matters, which does not depend on concurrency.
UNTRAINED = (8,)
# Answers that are compared as distributions must not share their random numbers.
PLAIN_SEED, DRAFTED_SEED = 0, 1_000_000


def answering(replica: Any, requests: Sequence[Request], concurrency: int) -> Iterator[Generation]:
    """Answers as they come, `concurrency` requests in flight at any time."""
    waiting = deque(requests)
    flying: list[Any] = []
    while waiting or flying:
        while waiting and len(flying) < concurrency:
            flying.append(replica.generate.remote([waiting.popleft()]))
        done, flying = ray.wait(flying)
        for generation in (answer for reference in done for answer in ray.get(reference)):
            if generation.finish_reason == "error":
                raise ValueError(f"the engine refused {generation.id}: {generation.text}")
            yield generation


def ask(replica: Any, requests: Sequence[Request], concurrency: int) -> list[Generation]:
    """Answers in order of `requests`."""
    found = {answer.id: answer for answer in answering(replica, requests, concurrency)}
    return [found[request.id] for request in requests]


@contextmanager
def serving(spec: EngineSpec) -> Iterator[Any]:
    """A replica for the duration, ready for as many requests as are ever in flight and no more: it starts sooner."""
    spec = spec.with_engine(replicas=1, max_num_seqs=min(spec.engine.max_num_seqs, MOST_CONCURRENT))
    with engine_pool(spec) as pool:
        (replica,) = ray.get(pool.handles.remote()).values()
        yield replica


def measure(
    replica: Any, asked: Sequence[Request], concurrency: int, seconds: float
) -> Measurement:
    """Answer all, one at a time with counters of its own for each, or with `concurrency` in flight at any time.

    In flight together, the prompts are repeated so that the tail of a pass, when fewer are left, stays short, and
    passes until they have taken `seconds`; with 0 every prompt is asked once, which suffices where no time is compared.
    """
    before: Acceptance = ray.get(replica.acceptance.remote())
    answers, counters = [], before
    timed: list[Timed] = []
    if concurrency == 1:
        for request in asked:
            earlier = counters
            (generation,), one = _timed(replica, [request], 1)
            counters = ray.get(replica.acceptance.remote())
            alone = counters - earlier
            own = alone.num_drafts, alone.accepted_per_position
            answers.append(Answer(request.id, generation.prompt_ids, generation.output_ids, *own))
            timed += one
    else:
        copies = math.ceil(PASS_ROUNDS * concurrency / len(asked)) if seconds else 1
        repeated = [replace(r, id=f"{r.id}#{copy}") for copy in range(copies) for r in asked]
        while not timed or sum(one.seconds for one in timed) < seconds:
            generations, more = _timed(replica, repeated, concurrency)
            timed += more
        counters = ray.get(replica.acceptance.remote())
        answers = [
            Answer(request.id, generation.prompt_ids, generation.output_ids)
            for request, generation in zip(asked, generations, strict=False)
        ]
    total = counters - before
    return Measurement(
        tuple(answers), (tuple(timed),), total.num_drafts, total.accepted_per_position
    )


def _timed(
    replica: Any, asked: Sequence[Request], concurrency: int
) -> tuple[list[Generation], list[Timed]]:
    """Answers in order of `asked`, and the time in SLICES of about as many answers, one after the other."""
    found, timed, requests, tokens = {}, [], 0, 0
    started = time.perf_counter()
    for generation in answering(replica, asked, concurrency):
        found[generation.id] = generation
        requests, tokens = requests + 1, tokens + len(generation.output_ids)
        if len(found) * SLICES // len(asked) > (len(found) - 1) * SLICES // len(asked):
            now = time.perf_counter()
            timed.append(Timed(requests, tokens, now - started))
            started, requests, tokens = now, 0, 0
    return [found[request.id] for request in asked], timed


def measure_all(
    config: JobConfig, replica: Any, prompts: Prompts, concurrency: Sequence[int], seed: int
) -> Passes:
    """Every dataset at every concurrency, after a warm-up on prompts of each dataset."""
    passes: Passes = {count: {} for count in concurrency}
    asked = {name: requests(config, group, seed) for name, group in prompts.items()}
    for count in concurrency:
        seconds = config.evaluate.seconds if count in config.evaluate.concurrency else 0.0
        warm = [
            replace(request, id=f"{name}/{i}", max_new_tokens=WARM_UP_TOKENS)
            for name, group in asked.items()
            for i, request in enumerate(islice(cycle(group), count))
        ]
        ask(replica, warm if seconds else [], count)
        for name, group in asked.items():
            passes[count][name] = found = measure(replica, group, count, seconds)
            log.info("evaluate: %s x%d | %.1f tok/s", name, count, found.tokens_per_s)
    return passes


def sample(config: JobConfig, replica: Any, prompts: Prompts, seed: int) -> Sampled:
    """evaluate.sampled_answers short answers to every prompt, at a temperature."""
    count = config.evaluate.sampled_answers
    once = [r for group in prompts.values() for r in requests(config, group, seed)]
    asked = [
        replace(
            request,
            id=f"{request.id}/{number}",
            max_new_tokens=SAMPLED_TOKENS,
            temperature=request.temperature or 1.0,
            seed=seed + number,
        )
        for number, request in enumerate(r for r in once for _ in range(count))
    ]
    ids = [answer.output_ids for answer in ask(replica, asked, MOST_CONCURRENT)]
    return [ids[first : first + count] for first in range(0, len(ids), count or 1)]


@dataclass(frozen=True, slots=True)
class Measured:
    """The target with one drafter or without: its passes, sampled answers, what the engine says of itself."""

    passes: Passes
    sampled: Sampled
    facts: EngineFacts

    @property
    def prompts(self) -> Prompts:
        """What was asked, later turns included."""
        first = next(iter(self.passes.values()))
        return {
            name: [
                Prompt(answer.id, "", np.array(answer.prompt_ids, dtype=np.int32), "null")
                for answer in measured.answers
            ]
            for name, measured in first.items()
        }


KEPT = TypeAdapter(tuple[dict[str, Any], Measured])


def read_kept(config: JobConfig, name: str, directory: Path | None = None) -> Measured | None:
    """What was measured, of the drafter in `directory` or without one, before an evaluation with these settings died."""
    path = RunDir(config.run_path).measured(name)
    if not path.is_file():
        return None
    made_with, measured = KEPT.validate_json(path.read_bytes())
    return measured if made_with == depends_on(config, directory) else None


def keep(config: JobConfig, name: str, directory: Path | None, measured: Measured) -> None:
    """Write what `read_kept` reads."""
    content = KEPT.dump_json((depends_on(config, directory), measured))
    write_atomic(RunDir(config.run_path).measured(name), content)


def depends_on(config: JobConfig, directory: Path | None) -> dict[str, Any]:
    """What a measurement depends on: the engine too (a speedup compares one engine), not what is beside it."""
    drafter = directory and [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    files = [source for source in config.evaluate.sources if source != HELD_OUT]
    rollout = RunDir(config.run_path).rollout_state
    held_out = HELD_OUT in config.evaluate.sources and rollout.is_file()
    return {
        "drafter": drafter and [str(directory), *digests(drafter)],
        "prompts": [files and fingerprint(files), held_out and digests([rollout])],
        "settings": config.model_dump(
            mode="json",
            include={"target", "corpus", "engine", "evaluate"},
            exclude={"evaluate": {"untrained", "against"}},
        ),
    }


def measure_plain(config: JobConfig, prompts: Prompts) -> Measured:
    """What the target does alone with all prompts and their later turns."""
    if kept := read_kept(config, "plain"):
        return kept
    # Prompts go in whole, as they must while drafting: else the speedup compares two schedules.
    with serving(replace(spec_for(config, "plain"), chunked_prefill=False)) as replica:
        most = max(config.evaluate.concurrency)
        prompts = with_followups(config, lambda asked: ask(replica, asked, most), prompts)
        passes = measure_all(config, replica, prompts, config.evaluate.concurrency, PLAIN_SEED)
        sampled = sample(config, replica, prompts, PLAIN_SEED)
        measured = Measured(passes, sampled, ray.get(replica.facts.remote()))
    keep(config, "plain", None, measured)
    return measured


def measure_drafters(
    config: JobConfig, prompts: Prompts, drafters: dict[str, Path]
) -> dict[str, Measured]:
    """Each drafter, sampled answers for the trained one only. Drafters of one shape share an engine."""
    kept = {name: read_kept(config, name, directory) for name, directory in drafters.items()}
    served = {name: measured for name, measured in kept.items() if measured}
    while waiting := {n: path for n, path in drafters.items() if n not in served}:
        first = next(iter(waiting.values()))
        with serving(spec_for(config, "serve", drafter=str(first))) as replica:
            for name, directory in waiting.items():
                if not _same_shape(first, directory):
                    continue
                ray.get(replica.load_drafter.remote(str(directory)))
                log.info("evaluate: serving %s", directory)
                counts = config.evaluate.concurrency if name != "untrained" else UNTRAINED
                passes = measure_all(config, replica, prompts, counts, DRAFTED_SEED)
                samples = (
                    sample(config, replica, prompts, DRAFTED_SEED) if name == "trained" else []
                )
                served[name] = Measured(passes, samples, ray.get(replica.facts.remote()))
                keep(config, name, directory, served[name])
    return served


def _same_shape(left: Path, right: Path) -> bool:
    """Whether an engine started with one drafter can serve the other's weights."""
    own = ("eagle3_train", "dtype", "torch_dtype")
    a, b = ({k: v for k, v in read_config(d).items() if k not in own} for d in (left, right))
    return a == b


def hardware(config: JobConfig) -> str:
    """What the engine ran on."""
    ranks = config.engine.tensor_parallel
    if not config.engine.gpus_per_worker:
        return f"{os.cpu_count()} CPU cores ({platform.machine()})"
    kinds = [
        k.partition(":")[2] for k in ray.cluster_resources() if k.startswith("accelerator_type:")
    ]
    return f"{ranks} x {'/'.join(sorted(kinds)) or 'GPU'}"
