"""One implementation in its own process: set up beside the others, time alone. Started by `step.py`.

Set-up and warm-up (imports, weights, compilation) hold a shared lock, the timed loop an exclusive one.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path += [p for p in os.environ.get("BENCH_PYTHONPATH_TAIL", "").split(":") if p]

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.step_ours import (
    SHAPES,
    Shape,
    make_documents,
    make_weights,
    measure_ours,
    measured,
    split_documents,
)

LOCK = Path("/tmp/eagle3-step-benchmark.lock")


class Turn:
    """Shared while setting up, exclusive while timing."""

    def __init__(self) -> None:
        self._file = LOCK.open("w")
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def alone(self) -> None:
        """Wait until nobody sets up or times."""
        torch.cuda.synchronize()
        fcntl.flock(self._file, fcntl.LOCK_UN)
        time.sleep(0.2)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def together(self) -> None:
        """Let the next one in."""
        torch.cuda.synchronize()
        fcntl.flock(self._file, fcntl.LOCK_UN)


def timed(
    shape: Shape,
    impl: str,
    cases: dict[float, list[Any]],
    forward: Callable[[Any], Any],
    backward: Callable[[Any], None],
    optimize: Callable[[], None],
    options: argparse.Namespace,
    turn: Turn,
) -> None:
    """Run every case: the micro-batches of one step, then the optimiser."""

    def step(batches: list[Any]) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        marks[0].record()
        spent = [0.0, 0.0]
        for batch in batches:
            t0 = time.perf_counter()
            out = forward(batch)
            torch.cuda.synchronize()
            t1 = time.perf_counter()
            backward(out)
            torch.cuda.synchronize()
            spent = [spent[0] + t1 - t0, spent[1] + time.perf_counter() - t1]
        t2 = time.perf_counter()
        optimize()
        marks[1].record()
        torch.cuda.synchronize()
        optimizer = time.perf_counter() - t2
        return [*(1e3 * part for part in (*spent, optimizer)), marks[0].elapsed_time(marks[1])]

    first: dict[float, float] = {}
    for fraction, batches in cases.items():
        started = time.perf_counter()
        step(batches)
        first[fraction] = time.perf_counter() - started
        for _ in range(options.warmup - 1):
            step(batches)
    turn.alone()
    for fraction, batches in cases.items():
        torch.cuda.reset_peak_memory_stats()
        times = [step(batches) for _ in range(options.iters)]
        print(
            "RESULT " + json.dumps(measured(shape, fraction, impl, times, first[fraction])),
            flush=True,
        )
    turn.together()


def padded(documents: list[dict[str, torch.Tensor]], rows: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of `rows` documents, right-padded to the longest, rounded up to a power of two from 512."""
    out = []
    for i in range(0, len(documents), rows):
        group = documents[i : i + rows]
        width = max(512, 1 << (max(len(d["ids"]) for d in group) - 1).bit_length())

        names = {
            "input_ids": "ids", "aux": "aux", "last_hidden": "last", "loss_mask": "mask", "attention_mask": "here"
        }  # fmt: skip
        group = [{**d, "here": torch.ones_like(d["mask"])} for d in group]
        batch = {}
        for theirs, ours in names.items():
            rows_of = pad_sequence([d[ours] for d in group], batch_first=True)
            missing = rows_of.new_zeros(len(group), width - rows_of.shape[1], *rows_of.shape[2:])
            batch[theirs] = torch.cat([rows_of, missing], 1)
        out.append(batch)
    return out


def run_driver(impl: str, shape: Shape, options: argparse.Namespace, turn: Turn) -> None:
    """SpecForge or TorchSpec through their driver, with our weights, our batches and our clock."""
    import bench_common

    weights = {name: t.cpu() for name, t in make_weights(shape, "cuda").items()}
    torch.cuda.empty_cache()
    rows = min(4, len(shape.lengths))
    cases = {f: padded(make_documents(shape, f, "cuda"), rows) for f in options.fractions}
    bench_common.make_weights = lambda _: weights
    bench_common.make_batch = lambda _: next(iter(cases.values()))[0]

    def loop(
        _: Any, name: str, prepare: Any, forward: Any, backward: Any, optimize: Any, __: Any
    ) -> None:
        weights.clear()
        names = prepare.__globals__

        def run(batch: Any) -> Any:
            names["B"] = batch
            return forward(prepare())

        timed(shape, name + eager, cases, run, backward, optimize, options, turn)

    bench_common.timed_loop = loop
    eager = "+eager-loss" if impl == "specforge" and shape.draft_vocab > 131072 else ""
    if (
        eager
    ):  # its fused loss refuses more than 131,072 columns; its own other one, compiled, takes them
        from specforge.algorithms.eagle3 import model
        from specforge.core import loss

        model.LogSoftmaxLoss = SimpleNamespace(apply=loss._compute_loss)
    arguments = {
        "hidden": shape.hidden, "inter": shape.inter, "heads": shape.heads, "kv-heads": shape.kv_heads,
        "head-dim": shape.head_dim, "vocab": shape.vocab, "draft-vocab": shape.draft_vocab,
        "rope-theta": shape.theta, "ttt": shape.ttt, "batch": rows, "seq": max(shape.lengths),
        "device": "cuda", "dtype": "bfloat16", "backend": "flex_attention", "oov-scale": 0.05,
    }  # fmt: skip
    drivers = (Path(folder) / f"bench_{impl}_step.py" for folder in sys.path)
    driver = str(next(path for path in drivers if path.exists()))
    sys.argv = [driver, *(x for k, v in arguments.items() for x in (f"--{k}", str(v)))]
    runpy.run_path(driver, run_name="__main__")


def run_speculators(shape: Shape, options: argparse.Namespace, turn: Turn) -> None:
    """speculators' own packed step, head trained."""
    sys.argv = [
        "bench", "--device", "cuda", "--impl", "speculators", "--train-lm-head", "--preset", "llama8b", "--hidden",
        str(shape.hidden), "--vocab", str(shape.vocab), "--draft-vocab", str(shape.draft_vocab), "--heads",
        str(shape.heads), "--kv-heads", str(shape.kv_heads), "--head-dim", str(shape.head_dim), "--inter", str(shape.inter),
        "--ttt", str(shape.ttt),
    ]  # fmt: skip
    import bench_speculators_step as driver
    from speculators.losses import fused

    # Its two kernels share one list of tunings; torch 2.11's Dynamo asserts that a list comes from one place.
    fused.loss_backward_kernel.configs = copy.deepcopy(fused.loss_backward_kernel.configs)
    peer = driver.Speculators(driver.args_())
    cases = {f: _speculators_packs(shape, f) for f in options.fractions}

    def optimize() -> None:
        torch.nn.utils.clip_grad_norm_(peer.m.parameters(), 1.0)
        peer.opt()
        for optimizer in peer.opts:
            optimizer.zero_grad()

    run = (lambda batch: peer.fwd(batch)[0], lambda loss: loss.backward(), optimize)
    timed(shape, "speculators", cases, *run, options, turn)


def _speculators_packs(shape: Shape, fraction: float) -> list[dict[str, torch.Tensor]]:
    """The same packs as ours, padded to one length (its attention wants multiples of 128)."""
    batches = []
    for pack in split_documents(shape, make_documents(shape, fraction, "cuda")):
        lengths = torch.tensor([len(d["ids"]) for d in pack], device="cuda")
        rows = {
            "hidden_states": [d["aux"] for d in pack],
            "verifier_last_hidden_states": [d["last"] for d in pack],
            "input_ids": [d["ids"] for d in pack],
            "loss_mask": [d["mask"].bool() for d in pack],
            "position_ids": [torch.arange(1, len(d["ids"]) + 1, device="cuda") for d in pack],
            "document_ids": [torch.arange(len(pack), device="cuda").repeat_interleave(lengths)],
        }
        batches.append({name: torch.cat(parts) for name, parts in rows.items()})
    width = min(shape.budget, -(-sum(shape.lengths) // 128) * 128)
    for batch in batches:
        for name, rows in batch.items():
            fill = -1 if name == "document_ids" else 0
            missing = rows.new_full((width - len(rows), *rows.shape[1:]), fill)
            batch[name] = torch.cat([rows, missing])[None]
    return batches


def main() -> None:
    """Parse and run one implementation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("impl")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("fractions", nargs="+", type=float)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--profile", type=Path, default=None)
    options = parser.parse_args()
    shape, turn = SHAPES[options.shape], Turn()
    if options.impl.startswith("ours"):
        measure_ours(shape, options, turn)
    elif options.impl == "speculators":
        run_speculators(shape, options, turn)
    else:
        run_driver(options.impl, shape, options, turn)


if __name__ == "__main__":
    main()
