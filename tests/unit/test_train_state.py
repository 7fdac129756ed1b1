"""When training has stopped getting better, and which checkpoint is the best one."""

from __future__ import annotations

from types import SimpleNamespace

from eagle3_train.stages.train import _best
from eagle3_train.training.state import Evaluations


def test_evaluations_in_a_row_without_gain_are_counted_and_a_gain_starts_afresh() -> None:
    evaluations, stale = Evaluations(), []
    for length in (1.0, 1.4, 1.4, 1.3, 1.5):
        evaluations.add(length)
        stale.append(evaluations.stale)
    assert stale == [0, 0, 1, 2, 0]
    assert (evaluations.last, evaluations.best) == (1.5, 1.5)


def test_the_best_checkpoint_is_the_newest_of_the_highest_scores() -> None:
    key = "eval/expected_acceptance_length"
    scores = {"c_1": 1.4, "c_2": 1.6, "c_3": 1.6, "c_4": 0.0}
    found = [(SimpleNamespace(path=path), {key: score}) for path, score in scores.items()]
    assert _best(found) == "c_3"
    assert _best([(c, {key: 0.0}) for c, _ in found]) == "c_4"
