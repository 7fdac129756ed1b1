"""What captured states must satisfy, as functions of tensors: complete, the engine's own words, alike however computed.

Two runs of one model in bfloat16 differ by a few parts in a thousand, which decides between tokens whose logits are
closer than that. So "the engine's token" means one whose logit, computed here, is the highest or within rounding of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3_train.drafter.drafting import draft_logits
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.model import Eagle3Drafter
from eagle3_train.engines.spec import Drafted
from eagle3_train.preflight.check import Check
from eagle3_train.target.weights import FrozenWeights

PARITY, COSINE = 0.99, 0.999


class Rounding(NamedTuple):
    """What the engine's arithmetic allows. slack: distance to the highest logit, in parts of the largest
    magnitude; share: of rows and draft lists that must agree (an expert chosen otherwise moves a whole row)."""

    slack: float
    share: float


EXACT, ROUNDED = Rounding(1e-4, 1.0), Rounding(2**-5, 0.99)


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer and its states: ids [n], states [n-1, boundaries, hidden] float32."""

    ids: tuple[int, ...]
    prompt_tokens: int
    states: Tensor


def leads(logits: Tensor, said: Tensor, slack: float) -> Tensor:
    """Per row of logits [n, vocab], whether token said[n] has the highest one, or one within `slack` of it."""
    chosen = logits.gather(-1, said[:, None])[:, 0]
    return chosen >= logits.amax(-1) - slack * logits.abs().amax(-1)


def teacher_logits(states: Tensor, weights: FrozenWeights, eps: float) -> Tensor:
    """The target's logits [n, vocab] from states [n, boundaries, hidden], float32."""
    last = states[:, -1].float()
    normed = F.rms_norm(last, last.shape[-1:], weights.norm_weight.float(), eps)
    return (normed.to(weights.lm_head.dtype) @ weights.lm_head.T).float()


def teacher_parity(
    answers: Sequence[Answer], weights: FrozenWeights, eps: float, rounding: Rounding
) -> Check:
    """Whether final norm and head, on the last captured boundary, choose the tokens the engine chose."""
    exact = near = total = 0
    for answer in answers:
        logits = teacher_logits(answer.states[answer.prompt_tokens - 1 :], weights, eps)
        said = torch.tensor(answer.ids[answer.prompt_tokens :])
        exact += int((logits.argmax(-1) == said).sum())
        near += int(leads(logits, said, rounding.slack).sum())
        total += len(said)
    ties = f" ({near - exact} of them within rounding of another)" if near > exact else ""
    reason = f"final norm and head on captured states choose the engine's token at {near} of {total} positions{ties}"
    if not total or near < PARITY * total:
        fix = "the last boundary is another layer than assumed, or the final norm or head is read wrongly"
        return Check("teacher_parity", "fail", reason, fix)
    return Check("teacher_parity", "ok", reason)


def agreement(
    name: str, first: Sequence[Tensor], second: Sequence[Tensor], rounding: Rounding
) -> Check:
    """Whether two captures of the same samples agree, row by row (a row: one position, one boundary)."""
    rows = torch.cat(
        [
            F.cosine_similarity(a.float(), b.float(), dim=-1).flatten()
            for a, b in zip(first, second, strict=True)
        ]
    )
    alike = int((rows > COSINE).sum())
    lowest = f", lowest cosine {rows.min():.6f}" if len(rows) else ""
    reason = f"{alike} of {len(rows)} rows as in the plain capture{lowest}"
    if not len(rows) or alike < rounding.share * len(rows):
        return Check(name, "fail", reason, f"do not rely on {name} with this engine version")
    return Check(name, "ok", reason)


def prefix_hit(
    first: Sequence[Tensor], second: Sequence[Tensor], cached: int, rounding: Rounding
) -> Check:
    """`agreement` of a second reading, of which the engine took `cached` tokens from its prefix cache."""
    if not cached:
        reason = "the engine took no token from its prefix cache: no hit was compared"
        return Check("prefix_hit", "warn", reason, "leave engine.prefix_caching off")
    check = agreement("prefix_hit", first, second, rounding)
    return replace(check, reason=f"{check.reason}; {cached} tokens were hits")


def draft_parity(
    drafted: Sequence[tuple[Answer, Sequence[Drafted]]],
    drafter: Eagle3Drafter,
    target: FrozenTarget,
    rounding: Rounding,
) -> Check:
    """Whether the engine's draft tokens are those computed from the captured states.

    Lists that follow other tokens than the answer's say nothing and must not be given.
    """
    same = total = 0
    for answer, lists in drafted:
        ids, aux = torch.tensor(answer.ids), answer.states[:, :-1].flatten(1)
        for one in lists:
            at = one.position + 1
            if at >= len(answer.ids) or answer.ids[at] != one.next_token:
                continue
            tokens = torch.tensor(one.draft_ids)
            logits = draft_logits(drafter, target, ids[: at + 1], aux[:at], tokens)
            drafts = torch.searchsorted(target.draft_ids, tokens).clamp(max=logits.shape[-1] - 1)
            found = target.draft_ids[drafts] == tokens
            same += bool((found & leads(logits, drafts, rounding.slack)).all())
            total += 1
    reason = f"{same} of {total} draft lists are those computed from captured states"
    if not total or same < rounding.share * total:
        fix = (
            "the drafter is fed other layers, positions or tokens while serving than while training"
        )
        return Check("draft_parity", "fail", reason, fix)
    return Check("draft_parity", "ok", reason)


def common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def lossless(
    plain: Sequence[Answer],
    served: Sequence[tuple[int, ...]],
    weights: FrozenWeights,
    eps: float,
    rounding: Rounding,
) -> Check:
    """Whether greedy answers with a drafter are those without, or part only where two tokens tie."""
    same, ties = 0, []
    for answer, ids in zip(plain, served, strict=True):
        if answer.ids == ids:
            same += 1
            continue
        at = common_tokens(answer.ids, ids)
        logits = teacher_logits(answer.states[at - 1 : at], weights, eps)
        said = torch.tensor(ids[at : at + 1])
        ties.append(len(said) == len(logits) and bool(leads(logits, said, rounding.slack).all()))
    reason = f"{same} of {len(plain)} greedy answers are the same with a drafter as without"
    if not plain or not all(ties):
        return Check("lossless", "fail", reason, "compare in float32")
    if ties:
        reason += f"; {len(ties)} part where two tokens are within rounding"
    return Check("lossless", "ok", reason)
