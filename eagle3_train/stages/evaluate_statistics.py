"""What evaluation computes from counts and token ids: ratios, intervals, loops, the best k. No engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eagle3_train.drafter.walk import Acceptance

LOOP_MIN_TOKENS = 32
LOOP_BIGRAMS = 0.5  # of an ordinary 128-token answer, about 0.9 of the bigrams are distinct
LOOP_PERIOD = 64  # tokens at most of what an answer ends in saying again and again
LOOP_REPEATS = 3  # times at least
DRAWS = 2000
NEXT_TURN = "-next"  # what the id of a later turn adds to that of the turn before
LEAST = 5  # of fewer, a bootstrap interval is far too narrow

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One measured request: what came back, and vLLM's counters for it alone (None when others ran beside it)."""

    id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    num_drafts: int | None = None
    accepted_per_position: tuple[int, ...] | None = None


class Timed(NamedTuple):
    """Requests answered together, the tokens that came back, and the seconds they took."""

    requests: float
    tokens: float
    seconds: float

    def times(self, factor: float) -> Timed:
        """As if it had been asked `factor` times."""
        return Timed(*(factor * value for value in self))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The prompts of one dataset, asked one at a time or again and again together.

    answers: one for each prompt. timed, a group for each dataset: one for each request, or for each pass over all.
    The rest are vLLM's counters over everything that was timed.
    """

    answers: tuple[Answer, ...]
    timed: tuple[tuple[Timed, ...], ...]
    num_drafts: float
    accepted_per_position: tuple[float, ...]

    @property
    def total(self) -> Timed:
        """Everything that was timed."""
        requests, tokens, seconds = zip(*chain.from_iterable(self.timed), strict=True)
        return Timed(sum(requests), sum(tokens), sum(seconds))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, all requests together."""
        return self.total.tokens / self.total.seconds


def pooled(datasets: Mapping[str, Measurement]) -> Measurement:
    """Several datasets as one; each prompt weighs the same, however often its dataset was repeated."""
    parts = list(datasets.values())
    weights = [len(part.answers) / part.total.requests for part in parts]
    return Measurement(
        answers=tuple(answer for part in parts for answer in part.answers),
        timed=tuple(
            tuple(one.times(weight) for one in group)
            for part, weight in zip(parts, weights, strict=True)
            for group in part.timed
        ),
        num_drafts=float(np.dot(weights, [part.num_drafts for part in parts])),
        accepted_per_position=tuple(
            np.dot(weights, [part.accepted_per_position for part in parts]).tolist()
        ),
    )


def served_row(
    served: Measurement,
    reference: Measurement,
    plain: Measurement | None,
    walked: Acceptance | None,
    exact: bool,
) -> dict[str, Any]:
    """One line of evaluation.json, names of dataset, drafter and setting apart.

    reference: answers without drafter; plain: their speed at the same concurrency, if measured; walked: the same
    answers walked, when they are greedy. exact: greedy in float32, where every answer must equal the reference.
    acceptance_length is vLLM's own count; acceptance_length_kept leaves out drafts accepted beyond the end of
    an answer.
    """
    drafts, total = max(served.num_drafts, 1), served.total
    per_position = [count / drafts for count in served.accepted_per_position]
    k = len(per_position)
    by_k = [] if walked is None else walked.expected_length.tolist()
    expected = [] if walked is None else walked.position[k - 1, :k] / max(walked.rounds[k - 1], 1)
    outputs = [answer.output_ids for answer in served.answers]
    alone = {answer.id: answer.output_ids for answer in reference.answers}
    same = [alone[answer.id] == answer.output_ids for answer in served.answers]
    return {
        "num_speculative_tokens": k,
        "prompts": len(outputs),
        "requests": round(total.requests),
        "output_tokens": round(total.tokens),
        "num_drafts": round(served.num_drafts),
        "acceptance_length": 1.0 + sum(per_position),
        "acceptance_length_kept": (total.tokens - total.requests) / drafts,
        "acceptance_interval": acceptance_interval(served.answers),
        "expected_acceptance_length": by_k[k - 1] if by_k else None,
        "expected_by_k": by_k,
        "expected_per_position": list(map(float, expected)),
        "acceptance_by_context": length_buckets(served.answers),
        "per_position_acceptance": per_position,
        "conditional_acceptance": conditional(per_position),
        "tokens_per_s": served.tokens_per_s,
        "tokens_per_s_plain": plain.tokens_per_s if plain else None,
        "speedup": served.tokens_per_s / plain.tokens_per_s if plain else None,
        "speedup_interval": speedup_interval(served, plain) if plain else None,
        "distinct_bigram": distinct_bigrams(outputs),
        "looping": looping(outputs),
        "identical_answers": sum(same) / len(same),
        "lossless": all(same) if exact else None,
    }


def distinct_bigrams(answers: Sequence[Sequence[int]]) -> float | None:
    """Share of an answer's bigrams that are distinct, over all answers; None without any bigram."""
    pairs = [list(pairwise(answer)) for answer in answers]
    total = sum(map(len, pairs))
    return sum(len(set(pair)) for pair in pairs) / total if total else None


def looping(answers: Sequence[Sequence[int]]) -> float:
    """Share of the answers that run in a loop: those of 32 tokens or more that end in one, or whose bigrams are
    distinct by less than half."""
    loops = [
        len(answer) >= LOOP_MIN_TOKENS
        and (ends_in_a_loop(answer) or (distinct_bigrams([answer]) or 0.0) < LOOP_BIGRAMS)
        for answer in answers
    ]
    return sum(loops) / max(len(loops), 1)


def ends_in_a_loop(answer: Sequence[int]) -> bool:
    """Whether the end, 32 tokens or more, says the same 64 tokens or fewer three times or more, however late it begins."""
    for period in range(1, LOOP_PERIOD + 1):
        size = max(LOOP_MIN_TOKENS, LOOP_REPEATS * period)
        tail = answer[-size:]
        if len(tail) == size and tail[period:] == tail[:-period]:
            return True
    return False


def conditional(per_position: Sequence[float]) -> list[float]:
    """Acceptance at position k given that every earlier position was accepted."""
    before = [1.0, *per_position[:-1]]
    return [now / then if then else 0.0 for now, then in zip(per_position, before, strict=True)]


def acceptance_interval(answers: Sequence[Answer], seed: int = 0) -> list[float] | None:
    """95 % bootstrap interval over conversations of 1 + accepted / drafts; None of few or without per-request counters."""
    counts = _counts(answers)
    if counts is None or len(counts) < LEAST:
        return None
    return _edges(_resampled(counts, _draws(len(counts), seed)))


def speedup_interval(served: Measurement, plain: Measurement) -> list[float] | None:
    """95 % bootstrap interval of the ratio of tokens per second, over what was timed, within each dataset: requests
    at concurrency 1, tenths of a pass above it.

    It covers the scatter while measuring, not what changed on the machine between the two engines. None when a
    dataset was timed less than five times: the interval would be too narrow.
    """
    if min(map(len, (*served.timed, *plain.timed))) < LEAST:
        return None
    ours, theirs = (
        sum(
            np.array(group)[_draws(len(group), seed + number)].sum(axis=1)
            for number, group in enumerate(side.timed)
        )
        for seed, side in ((0, served), (1000, plain))
    )
    return _edges((ours[:, 1] / ours[:, 2]) / (theirs[:, 1] / theirs[:, 2]))


def paired_difference(
    ours: Sequence[Answer], theirs: Sequence[Answer], seed: int = 0
) -> dict[str, Any] | None:
    """Our acceptance length minus theirs on the same prompts; 95 % interval from resampling both together."""
    assert [a.id for a in ours] == [a.id for a in theirs]
    left, right = _counts(ours), _counts(theirs)
    if left is None or right is None or len(left) < LEAST:
        return None
    draws = _draws(len(left), seed)
    interval = _edges(_resampled(left, draws) - _resampled(right, draws))
    whole = np.arange(len(left))[None]
    difference = _resampled(left, whole) - _resampled(right, whole)
    return {"difference": float(difference[0]), "interval": interval}


def length_buckets(answers: Sequence[Answer]) -> dict[str, dict[str, Any]] | None:
    """Acceptance by context length (prompt + answer, powers of two from 256); None without counters."""
    groups: dict[int, list[Answer]] = {}
    for answer in answers:
        tokens = len(answer.prompt_ids) + len(answer.output_ids)
        groups.setdefault(max(256, 1 << (tokens - 1).bit_length()), []).append(answer)
    found = {}
    for bound, group in sorted(groups.items()):
        counts = _counts(group)
        if counts is None:
            continue
        *accepted, drafts = counts.sum(axis=0).tolist()
        per_position = [count / drafts for count in accepted]
        found[f"<= {bound}"] = {
            "requests": len(group),
            "acceptance_length": 1.0 + sum(per_position),
            "per_position_acceptance": per_position,
            "conditional_acceptance": conditional(per_position),
        }
    return found or None


def agreement(
    plain: Sequence[Sequence[Tokens]], drafted: Sequence[Sequence[Tokens]], seed: int = 0
) -> float:
    """p-value that sampled answers with and without drafter come from one distribution (permutation test).

    Both: for each prompt, its answers. Compared are how often a token occurs, over all prompts, and which token
    stands at each place of each prompt's answers; answers change sides only within their prompt, so the
    test is exact whatever the prompts are.
    """
    answers = [
        (number, sign, answer)
        for number, groups in enumerate(zip(plain, drafted, strict=True))
        for sign, side in zip((1.0, -1.0), groups, strict=True)
        for answer in side
    ]
    cells: dict[tuple[int, ...], int] = {}
    found = [
        (cells.setdefault(cell, len(cells)), owner)
        for owner, (number, _, answer) in enumerate(answers)
        for place, token in enumerate(answer)
        for cell in ((token,), (number, place, token))
    ]
    at, of = np.array(found).T
    totals = np.bincount(at)
    prompts, signs = (np.array([answer[column] for answer in answers]) for column in (0, 1))

    def distance(signs: npt.NDArray[np.float64]) -> float:
        return float((np.bincount(at, signs[of]) ** 2 / totals).sum())

    rng = np.random.default_rng(seed)
    measured = distance(signs)
    larger = sum(
        distance(signs[np.lexsort((rng.random(len(signs)), prompts))]) >= measured - 1e-9
        for _ in range(DRAWS)
    )
    return (1 + larger) / (1 + DRAWS)


def best_k(
    expected_by_k: Sequence[float],
    num_speculative_tokens: int,
    served: float,
    speedup: float | None,
) -> int | None:
    """The k with the largest predicted speedup; None when a walk or a plain measurement is missing, or none gains.

    One served point gives the price of a draft token: a round costs acceptance length / speedup plain steps,
    taken as 1 + c * k. A drafter that looks free (c <= 0) is priced at zero.
    """
    if not expected_by_k or not speedup:
        return None
    price = max(0.0, (served / speedup - 1.0) / num_speculative_tokens)
    predicted = [length / (1.0 + price * k) for k, length in enumerate(expected_by_k, start=1)]
    return int(np.argmax(predicted)) + 1 if max(predicted) > 1 else None


def _counts(answers: Sequence[Answer]) -> npt.NDArray[np.int64] | None:
    """int64 [conversations, k + 1]: accepted at each position, drafts; None when an answer lacks them or none drafted.

    Turns of one conversation are alike: resampled one by one, they would make an interval too narrow.
    """
    if not answers or any(a.accepted_per_position is None for a in answers):
        return None
    conversations: dict[str, npt.NDArray[np.int64]] = {}
    for a in answers:
        row = np.array((*(a.accepted_per_position or ()), a.num_drafts), dtype=np.int64)
        first = a.id.split(NEXT_TURN)[0]
        conversations[first] = conversations.get(first, 0) + row
    counts = np.stack(list(conversations.values()))
    return counts if counts[:, -1].sum() else None


def _edges(values: npt.NDArray[np.float64]) -> list[float]:
    return [float(edge) for edge in np.quantile(values, (0.025, 0.975))]


def _draws(size: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(size, size=(DRAWS, size))


def _resampled(
    counts: npt.NDArray[np.int64], draws: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Acceptance length of each resampling of the prompts."""
    sums = counts[draws].sum(axis=1)
    lengths: npt.NDArray[np.float64] = 1.0 + sums[:, :-1].sum(1) / np.maximum(sums[:, -1], 1)
    return lengths
