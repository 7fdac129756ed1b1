"""When training has stopped getting better, and which checkpoint is the best one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from eagle3_train.config import JobConfig
from eagle3_train.records import Pack, Sample
from eagle3_train.stages.train import _best
from eagle3_train.stream.ledger import Ledger
from eagle3_train.stream.plan import Window
from eagle3_train.training.clock import StepClock
from eagle3_train.training.feed import FedPack
from eagle3_train.training.optim import AdamW
from eagle3_train.training.state import Evaluations, TrainState
from eagle3_train.training.step import NonFiniteLossError, train_step
from tests.unit.drafter_cases import llama_spec, make_document, make_drafter, make_target, pack

CPU = torch.device("cpu")


def job(**train: object) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "unit",
            "target": {"path": "absent"},
            "stream": {"max_bytes_in_flight": 1},
            "train": {"ttt_steps": 3, "dtype": "float32", **train},
        }
    )


@pytest.mark.parametrize("interval", ["log_every", "checkpoint_every"])
def test_a_step_that_did_not_count_ends_training_before_anything_is_saved(interval: str) -> None:
    config = job(**({"log_every": 100, "checkpoint_every": 100, "eval_every": 100} | {interval: 4}))
    spec, mask = llama_spec(), np.array([0, 0, 0] + [1] * 9, bool)
    drafter = make_drafter(spec).float()
    optimizer, clock = AdamW(drafter.parameters(), lr=1e-3), StepClock(CPU)
    samples = [Sample(str(i), "chat", np.arange(12, dtype=np.int32), mask) for i in range(4)]
    frozen, ledger = make_target(spec).to("cpu", torch.float32), Ledger(1, 4)
    state = TrainState(
        config, 0, 1, CPU, torch.float32, drafter, frozen, optimizer, clock, samples, [], ledger
    )
    state.total_steps = 50

    def step(number: int) -> None:
        batch = pack([make_document(spec, mask, number)], 3).to("cpu", torch.float32)
        one = Pack(number, 0, 0, ((0, number),), 11)
        starts = batch.rows.supervised_starts
        if number == 1:
            batch.aux_hidden_states[:] = float("inf")
        window = Window(number, "train", number + 1, True, (one,), 11, starts)
        assert train_step(state, window, iter([FedPack(one, batch, {})]), 0) == {}

    for number in range(3):
        step(number)
    with pytest.raises(NonFiniteLossError, match=r"not finite at steps \[2\], the loss of step 4"):
        step(3)


@pytest.mark.parametrize("wrong", [{"betas": (0.9, 1.0)}, {"betas": (-1, 0.9)}, {"lr": "inf"}])
def test_settings_that_would_write_nan_into_the_weights_are_refused(
    wrong: dict[str, object],
) -> None:
    with pytest.raises(ValidationError):
        job(**wrong)


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
