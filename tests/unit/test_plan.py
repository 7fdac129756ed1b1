"""The planned stream: every pair once, budgets kept, resuming equals never having stopped."""

from dataclasses import replace

import numpy as np
import pytest

from eagle3_train.records import Sample
from eagle3_train.stream.ledger import Ledger
from eagle3_train.stream.plan import PlanShape, Window, plan_run, supervised_starts


def samples(count: int, seed: int = 0, longest: int = 90) -> list[Sample]:
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(rng.integers(8, longest))
        mask = np.zeros(length, dtype=np.bool_)
        mask[length // 2 :] = True
        made.append(Sample(f"s{number}", "test", np.arange(length, dtype=np.int32), mask))
    return made


SHAPE = PlanShape(ranks=2, accumulation=2, tokens_per_pack=128, epochs=3, seed=7, eval_every=5)


def pairs_of(windows: list[Window]) -> list[tuple[int, int]]:
    return [e for w in windows if w.kind == "train" for p in w.packs for e in p.entries]


def test_every_sample_is_planned_once_per_epoch() -> None:
    train = samples(37)
    plan = plan_run(train, samples(5, 1), SHAPE, np.zeros((3, 37), np.bool_), 0)
    assert sorted(pairs_of(plan)) == [(e, s) for e in range(3) for s in range(37)]


def test_no_pack_exceeds_its_token_budget_and_each_rank_gets_its_packs() -> None:
    plan = plan_run(samples(50), samples(9, 1), SHAPE, np.zeros((3, 50), np.bool_), 0)
    assert [w.index for w in plan] == list(range(len(plan)))
    for window in plan:
        assert all(pack.tokens <= SHAPE.tokens_per_pack for pack in window.packs)
        assert [p.rank for p in window.packs] == [s % 2 for s in range(len(window.packs))]
        assert window.tokens == sum(pack.tokens for pack in window.packs)


def test_epochs_have_different_orders() -> None:
    plan = plan_run(samples(37), [], SHAPE, np.zeros((3, 37), np.bool_), 0)
    orders = [[s for e, s in pairs_of(plan) if e == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("stop_after", [1, 4, 9])
def test_the_plan_after_a_stop_is_the_rest_of_the_original_plan(stop_after: int) -> None:
    train, held_out = samples(40), samples(6, 1)
    ledger = Ledger(3, 40)
    whole = plan_run(train, held_out, SHAPE, ledger.trained, 0)
    steps = [w for w in whole if w.kind == "train"]
    for window in steps[:stop_after]:
        ledger.mark(e for p in window.packs for e in p.entries)
    again = Ledger.from_hex(ledger.to_hex(), 3, 40)
    rest = plan_run(train, held_out, SHAPE, again.trained, stop_after)
    assert [(w.step, [p.entries for p in w.packs]) for w in rest if w.kind == "train"] == [
        (w.step, [p.entries for p in w.packs]) for w in steps[stop_after:]
    ]
    assert [w.step for w in rest if w.kind == "eval"] == [
        w.step for w in whole if w.kind == "eval" and w.step > stop_after
    ]


def test_evaluations_come_first_periodically_and_last_and_only_the_final_part_closes() -> None:
    plan = plan_run(samples(40), samples(30, 1), SHAPE, np.zeros((3, 40), np.bool_), 0)
    evaluations = [w for w in plan if w.kind == "eval"]
    last = max(w.step for w in plan)
    assert sorted({w.step for w in evaluations}) == sorted({0, *range(5, last + 1, 5), last})
    for step in {w.step for w in evaluations}:
        parts = [w for w in evaluations if w.step == step]
        assert len(parts) > 1
        assert [w.closes for w in parts] == [False] * (len(parts) - 1) + [True]
        rows = sorted(row for w in parts for p in w.packs for _, row in p.entries)
        assert rows == list(range(40, 70))


def test_fewer_samples_than_packs_is_an_error_that_names_the_minimum() -> None:
    with pytest.raises(ValueError, match="at least 4 samples"):
        plan_run(samples(3), [], SHAPE, np.zeros((3, 3), np.bool_), 0)


def test_supervised_starts_follow_the_rule_of_the_contract() -> None:
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 0, 1, 1], dtype=np.bool_)
    brute = sum(bool(mask[t + 1] and mask[t + 2]) for t in range(len(mask) - 2))
    assert supervised_starts(mask) == brute == 3


def test_a_pair_trained_twice_is_refused() -> None:
    ledger = Ledger(1, 4)
    ledger.mark([(0, 2)])
    with pytest.raises(AssertionError, match="trained twice"):
        ledger.mark([(0, 2)])


def test_a_ledger_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data or train\.epochs changed"):
        Ledger.from_hex(Ledger(2, 100).to_hex(), 2, 50)


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_a_replayed_window_makes_its_steps_at_once_and_resuming_is_exact(stop_after: int) -> None:
    train = samples(40)
    shape = replace(SHAPE, epochs=4, replay=2, eval_every=6)
    ledger = Ledger(4, 40)
    whole = [w for w in plan_run(train, [], shape, ledger.trained, 0) if w.kind == "train"]
    assert [w.step for w in whole] == list(range(2, 2 * len(whole) + 1, 2))
    assert {e for e, _ in pairs_of(whole)} == {0, 2}, "an entry stands for the epochs e and e + 1"
    for window in whole[:stop_after]:
        for again in range(2):
            ledger.mark((e + again, row) for p in window.packs for e, row in p.entries)
    rest = plan_run(train, [], shape, ledger.trained, 2 * stop_after)
    assert [(w.step, [p.entries for p in w.packs]) for w in rest if w.kind == "train"] == [
        (w.step, [p.entries for p in w.packs]) for w in whole[stop_after:]
    ]
    for window in whole[stop_after:]:
        for again in range(2):
            ledger.mark((e + again, row) for p in window.packs for e, row in p.entries)
    assert ledger.trained.all()


def test_a_ledger_of_another_replay_is_refused() -> None:
    train, shape = samples(20), replace(SHAPE, epochs=4, replay=2)
    half = np.zeros((4, 20), np.bool_)
    half[0] = True  # one of the two passes
    for steps in (4, 5):
        with pytest.raises(ValueError, match="is not what this run was trained with"):
            plan_run(train, [], shape, half, steps)
    half[1] = True
    assert {epoch for epoch, _ in pairs_of(plan_run(train, [], shape, half, 4))} == {2}
