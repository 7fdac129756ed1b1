"""The stream under load: engines -> object store -> trainer memory, by case; one engine per purpose.

  python -m benchmarks.stream --target models/smollm2-135m-instruct [--cases a b c d e epochs decode]
  python -m benchmarks.stream --target llama8b          8B sizes, random weights, needs a GPU
  python -m benchmarks.stream --target ... --states float8_e4m3fn

  a       capture delivered into the trainer's device memory against plain prefill of the same settings
  b       the train stage with engine and trainer on one device, against 1 / (1/capture + 1/train)
  c       a producer ten times faster than its consumer: bytes bounded, nothing spilled
  d       a consumer faster than its producer: engines never wait
  e       one long sample among short ones
  epochs  five epochs with a budget of 1/20 of an epoch's bytes and 40 % of the samples cached
  decode  answers with their states captured in the same pass against plain decoding

Appends one line per case to benchmarks/results/stream.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from eagle3_train.config import JobConfig, StateType
from eagle3_train.corpus.table import write_shard
from eagle3_train.engines.pool import engine_pool, spec_for
from eagle3_train.engines.spec import Request
from eagle3_train.provenance import commit
from eagle3_train.records import Pack, Sample
from eagle3_train.rundir import RunDir
from eagle3_train.runlog import read_metrics
from eagle3_train.stages import train
from eagle3_train.stream.cache import pin, planned_captures
from eagle3_train.stream.coordinator import coordinating
from eagle3_train.stream.pipeline import StreamLink, captured_packs
from eagle3_train.stream.plan import PlanShape, Window, plan_run
from eagle3_train.stream.store import FREE_AT_ONCE, store_stats
from eagle3_train.target.facts import bytes_per_token, read_facts, resolve_boundaries
from eagle3_train.training.feed import FeedShape, feed

RESULTS = Path(__file__).resolve().parent / "results" / "stream.jsonl"
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run of this benchmark; tokens, unless named otherwise. slow_s: length of case c. states: their type."""

    sample: int
    per_pack: int
    packs: int
    long: int
    short: int
    train_packs: int
    slow_s: float
    answers: int
    answer: int
    states: StateType = "bfloat16"


WIDE = Scale(2048, 4, 48, 65536, 500, 48, 120.0, 256, 256)  # of H200s, for targets like Llama-8B
NARROW = Scale(2048, 16, 48, 8000, 500, 48, 120.0, 256, 256)  # of H200s, for targets like SmolLM2
CPU = Scale(127, 2, 24, 1920, 30, 24, 120.0, 16, 32)


def write_llama8b(directory: Path) -> Path:
    """A target of Llama-8B's sizes: the engine makes up its weights, the trainer reads these three."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from tests.tiny import write_tokenizer

    hidden, vocab = 4096, 128256
    LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=hidden, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=vocab,
        max_position_embeddings=131072, tie_word_embeddings=False, dtype="bfloat16",
    ).save_pretrained(directory)  # fmt: skip
    write_tokenizer(directory)
    tensors = {
        name: (torch.randn(vocab, hidden, dtype=torch.bfloat16, device=DEVICE) * 0.02).cpu()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def job(
    target: Path, folder: Path, scale: Scale, max_len: int, name: str = "bench", **stream: Any
) -> JobConfig:
    """Configuration of engines and of case b; one window is one pack, as many epochs as replays."""
    facts = read_facts(str(target))
    share: dict[str, Any] = {"gpus_per_worker": 0.5} if ON_GPU else {}
    return JobConfig.model_validate(
        {
            "name": name,
            "runs_dir": str(folder),
            "target": {"path": str(target)},
            "drafter": {"draft_vocab_size": min(32000, facts.vocab_size // 4)},
            "corpus": {"max_len": scale.sample + 1, "held_out_fraction": 0.0},
            "engine": share
            | {
                "cpus": 4 if ON_GPU else 1,
                "dtype": "bfloat16" if ON_GPU else "float32",
                "max_model_len": max_len + 1,
                "max_num_seqs": 256 if ON_GPU else 16,
                "max_num_batched_tokens": 16384 if ON_GPU else 2048,
                "kv_cache_bytes": None if ON_GPU else 268435456,
                "gpu_memory_utilization": 0.45,
                "enforce_eager": True,
                "load_format": "dummy" if facts.hidden_size == 4096 else "auto",
            },
            "stream": {
                "max_bytes_in_flight": 1 << 40,
                "dtype": scale.states,
                "tokens_per_pack": scale.sample * scale.per_pack + 1,
                "lookahead_packs": 8,
            }
            | stream,
            "train": share
            | {
                "epochs": stream.get("replay", 1),
                "cpus_per_worker": 4 if ON_GPU else 1,
                "ttt_steps": 7 if ON_GPU else 3,
                "dtype": "bfloat16" if ON_GPU else "float32",
                "eval_every": 10_000,
                "checkpoint_every": 10_000,
            },
            "log": {"wandb_mode": "disabled"},
        }
    )


def make_samples(lengths: list[int], vocab: int) -> list[Sample]:
    """Random token ids; the last 60 % of each sample are supervised. `lengths` are captured tokens."""
    random = np.random.default_rng(0)
    made = []
    for number, length in enumerate(lengths):
        ids = random.integers(5, vocab, length + 1).astype(np.int32)
        made.append(Sample(f"{number:06x}", "bench", ids, np.arange(length + 1) > 0.4 * length))
    return made


class StorePeak:
    """Bytes that Ray's object stores held at most while the block ran, by their own count, above what they held before."""

    def __enter__(self) -> StorePeak:
        self.nbytes, self._stop = 0, threading.Event()
        self._before = store_stats().object_store_bytes_used
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            now = store_stats().object_store_bytes_used - self._before
            self.nbytes = max(self.nbytes, now)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def plain_rate(pool: Any, samples: list[Sample], scale: Scale) -> float:
    """Prefill tokens per second of a plain engine, eight packs in flight; timed as Consumer.run is."""
    _, handle = ray.get(pool.lease.remote(1))
    packs = [
        [Request(s.id, tuple(s.input_ids[:-1].tolist())) for s in samples[i : i + scale.per_pack]]
        for i in range(0, len(samples), scale.per_pack)
    ]
    warm, started = len(packs) // 4, 0.0
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda pack: ray.get(handle.generate.remote(pack)), packs)
        for number, _ in enumerate(answers, 1):
            if number == warm:
                started = time.perf_counter()
    tokens = sum(len(request.prompt_ids) for pack in packs[warm:] for request in pack)
    return tokens / (time.perf_counter() - started)


def decode_rate(pool: Any, scale: Scale, vocab: int, capture: bool) -> float:
    """Answer tokens per second of one batch of requests."""
    _, handle = ray.get(pool.lease.remote(1))
    requests = [
        Request(s.id, tuple(s.input_ids.tolist()), scale.answer, ignore_eos=True, capture=capture)
        for s in make_samples([32] * scale.answers, vocab)
    ]
    ray.get(handle.generate.remote(requests[: scale.answers // 4]))
    started = time.perf_counter()
    ray.get(handle.generate.remote(requests))
    return scale.answers * scale.answer / (time.perf_counter() - started)


class Consumer:
    """A trainer that only receives: the stream's own path into device memory, and a pace."""

    def __init__(self, pool: Any, config: JobConfig, token_bytes: int) -> None:
        self._pool, self._config, self._token_bytes = pool, config, token_bytes

    def run(
        self,
        samples: list[Sample],
        budget: int,
        tokens_per_pack: int,
        epochs: int = 1,
        cache_bytes: int = 0,
        pace_tok_s: float = 0.0,
    ) -> dict[str, Any]:
        """Receive every window once; the first quarter warms up and is not timed."""
        shape = PlanShape(1, 1, tokens_per_pack, epochs, 0, 10_000)
        nothing = np.zeros((epochs, len(samples)), dtype=np.bool_)
        windows = plan_run(samples, [], shape, nothing, 0)
        pinned = pin(samples, self._token_bytes, cache_bytes, 0)
        with coordinating(self._pool, samples, pinned, None, budget, 1, 3) as coordinator:
            with StorePeak() as store:
                timed = self._receive(samples, windows, coordinator, pace_tok_s)
            counters = ray.get(coordinator.counters.remote())
            spilled = ray.get(coordinator.spilled.remote())
        return timed | {
            "peak_bytes": counters.peak_in_flight,
            "store_peak_bytes": store.nbytes,
            "budget_bytes": budget,
            "spilled_bytes": spilled,
            "captures": counters.captures,
            "captures_formula": planned_captures(pinned, epochs),
            "epoch_bytes": sum(s.captured_tokens for s in samples) * self._token_bytes,
        }

    def _receive(
        self, samples: list[Sample], windows: list[Window], coordinator: Any, pace_tok_s: float
    ) -> dict[str, Any]:
        attempt = ray.get(coordinator.begin.remote())
        link = StreamLink(
            coordinator, attempt, self._token_bytes, self._config.stream.lookahead_packs
        )
        hidden = read_facts(self._config.target.path).hidden_size
        dtype = torch.bfloat16 if ON_GPU else torch.float32

        def documents(pack: Pack) -> tuple[list[Sample], int]:
            return [samples[row] for _, row in pack.entries], 7

        packs = feed(
            captured_packs(windows, 0, link),
            documents,
            FeedShape(DEVICE, dtype, 3 * hidden, hidden),
        )
        started, waited, tokens, busy_s = 0.0, 0.0, 0, 0.0
        for number, window in enumerate(windows):
            if number == len(windows) // 4:
                busy_s = ray.get(coordinator.counters.remote()).capture_busy_s
                started, waited, tokens = time.perf_counter(), 0.0, 0
            asked = time.perf_counter()
            fed = next(packs)
            waited += time.perf_counter() - asked
            assert fed.bad == {}
            assert fed.batch.aux_hidden_states.device.type == DEVICE.type
            tokens += window.tokens
            if pace_tok_s:
                time.sleep(window.tokens / pace_tok_s)
            del fed
            coordinator.ack.remote(attempt, window.index, 0)
        if ON_GPU:
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - started
        busy_s = ray.get(coordinator.counters.remote()).capture_busy_s - busy_s
        return {
            "delivered_tok_s": tokens / wall_s,
            "data_wait": waited / wall_s,
            "engines_busy": busy_s / wall_s,
        }


def together(
    pool: Any, target: Path, folder: Path, scale: Scale, token_bytes: int
) -> dict[str, Any]:
    """The train stage end to end, and the trainer alone: replays of a window with no room for another."""
    window = (scale.sample * scale.per_pack + 1) * token_bytes
    vocab = read_facts(str(target)).vocab_size

    def fit(name: str, packs: int, **stream: Any) -> tuple[JobConfig, dict[str, Any]]:
        config = job(target, folder, scale, scale.sample, name, **stream)
        samples = make_samples([scale.sample] * packs * scale.per_pack, vocab)
        write_shard(RunDir(config.run_path).samples, samples, ["null"] * len(samples))
        result = train.run(config, pool)
        logging.info("trained %s: %d steps", name, result["steps"])
        return config, result

    stream, result = fit("together", scale.train_packs, max_bytes_in_flight=6 * window)
    # Without the start (compilation) and the end, where what is left has been captured already.
    lines = read_metrics(RunDir(stream.run_path).metrics)[scale.train_packs // 4 : -8]
    tokens = sum(line["perf/tokens"] for line in lines[1:])
    ahead = lines[0]["stream/bytes_in_flight"] - lines[-1]["stream/bytes_in_flight"]
    tokens -= max(0, ahead) / token_bytes  # captured before these steps began
    alone, _ = fit("alone", 6, max_bytes_in_flight=window, replay=4)
    again = [m for m in read_metrics(RunDir(alone.run_path).metrics) if (m["step"] - 1) % 4]
    return {
        "delivered_tok_s": tokens / (lines[-1]["time_s"] - lines[0]["time_s"]),
        "train_alone_tok_s": statistics.median(m["perf/tokens_per_s"] for m in again[6:]),
        "data_wait": statistics.median(m["perf/data_wait_frac"] for m in lines),
        "peak_bytes": result["peak_bytes_in_flight"],
        "budget_bytes": result["max_bytes_in_flight"],
        "spilled_bytes": result["spilled_bytes"],
        "captures": result["captures"],
        "captures_formula": result["captures_planned"],
    }


def measure(
    cases: list[str], target: Path, folder: Path, scale: Scale
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every case asked for, as soon as it is measured."""
    longest = scale.long if "e" in cases else scale.sample
    config, facts = job(target, folder, scale, longest), read_facts(str(target))
    boundaries = resolve_boundaries(None, facts.num_layers)
    token_bytes = bytes_per_token(facts.hidden_size, len(boundaries), scale.states)
    samples = make_samples([scale.sample] * scale.packs * scale.per_pack, facts.vocab_size)
    window = scale.sample * scale.per_pack
    decode = partial(decode_rate, scale=scale, vocab=facts.vocab_size)
    plain: dict[str, float] = {}
    plain_decode = 0.0
    if cases != ["b"]:  # which compares with the capture engine
        with engine_pool(spec_for(config, "plain")) as pool:
            plain["plain_tok_s"] = plain_rate(pool, samples, scale)
            plain_decode = decode(pool, capture=False) if "decode" in cases else 0.0
    with engine_pool(spec_for(config, "capture", boundaries)) as pool:
        consumer = Consumer(pool, config, token_bytes)
        fast = consumer.run(samples, 8 * window * token_bytes, window)
        rate = fast["delivered_tok_s"]
        logging.info("capture alone: %.0f tok/s", rate)
        for case in sorted({"a", "d"} & set(cases)):  # one measurement answers both
            yield case, plain | fast | {"ratio": rate / plain["plain_tok_s"]}
        if "b" in cases:
            both = together(pool, target, folder, scale, token_bytes)
            both["capture_alone_tok_s"] = rate
            ideal = 1 / (1 / rate + 1 / both["train_alone_tok_s"])
            yield "b", plain | both | {"ratio": both["delivered_tok_s"] / ideal}
        if "c" in cases:
            wanted = int(scale.slow_s * rate / 10 / scale.sample * 4 / 3)
            slow = {"pace_tok_s": rate / 10}
            yield (
                "c",
                plain
                | slow
                | consumer.run(samples[:wanted], 4 * window * token_bytes, window, **slow),
            )
        if "e" in cases:
            short = [scale.short] * (4 * longest // scale.short)
            mixed = make_samples([*short, longest, *short], facts.vocab_size)
            yield "e", plain | consumer.run(mixed, 2 * longest * token_bytes, longest)
        if "epochs" in cases:
            some = make_samples([scale.sample] * 200, facts.vocab_size)
            total = 200 * scale.sample * token_bytes
            cached = {"epochs": 5, "cache_bytes": int(0.4 * total)}
            yield "epochs", plain | consumer.run(some, total // 20, window, **cached)
        if "decode" in cases:
            captured = decode(pool, capture=True)
            rates = {"plain_tok_s": plain_decode, "delivered_tok_s": captured}
            yield "decode", rates | {"ratio": captured / plain_decode}


def main() -> None:
    """Parse, run, append, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="a directory, or llama8b")
    parser.add_argument("--cases", nargs="*", default=["a", "b", "c", "d", "e", "epochs", "decode"])
    parser.add_argument("--states", default="bfloat16", help="stream.dtype")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    hardware = torch.cuda.get_device_name() if ON_GPU else f"{os.cpu_count()} CPU cores"
    ray.init(
        "local",
        num_cpus=16,
        object_store_memory=(8 << 30) if ON_GPU else (1 << 30),
        runtime_env={"env_vars": {"VLLM_NO_USAGE_STATS": "1"}},
        log_to_driver=False,
        _system_config=FREE_AT_ONCE,
    )
    with tempfile.TemporaryDirectory() as folder:
        wide = arguments.target == "llama8b"
        target = (
            write_llama8b(Path(folder) / "target") if wide else Path(arguments.target).resolve()
        )
        narrow = read_facts(str(target)).hidden_size < 2048
        scale = (NARROW if narrow else WIDE) if ON_GPU else CPU
        scale = replace(scale, states=arguments.states)
        facts = {
            "target": arguments.target,
            "states": arguments.states,
            "hardware": hardware,
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        RESULTS.parent.mkdir(exist_ok=True)
        for case, values in measure(arguments.cases, target, Path(folder), scale):
            line = json.dumps({"case": case} | values | facts)
            with RESULTS.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
