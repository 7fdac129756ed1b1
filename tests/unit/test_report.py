"""The report says what was measured, flags what changed, and refuses to invent what is missing."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from eagle3_train.config import JobConfig
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.stages import report
from eagle3_train.stages.report_page import trained_tokens


def row(dataset: str, drafter: str, concurrency: int, length: float | None) -> dict[str, Any]:
    return {
        "dataset": dataset,
        "prompts": 4,
        "drafter": drafter,
        "concurrency": concurrency,
        "num_speculative_tokens": 3,
        "temperature": 0.0,
        "acceptance_length": length,
        "acceptance_interval": [length - 0.1, length + 0.1] if length else None,
        "per_position_acceptance": [0.6, 0.3, 0.1],
        "conditional_acceptance": [0.6, 0.5, 0.33],
        "acceptance_by_context": {
            "<= 256": {
                "requests": 4,
                "acceptance_length": length,
                "per_position_acceptance": [0.6, 0.3, 0.1],
                "conditional_acceptance": [0.6, 0.5, 0.33],
            }
        },
        "expected_acceptance_length": 1.88,
        "expected_by_k": [1.6, 1.8, 1.88],
        "expected_per_position": [0.59, 0.29, 0.1],
        "tokens_per_s": 41.0,
        "tokens_per_s_plain": 30.0,
        "speedup": 1.37,
        "speedup_interval": [1.3, 1.45],
        "distinct_bigram": 0.81,
        "lossless": True,
        "hardware": "2 CPU cores",
    }


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    config = JobConfig.model_validate(
        {
            "name": "unit",
            "runs_dir": tmp_path,
            "target": {"path": "models/target-a"},
            "stream": {"max_bytes_in_flight": 2**20},
        }
    )
    record(config)
    return config


def record(config: JobConfig) -> None:
    run = RunDir(config.run_path)
    lines: list[dict[str, Any]] = [
        {
            "step": s,
            "epoch": 0,
            "perf/tokens": 100,
            "train/loss": 5.0 / s,
            "perf/tokens_per_s": 90.0 + s,
            "perf/data_wait_frac": 0.25,
        }
        for s in range(1, 6)
    ]
    lines.insert(
        4,
        {
            "step": 4,
            "tokens": 400,
            "eval/expected_acceptance_length": 1.7,
            "eval/expected_by_k": [1.5],
        },
    )
    write_atomic(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    overall = row("all", "trained", 1, 1.9)
    evaluation = {
        "trained": overall,
        "untrained": row("all", "untrained", 1, 1.2) | {"per_position_acceptance": [0.2, 0.0, 0.0]},
        "expected_in_training": 1.77,
        "rounds": [[20, 20], [31, 30]],
        "sampled_agreement": 0.4,
        "difference_to_other": [{"dataset": "all", "difference": 0.31, "interval": [0.2, 0.42]}],
        "best_k": 2,
        "lossless": True,
        "alarms": ["prompts <b>leak</b>"],
        "rows": [row("gsm8k", "trained", c, 1.9) for c in (1, 8)]
        + [row("gsm8k", "untrained", 1, 1.2)],
    }
    trained = {
        "samples_expected": 10,
        "samples_trained": 10,
        "steps": 5,
        "peak_bytes_in_flight": 2**19,
        "hidden_state_bytes_total": 2**23,
    }
    for path, content in [
        (run.evaluation, evaluation),
        (run.train_result, trained),
        (run.timings, {"rollout": 60.0, "train": 200.0, "evaluate": 90.0}),
        (run.provenance, {"versions": {"torch": "2.13"}, "commit": "abc"}),
    ]:
        write_atomic(path, json.dumps(content))


def test_the_summary_holds_what_the_stages_measured_and_survives_json(config: JobConfig) -> None:
    summary = report.run(config)
    written = json.loads((RunDir(config.run_path).report / "summary.json").read_text())
    assert written == summary
    assert (written["acceptance_length"], written["acceptance_length_untrained"]) == (1.9, 1.2)
    assert written["tokens_trained"] == 500
    assert written["wall_s"] == {"rollout": 60.0, "train": 200.0, "evaluate": 90.0}


def test_every_figure_is_wellformed_svg_and_the_page_needs_no_other_file(config: JobConfig) -> None:
    report.run(config)
    folder = RunDir(config.run_path).report
    figures = sorted(path.stem for path in folder.glob("*.svg"))
    assert figures == ["positions", "rounds", "serving", "training"]
    for figure in figures:
        ElementTree.fromstring((folder / f"{figure}.svg").read_text())
    page = (folder / "index.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == len(figures)
    assert "http" not in page.replace("http://www.w3.org", "")


def test_contexts_and_the_other_drafter_have_tables_of_their_own(config: JobConfig) -> None:
    report.run(config)
    text = (RunDir(config.run_path).report / "report.md").read_text()
    assert "| <= 256 | 4 | 1.90 | 0.60 0.30 0.10 | 0.60 0.50 0.33 |" in text
    assert "| all | 0.31 | 0.20 to 0.42 |" in text
    svg = (RunDir(config.run_path).report / "rounds.svg").read_text()
    assert "1 of 2 as walked" in svg


def test_what_the_run_says_cannot_inject_html(config: JobConfig) -> None:
    report.run(config)
    page = (RunDir(config.run_path).report / "index.html").read_text()
    assert "<b>leak</b>" not in page
    assert "&lt;b&gt;leak&lt;/b&gt;" in page


@pytest.mark.parametrize("stage", ["evaluate", "train"])
def test_a_missing_stage_is_named(config: JobConfig, stage: str) -> None:
    run = RunDir(config.run_path)
    (run.evaluation if stage == "evaluate" else run.train_result).unlink()
    with pytest.raises(ValueError, match=f"run the {stage} stage"):
        report.run(config)


def test_tokens_trained_are_those_of_all_lines_so_far() -> None:
    lines = [{"step": 10, "perf/tokens": 70}, {"step": 20, "perf/tokens": 90}]
    assert trained_tokens(lines) == ([0, 10, 20], [0.0, 70.0, 160.0])


def test_a_run_without_an_untrained_or_plain_measurement_says_so_with_dashes(
    config: JobConfig,
) -> None:
    path = RunDir(config.run_path).evaluation
    evaluation = json.loads(path.read_text())
    evaluation |= {"untrained": None, "lossless": None, "best_k": None}
    evaluation["trained"] |= {"expected_acceptance_length": None, "expected_by_k": []}
    evaluation["trained"] |= {"speedup": None, "tokens_per_s_plain": None}
    path.write_text(json.dumps(evaluation))
    summary = report.run(config)
    card = report.card(summary)
    assert summary["acceptance_length_untrained"] is None
    assert "not checked" in card
    assert "speedup                 -" in card


def test_only_changes_beyond_five_per_cent_are_flagged_in_the_right_direction(
    config: JobConfig,
) -> None:
    summary = report.run(config)
    before = copy.deepcopy(summary)
    before["acceptance_length"] = summary["acceptance_length"] * 1.02  # within tolerance
    before["expected_acceptance_length"] = summary["expected_acceptance_length"] * 1.2
    before["total_wall_s"] = summary["total_wall_s"] * 1.2
    changes = {c["number"]: c["verdict"] for c in report.compare(summary, before)}
    assert changes == {"expected_acceptance_length": "WORSE", "total_wall_s": "better"}


def test_another_run_is_compared_through_the_configuration(config: JobConfig) -> None:
    report.run(config)
    other = config.model_copy(
        update={
            "name": "later",
            "report": config.report.model_copy(update={"against": config.run_path}),
        }
    )
    record(other)
    path = RunDir(other.run_path).evaluation
    evaluation = json.loads(path.read_text())
    evaluation["trained"]["acceptance_length"] = 1.5
    path.write_text(json.dumps(evaluation))
    report.run(other)
    text = (RunDir(other.run_path).report / "report.md").read_text()
    assert "| acceptance_length | 1.90 | 1.50 | -21.1% | WORSE |" in text


def test_the_card_is_a_closed_box_with_the_headline_numbers(config: JobConfig) -> None:
    lines = report.card(report.run(config)).splitlines()
    assert len({len(line) for line in lines}) == 1
    text = "\n".join(lines)
    for part in (
        "1.90",
        "1.20    same drafter, step 0",
        "10 of 10",
        "0.5 MiB peak",
        "1.0 MiB allowed",
        "ALARM",
    ):
        assert part in text
