"""Times the attention kernels of a step under several tiles, on one GPU.

  python benchmarks/tune_attention.py [--shapes kimi-mla llama8b] [--processes 15]

Processes compile side by side and time one after the other. Prints, by shape and kernel, each tile of (query lines, keys,
warps, stages) and its median milliseconds, fastest first; the gradient kernels are timed with the diagonal's. What wins goes
into attention_launch.TILES, and the table into docs/log.md.
"""

from __future__ import annotations

import argparse
import fcntl
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step_ours import SHAPES
from eagle3_train.drafter import attention_launch
from eagle3_train.drafter.attention import QueryRows, StepAttention
from eagle3_train.drafter.rope import rope_tables
from eagle3_train.drafter.rows import plan_rows

Tile = tuple[int, int, int, int]
GRID: dict[str, list[Tile]] = {
    "forward": list(product((64, 128), (64, 128), (4, 8), (2, 3))),
    "query": [*product((64, 128), (32, 64), (4, 8), (2, 3)), (128, 128, 8, 2)],
    "key": [*product((32, 64, 128), (64, 128), (4, 8), (1, 2)), (64, 64, 8, 3)],
}
SUPERVISED = 0.6
STEP = 2  # the later step that is timed: context and two keys on the diagonal


def time_tiles(shape_name: str, part: int, processes: int, lock: str) -> None:
    """Prints `shape kernel tile ms` for every `processes`-th tile from `part` on."""
    shape = SHAPES[shape_name]
    ids = [np.zeros(length, dtype=np.int64) for length in shape.lengths]
    masks = [np.arange(n) >= int(n * (1 - SUPERVISED)) for n in shape.lengths]
    rows, spec = plan_rows(ids, masks, shape.ttt).to("cuda"), shape.spec
    tables = rope_tables(spec, rows.max_position, torch.device("cuda"))
    keys = [len(rows.context), *rows.counts[1:]]
    empty = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    state = StepAttention(spec, rows.counts, keys, rows.offsets, empty)
    state.store.whole().normal_()
    state.grads.whole().zero_()
    state.steps = STEP + 1
    query_rows = QueryRows.of_step(rows, STEP, tables)
    query = empty.new_empty(rows.counts[STEP], state.heads, state.qk_dim).normal_()
    out = empty.new_empty(len(query), state.heads * state.value_dim)
    lse = torch.empty(query.shape[:2], device="cuda")
    d_out, d_query = torch.randn_like(out), torch.empty_like(query)

    def forward() -> None:
        attention_launch.forward(query, state, query_rows, out, lse)

    def backward() -> None:
        saved = (query, out, lse, d_out)
        attention_launch.backward(saved, state, query_rows, STEP, d_query)

    forward()
    tiles = [(kernel, tile) for kernel, grid in GRID.items() for tile in grid]
    with Path(lock).open("w") as one_at_a_time:
        for kernel, tile in tiles[part::processes]:
            name = kernel if state.qk_dim <= 128 else f"{kernel}-wide"
            run = forward if kernel == "forward" else backward
            before = attention_launch.TILES[name]
            attention_launch.TILES[name] = tile
            try:
                run()
                torch.cuda.synchronize()
                fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
                ms = triton.testing.do_bench(run, warmup=5, rep=25, return_mode="median")
                print(shape_name, kernel, *tile, round(ms, 3), flush=True)
            except triton.runtime.errors.OutOfResources as error:
                print(shape_name, kernel, *tile, "inf", error, file=sys.stderr, flush=True)
            finally:
                fcntl.flock(one_at_a_time, fcntl.LOCK_UN)
                attention_launch.TILES[name] = before


def main() -> None:
    """Starts the processes, sorts what they print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["kimi-mla", "llama8b"], choices=SHAPES)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--part", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--lock", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        for shape in options.shapes:
            time_tiles(shape, options.part, options.processes, options.lock)
        return
    with tempfile.NamedTemporaryFile() as lock:
        command = [sys.executable, __file__, "--shapes", *options.shapes, "--lock", lock.name]
        command += ["--processes", str(options.processes), "--part"]
        running = [
            subprocess.Popen([*command, str(part)], stdout=subprocess.PIPE, text=True)
            for part in range(options.processes)
        ]
        lines = [line for process in running for line in process.communicate()[0].splitlines()]
    for line in sorted(lines, key=lambda line: (*line.split()[:2], float(line.split()[-1]))):
        print(line)
    if any(process.returncode for process in running):
        sys.exit("a process failed: its error is above")


if __name__ == "__main__":
    main()
