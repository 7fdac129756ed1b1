"""Times of steps."""

from __future__ import annotations

import torch

from eagle3_train.training.clock import StepClock


def test_a_look_at_the_clock_covers_the_steps_since_the_last_one() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.add(100, (1.0, 3.0), [(1.0, 1.5), (2.0, 2.25)])
    clock.add(50, (7.0, 8.0), [])  # what lies between two steps belongs to none
    assert clock.read() == (150, 3.0, 0.75, 1.5)
    clock.add(10, (9.0, 9.5), [(9.0, 9.5)])
    assert clock.read() == (10, 0.5, 0.5, 0.5)
    assert clock.mark() <= clock.mark()
