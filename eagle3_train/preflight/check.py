"""One check of a preflight and how a list of them is printed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]
_WIDTH = 110
_NAMES = """
target engine_class remote_code capture serve_sglang boundaries head weights corpus tokenizer chat_template
draft_vocabulary evaluate_sources rope drafter drafter_width fp8 positions tensor_parallel evaluate_against
plan bytes_per_token stream_budget placement engine_memory trainer_memory disk package_size rates
versions object_store engine_start states batched decoded teacher_parity chunked_prefill prefix_hit
drafter_start lossless draft_parity live_time
"""
NAMES = frozenset(_NAMES.split())
"""Every check, as preflight.skip may name them."""


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
    indent = " " * (wide + 8)
    lines = [title]
    for check in checks:
        text = check.reason + (f" -> {check.action}" if check.action else "")
        head = f"  {check.verdict:<4}  {check.name:<{wide}}  "[: wide + 10]
        body = textwrap.wrap(text, _WIDTH - len(indent), break_long_words=False) or [""]
        lines.append(head + body[0])
        lines += [indent + "  " + line for line in body[1:]]
    return "\n".join(lines)
