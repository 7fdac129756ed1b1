"""When training has stopped getting better."""

from __future__ import annotations

from eagle3_train.training.state import Evaluations


def test_evaluations_in_a_row_without_gain_are_counted_and_a_gain_starts_afresh() -> None:
    evaluations, stale = Evaluations(), []
    for length in (1.0, 1.4, 1.4, 1.3, 1.5):
        evaluations.add(length)
        stale.append(evaluations.stale)
    assert stale == [0, 0, 1, 2, 0]
    assert (evaluations.last, evaluations.best) == (1.5, 1.5)
