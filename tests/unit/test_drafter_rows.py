"""The loader's index lists say exactly which rows contracts.md supervises, and nothing else."""

import numpy as np
import pytest

from eagle3_train.drafter.rows import plan_rows
from eagle3_train.drafter.walk import walk_answers


def random_documents(seed: int, count: int):
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        n = int(rng.integers(1, 14))
        runs = np.repeat(rng.random(n) < 0.6, rng.integers(1, 4, n))[:n]
        documents.append((rng.integers(0, 1000, n), runs))
    return documents


def brute_force(documents, steps):
    """{(document, k, t)} by the rule, read off literally."""
    return {
        (d, k, t)
        for d, (ids, mask) in enumerate(documents)
        for t in range(len(ids))
        for k in range(steps)
        if t + 2 + k < len(ids) and all(mask[t + 1 + i] for i in range(k + 2))
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_planned_rows_are_the_supervised_rows(seed):
    documents, steps = random_documents(seed, 1 + seed % 7), 1 + seed % 5
    plan = plan_rows(*zip(*documents, strict=True), steps)
    first_row = np.cumsum([0] + [len(ids) - 1 for ids, _ in documents])
    owner = np.searchsorted(first_row, plan.context.numpy(), side="right") - 1
    local = plan.context.numpy() - first_row[owner]
    starts = plan.starts.numpy()
    found = {(owner[c], k, local[c]) for k, n in enumerate(plan.counts) for c in starts[:n]}
    assert found == brute_force(documents, steps)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_reads_its_own_token_teacher_and_keys(seed):
    documents, steps = random_documents(100 + seed, 5), 4
    plan = plan_rows(*zip(*documents, strict=True), steps)
    rows = np.concatenate(
        [
            np.stack([np.full(len(i) - 1, d), np.arange(len(i) - 1)], 1)
            for d, (i, _) in enumerate(documents)
        ]
    )
    document, local = rows[plan.context.numpy()].T if len(plan.context) else (np.zeros(0, int),) * 2
    tokens = [documents[d][0][t + 1] for d, t in zip(document, local, strict=True)]
    assert plan.context_ids.tolist() == tokens
    assert plan.positions.tolist() == local.tolist()
    assert all(
        document[b] == d and local[b] == 0
        for b, d in zip(plan.begin.tolist(), document, strict=True)
    )
    starts = plan.starts.numpy()
    for k in range(plan.steps):
        slots = plan.at(plan.slots, k).numpy()
        assert np.array_equal(starts[slots], starts[: plan.counts[k]] + k)
        ordered = starts[plan.at(plan.order, k).numpy()]
        assert (np.diff(ordered) > 0).all()
        assert len(ordered) == plan.counts[k]
    targets = rows[plan.target_rows.numpy()] if len(starts) else np.zeros((0, 2), int)
    assert [tuple(pair) for pair in targets] == [(document[c], local[c] + 1) for c in starts]
    for d in set(document.tolist()):  # context ends with the last start
        assert local[document == d].max() == local[starts[document[starts] == d]].max()


def test_an_answer_of_n_tokens_gives_n_minus_1_minus_k_rows_and_starts_before_its_first_token():
    mask = np.array([0, 0, 0] + [1] * 6, dtype=bool)
    plan = plan_rows([np.arange(9)], [mask], 4)
    assert plan.counts == (5, 4, 3, 2)
    assert plan.starts[0] == 2  # the state of x[p-1] with the embedding of x[p]


def test_a_pack_of_prompts_has_no_rows_at_all():
    plan = plan_rows([np.arange(5), np.arange(1)], [np.zeros(5, bool), np.ones(1, bool)], 3)
    assert plan.counts == (0, 0, 0)
    assert plan.steps == 0
    assert len(plan.context) == 0


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="document 1 has 3 ids and a mask of 2"):
        plan_rows([np.arange(2), np.arange(3)], [np.ones(2, bool), np.ones(2, bool)], 3)


def test_the_walk_counts_rounds_as_an_engine_would():
    # one answer with 8 starts; leading hits per start
    accepted = np.array([2, 0, 1, 3, 0, 0, 1, 0])
    starts = np.arange(10, 18)
    result = walk_answers(accepted, starts, np.zeros(8, int), 3)
    # K=3: 0 (+2) -> 3 (+3) -> 7 (+0) -> end; K=1: 0 (+1) -> 2 (+1) -> 4 -> 5 -> 6 (+1) -> end
    assert result.rounds.tolist()[2] == 3
    assert result.accepted.tolist()[2] == 5
    assert result.rounds.tolist()[0] == 5
    assert result.accepted.tolist()[0] == 3
    assert result.expected_length[2] == pytest.approx(1 + 5 / 3)
    assert result.position[2].tolist() == [2, 2, 1]


def test_the_walk_equals_a_plain_loop_over_answers_in_any_order():
    rng = np.random.default_rng(1)
    starts, begin, accepted, answers = [], [], [], []
    at = 0
    for document in range(6):
        first, at = at, at + int(rng.integers(0, 3))
        for _ in range(int(rng.integers(1, 4))):
            length = int(rng.integers(1, 15))
            hits = rng.integers(0, 6, length)
            answers.append(hits)
            starts += range(at, at + length)
            begin += [first] * length
            accepted += hits.tolist()
            at += length + (1 + int(rng.integers(0, 3)) if document != 2 else 1)
        at -= 1 if document == 3 else 0  # the next document may begin right after this answer
    shuffle = rng.permutation(len(starts))
    got = walk_answers(*(np.array(a)[shuffle] for a in (accepted, starts, begin)), 5)
    for depth in range(1, 6):
        rounds = total = 0
        for hits in answers:
            t = 0
            while t < len(hits):
                a = min(int(hits[t]), depth)
                rounds, total, t = rounds + 1, total + a, t + a + 1
        assert (got.rounds[depth - 1], got.accepted[depth - 1]) == (rounds, total)
    twice = got + got
    assert np.array_equal(twice.expected_length, got.expected_length)


def test_an_empty_walk_accepts_nothing():
    none = np.zeros(0, int)
    assert walk_answers(none, none, none, 2).expected_length.tolist() == [1, 1]
