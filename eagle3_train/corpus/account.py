"""Row accounting: rows in = rows kept + sum of drop reasons, and a quarantine file that names each.

`Unusable` is raised by whatever cannot use one row; `CorpusError` stops the job.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from eagle3_train.records import Prompt, Sample
from eagle3_train.rundir import write_atomic

DETAILS_KEPT = 5


class CorpusError(ValueError):
    """Data that no run should start with; the message says what was found and what to do."""


class Unusable(Exception):
    """One row cannot be used: a short `reason` to count by, and a `detail` for a person."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(slots=True)
class Accounting:
    """Counts of one read. Every row ends in `keep` or `drop`, once.

    quarantine: gets one JSON line per dropped row. fixed: rows normalised, by what was done. domains: per
    domain the samples (a row can give one per turn), tokens and supervised tokens of the kept rows.
    """

    quarantine: TextIO | None = None
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    fixed: Counter[str] = field(default_factory=Counter)
    details: dict[str, list[str]] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    domains: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def rows_in(self) -> int:
        """Rows read so far."""
        return self.kept + self.dropped.total()

    def drop(self, where: str, problem: Unusable) -> None:
        """Count one row out and write it to the quarantine file."""
        self.dropped[problem.reason] += 1
        detail = problem.detail.encode("utf-8", "backslashreplace").decode()[:300]
        shown = self.details.setdefault(problem.reason, [])
        line = f"{where}: {detail}" if detail else where
        if len(shown) < DETAILS_KEPT and line not in shown:
            shown.append(line)
        if self.quarantine is not None:
            record = {"where": where, "reason": problem.reason, "detail": detail}
            self.quarantine.write(json.dumps(record, ensure_ascii=False) + "\n")

    def keep(self, items: Sequence[Prompt | Sample]) -> None:
        """Count one row in, which became `items`."""
        self.kept += 1
        counts = self.domains.setdefault(items[0].domain, Counter())
        for item in items:
            supervised = int(item.loss_mask.sum()) if isinstance(item, Sample) else 0
            counts.update(samples=1, tokens=len(item.input_ids), supervised=supervised)

    def check(self, min_yield: float, sources: tuple[str, ...]) -> None:
        """Raise CorpusError when nothing, or less than `min_yield`, of the rows is usable; duplicates are."""
        usable = self.kept + self.dropped["duplicate"]
        if self.kept and usable / self.rows_in >= min_yield:
            return
        if not self.rows_in:
            raise CorpusError(f"{', '.join(sources)}: no rows; the files are empty")
        lines = [
            f"{self.kept} of {self.rows_in} rows of {', '.join(sources)} are usable "
            f"(corpus.min_yield={min_yield:g}); top reasons:"
        ]
        for reason, count in self.dropped.most_common(5):
            lines.append(f"  {count:>7} {reason}, e.g. {self.details[reason][0]}")
        if self.dropped["no_conversation"]:
            lines.append(f"  columns found: {', '.join(sorted(self.columns)[:40])}")
            lines.append(
                "  columns understood: messages, conversations, turns; input_ids + loss_mask"
            )
        lines.append("Repair the data, or lower corpus.min_yield when this loss is expected.")
        raise CorpusError("\n".join(lines))

    def save(self, path: Path) -> None:
        """Write what a report needs, JSON."""
        content = {
            "rows_in": self.rows_in,
            "rows_kept": self.kept,
            "samples": self._totals()["samples"],
            "dropped": dict(self.dropped.most_common()),
            "fixed": dict(self.fixed.most_common()),
            "examples": self.details,
            "domains": {name: dict(counts) for name, counts in sorted(self.domains.items())},
        }
        write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def summary(self) -> str:
        """One line for the log."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.most_common())
        totals = self._totals()
        return (
            f"rows {self.rows_in} = kept {self.kept} + dropped {self.dropped.total()}"
            f" ({reasons or 'none'}) | samples {totals['samples']} | tokens {totals['tokens']}"
            f" | supervised {totals['supervised']}"
        )

    def _totals(self) -> Counter[str]:
        return sum(self.domains.values(), Counter())
