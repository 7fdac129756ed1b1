"""The record of a run as summary.json, report.md, figures and one self-contained index.html.

Reads what the other stages wrote (metrics.jsonl, train/result.json, evaluate/evaluation.json, timings,
provenance) and computes nothing that was not measured. `card` is what a terminal shows at the end.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from eagle3_train.config import JobConfig
from eagle3_train.drafter.model_card import interval, number, served, shares, yes
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.runlog import log, read_metrics
from eagle3_train.stages.report_page import (
    Document,
    Table,
    draw_figures,
    html,
    markdown,
    trained_tokens,
)

Json = dict[str, Any]

OF_THE_UNTRAINED = ("acceptance_length", "per_position_acceptance")
OF_TRAINING = (
    *("samples_expected", "samples_trained", "steps"),
    *("peak_bytes_in_flight", "hidden_state_bytes_total"),
)
CHANGE_TOLERANCE = 0.05
COMPARED = {  # summary key -> +1 when larger is better
    "acceptance_length": 1,
    "expected_acceptance_length": 1,
    "distinct_bigram": 1,
    "speedup": 1,
    "tokens_per_s": 1,
    "train_tokens_per_s": 1,
    "final_loss": -1,
    "peak_bytes_in_flight": -1,
    "total_wall_s": -1,
}


def run(config: JobConfig) -> Json:
    """Write the report of a finished run and return its summary.

    `config.report.against` names another run's directory; changes beyond 5 % are flagged. Raises
    ValueError naming the stage to run first when its output is missing.
    """
    run_dir = RunDir(config.run_path)
    summary = summarise(config, run_dir)
    changes: Table = []
    if other := config.report.against:
        before = _read(RunDir(other).report / "summary.json", f"report of {other.name}, or another")
        changes = compare(summary, before)
    figures = draw_figures(read_metrics(run_dir.metrics), summary)
    for name, svg in figures.items():
        write_atomic(run_dir.report / f"{name}.svg", svg)
    write_atomic(run_dir.report / "summary.json", json.dumps(summary, indent=2) + "\n")
    document = compose(summary, changes)
    write_atomic(run_dir.report / "report.md", markdown(document, list(figures)))
    write_atomic(run_dir.report / "index.html", html(document, figures))
    log.info("report: %s", run_dir.report / "index.html")
    return summary


def summarise(config: JobConfig, run_dir: RunDir) -> Json:
    """Every number a reader asks first, flat; null where the run did not measure it."""
    trained = _read(run_dir.train_result, "train")
    evaluation = _read(run_dir.evaluation, "evaluate")
    provenance = _read(run_dir.provenance, "train")
    wall_s = _read(run_dir.timings, "train")
    steps = [line for line in read_metrics(run_dir.metrics) if "train/loss" in line]
    ours, before, rows = (evaluation.pop(key) for key in ("trained", "untrained", "rows"))
    return {
        "name": config.name,
        "target": Path(config.target.path).name,
        **ours,
        **{f"{key}_untrained": before[key] if before else None for key in OF_THE_UNTRAINED},
        **evaluation,
        "evaluation_rows": rows,
        **{key: trained[key] for key in OF_TRAINING},
        "tokens_trained": int(max(trained_tokens(steps)[1])),
        "final_loss": steps[-1]["train/loss"] if steps else None,
        "train_tokens_per_s": _median([line["perf/tokens_per_s"] for line in steps]),
        "data_wait_frac": _median([line["perf/data_wait_frac"] for line in steps]),
        "max_bytes_in_flight": config.stream.max_bytes_in_flight,
        "wall_s": wall_s,
        "total_wall_s": sum(wall_s.values()),
        "versions": provenance["versions"],
        "commit": provenance["commit"],
    }


def compare(summary: Json, other: Json) -> Table:
    """Changes beyond 5 % against another run's summary."""
    changes = []
    for key, sign in COMPARED.items():
        after, before = summary[key], other.get(key)
        if after is None or not before:
            continue
        change = after / before - 1.0
        if abs(change) > CHANGE_TOLERANCE:
            changes.append(
                {
                    "number": key,
                    "before": number(before),
                    "after": number(after),
                    "change": f"{change:+.1%}",
                    "verdict": "better" if change * sign > 0 else "WORSE",
                }
            )
    return changes


def card(summary: Json) -> str:
    """The run in a box, for the terminal."""
    document = compose(summary, [])
    lines = [document.title, ""]
    lines += [f"{name:<24}{value:<7} {note}" for name, (value, note) in document.tiles.items()]
    lines += [f"{name:<24}{value}" for name, value in document.facts.items()]
    for alarm in document.alarms:
        lines += wrap(f"ALARM  {alarm}", 96, subsequent_indent="       ")
    width = max(map(len, lines))
    bar = "+" + "-" * (width + 2) + "+"
    return "\n".join([bar, *(f"| {line:<{width}} |" for line in lines), bar])


def _tiles(summary: Json) -> dict[str, tuple[str, str]]:
    """The numbers a reader looks for first, and what each means."""
    k, agrees = summary["num_speculative_tokens"], summary["sampled_agreement"]
    return {
        "acceptance length": (
            number(summary["acceptance_length"]),
            f"{k} draft tokens, 95 % interval {interval(summary['acceptance_interval'])}",
        ),
        "before training": (number(summary["acceptance_length_untrained"]), "same drafter, step 0"),
        "expected": (
            number(summary["expected_acceptance_length"]),
            "walked over the same greedy answers; "
            f"{number(summary['expected_in_training'])} at the last evaluation of training",
        ),
        "speedup": (
            number(summary["speedup"], "x"),
            f"at concurrency {summary['concurrency']}, same engine without drafter, "
            f"95 % interval {interval(summary['speedup_interval'])}",
        ),
        "lossless": (
            yes(summary["lossless"]),
            "greedy tokens with and without drafter"
            + ("" if agrees is None else f"; sampled answers agree with p = {agrees:.3f}"),
        ),
        "distinct bigrams": (number(summary["distinct_bigram"]), "loops flatter acceptance"),
    }


def compose(summary: Json, changes: Table) -> Document:
    """What the report says, before it is Markdown, HTML or a box."""
    k = summary["num_speculative_tokens"]
    stages = ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in summary["wall_s"].items())
    facts = {
        "accepted per position": shares(summary["per_position_acceptance"]),
        "samples trained": f"{summary['samples_trained']} of {summary['samples_expected']}"
        f" (sample x epoch), {summary['steps']} steps",
        "hidden states in flight": f"{mib(summary['peak_bytes_in_flight'])} peak,"
        f" {mib(summary['max_bytes_in_flight'])} allowed,"
        f" {mib(summary['hidden_state_bytes_total'])} in one epoch",
        "final loss": number(summary["final_loss"]),
        "best k": f"{summary['best_k']} (predicted from the walk and the speed measured at {k})"
        if summary["best_k"]
        else "none: no walk, no plain speed, or no gain at any",
        "wall time": f"{summary['total_wall_s']:.0f} s ({stages})",
        "hardware": summary["hardware"],
        "commit": summary["commit"],
    }
    versions = ", ".join(f"{name} {v}" for name, v in summary["versions"].items())
    tables = {
        "Changes beyond 5 %": changes,
        "Served": [served(row) for row in summary["evaluation_rows"]],
        "Against the other drafter": [
            {
                "dataset": row["dataset"],
                "acceptance length, trained minus other": number(row["difference"]),
                "95 % interval": interval(row["interval"]),
            }
            for row in summary["difference_to_other"] or []
        ],
        "By context length": [
            {
                "tokens of prompt and answer": bound,
                "answers": str(row["requests"]),
                "acceptance length": number(row["acceptance_length"]),
                "per position": shares(row["per_position_acceptance"]),
                "given all before": shares(row["conditional_acceptance"]),
            }
            for bound, row in (summary["acceptance_by_context"] or {}).items()
        ],
        "Run": [{"fact": n, "value": text} for n, text in {**facts, "versions": versions}.items()],
    }
    title = f"{summary['name']}: EAGLE-3 drafter for {summary['target']}"
    found = {name: table for name, table in tables.items() if table}
    return Document(title, summary["alarms"], _tiles(summary), facts, found)


def mib(count: int) -> str:
    """Bytes as MiB."""
    return f"{count / 2**20:.1f} MiB"


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _read(path: Path, stage: str) -> Json:
    if not path.is_file():
        raise ValueError(f"no {path}: run the {stage} stage before the report")
    content: Json = json.loads(path.read_text())
    return content
