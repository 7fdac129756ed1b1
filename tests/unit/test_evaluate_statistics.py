"""Ratios, intervals and alarms of evaluation, checked against hand counts and simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eagle3_train.stages.evaluate_statistics import (
    NEXT_TURN,
    Answer,
    acceptance_interval,
    agreement,
    best_k,
    conditional,
    distinct_bigrams,
    length_buckets,
    looping,
    paired_difference,
)


def answers(accepted: list[int], drafts: list[int], tokens: int = 40) -> list[Answer]:
    return [
        Answer(str(i), tuple(range(10)), tuple(range(tokens)), d, (a,))
        for i, (a, d) in enumerate(zip(accepted, drafts, strict=True))
    ]


def test_bigrams_are_counted_within_answers_not_across_them() -> None:
    assert distinct_bigrams([[1, 2, 1, 2], [1, 2]]) == pytest.approx(3 / 4)
    assert distinct_bigrams([[7], []]) is None


def test_a_loop_is_long_and_repetitive() -> None:
    assert looping([[1, 2] * 20, list(range(40)), [1, 1, 1]]) == pytest.approx(1 / 3)


VARIED = list(range(100, 400))


@pytest.mark.parametrize("period", [1, 2, 7, 11, 40, 64])
def test_a_loop_that_begins_late_is_seen(period: int) -> None:
    said = list(range(period))
    loop = (said * 40)[: max(32, 3 * period)]
    assert looping([VARIED + loop]) == 1.0
    assert looping([VARIED + loop[1:]]) == 0.0  # one token less does not count yet
    assert looping([VARIED + loop + [7]]) == 0.0  # the answer got out of it


def test_long_texts_that_repeat_and_lists_that_advance_are_no_loops() -> None:
    stanza = list(range(65))
    assert looping([VARIED + stanza * 3]) == 0.0
    assert looping([[token for n in range(30) for token in (n, 900, 901)]]) == 0.0


def test_conditional_acceptance_multiplies_back_to_the_unconditional_one() -> None:
    per_position = [0.6, 0.3, 0.12]
    assert np.cumprod(conditional(per_position)) == pytest.approx(per_position)
    assert conditional([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]


def test_the_interval_covers_the_truth_about_as_often_as_it_claims() -> None:
    rng = np.random.default_rng(0)
    truth = 1 + 3 * 0.4
    covered = 0
    for trial in range(100):
        accepted = rng.binomial(3 * 20, 0.4, size=40)
        interval = acceptance_interval(answers(accepted.tolist(), [20] * 40), seed=trial)
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert 86 <= covered <= 100


def test_an_interval_takes_the_turns_of_a_conversation_for_one_sample() -> None:
    first = answers([30, 10, 25, 40, 5, 20, 35], [20] * 7)
    second = [replace(answer, id=f"{answer.id}{NEXT_TURN}") for answer in first]
    assert acceptance_interval([*first, *second]) == acceptance_interval(first)
    assert acceptance_interval([*first[:3], *second[:3]]) is None  # three conversations


def test_an_interval_needs_counters_of_every_request() -> None:
    some = [*answers([3], [4]), Answer("x", (1,), (1, 2))]
    assert acceptance_interval(some) is None
    assert length_buckets(some) is None
    assert paired_difference(some, some) is None


def test_a_paired_difference_sees_what_two_separate_intervals_cannot() -> None:
    rng = np.random.default_rng(1)
    hard = rng.integers(0, 50, size=30)  # prompts differ a lot, drafters by a little on each
    ours, theirs = answers((hard + 2).tolist(), [20] * 30), answers(hard.tolist(), [20] * 30)
    found = paired_difference(ours, theirs)
    assert found is not None
    assert found["difference"] == pytest.approx(0.1)
    assert found["interval"] == pytest.approx([0.1, 0.1])
    left, right = acceptance_interval(ours), acceptance_interval(theirs)
    assert left is not None
    assert right is not None
    assert left[0] < right[1]


def test_acceptance_is_reported_by_context_length_and_position() -> None:
    short = Answer("short", tuple(range(10)), tuple(range(40)), 10, (8, 2))
    long = Answer("long", tuple(range(400)), tuple(range(112)), 20, (5, 0))
    found = length_buckets([short, long])
    assert found is not None
    assert {bucket: row["acceptance_length"] for bucket, row in found.items()} == {
        "<= 256": 2.0,
        "<= 512": 1.25,
    }
    assert found["<= 256"]["per_position_acceptance"] == [0.8, 0.2]
    assert found["<= 256"]["conditional_acceptance"] == pytest.approx([0.8, 0.25])


def sampled(rng: np.random.Generator, first: float, count: int = 24) -> list[list[tuple[int, ...]]]:
    """Answers to four prompts; `first` is how often one starts with its favourite token."""
    return [
        [
            (prompt if rng.random() < first else 50, *rng.integers(10, 14, size=7).tolist())
            for _ in range(count)
        ]
        for prompt in range(4)
    ]


def test_equal_distributions_agree_and_the_p_value_is_uniform() -> None:
    rng = np.random.default_rng(2)
    values = [agreement(sampled(rng, 0.5), sampled(rng, 0.5)) for _ in range(20)]
    assert min(values) > 0.005
    assert 0.25 < np.mean(values) < 0.75


def test_a_drafter_that_changes_what_is_sampled_is_found_out() -> None:
    rng = np.random.default_rng(3)
    assert agreement(sampled(rng, 0.5), sampled(rng, 0.95)) < 0.001
    # One answer per prompt and side, as a pass at a temperature gives: 200 prompts.
    plain = [[tuple(rng.integers(0, 20, size=8).tolist())] for _ in range(200)]
    drafted = [[tuple(rng.integers(0, 18, size=8).tolist())] for _ in range(200)]
    assert agreement(plain, drafted) < 0.001


def test_the_best_k_weighs_longer_drafts_against_their_measured_price() -> None:
    expected = [1.6, 1.9, 2.05, 2.1]
    assert best_k(expected, 3, served=2.05, speedup=2.05) == 4  # free drafts: the longer the better
    assert best_k(expected, 3, served=2.05, speedup=1.0) == 1  # dear drafts: hardly any
    assert best_k(expected, 3, served=2.05, speedup=0.5) is None  # no draft is worth its price
    assert best_k(expected, 3, served=2.05, speedup=None) is None
    assert best_k([], 3, served=2.05, speedup=1.5) is None
