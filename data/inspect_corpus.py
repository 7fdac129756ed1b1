"""Show what a corpus became: which tokens are supervised, how long samples are, why rows were dropped.

    python data/inspect_corpus.py FILE_OR_URL... --tokenizer DIR [--html page.html] [--png page.png]
    python data/inspect_corpus.py runs/NAME/rollout/samples --tokenizer DIR

The first form reads conversations that carry answers, the second the committed shards of a rollout.
Exits with 1 when the supervised share of the tokens is implausible. (Not named inspect.py: a script's own
folder comes first on the import path, and dataclasses imports the standard library's `inspect`.)
"""

from __future__ import annotations

import argparse
import html
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import yaml

from eagle3_train.config import CorpusConfig
from eagle3_train.corpus.account import Accounting
from eagle3_train.corpus.load import load_given
from eagle3_train.corpus.render import Renderer
from eagle3_train.corpus.table import read_samples
from eagle3_train.records import Sample
from eagle3_train.rundir import write_atomic

GREEN, DIM, RESET = "\033[32;1m", "\033[2m", "\033[0m"
PLAUSIBLE = (0.01, 0.99)
CUT_ALARM = 0.1
BINS = 12
STYLE = """body{font:15px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse}td,th{padding:.15em .8em;text-align:left}td.n{text-align:right}
.bar{background:#4a7fb5;height:1em;display:inline-block}.text{white-space:pre-wrap;font:13px/1.6
ui-monospace,monospace;background:#f6f6f4;padding:1em;border-radius:6px;color:#777}
.text b{font-weight:normal;color:#0a4a1e;background:#cdebd3;border-radius:3px}.c{font-style:italic;opacity:.6}.alarm{color:#a00}"""


def main() -> int:
    """Read, show, write the pages asked for."""
    arguments = parse_arguments()
    try:
        renderer = Renderer.load(arguments.tokenizer, arguments.trust_remote_code)
        samples, accounting = load(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    shown = pick(samples, arguments.samples)
    print_terminal(
        samples, shown, accounting, renderer, colour=sys.stdout.isatty() or arguments.colour
    )
    if arguments.html:
        write_atomic(arguments.html, html_page(samples, shown, accounting, renderer))
        print(f"wrote {arguments.html}")
    if arguments.png:
        write_png(arguments.png, samples)
        print(f"wrote {arguments.png}")
    found = alarms(samples)
    for alarm in found:
        print(f"ALARM: {alarm}", file=sys.stderr)
    return 1 if found else 0


def parse_arguments() -> argparse.Namespace:
    """Command line; every corpus.* setting can be given with --set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+")
    parser.add_argument(
        "--tokenizer", required=True, help="directory of the target or its tokenizer"
    )
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="corpus settings"
    )
    parser.add_argument("--samples", type=int, default=3, help="samples shown in full")
    parser.add_argument("--colour", action="store_true", help="colours even into a pipe")
    parser.add_argument("--quarantine", type=Path, help="write dropped rows here, JSONL")
    parser.add_argument("--html", type=Path)
    parser.add_argument("--png", type=Path)
    return parser.parse_args()


def load(arguments: argparse.Namespace) -> tuple[list[Sample], Accounting | None]:
    """Samples of a rollout folder, or of conversations with their account."""
    folder = Path(arguments.sources[0])
    if folder.is_dir() and any(folder.glob("samples-*.parquet")):
        return read_samples(folder), None
    settings = {
        key: yaml.safe_load(value) for key, _, value in (s.partition("=") for s in arguments.set)
    }
    config = CorpusConfig.model_validate(
        {"min_yield": 0.0, **settings, "sources": arguments.sources}
    )
    renderer = Renderer.load(
        arguments.tokenizer, arguments.trust_remote_code, config.template_kwargs
    )
    return load_given(config, renderer, arguments.quarantine)


def pick(samples: list[Sample], count: int) -> list[Sample]:
    """Samples spread evenly over the corpus."""
    return [
        samples[index]
        for index in np.linspace(0, len(samples) - 1, min(count, len(samples))).astype(int)
    ]


def supervised_share(samples: list[Sample]) -> float:
    """Share of all tokens that the target produced."""
    return float(sum(s.loss_mask.sum() for s in samples) / sum(len(s.input_ids) for s in samples))


def alarms(samples: list[Sample]) -> list[str]:
    """What should stop a person from training on this."""
    found = []
    share = supervised_share(samples)
    if not PLAUSIBLE[0] <= share <= PLAUSIBLE[1]:
        found.append(f"{share:.1%} of the tokens are supervised; look at the coloured samples")
    cut = sum(s.finish_reason == "length" for s in samples) / len(samples)
    if cut > CUT_ALARM:
        found.append(
            f"{cut:.0%} of the answers were cut at a token limit; raise max_new_tokens or max_len"
        )
    return found


def facts(samples: list[Sample], accounting: Accounting | None) -> list[tuple[str, str]]:
    """The lines of the summary: name, value."""
    lengths = np.array([len(s.input_ids) for s in samples])
    reasons = Counter(s.finish_reason for s in samples)
    rows = [
        ("samples", f"{len(samples)}"),
        ("tokens", f"{lengths.sum()}, median {np.median(lengths):.0f}, longest {lengths.max()}"),
        ("supervised", f"{supervised_share(samples):.1%} of the tokens"),
        ("finish reasons", ", ".join(f"{name} {count}" for name, count in reasons.most_common())),
    ]
    for domain in sorted({s.domain for s in samples}):
        own = [s for s in samples if s.domain == domain]
        rows.append(
            (f"domain {domain}", f"{len(own)} samples, {supervised_share(own):.1%} supervised")
        )
    if accounting is not None:
        dropped = sum(accounting.dropped.values())
        rows.append(("rows", f"{accounting.rows_in} = {accounting.kept} kept + {dropped} dropped"))
        for reason, count in accounting.dropped.most_common():
            rows.append((f"dropped {reason}", f"{count}, e.g. {accounting.details[reason][0]}"))
        rows += [
            (f"normalised {name}", str(count)) for name, count in accounting.fixed.most_common()
        ]
    return rows


def histogram(samples: list[Sample]) -> list[tuple[str, int]]:
    """(range of tokens, samples) per bin."""
    lengths = [len(s.input_ids) for s in samples]
    counts, edges = np.histogram(lengths, bins=min(BINS, len(set(lengths))))
    return [(f"{edges[i]:.0f}-{edges[i + 1]:.0f}", int(count)) for i, count in enumerate(counts)]


def stretches(sample: Sample) -> list[tuple[bool, list[int]]]:
    """Runs of tokens with the same mask value, in order."""
    borders = np.flatnonzero(np.diff(sample.loss_mask)) + 1
    parts = np.split(sample.input_ids, borders)
    masks = np.split(sample.loss_mask, borders)
    return [(bool(mask[0]), part.tolist()) for mask, part in zip(masks, parts, strict=True)]


def print_terminal(
    samples: list[Sample],
    shown: list[Sample],
    accounting: Accounting | None,
    renderer: Renderer,
    colour: bool,
) -> None:
    """Summary, histogram and coloured samples; without colours supervised text stands in [[ ]]."""
    for name, value in facts(samples, accounting):
        print(f"{name:<24} {value}")
    bins = histogram(samples)
    widest = max(count for _, count in bins)
    print("\nlength in tokens")
    for label, count in bins:
        print(f"{label:>12} {'#' * round(40 * count / widest):<40} {count}")
    before, after = (GREEN, RESET) if colour else ("[[", "]]")
    for sample in shown:
        print(f"\n--- {sample.id} ({sample.domain}, {len(sample.input_ids)} tokens)")
        for supervised, ids in stretches(sample):
            text = renderer.tokenizer.decode(ids, skip_special_tokens=False)
            plain = f"{DIM}{text}{RESET}" if colour else text
            print(f"{before}{text}{after}" if supervised else plain, end="")
        print()


def html_page(
    samples: list[Sample], shown: list[Sample], accounting: Accounting | None, renderer: Renderer
) -> str:
    """One self-contained page; hovering over a token shows its id."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}<td>{html.escape(value)}"
        for name, value in facts(samples, accounting)
    )
    bins = histogram(samples)
    widest = max(count for _, count in bins)
    bars = "".join(
        f"<tr><td class=n>{label}<td><span class=bar style='width:{30 * count / widest:.2f}em'></span> {count}"
        for label, count in bins
    )
    warnings = "".join(f"<p class=alarm>{html.escape(alarm)}" for alarm in alarms(samples))
    texts = "".join(
        f"<h3>{html.escape(sample.domain)} <small>{sample.id}</small></h3>"
        f"<div class=text>{token_spans(sample, renderer)}</div>"
        for sample in shown
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>Corpus</title><style>{STYLE}</style><h1>Corpus</h1>{warnings}"
        f"<table>{rows}</table><h2>Length in tokens</h2><table>{bars}</table>"
        f"<h2>Samples</h2><p>Green is supervised: what the target produced. Control tokens are faint and slanted; the same characters as plain text are not.{texts}\n"
    )


def token_spans(sample: Sample, renderer: Renderer) -> str:
    """One element per token, <b> when it is supervised."""
    spans = []
    for id, supervised in zip(sample.input_ids.tolist(), sample.loss_mask, strict=True):
        text = html.escape(renderer.tokenizer.decode([id], skip_special_tokens=False))
        tag = "b" if supervised else "span"
        control = " class=c" if id in renderer.always_drafted else ""
        spans.append(f"<{tag}{control} title={id}>{text}</{tag}>")
    return "".join(spans)


def write_png(path: Path, samples: list[Sample]) -> None:
    """Length histogram, and the masks of up to 60 samples as strips."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, height_ratios=(1, 2))
    top.hist([len(s.input_ids) for s in samples], bins=40, color="#4a7fb5")
    top.set(xlabel="tokens", ylabel="samples", title=f"{len(samples)} samples")
    strips = pick(samples, 60)
    image = np.full((len(strips), max(len(s.input_ids) for s in strips)), np.nan)
    for row, sample in zip(image, strips, strict=True):
        row[: len(sample.loss_mask)] = sample.loss_mask
    bottom.imshow(image, aspect="auto", interpolation="none", cmap="Greens", vmin=-0.4, vmax=1.2)
    title = f"{supervised_share(samples):.0%} of the tokens are supervised (dark)"
    bottom.set(xlabel="token", ylabel="sample", title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
