"""How a report looks: figures as SVG, one Markdown file, one self-contained HTML page. No run facts."""

from __future__ import annotations

import io
from base64 import b64encode
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import matplotlib as mpl
import numpy as np
from jinja2 import Template
from matplotlib.figure import Figure

from eagle3_train.drafter.model_card import markdown_table

Json = dict[str, Any]

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, AMBER, SLATE = "#2563eb", "#d97706", "#94a3b8"
SIZE = 6.4, 3.6  # inches
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
    "axes.prop_cycle": f"cycler(color={[BLUE, AMBER, '#059669', '#e11d48', SLATE]})",
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{{ document.title }}</title>
<meta name="viewport" content="width=device-width"><style>
:root{color-scheme:light}*{box-sizing:border-box}
body{margin:0;background:#f5f7fa;color:#1f2933;font:15px/1.5 Inter,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:40px 24px 64px}
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
th,td{padding:7px 9px 7px 2px}td{white-space:nowrap}td:last-child{white-space:normal}tr+tr td{border-top:1px solid #eef1f4}
@media(max-width:560px){.figures{grid-template-columns:1fr}}
</style><main><h1>{{ document.title }}</h1>
{% for alarm in document.alarms %}<div class="alarm">{{ alarm }}</div>{% endfor %}
<div class="tiles">{% for name, (value, note) in document.tiles.items() %}
<div class="tile"><span>{{ name }}</span><b>{{ value }}</b><small>{{ note }}</small></div>
{% endfor %}</div>
<div class="figures">{% for name, svg in figures.items() %}
<div class="panel"><img alt="{{ name }}" src="data:image/svg+xml;base64,{{ svg }}"></div>
{% endfor %}</div>
{% for title, table in document.tables.items() %}<h2>{{ title }}</h2><div class="panel scroll"><table>
<tr>{% for name in table[0] %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table %}<tr>{% for cell in row.values() %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endfor %}
</main></html>
"""

Table = list[dict[str, str]]
"""Rows of column -> ready-made text."""


@dataclass(frozen=True, slots=True)
class Document:
    """A report: alarms first, then tiles (name -> value, remark), facts (name -> value), tables by title."""

    title: str
    alarms: list[str]
    tiles: dict[str, tuple[str, str]]
    facts: dict[str, str]
    tables: dict[str, Table]


def draw_figures(metrics: list[Json], summary: Json) -> dict[str, str]:
    """Name -> SVG text; a figure without data is left out."""
    with mpl.rc_context(_STYLE):
        figures = {
            "training": _training(metrics),
            "positions": _positions(summary),
            "rounds": _rounds(summary["rounds"]),
            "serving": _serving(summary["evaluation_rows"]),
        }
        return {name: _svg(figure) for name, figure in figures.items() if figure}


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def trained_tokens(steps: list[Json]) -> tuple[list[int], list[float]]:
    """Steps and the tokens trained by then, from 0."""
    tokens = [0.0, *accumulate(float(line["perf/tokens"]) for line in steps)]
    return [0, *(line["step"] for line in steps)], tokens


def _training(metrics: list[Json]) -> Figure | None:
    steps = [line for line in metrics if "train/loss" in line]
    evaluations = [line for line in metrics if "eval/expected_acceptance_length" in line]
    if not steps:
        return None
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    at, tokens = trained_tokens(steps)
    axes.plot(tokens[1:], [s["train/loss"] for s in steps], color=SLATE)
    axes.set(title="Training", xlabel="tokens trained", ylabel="loss")
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 5), useMathText=True)
    if evaluations:
        right = axes.twinx()
        right.grid(visible=False)
        when = np.interp([e["step"] for e in evaluations], at, tokens)
        lengths = [e["eval/expected_acceptance_length"] for e in evaluations]
        right.plot(when, lengths, "o-", color=BLUE, markersize=4)
        right.set_ylabel("expected acceptance length, held out", color=BLUE)
    return figure


def _positions(summary: Json) -> Figure:
    figure = Figure(figsize=SIZE, layout="constrained")
    left, right = figure.subplots(1, 2)
    k, by_k = summary["num_speculative_tokens"], summary["expected_by_k"]
    places = np.arange(k)
    left.bar(places + 0.18, summary["per_position_acceptance"], 0.34, color=BLUE, label="trained")
    if before := summary["per_position_acceptance_untrained"]:
        left.bar(places - 0.18, before, 0.34, color=SLATE, label="untrained")
    if by_k:
        left.plot(places + 0.18, summary["expected_per_position"], "D", color=AMBER, label="walked")
        right.plot(range(1, len(by_k) + 1), by_k, "o-", color=BLUE, markersize=4, label="walked")
    left.set(title="Accepted per position", xlabel="draft position", ylim=(0, 1), xticks=places)
    left.legend(loc="upper right")
    right.plot([k], [summary["acceptance_length"]], "D", color=AMBER, label="served")
    right.set(title="Acceptance length", xlabel="draft tokens k")
    right.set_xticks(range(1, max(len(by_k), k) + 1))
    right.legend(loc="lower right")
    return figure


def _rounds(rounds: list[tuple[int, int]]) -> Figure | None:
    if not rounds:
        return None
    walked, served = zip(*rounds, strict=True)
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    most = max(*walked, *served)
    axes.plot([0, most], [0, most], color=SLATE, linewidth=1)
    axes.plot(walked, served, "o", color=BLUE, markersize=5, alpha=0.6)
    equal = sum(w == s for w, s in rounds)
    axes.set_title(f"Drafting rounds per answer: {equal} of {len(served)} as walked")
    axes.set(xlabel="walked", ylabel="served (vLLM's num_drafts)")
    return figure


def _serving(rows: list[Json]) -> Figure:
    """Every dataset at every concurrency of the trained drafter."""
    rows = [row for row in rows if row["drafter"] == "trained"]
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    counts = list(dict.fromkeys(row["concurrency"] for row in rows))
    figure = Figure(figsize=SIZE, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    width = 0.8 / len(counts)
    keys = {"acceptance_length": "Acceptance length", "speedup": "Speedup"}
    for axes, (key, title) in zip(panels, keys.items(), strict=True):
        for index, count in enumerate(counts):
            chosen = [row for row in rows if row["concurrency"] == count]
            places = [datasets.index(row["dataset"]) + index * width for row in chosen]
            values = [row[key] or 0.0 for row in chosen]
            axes.barh(places, values, width * 0.9, label=f"concurrency {count}")
        axes.set_title(title)
        axes.set_yticks([p + 0.4 - width / 2 for p in range(len(datasets))], datasets)
        axes.grid(visible=False, axis="y")
        axes.axvline(1.0, color=MUTED, linewidth=0.8, linestyle=":")
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def markdown(document: Document, figures: list[str]) -> str:
    """The document as Markdown; figures are linked as NAME.svg."""
    tiles = [
        {"number": n, "value": value, "remark": note} for n, (value, note) in document.tiles.items()
    ]
    return "\n\n".join(
        [
            f"# {document.title}",
            *(f"> **Alarm:** {alarm}" for alarm in document.alarms),
            markdown_table(tiles),
            *(f"## {name}\n\n{markdown_table(t)}" for name, t in document.tables.items()),
            *(f"![{name}]({name}.svg)\n" for name in figures),
        ]
    )


def html(document: Document, figures: dict[str, str]) -> str:
    """The document as one HTML file that needs nothing beside it."""
    encoded = {name: b64encode(svg.encode()).decode() for name, svg in figures.items()}
    page: str = Template(_PAGE, autoescape=True).render(document=document, figures=encoded)
    return page
