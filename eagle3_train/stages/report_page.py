"""How a report looks: figures as SVG, one Markdown file, one self-contained HTML page. No run facts."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

Json = dict[str, Any]

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, AMBER, GREEN, ROSE, SLATE = "#2563eb", "#d97706", "#059669", "#e11d48", "#94a3b8"
_STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
_CSS = """
:root{color-scheme:light}*{box-sizing:border-box}
body{margin:0;background:#f5f7fa;color:#1f2933;font:15px/1.5 Inter,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:26px;margin:0 0 24px;letter-spacing:-.01em}h2{font-size:17px;margin:36px 0 12px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:14px}
.tile,.panel,.alarm{background:#fff;border:1px solid #e4e7eb;border-radius:10px}
.tile{padding:16px 18px}.tile b{display:block;font-size:27px;line-height:1.25;letter-spacing:-.02em}
.tile:first-child b{color:#2563eb}.tile span{font-size:13px;color:#7b8794}
.tile small{color:#7b8794;display:block;font-size:12.5px}
.alarm{padding:12px 18px;margin-bottom:12px;border-left:4px solid #e11d48}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(500px,1fr));gap:14px;margin-top:24px}
.panel{padding:14px}.panel img{width:100%;display:block}.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:13.5px}
th{color:#7b8794;font-weight:500;text-align:left;border-bottom:1px solid #cbd2d9}
th,td{padding:7px 12px 7px 2px}td{white-space:nowrap}td:last-child{white-space:normal}tr+tr td{border-top:1px solid #eef1f4}
@media(max-width:560px){.figures{grid-template-columns:1fr}}
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of ready-made strings."""

    title: str
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True)
class Document:
    """A report: alarms first, then tiles (name -> value, remark), then tables."""

    title: str
    alarms: list[str]
    tiles: dict[str, tuple[str, str]]
    tables: list[Table]


def draw_figures(metrics: list[Json], summary: Json) -> dict[str, str]:
    """Name -> SVG text; a figure without data is left out."""
    painters: dict[str, Callable[[list[Json], Json], Figure | None]] = {
        "training": _training,
        "positions": _positions,
        "rounds": _rounds,
        "serving": _serving,
        "time": _time,
    }
    figures = {}
    with mpl.rc_context(_STYLE):
        for name, paint in painters.items():
            figure = paint(metrics, summary)
            if figure is not None:
                buffer = io.StringIO()
                figure.savefig(buffer, format="svg", metadata={"Date": None})
                figures[name] = buffer.getvalue()
    return figures


def trained_tokens(steps: list[Json]) -> tuple[list[int], list[float]]:
    """Steps and the tokens trained by then; steps between two records count like the later one."""
    at, tokens = [0], [0.0]
    for line in steps:
        tokens.append(tokens[-1] + line["perf/tokens"] * (line["step"] - at[-1]))
        at.append(line["step"])
    return at, tokens


def _training(metrics: list[Json], _: Json) -> Figure | None:
    steps = [line for line in metrics if "train/loss" in line]
    evaluations = [line for line in metrics if "eval/expected_acceptance_length" in line]
    if not steps:
        return None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    at, tokens = trained_tokens(steps)
    axes.plot(tokens[1:], [s["train/loss"] for s in steps], color=SLATE)
    axes.set(title="Training", xlabel="tokens trained", ylabel="loss")
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 5), useMathText=True)
    if evaluations:
        right = axes.twinx()
        right.grid(visible=False)
        right.plot(
            np.interp([e["step"] for e in evaluations], at, tokens),
            [e["eval/expected_acceptance_length"] for e in evaluations],
            color=BLUE,
            marker="o",
            markersize=4,
        )
        right.set_ylabel("expected acceptance length, held out", color=BLUE)
    return figure


def _positions(_: list[Json], summary: Json) -> Figure | None:
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    served = summary["per_position_acceptance"]
    before = summary["per_position_acceptance_untrained"]
    places = range(len(served))
    left.bar([p + 0.18 for p in places], served, 0.34, color=BLUE, label="trained")
    if before:
        left.bar([p - 0.18 for p in places], before, 0.34, color=SLATE, label="untrained")
    expected = summary["expected_per_position"]
    if expected:
        left.plot([p + 0.18 for p in places], expected, "D", color=AMBER, label="walked")
    left.set(title="Accepted per position", xlabel="draft position", ylim=(0, 1))
    left.set_xticks(list(places))
    left.legend(loc="upper right")
    by_k = summary["expected_by_k"]
    if by_k:
        right.plot(
            range(1, len(by_k) + 1),
            by_k,
            color=BLUE,
            marker="o",
            markersize=4,
            label="walked",
        )
    right.plot(
        [summary["num_speculative_tokens"]],
        [summary["acceptance_length"]],
        "D",
        color=AMBER,
        label="served",
    )
    right.set(title="Acceptance length", xlabel="draft tokens k")
    right.set_xticks(range(1, max(len(by_k), summary["num_speculative_tokens"]) + 1))
    right.legend(loc="lower right")
    return figure


def _rounds(_: list[Json], summary: Json) -> Figure | None:
    if not summary["rounds"]:
        return None
    walked, served = zip(*summary["rounds"], strict=True)
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    most = max(*walked, *served)
    axes.plot([0, most], [0, most], color=SLATE, linewidth=1)
    axes.plot(walked, served, "o", color=BLUE, markersize=5, alpha=0.6)
    equal = sum(w == s for w, s in summary["rounds"])
    axes.set(
        title=f"Drafting rounds per answer: {equal} of {len(served)} as walked",
        xlabel="walked",
        ylabel="served (vLLM's num_drafts)",
    )
    return figure


def _serving(_: list[Json], summary: Json) -> Figure | None:
    rows = [row for row in summary["evaluation_rows"] if row["drafter"] == "trained"]
    if not rows:
        return None
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    settings = list(dict.fromkeys((row["concurrency"], row["temperature"]) for row in rows))
    colours = [BLUE, AMBER, GREEN, ROSE, SLATE]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    width = 0.8 / len(settings)
    for index, setting in enumerate(settings):
        chosen = [row for row in rows if (row["concurrency"], row["temperature"]) == setting]
        places = [datasets.index(row["dataset"]) + index * width for row in chosen]
        label = f"concurrency {setting[0]}" + (f", T {setting[1]:g}" if setting[1] else "")
        for axes, key in zip(panels, ("acceptance_length", "speedup"), strict=True):
            values = [row[key] or 0.0 for row in chosen]
            axes.barh(places, values, width * 0.9, color=colours[index % 5], label=label)
    for axes, title in zip(panels, ("Acceptance length", "Speedup"), strict=True):
        axes.set_title(title)
        axes.set_yticks([p + 0.4 - width / 2 for p in range(len(datasets))], datasets)
        axes.grid(visible=False, axis="y")
        axes.axvline(1.0, color=MUTED, linewidth=0.8, linestyle=":")
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _time(_: list[Json], summary: Json) -> Figure | None:
    if not summary["wall_s"]:
        return None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    names, seconds = list(summary["wall_s"]), list(summary["wall_s"].values())
    bars = axes.barh(names, seconds, 0.6, color=BLUE)
    waiting = summary["data_wait_frac"]
    if waiting and "train" in names:
        index = names.index("train")
        axes.barh(["train"], [seconds[index] * waiting], 0.6, color=AMBER, label="waiting for data")
        figure.legend(loc="outside lower right")
    axes.bar_label(bars, [f"{s:.0f} s" for s in seconds], padding=4, color=MUTED)
    axes.margins(x=0.14)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(title="Where the time went", xlabel="wall seconds")
    return figure


def markdown(document: Document, figures: list[str]) -> str:
    """The document as Markdown; figures are linked as NAME.svg."""
    tiles = [[name, value, remark] for name, (value, remark) in document.tiles.items()]
    tables = [Table("", ["", "", ""], tiles), *document.tables]
    parts = [f"# {document.title}", *(f"> **Alarm:** {alarm}" for alarm in document.alarms)]
    for table in tables:
        lines = [table.header, ["---"] * len(table.header), *table.rows]
        text = "\n".join(
            "| " + " | ".join(c.replace("|", "/") for c in line) + " |" for line in lines
        )
        parts.append(f"## {table.title}\n\n{text}" if table.title else text)
    parts += [f"![{name}]({name}.svg)" for name in figures]
    return "\n\n".join(parts) + "\n"


def html(document: Document, figures: dict[str, str]) -> str:
    """The document as one HTML file that needs nothing beside it."""
    tiles = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b>'
        f"<small>{escape(remark)}</small></div>"
        for name, (value, remark) in document.tiles.items()
    )
    alarms = "".join(f'<div class="alarm">{escape(alarm)}</div>' for alarm in document.alarms)
    panels = "".join(
        f'<div class="panel"><img alt="{name}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(svg.encode()).decode()}"></div>'
        for name, svg in figures.items()
    )
    title = escape(document.title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_CSS}</style><main><h1>{title}</h1>'
        f'{alarms}<div class="tiles">{tiles}</div><div class="figures">{panels}</div>'
        + "".join(map(_html_table, document.tables))
        + "</main></html>\n"
    )


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header if any(table.header))
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    body = f"<table><tr>{head}</tr>{rows}</table>"
    return f'<h2>{escape(table.title)}</h2><div class="panel scroll">{body}</div>'
