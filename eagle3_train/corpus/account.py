"""Row accounting: rows in = rows kept + sum of drop reasons, and a quarantine file that names each.

`Unusable` is raised by whatever cannot use one row; `CorpusError` stops the job.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

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

    samples: what the kept rows became (a conversation can give one sample per turn). fixed: rows
    normalised, by what was done. tokens, supervised: per domain.
    """

    quarantine: Path | None = None
    rows_in: int = 0
    kept: int = 0
    samples: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    fixed: Counter[str] = field(default_factory=Counter)
    details: dict[str, list[str]] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    domains: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    supervised: Counter[str] = field(default_factory=Counter)
    _file: TextIO | None = None

    def __enter__(self) -> Self:
        if self.quarantine is not None:
            self.quarantine.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.quarantine.open("w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def drop(self, where: str, problem: Unusable) -> None:
        """Count one row out and write it to the quarantine file."""
        self.rows_in += 1
        self.dropped[problem.reason] += 1
        detail = problem.detail.encode("utf-8", "backslashreplace").decode()[:300]
        shown = self.details.setdefault(problem.reason, [])
        line = f"{where}: {detail}" if detail else where
        if len(shown) < DETAILS_KEPT and line not in shown:
            shown.append(line)
        if self._file is not None:
            record = {"where": where, "reason": problem.reason, "detail": detail}
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def keep(self, domain: str, sizes: list[tuple[int, int]]) -> None:
        """Count one row in; `sizes` holds (tokens, supervised tokens) of each sample it became."""
        self.rows_in += 1
        self.kept += 1
        self.samples += len(sizes)
        self.domains[domain] += len(sizes)
        self.tokens[domain] += sum(tokens for tokens, _ in sizes)
        self.supervised[domain] += sum(supervised for _, supervised in sizes)

    @property
    def usable(self) -> float:
        """Share of rows that could be used; duplicates were usable."""
        return (self.kept + self.dropped["duplicate"]) / self.rows_in if self.rows_in else 0.0

    def check(self, min_yield: float, sources: tuple[str, ...]) -> None:
        """Raise CorpusError when nothing, or less than `min_yield`, of the rows is usable."""
        assert self.rows_in == self.kept + sum(self.dropped.values()), "a row was counted twice"
        if self.kept and self.usable >= min_yield:
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

    def as_dict(self) -> dict[str, Any]:
        """What a report needs, JSON-serialisable."""
        return {
            "rows_in": self.rows_in,
            "rows_kept": self.kept,
            "samples": self.samples,
            "dropped": dict(self.dropped.most_common()),
            "fixed": dict(self.fixed.most_common()),
            "examples": self.details,
            "domains": {
                name: {
                    "samples": count,
                    "tokens": self.tokens[name],
                    "supervised": self.supervised[name],
                }
                for name, count in sorted(self.domains.items())
            },
        }

    def save(self, path: Path) -> None:
        """Write `as_dict` as JSON."""
        write_atomic(path, json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n")

    def summary(self) -> str:
        """One line for the log."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.most_common())
        return (
            f"rows {self.rows_in} = kept {self.kept} + dropped {sum(self.dropped.values())}"
            f" ({reasons or 'none'}) | samples {self.samples} | tokens {self.tokens.total()}"
            f" | supervised {self.supervised.total()}"
        )
