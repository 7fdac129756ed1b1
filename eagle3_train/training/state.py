"""Everything one training worker holds between optimiser steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train.collective import broadcast_from_rank_zero
from torch import Tensor

from eagle3_train.config import JobConfig
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.model import Eagle3Drafter
from eagle3_train.records import Pack, Sample
from eagle3_train.rundir import RunDir
from eagle3_train.runlog import log
from eagle3_train.stream.ledger import Ledger
from eagle3_train.stream.plan import PlanShape, Window, plan_run
from eagle3_train.training import checkpoint
from eagle3_train.training.clock import StepClock
from eagle3_train.training.feed import FeedShape
from eagle3_train.training.initial import load_initial, spec_of
from eagle3_train.training.optim import AdamW
from eagle3_train.training.shard import shard


def plan_shape(config: JobConfig) -> PlanShape:
    """What the layout of this job's stream depends on, beside the samples and the ledger."""
    return PlanShape(
        ranks=config.train.workers,
        accumulation=config.train.accumulation,
        tokens_per_pack=config.stream.tokens_per_pack,
        epochs=config.train.epochs,
        seed=config.train.seed,
        eval_every=config.train.eval_every,
        replay=config.stream.replay,
    )


@dataclass(slots=True)
class Evaluations:
    """Expected acceptance length at the held-out evaluations so far; `stale` of them brought nothing new."""

    last: float = 0.0
    best: float = 0.0
    stale: int = 0

    def add(self, length: float) -> None:
        """Take the next evaluation's."""
        self.stale = 0 if length > self.best else self.stale + 1
        self.last, self.best = length, max(length, self.best)


@dataclass(slots=True)
class TrainState:
    """One rank: model, optimiser, position in the data. step counts optimiser steps made."""

    config: JobConfig
    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype
    drafter: Eagle3Drafter
    frozen: FrozenTarget
    optimizer: AdamW
    clock: StepClock
    train: list[Sample]
    held_out: list[Sample]
    ledger: Ledger
    step: int = 0
    total_steps: int = 0
    bad_samples: int = 0
    norms: list[Tensor] = field(default_factory=list)
    """Gradient norm of each step since the last metrics, on the device."""
    evaluations: Evaluations = field(default_factory=Evaluations)

    @classmethod
    def create(cls, config: JobConfig, train: list[Sample], held_out: list[Sample]) -> TrainState:
        """Build this rank's part of the drafter and its optimiser, at the initial weights."""
        context = ray.train.get_context()
        ranks, device = context.get_world_size(), ray.train.torch.get_device()
        dtype = getattr(torch, config.train.dtype)
        if device.type == "cpu":
            torch.set_num_threads(max(1, int(config.train.cpus_per_worker)))
        drafter = Eagle3Drafter(spec_of(config), fp8=config.train.fp8)
        frozen = load_initial(config, drafter, dtype)
        drafter.to(device, dtype if ranks == 1 else torch.float32)  # FSDP2 casts float32 shards
        shard(drafter, ranks, device, dtype)
        return cls(
            config=config,
            rank=context.get_world_rank(),
            ranks=ranks,
            device=device,
            dtype=dtype,
            drafter=drafter,
            frozen=frozen.to(device, dtype),
            optimizer=AdamW(
                drafter.parameters(),
                lr=config.train.lr,
                betas=config.train.betas,
                weight_decay=config.train.weight_decay,
                max_grad_norm=config.train.grad_clip,
            ),
            clock=StepClock(device),
            train=train,
            held_out=held_out,
            ledger=Ledger(config.train.epochs, len(train)),
        )

    def restore(self) -> None:
        """Continue from Ray Train's latest checkpoint, if there is one."""
        latest = ray.train.get_checkpoint()
        if latest is None:
            return
        with latest.as_directory() as folder:
            saved = checkpoint.restore(Path(folder), self.drafter, self.optimizer)
        self.step = saved["step"]
        self.bad_samples = saved["bad_samples"]
        self.evaluations = Evaluations(**saved["evaluations"])
        self.ledger = Ledger.from_hex(saved["ledger"], self.config.train.epochs, len(self.train))
        log.info("restored step %d: %d pairs trained", self.step, self.ledger.count)

    def plan(self) -> list[Window]:
        """Windows still to do; sets the length of the learning-rate schedule."""
        shape = plan_shape(self.config)
        windows = plan_run(self.train, self.held_out, shape, self.ledger.trained, self.step)
        self.total_steps = max((w.step for w in windows), default=self.step)
        return windows

    @property
    def walked_steps(self) -> int:
        """Draft steps an evaluation walks."""
        return max(self.config.train.ttt_steps, self.config.evaluate.num_speculative_tokens)

    @property
    def has_stalled(self) -> bool:
        """Whether train.early_stop_evals evaluations in a row brought nothing; the same on every rank."""
        patience = self.config.train.early_stop_evals
        return 0 < patience <= self.evaluations.stale

    def feed_shape(self) -> FeedShape:
        """What this rank's step expects of a pack."""
        spec = self.drafter.spec
        return FeedShape(self.device, self.dtype, spec.num_aux * spec.hidden_size, spec.hidden_size)

    def documents(self, pack: Pack) -> tuple[list[Sample], int]:
        """A pack's samples, and how many steps their chains are unrolled."""
        rows = [row for _, row in pack.entries]
        is_held_out = bool(rows) and rows[0] >= len(self.train)
        steps = self.walked_steps if is_held_out else self.config.train.ttt_steps
        return [self.sample(row) for row in rows], steps

    def sample(self, row: int) -> Sample:
        """Row of the plan: training samples first, held-out ones after them."""
        return self.train[row] if row < len(self.train) else self.held_out[row - len(self.train)]

    def agree(self, decide: Callable[[], int]) -> int:
        """One number for all ranks, decided by rank 0."""
        return int(broadcast_from_rank_zero(decide() if self.rank == 0 else 0))

    def longest(self, seconds: float) -> float:
        """Largest value over the ranks: one rank that waits for data makes all of them wait."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value.item())

    def save(self, metrics: dict[str, Any]) -> None:
        """Report a checkpoint to Ray Train; every rank must call it at the same step."""
        state = {
            "rank": self.rank,
            "step": self.step,
            "ledger": self.ledger.to_hex(),
            "bad_samples": self.bad_samples,
            "evaluations": asdict(self.evaluations),
        }
        paths = RunDir(self.config.run_path)
        if self.rank == 0:
            checkpoint.copy_registered(paths)
        saving = paths.saving
        saving.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=saving) as folder:
            checkpoint.save(Path(folder), self.drafter, self.optimizer, state)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
