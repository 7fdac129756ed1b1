"""Train/held-out split by a stable hash of what the user asked first."""

from __future__ import annotations

import hashlib


def is_held_out(id: str, fraction: float) -> bool:
    """Whether the sample or prompt `id` is kept for evaluation.

    Only the part of the id before the first "-" counts: the hash of the conversation's opening
    question, so the turns, answers and system prompts of one question never fall on both sides. A larger
    fraction holds out a superset.
    """
    family = id.partition("-")[0]
    digest = hashlib.sha256(family.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < fraction
