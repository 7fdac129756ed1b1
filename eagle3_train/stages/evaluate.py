"""`evaluate`: what the drafter is worth in the engine, on prompts training never saw.

A plain engine answers first (speed without drafter, reference answers); then one serving engine per drafter shape
measures each drafter on the same prompts. Produces evaluate/evaluation.json and the model card's acceptance table.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray

from eagle3_train import provenance
from eagle3_train.config import JobConfig
from eagle3_train.drafter.checkpoint_format import read_config
from eagle3_train.drafter.model_card import write_card
from eagle3_train.engines.pool import close_pool, spec_for, start_pool
from eagle3_train.engines.spec import Acceptance, Request
from eagle3_train.records import EngineFacts, Generation
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.runlog import log, read_metrics
from eagle3_train.stages.evaluate_prompts import (
    Prompts,
    evaluation_prompts,
    leaked,
    requests,
    with_followups,
)
from eagle3_train.stages.evaluate_statistics import (
    Answer,
    Measurement,
    best_k,
    paired_difference,
    pooled,
    served_row,
)

Json = dict[str, Any]
Passes = dict[tuple[str, int], Measurement]
"""Measurement of (dataset, concurrency)."""

WARM_UP_TOKENS = 32
GAP = 0.05
# The untrained drafter is slow and only its acceptance matters, which does not depend on concurrency.
UNTRAINED_CONCURRENCY = 8
LOOPS = 0.1


def run(config: JobConfig) -> Json:
    """Measure and return the content of evaluation.json; what was measured with these settings stays.

    Raises ValueError when there is no exported drafter or no prompt to evaluate on.
    """
    paths = RunDir(config.run_path)
    if not (paths.drafter / "config.json").is_file():
        raise ValueError(f"no drafter in {paths.drafter}: run ray_jobs/export.py first")
    inputs = {
        "drafter": read_config(paths.drafter)["eagle3_train"]["source"],
        "settings": config.evaluate.model_dump(mode="json"),
    }
    if paths.evaluation.is_file():
        done: Json = json.loads(paths.evaluation.read_text())
        if done["inputs"] == inputs:
            log.info("evaluate: %s is current", paths.evaluation)
            return done
    prompts = evaluation_prompts(config)
    leaks = leaked(config, prompts)
    plain, prompts, facts = measure_plain(config, prompts)
    served = measure_drafters(config, prompts)
    result = compose(config, plain, served, facts) | {"inputs": inputs}
    if leaks:
        result["alarms"].append(
            f"{len(leaks)} of {sum(map(len, prompts.values()))} prompts resemble training prompts: "
            + ", ".join(leaks[:5])
        )
    for alarm in result["alarms"]:
        log.warning("evaluate: ALARM %s", alarm)
    write_atomic(paths.evaluation, json.dumps(result, indent=1))
    write_card(paths.drafter, result["rows"])
    return result


class Server:
    """One engine replica, asked from here."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    def answer(self, requests: Sequence[Request], concurrency: int) -> list[Generation]:
        """Answers in order of `requests`, `concurrency` of them in flight at any time."""
        waiting, found = deque(requests), {}
        flying: list[Any] = []
        while waiting or flying:
            while waiting and len(flying) < concurrency:
                flying.append(self._replica.generate.remote([waiting.popleft()]))
            done, flying = ray.wait(flying)
            for generation in (answer for reference in done for answer in ray.get(reference)):
                if generation.finish_reason == "error":
                    raise ValueError(f"the engine refused {generation.id}: {generation.text}")
                found[generation.id] = generation
        return [found[request.id] for request in requests]

    def acceptance(self) -> Acceptance:
        """Counters since the engine started."""
        counters: Acceptance = ray.get(self._replica.acceptance.remote())
        return counters

    def facts(self) -> EngineFacts:
        """What the engine says of itself."""
        facts: EngineFacts = ray.get(self._replica.facts.remote())
        return facts

    def load_drafter(self, directory: Path) -> None:
        """Serve another drafter from now on."""
        ray.get(self._replica.load_drafter.remote(str(directory.resolve())))


@contextmanager
def serving(config: JobConfig, drafter: Path | None) -> Iterator[Server]:
    """An engine for the duration: with this drafter, or without one."""
    if drafter is None:
        spec = spec_for(config, "plain")
    else:
        spec = spec_for(config, "serve", drafter=str(drafter.resolve()))
    pool = start_pool(spec, config.engine.model_copy(update={"replicas": 1}))
    try:
        (replica,) = ray.get(pool.handles.remote()).values()
        yield Server(replica)
    finally:
        close_pool(pool)


def measure(engine: Server, asked: Sequence[Request], concurrency: int) -> Measurement:
    """Answer all with `concurrency` in flight; one at a time, each answer gets counters of its own."""
    before = engine.acceptance()
    answers, wall_s = [], 0.0
    if concurrency == 1:
        last = before
        for request in asked:
            started = time.perf_counter()
            (generation,) = engine.answer([request], 1)
            wall_s += time.perf_counter() - started
            now = engine.acceptance()
            alone = now - last
            counts = (alone.num_drafts, alone.num_accepted_tokens)
            answers.append(
                Answer(request.id, len(request.prompt_ids), generation.output_ids, *counts)
            )
            last = now
    else:
        started = time.perf_counter()
        generations = engine.answer(asked, concurrency)
        wall_s = time.perf_counter() - started
        answers = [Answer(g.id, len(g.prompt_ids), g.output_ids) for g in generations]
    total = engine.acceptance() - before
    accepted = total.num_accepted_tokens
    return Measurement(
        tuple(answers), wall_s, total.num_drafts, accepted, total.accepted_per_position
    )


def measure_all(
    config: JobConfig, engine: Server, prompts: Prompts, concurrency: Sequence[int]
) -> Passes:
    """Every dataset at every concurrency, after a short warm-up."""
    passes: Passes = {}
    first = requests(config, next(iter(prompts.values())))[0]
    for count in concurrency:
        warm = [replace(first, id=str(i), max_new_tokens=WARM_UP_TOKENS) for i in range(count)]
        engine.answer(warm, count)
        for name, group in prompts.items():
            passes[name, count] = measure(engine, requests(config, group), count)
            log.info("evaluate: %s x%d | %.1f tok/s", name, count, passes[name, count].tokens_per_s)
    return passes


def measure_plain(config: JobConfig, prompts: Prompts) -> tuple[Passes, Prompts, EngineFacts]:
    """Passes without drafter, all prompts with their later turns, and what the engine says of itself."""
    with serving(config, None) as engine:
        if config.evaluate.sources:
            most = max(config.evaluate.concurrency)
            prompts = with_followups(config, lambda asked: engine.answer(asked, most), prompts)
        passes = measure_all(config, engine, prompts, config.evaluate.concurrency)
        return passes, prompts, engine.facts()


def measure_drafters(config: JobConfig, prompts: Prompts) -> dict[str, Passes]:
    """Drafter -> passes. Drafters of one shape are swapped within one engine."""
    paths, settings = RunDir(config.run_path), config.evaluate.concurrency
    drafters = {"trained": (paths.drafter, settings)}
    if config.evaluate.untrained:
        drafters["untrained"] = (paths.untrained_drafter, (UNTRAINED_CONCURRENCY,))
    if config.evaluate.against:
        drafters["other"] = (Path(config.evaluate.against), settings)
    served: dict[str, Passes] = {}
    while waiting := [name for name in drafters if name not in served]:
        first = drafters[waiting[0]][0]
        with serving(config, first) as engine:
            for name in waiting:
                directory, concurrency = drafters[name]
                if _same_shape(first, directory):
                    engine.load_drafter(directory)
                    log.info("evaluate: serving %s", directory)
                    served[name] = measure_all(config, engine, prompts, concurrency)
    return served


def _same_shape(left: Path, right: Path) -> bool:
    """Whether an engine started with one drafter can serve the other's weights."""
    own = ("eagle3_train", "dtype", "torch_dtype")
    a, b = ({k: v for k, v in read_config(d).items() if k not in own} for d in (left, right))
    return a == b


def compose(
    config: JobConfig, plain: Passes, served: dict[str, Passes], facts: EngineFacts
) -> Json:
    """evaluation.json: rows, pooled figures of each drafter at the first concurrency, estimate, alarms."""
    sampling = config.evaluate.sampling
    exact = sampling.temperature == 0 and facts.dtype == "float32"
    common = {
        "temperature": sampling.temperature,
        "engine": facts.engine,
        "engine_dtype": facts.dtype,
        "hardware": hardware(config),
        "commit": provenance.commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    by_k = walked(config)
    k = config.evaluate.num_speculative_tokens
    expected = by_k[k - 1] if k <= len(by_k) else None
    first = config.evaluate.concurrency[0]
    rows: list[Json] = []
    overall: dict[str, Json] = {}
    for drafter, passes in served.items():
        for (dataset, count), measured in passes.items():
            names = {"dataset": dataset, "drafter": drafter, "concurrency": count}
            compared = plain[dataset, first], plain.get((dataset, count))
            rows.append(names | served_row(measured, *compared, exact) | common)
        count = next(iter(passes))[1]
        whole, reference = _at(passes, count), _at(plain, first)
        assert whole is not None
        assert reference is not None
        names = {"dataset": "all", "drafter": drafter, "concurrency": count}
        overall[drafter] = names | served_row(whole, reference, _at(plain, count), exact) | common
    ours = overall["trained"]
    verdicts = [row["lossless"] for row in rows if row["lossless"] is not None]
    return {
        "num_speculative_tokens": k,
        "expected_acceptance_length": expected,
        "expected_by_k": by_k,
        "best_k": best_k(by_k, k, ours["acceptance_length"], ours["speedup"]),
        "lossless": all(verdicts) if verdicts else None,
        "trained": ours,
        "untrained": overall.get("untrained"),
        "other": overall.get("other"),
        "difference_to_other": _difference(served, first),
        "rows": rows,
        "alarms": alarms(config, ours, expected, verdicts),
        **common,
    }


def walked(config: JobConfig) -> list[float]:
    """Expected acceptance length for k = 1.. of the exported step, from training's held-out evaluations."""
    paths = RunDir(config.run_path)
    step = read_config(paths.drafter)["eagle3_train"]["steps"]
    lines = [
        m for m in read_metrics(paths.metrics) if "eval/expected_by_k" in m and m["step"] <= step
    ]
    lengths: list[float] = lines[-1]["eval/expected_by_k"] if lines else []
    return lengths[: config.evaluate.max_k]


def _at(passes: Passes, concurrency: int) -> Measurement | None:
    """All datasets at one concurrency as one; None when it was not measured."""
    parts = [measured for (_, count), measured in passes.items() if count == concurrency]
    return pooled(parts) if parts else None


def _difference(served: dict[str, Passes], concurrency: int) -> list[float] | None:
    """95 % interval of trained minus other over the same prompts, where counters are per request."""
    if "other" not in served:
        return None
    ours, theirs = (
        pooled([m for (_, count), m in served[name].items() if count == concurrency]).answers
        for name in ("trained", "other")
    )
    return paired_difference(ours, theirs)


def alarms(
    config: JobConfig, ours: Json, expected: float | None, verdicts: list[bool]
) -> list[str]:
    """What a reader must not miss."""
    found = []
    low, high = ours["acceptance_length_kept"] * (1 - GAP), ours["acceptance_length"] * (1 + GAP)
    # The estimate walks held-out rollouts; other prompts have other acceptance.
    if expected is not None and not config.evaluate.sources and not low <= expected <= high:
        found.append(
            f"served acceptance length {ours['acceptance_length']:.2f} and expected {expected:.2f} "
            f"differ by more than {GAP:.0%}"
        )
    if ours["looping"] > LOOPS:
        found.append(
            f"{ours['looping']:.0%} of the answers run in loops, which flatters acceptance "
            f"(distinct bigrams {ours['distinct_bigram']:.2f})"
        )
    if not all(verdicts):
        found.append("answers with drafter differ from answers without")
    return found


def hardware(config: JobConfig) -> str:
    """What the engine ran on."""
    ranks = config.engine.tensor_parallel
    if not config.engine.gpus_per_worker:
        return f"{os.cpu_count()} CPU cores ({platform.machine()})"
    kinds = [
        k.partition(":")[2] for k in ray.cluster_resources() if k.startswith("accelerator_type:")
    ]
    return f"{ranks} x {'/'.join(sorted(kinds)) or 'GPU'}"
