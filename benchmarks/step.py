"""One training step: ours beside the peers', on one GPU, in one run.

  python benchmarks/step.py --all --peers DIR      parity, every shape, every implementation, the ratio table
  python benchmarks/step.py --shapes llama8b --impls ours --supervised 0.6 --profile DIR

DIR holds drivers/ (bench_common.py and bench_*_step.py) and the peers' checkouts SpecForge/, TorchSpec/ and spec/
(the speculators wheels unpacked), with site/ for what they import and the host lacks and shims/ for modules they import
and never call. Each line of benchmarks/results/step.jsonl is one measurement; nothing of the peers is kept here.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3_train.provenance import commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "step.jsonl"
Record = dict[str, Any]
LOCK = Path("/tmp/eagle3-step-benchmark.lock")
LLAMA = ("ours", "ours-fp8", "specforge"), ("torchspec", "speculators")
PLAN = {
    "llama8b": ([0.35, 0.6, 0.9], LLAMA),
    "kimi": ([0.6], (("ours", "specforge"), ("torchspec", "speculators"))),
    "ragged": ([0.6], (("ours", "specforge"), ("torchspec",), ("speculators",))),
    "kimi-32k": ([0.6], (("ours",),)),
    "kimi-mla": ([0.6], (("ours",),)),
}
"""Per shape: supervised fractions, and the implementations in rounds that fit the memory side by side."""
PARITY = (
    "--device cuda --dtype bfloat16 --hidden 256 --inter 512 --heads 4 --kv-heads 2 --head-dim 64 --vocab 4096 "
    "--draft-vocab 1024 --oov-scale 0.05 --ttt 4 --batch 2 --seq 256 --iters 1 --warmup 0 --backend flex_attention"
)


def _environment(peers: Path | None, impl: str) -> dict[str, str]:
    paths = [str(ROOT)]
    if peers is not None:
        checkout = {"specforge": "SpecForge", "torchspec": "TorchSpec", "speculators": "spec"}
        paths += [str(peers / checkout.get(impl, "shims")), str(peers / "drivers")]
    known = os.environ.get("PYTHONPATH", "")
    tail = [known] if known else []
    tail += [str(peers / "site"), str(peers / "shims")] if peers is not None else []
    return {**os.environ, "PYTHONPATH": ":".join(paths), "BENCH_PYTHONPATH_TAIL": ":".join(tail)}


def _launch(
    impl: str, shape: str, fractions: list[float], options: argparse.Namespace
) -> subprocess.Popen[str]:
    module = "benchmarks.step_run"
    command = [sys.executable, "-m", module, impl, shape, *map(str, fractions)]
    command += ["--iters", str(options.iters), "--warmup", str(options.warmup)]
    if options.profile and impl.startswith("ours"):
        command += ["--profile", str(options.profile)]
    return subprocess.Popen(
        command, env=_environment(options.peers, impl), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_round(
    shape: str,
    fractions: list[float],
    impls: tuple[str, ...],
    options: argparse.Namespace,
    parity: bool,
) -> Iterator[Record]:
    """Results of implementations that set up together and are timed one at a time (a file lock), as they come."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        running = {impl: _launch(impl, shape, fractions, options) for impl in impls}
        if parity:
            check_parity(options)
    for impl, process in running.items():
        out, _ = process.communicate()
        found = [json.loads(line[7:]) for line in out.splitlines() if line.startswith("RESULT ")]
        if options.verbose or not found:
            print(f"--- {impl} on {shape} (exit {process.returncode})\n{out[-3500:]}", flush=True)
        yield from found


def check_parity(options: argparse.Namespace) -> None:
    """Our loss and gradients against SpecForge's and TorchSpec's, on their inputs and under their mask rule."""
    drivers, environments = options.peers / "drivers", {}
    for peer in ("specforge", "torchspec"):
        env = _environment(options.peers, peer)
        environments[peer] = env
        env["PYTHONPATH"] += f":{env['BENCH_PYTHONPATH_TAIL']}"
    dumps = {peer: Path(tempfile.gettempdir()) / f"parity-{peer}.pt" for peer in environments}
    running = [
        subprocess.Popen(
            [sys.executable, drivers / f"bench_{peer}_step.py", *PARITY.split(), "--dump", dumps[peer]],
            env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for peer, env in environments.items()
    ]  # fmt: skip
    for process in running:
        process.wait()
    for peer, env in environments.items():
        command = [
            sys.executable,
            "-m",
            "benchmarks.step_parity",
            dumps[peer],
            "--drivers",
            drivers,
        ]
        command += ["--ours-dtype", "bfloat16", *PARITY.split()]
        done = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, check=False
        )
        print("PARITY", done.stdout.strip() or done.stderr[-800:], flush=True)


def table(records: list[Record]) -> str:
    """Ours against the fastest and the leanest peer, per shape and supervised fraction."""
    lines = [
        f"{'shape':9} {'sup':>5} {'impl':18} {'tok/s':>9} {'ms':>8} {'GB':>6} {'mfu':>6} {'x fastest':>9} {'mem x':>6}"
    ]
    for key in sorted({(r["shape"], r["supervised"]) for r in records}):
        group = [r for r in records if (r["shape"], r["supervised"]) == key]
        peers = [r for r in group if not r["impl"].startswith("ours")]
        fastest = max((r["tok_s"] for r in peers), default=float("nan"))
        leanest = min((r["peak_mem_bytes"] for r in peers), default=float("nan"))
        for r in sorted(group, key=lambda r: -r["tok_s"]):
            tok, mem = r["tok_s"], r["peak_mem_bytes"]
            lines.append(
                f"{key[0]:9} {key[1]:5.2f} {r['impl']!s:18} {tok:9.0f} {r['step_ms']!s:>8} {mem / 1e9:6.1f} "
                f"{r.get('mfu', '')!s:>6} {tok / fastest:9.2f} {mem / leanest:6.2f}"
            )
    return "\n".join(lines)


def roofline(records: list[Record]) -> str:
    """What our steps needed, did and took, per shape and supervised fraction."""
    lines = [
        "ours, per step: TFLOP needed / done; GB that must move / stay; floor ms, measured ms "
        "(forward, backward, optimiser); s to the first step"
    ]
    for r in records:
        if r["impl"].startswith("ours"):
            lines.append(
                f"{r['shape']:9} {r['supervised']:5.2f} {r['impl']:9} "
                f"{r['flops_needed'] / 1e12:7.1f} / {r['flops_done'] / 1e12:.1f}; "
                f"{r['floor_bytes_moved'] / 1e9:.1f} / {r['floor_bytes_resident'] / 1e9:.1f}; "
                f"{r['floor_ms']:.1f}, {r['step_ms']:.1f} ({r['forward_ms']:.1f}, {r['backward_ms']:.1f}, "
                f"{r['optimizer_ms']:.1f}); {r['first_step_s']:.1f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Parse, run, append, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every shape and implementation")
    parser.add_argument("--shapes", nargs="*", default=["llama8b"])
    parser.add_argument(
        "--impls",
        nargs="*",
        default=None,
        help="ours, ours-fp8, ours-fp8:forward+input, specforge, ...",
    )
    parser.add_argument("--supervised", nargs="*", type=float, default=None)
    parser.add_argument("--peers", type=Path, default=None)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--profile", type=Path, default=None)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    records: list[Record] = []
    parity = options.all and options.peers is not None
    for shape in PLAN if options.all else options.shapes:
        fractions, rounds = PLAN[shape]
        if options.impls:
            rounds = (tuple(options.impls),)
        elif options.peers is None:
            rounds = (tuple(impl for impls in rounds for impl in impls if impl.startswith("ours")),)
        started = time.monotonic()
        for impls in rounds:
            for found in run_round(shape, options.supervised or fractions, impls, options, parity):
                date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                records.append({**found, "commit": commit(), "date": date})
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
            parity = False
        print(f"{shape}: {time.monotonic() - started:.0f} s", flush=True)
    print(table(records), roofline(records), sep="\n\n", flush=True)


if __name__ == "__main__":
    main()
