"""`evaluate`: what the drafter is worth in the engine, on prompts training never saw.

A plain engine answers first (speed without drafter, reference answers); one serving engine per drafter shape measures
each drafter on the same prompts; then a capture engine reads the plain engine's greedy answers for the walked estimate.
Produces evaluate/evaluation.json and the model card's acceptance table.
"""

from __future__ import annotations

import json
import shutil
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
from eagle3_train.preflight.drafter import fitting
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.runlog import log, read_metrics
from eagle3_train.stages.evaluate_engine import (
    Datasets,
    Measured,
    depends_on,
    hardware,
    measure_drafters,
    measure_plain,
)
from eagle3_train.stages.evaluate_prompts import evaluation_prompts, leaked
from eagle3_train.stages.evaluate_statistics import (
    agreement,
    best_k,
    paired_difference,
    pooled,
    served_row,
)
from eagle3_train.stages.evaluate_walk import Walks, walk_answers_of
from eagle3_train.target.facts import read_facts

Json = dict[str, Any]

GAP = 0.05
LOOPS = 0.1
DISAGREEMENT = 0.001


def run(config: JobConfig) -> Json:
    """Measure and return the content of evaluation.json; what was measured with these settings stays.

    Raises ValueError when a drafter is missing or no prompt to evaluate on.
    """
    paths = RunDir(config.run_path)
    drafters = {"trained": paths.drafter.resolve()}
    if config.evaluate.untrained:
        drafters["untrained"] = paths.untrained_drafter.resolve()
    for directory in drafters.values():
        if not (directory / "config.json").is_file():
            raise ValueError(f"no drafter in {directory}: run ray_jobs/export.py first")
    if config.evaluate.against:
        drafters["other"] = Path(config.evaluate.against).resolve()
        fitting(drafters["other"], config, read_facts(config.target.path))
    inputs = {name: depends_on(config, directory) for name, directory in drafters.items()}
    if paths.evaluation.is_file():
        done: Json = json.loads(paths.evaluation.read_text())
        if done["inputs"] == inputs:
            log.info("evaluate: %s is current", paths.evaluation)
            write_card(paths.drafter, done["rows"])  # an export made again says nothing of them
            return done
    prompts = evaluation_prompts(config)
    leaks = leaked(config, prompts)
    plain = measure_plain(config, prompts)
    served = measure_drafters(config, plain.prompts, drafters)
    walks: dict[str, Walks] = {}
    if config.evaluate.sampling.temperature == 0:  # only greedy answers can be walked
        first = plain.passes[config.evaluate.concurrency[0]]
        answers = {name: measured.answers for name, measured in first.items()}
        walks = walk_answers_of(config, drafters, answers, plain.facts.dtype)
    result = compose(config, plain, served, walks, leaks) | {"inputs": inputs}
    for alarm in result["alarms"]:
        log.warning("evaluate: ALARM %s", alarm)
    write_card(paths.drafter, result["rows"])
    write_atomic(paths.evaluation, json.dumps(result, indent=1))
    shutil.rmtree(paths.measured(), ignore_errors=True)  # another evaluation may have been faster
    return result


def compose(
    config: JobConfig,
    plain: Measured,
    served: dict[str, Measured],
    walks: dict[str, Walks],
    leaks: Json,
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
    for drafter, measured in served.items():
        walked = {name: reduce(add, group) for name, group in walks.get(drafter, {}).items()}
        everything: Acceptance | None = reduce(add, walked.values()) if walked else None
        for count, passes in measured.passes.items():
            names = {"drafter": drafter, "concurrency": count}
            alone, beside = plain.passes[first], plain.passes.get(count)
            for dataset, one in passes.items():
                compared = alone[dataset], beside[dataset] if beside else None
                row = served_row(one, *compared, walked.get(dataset), exact)
                rows.append({"dataset": dataset} | names | row | common)
            if drafter not in overall:
                compared = pooled(alone), pooled(beside) if beside else None
                row = served_row(pooled(passes), *compared, everything, exact)
                overall[drafter] = {"dataset": "all"} | names | row | common
    ours = overall["trained"]
    verdicts = [row["lossless"] for row in rows if row["lossless"] is not None]
    k = config.evaluate.num_speculative_tokens
    result = {
        "expected_in_training": expected_in_training(config),
        "best_k": best_k(ours["expected_by_k"], k, ours["acceptance_length"], ours["speedup"]),
        "lossless": all(verdicts) if verdicts else None,
        "sampled_agreement": _sampled_agreement(plain, served["trained"], first, temperature),
        "trained": ours,
        "untrained": overall.get("untrained"),
        "other": overall.get("other"),
        "difference_to_other": differences(served, first),
        "rounds": rounds(served["trained"].passes[first], walks.get("trained", {}), k),
        "leaked": leaks,
        "rows": rows,
    }
    return result | {"alarms": alarms(result, first)}


def expected_in_training(config: JobConfig) -> float | None:
    """Expected acceptance length of the exported step at the last held-out evaluation of training."""
    paths = RunDir(config.run_path)
    step = read_config(paths.drafter)["eagle3_train"]["steps"]
    key = "eval/expected_acceptance_length"
    found = [m[key] for m in read_metrics(paths.metrics) if key in m and m["step"] <= step]
    return found[-1] if found else None


def differences(served: dict[str, Measured], concurrency: int) -> list[Json] | None:
    """Rows of trained minus other on the same prompts, all together last; none without counters per request."""
    if "other" not in served:
        return None
    ours, theirs = (served[name].passes[concurrency] for name in ("trained", "other"))
    pairs = [(name, measured, theirs[name]) for name, measured in ours.items()]
    return [
        {"dataset": name} | difference
        for name, left, right in [*pairs, ("all", pooled(ours), pooled(theirs))]
        if (difference := paired_difference(left.answers, right.answers))
    ]


def rounds(served: Datasets, walks: Walks, k: int) -> list[tuple[int, int]]:
    """Drafting rounds of each answer, walked and served: equal in float32. Empty without counters per request."""
    return [
        (int(walk.rounds[k - 1]), answer.num_drafts)
        for dataset, group in walks.items()
        for walk, answer in zip(group, served[dataset].answers, strict=True)
        if answer.num_drafts is not None
    ]


def _sampled_agreement(
    plain: Measured, trained: Measured, first: int, temperature: float
) -> float | None:
    """p-value of the sampled answers, else of what was measured at a temperature; null when all is greedy."""
    if trained.sampled:
        return agreement(plain.sampled, trained.sampled)
    if not temperature:
        return None
    alone, drafted = (
        [[answer.output_ids] for answer in pooled(side.passes[first]).answers]
        for side in (plain, trained)
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
    found += [
        f"{len(ids)} of {one['of']} {kind} resemble training prompts: {', '.join(ids[:5])}"
        for kind, one in result["leaked"].items()
        if (ids := one["leaked"])
    ]
    return found
