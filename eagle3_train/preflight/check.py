"""One check of a preflight and how a list of them is printed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, how it went, why, and what to do about it (empty when ok)."""

    name: str
    verdict: Verdict
    reason: str
    action: str = ""


def attempt(name: str, action: str, try_it: Callable[[], str]) -> Check:
    """Ok with the returned reason, or fail with the ValueError's message and `action`."""
    try:
        return Check(name, "ok", try_it())
    except ValueError as error:
        return Check(name, "fail", str(error), action)


def failed(checks: Sequence[Check]) -> list[str]:
    """Names of the checks that failed."""
    return [check.name for check in checks if check.verdict == "fail"]


def table(title: str, checks: Sequence[Check]) -> str:
    """The checks as an aligned text table."""
    wide = max([len(check.name) for check in checks], default=0)
    lines = [title]
    for check in checks:
        text = check.reason + (f" -> {check.action}" if check.action else "")
        head = f"  {check.verdict:<4}  {check.name:<{wide}}  "
        below = " " * len(head)
        lines.append(
            textwrap.fill(
                text, _WIDTH, initial_indent=head, subsequent_indent=below, break_long_words=False
            )
        )
    return "\n".join(lines)
