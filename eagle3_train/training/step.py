"""One optimiser step, and one held-out evaluation, of one rank.

Both pull the rank's packs of a window from its feed, in order; nothing of a pack is kept after they
return, so the caller may acknowledge the window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eagle3_train.drafter.losses import LossOptions
from eagle3_train.drafter.rows import PackedBatch
from eagle3_train.drafter.ttt import StepMetrics
from eagle3_train.drafter.walk import walk_batch
from eagle3_train.runlog import log
from eagle3_train.stream.plan import Window
from eagle3_train.training.feed import FedPack
from eagle3_train.training.optim import learning_rate
from eagle3_train.training.state import TrainState


class NonFiniteLossError(RuntimeError):
    """The loss or a gradient is not finite; such a step updates nothing, and what came of it is not saved."""


def train_step(
    state: TrainState, window: Window, packs: Iterator[FedPack], replay: int
) -> dict[str, Any]:
    """Train on one window, for the `replay`-th time (from 0), and return metrics; empty off the log interval.

    The loss is normalised by the supervised starts of the whole window over all ranks, so a token
    weighs the same however it was batched. FSDP averages gradients over ranks: hence times ranks.
    """
    config, clock = state.config.train, state.clock
    step = state.step + 1
    # Metrics come with every checkpoint too, so that none is written after a step that did not count.
    intervals = (config.log_every, config.checkpoint_every)
    logged = step == state.total_steps or any(step % every == 0 for every in intervals)
    options = LossOptions(kind=config.loss, decay=config.decay)
    tally = Tally(config.ttt_steps, state.device)
    waits, started = [], clock.mark()
    for _ in range(config.accumulation):
        asked = clock.mark()
        batch = _next_batch(state, packs)
        waits.append((asked, clock.mark()))
        out = state.drafter(batch, state.frozen, options, float(max(window.starts, 1)), logged)
        (out.loss * state.ranks).backward()
        tally.add(out.loss.detach(), out.metrics)
    lr = learning_rate(
        step,
        peak=config.lr,
        warmup=config.warmup_ratio * state.total_steps,
        total=state.total_steps,
        floor=config.min_lr_ratio,
    )
    state.optimizer.set_lr(lr)
    state.norms.append(state.optimizer.step())
    state.optimizer.zero_grad()
    clock.add(window.tokens, (started, clock.mark()), waits)
    state.step = step
    state.ledger.mark((epoch + replay, row) for pack in window.packs for epoch, row in pack.entries)
    if not logged:
        return {}
    loss, accuracy, prefix = tally.reduce(state.ranks)
    tokens, seconds, waited, step_s = clock.read()
    norms = torch.stack(state.norms).tolist()
    state.norms.clear()
    wrong = [step - back for back, norm in enumerate(reversed(norms)) if not math.isfinite(norm)]
    if wrong or not math.isfinite(loss):
        raise NonFiniteLossError(
            f"the gradient is not finite at steps {wrong[::-1]}, the loss of step {step} is {loss}; lower train.lr, or set "
            f"train.log_every=1 to see which samples it is (of step {step}: {[pack.entries for pack in window.packs]})"
        )
    return {
        "epoch": state.ledger.count / len(state.train),
        "train/loss": loss,
        "train/accuracy_k": accuracy,
        "train/prefix_accuracy_k": prefix,
        "train/lr": lr,
        "train/grad_norm": norms[-1],
        "perf/tokens": tokens,
        "perf/tokens_per_s": tokens / seconds,
        "perf/data_wait_frac": state.longest(waited) / seconds,
        "perf/step_s": step_s,
    }


class Tally:
    """Sums of one window: loss, and hits per TTT step; no host sync before `reduce`."""

    def __init__(self, ttt_steps: int, device: torch.device) -> None:
        self._loss = torch.zeros(1, dtype=torch.float64, device=device)
        self._hits = torch.zeros(3, ttt_steps, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, metrics: StepMetrics | None) -> None:
        """Add one pack."""
        self._loss += loss
        if metrics is not None:
            rows = torch.tensor(metrics.supervised, device=self._hits.device)
            self._hits += torch.stack([rows, metrics.correct, metrics.prefix])

    def reduce(self, ranks: int) -> tuple[float, list[float], list[float]]:
        """Loss, step accuracy and prefix accuracy per TTT step, over all ranks."""
        sums = torch.cat([self._loss, self._hits.flatten()])
        if ranks > 1:
            dist.all_reduce(sums)
        loss, rows, correct, prefix = sums[0], *sums[1:].view(3, -1)
        rows = rows.clamp(min=1)
        return float(loss), (correct / rows).tolist(), (prefix / rows).tolist()


def _next_batch(state: TrainState, packs: Iterator[FedPack]) -> PackedBatch:
    """The rank's next pack. Unusable samples are logged and counted; too many of them raise ValueError."""
    fed = next(packs)
    for index, reason in fed.bad.items():
        epoch, row = fed.pack.entries[index]
        log.warning("sample %s (epoch %d): %s", state.sample(row).id, epoch, reason)
    state.bad_samples += len(fed.bad)
    allowed = state.config.train.max_bad_samples * state.config.train.epochs * len(state.train)
    if state.bad_samples > max(allowed, 1):
        raise ValueError(
            f"{state.bad_samples} captured samples were unusable, more than train.max_bad_samples="
            f"{state.config.train.max_bad_samples} allows; run the live preflight on this target"
        )
    return fed.batch


class Evaluation:
    """Walks held-out greedy rollouts as the engine does; one evaluation may span several windows."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._start()

    def _start(self) -> None:
        steps = self._state.walked_steps
        self._tally = Tally(steps, self._state.device)
        self._walked = np.zeros((2, steps), dtype=np.int64)  # rounds, accepted for k = 1..

    def add(self, window: Window, packs: Iterator[FedPack]) -> dict[str, Any]:
        """Walk one window's packs; metrics after the window that closes the evaluation, else empty."""
        state = self._state
        options = LossOptions(kind=state.config.train.loss, decay=state.config.train.decay)
        batch = _next_batch(state, packs)
        out, walked = walk_batch(
            state.drafter, state.frozen, batch, options, float(max(window.starts, 1))
        )
        if batch.rows.supervised_starts:  # an empty pack is planned less deep
            self._tally.add(out.loss, out.metrics)
            self._walked += np.stack([walked.rounds, walked.accepted])
        return self._finish() if window.closes else {}

    def _finish(self) -> dict[str, Any]:
        """Reduce over ranks and start afresh."""
        loss, accuracy, prefix = self._tally.reduce(self._state.ranks)
        walked = torch.from_numpy(self._walked).to(self._state.device)
        if self._state.ranks > 1:
            dist.all_reduce(walked)
        rounds, accepted = walked.cpu().numpy()
        lengths = 1.0 + accepted / np.maximum(rounds, 1)
        self._start()
        served = float(lengths[self._state.config.evaluate.num_speculative_tokens - 1])
        self._state.evaluations.add(served)
        return {
            "eval/expected_acceptance_length": served,
            "eval/expected_by_k": lengths.tolist(),
            "eval/loss": loss,
            "eval/step_accuracy": accuracy,
            "eval/prefix_accuracy_k": prefix,
        }
