"""Scheduler of capture engines: like vLLM's, but it ignores the fake drafter's proposals.

`extract_hidden_states` proposes one token per step only so that states get written; verifying it would make
every decode step compute two tokens instead of one.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class CaptureScheduler(Scheduler):  # type: ignore[misc]
    """Decodes one token per step."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Forget what the fake drafter proposed."""
