"""`evaluate`: what the drafter is worth in the engine, on prompts training never saw.

A plain engine answers first (speed without drafter, reference answers); a capture engine reads its greedy answers for
the walked estimate; then one serving engine per drafter shape measures each drafter on the same prompts.
Produces evaluate/evaluation.json and the model card's acceptance table.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from eagle3_train import provenance
from eagle3_train.config import JobConfig
from eagle3_train.drafter.checkpoint_format import read_config
from eagle3_train.drafter.model_card import write_card
from eagle3_train.drafter.walk import Acceptance
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.runlog import log, read_metrics
from eagle3_train.stages.evaluate_engine import (
    Passes,
    Plain,
    Sampled,
    hardware,
    measure_drafters,
    measure_plain,
)
from eagle3_train.stages.evaluate_prompts import evaluation_prompts, leaked
from eagle3_train.stages.evaluate_statistics import (
    Measurement,
    agreement,
    best_k,
    paired_difference,
    pooled,
    served_row,
)
from eagle3_train.stages.evaluate_walk import Walks, walk_answers_of

Json = dict[str, Any]

GAP = 0.05
LOOPS = 0.1
DISAGREEMENT = 0.001


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
    drafters = {"trained": paths.drafter.resolve()}
    if config.evaluate.untrained:
        drafters["untrained"] = paths.untrained_drafter.resolve()
    if config.evaluate.against:
        drafters["other"] = Path(config.evaluate.against).resolve()
    prompts = evaluation_prompts(config)
    leaks = leaked(config, prompts)
    plain, prompts = measure_plain(config, prompts)
    walks: dict[str, Walks] = {}
    if config.evaluate.sampling.temperature == 0:  # only greedy answers can be walked
        first = config.evaluate.concurrency[0]
        answers = {name: m.answers for (name, count), m in plain.passes.items() if count == first}
        walks = walk_answers_of(config, drafters, answers, plain.facts.dtype)
    served, sampled = measure_drafters(config, prompts, drafters)
    result = compose(config, plain, served, walks, sampled, leaks) | {"inputs": inputs}
    for alarm in result["alarms"]:
        log.warning("evaluate: ALARM %s", alarm)
    write_atomic(paths.evaluation, json.dumps(result, indent=1))
    write_card(paths.drafter, result["rows"])
    return result


def compose(
    config: JobConfig,
    plain: Plain,
    served: dict[str, Passes],
    walks: dict[str, Walks],
    sampled: Sampled,
    leaks: list[str],
) -> Json:
    """evaluation.json: rows, pooled figures of each drafter at the first concurrency, estimates, alarms."""
    temperature, facts = config.evaluate.sampling.temperature, plain.facts
    exact = temperature == 0 and facts.dtype == "float32"
    common = {
        "temperature": temperature,
        "engine": facts.engine,
        "engine_dtype": facts.dtype,
        "hardware": hardware(config),
        "commit": provenance.commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    first = config.evaluate.concurrency[0]
    rows: list[Json] = []
    overall: dict[str, Json] = {}
    for drafter, passes in served.items():
        walked = {name: reduce(add, group) for name, group in walks.get(drafter, {}).items()}
        for (dataset, count), measured in passes.items():
            names = {"dataset": dataset, "drafter": drafter, "concurrency": count}
            compared = plain.passes[dataset, first], plain.passes.get((dataset, count))
            row = served_row(measured, *compared, walked.get(dataset), exact)
            rows.append(names | row | common)
        count = next(iter(passes))[1]
        names = {"dataset": "all", "drafter": drafter, "concurrency": count}
        everything: Acceptance | None = reduce(add, walked.values()) if walked else None
        whole, alone = _at(passes, count), _at(plain.passes, first)
        assert whole is not None
        assert alone is not None
        row = served_row(whole, alone, _at(plain.passes, count), everything, exact)
        overall[drafter] = names | row | common
    ours = overall["trained"]
    verdicts = [row["lossless"] for row in rows if row["lossless"] is not None]
    k = config.evaluate.num_speculative_tokens
    result = {
        "num_speculative_tokens": k,
        "expected_acceptance_length": ours["expected_acceptance_length"],
        "expected_in_training": expected_in_training(config),
        "expected_by_k": ours["expected_by_k"],
        "best_k": best_k(ours["expected_by_k"], k, ours["acceptance_length"], ours["speedup"]),
        "lossless": all(verdicts) if verdicts else None,
        "sampled_agreement": _sampled_agreement(plain, served, sampled, first, temperature),
        "trained": ours,
        "untrained": overall.get("untrained"),
        "other": overall.get("other"),
        "difference_to_other": differences(served, first),
        "rounds": rounds(served["trained"], walks.get("trained", {}), first, k),
        "leaked": leaks,
        "rows": rows,
        **common,
    }
    return result | {"alarms": alarms(result, first)}


def expected_in_training(config: JobConfig) -> float | None:
    """Expected acceptance length of the exported step at the last held-out evaluation of training."""
    paths = RunDir(config.run_path)
    step = read_config(paths.drafter)["eagle3_train"]["steps"]
    key = "eval/expected_acceptance_length"
    found = [m[key] for m in read_metrics(paths.metrics) if key in m and m["step"] <= step]
    return found[-1] if found else None


def _at(passes: Passes, concurrency: int) -> Measurement | None:
    """All datasets at one concurrency as one; None when it was not measured."""
    parts = [measured for (_, count), measured in passes.items() if count == concurrency]
    return pooled(parts) if parts else None


def differences(served: dict[str, Passes], concurrency: int) -> dict[str, Json | None] | None:
    """Trained minus other on the same prompts, by dataset; null where counters are not per request."""
    if "other" not in served:
        return None
    pairs = {
        dataset: (measured.answers, served["other"][dataset, count].answers)
        for (dataset, count), measured in served["trained"].items()
        if count == concurrency
    }
    ours, theirs = zip(*pairs.values(), strict=True)
    pairs["all"] = (sum(ours, ()), sum(theirs, ()))
    return {dataset: paired_difference(*pair) for dataset, pair in pairs.items()}


def rounds(passes: Passes, walks: Walks, concurrency: int, k: int) -> list[tuple[int, int]]:
    """Drafting rounds of each answer, walked and served: equal in float32. Empty without counters per request."""
    return [
        (int(walk.rounds[k - 1]), answer.num_drafts)
        for dataset, group in walks.items()
        for walk, answer in zip(group, passes[dataset, concurrency].answers, strict=True)
        if answer.num_drafts is not None
    ]


def _sampled_agreement(
    plain: Plain, served: dict[str, Passes], sampled: Sampled, first: int, temperature: float
) -> float | None:
    """p-value of the sampled answers, else of what was measured at a temperature; null when all is greedy."""
    if sampled:
        return agreement(plain.sampled, sampled)
    if not temperature:
        return None
    alone, drafted = (
        [[a.output_ids] for (_, count), m in passes.items() if count == first for a in m.answers]
        for passes in (plain.passes, served["trained"])
    )
    return agreement(alone, drafted)


def alarms(result: Json, first: int) -> list[str]:
    """What a reader must not miss."""
    found = []
    for row in result["rows"]:
        if row["drafter"] != "trained" or row["concurrency"] != first:
            continue
        expected, served = row["expected_acceptance_length"], row["acceptance_length"]
        low, high = row["acceptance_length_kept"] * (1 - GAP), served * (1 + GAP)
        if expected is not None and not low <= expected <= high:
            found.append(
                f"{row['dataset']}: served acceptance length {served:.2f} and {expected:.2f} expected from "
                f"walking the same answers differ by more than {GAP:.0%}"
            )
        if row["looping"] > LOOPS:
            found.append(
                f"{row['dataset']}: {row['looping']:.0%} of the answers run in loops, which flatters acceptance "
                f"(distinct bigrams {row['distinct_bigram']:.2f})"
            )
    if result["lossless"] is False:
        found.append("answers with drafter differ from answers without")
    agrees = result["sampled_agreement"]
    if agrees is not None and agrees < DISAGREEMENT:
        found.append(
            f"sampled answers with and without drafter are not of one distribution (p = {agrees:.4f})"
        )
    if leaks := result["leaked"]:
        found.append(
            f"{len(leaks)} of {result['trained']['requests']} prompts resemble training prompts: "
            + ", ".join(leaks[:5])
        )
    return found
