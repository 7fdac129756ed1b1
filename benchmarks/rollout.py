"""`rollout` beside plain vLLM offline generation: same engine settings, prompts and sampling, one run after the other.

  python benchmarks/rollout.py -c configs/h200-smollm2.yaml [section.field=value ...]

The bar is 0.95x of plain vLLM. Appends one line to benchmarks/results/rollout.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eagle3_train.config import JobConfig
from eagle3_train.config_file import load_config
from eagle3_train.corpus.table import read_samples
from eagle3_train.provenance import commit, versions
from eagle3_train.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "rollout.jsonl"


def plain(config: JobConfig, prompts: list[tuple[list[int], dict[str, Any]]], out: Any) -> None:
    """Seconds and tokens of vLLM's own offline `LLM.generate` on the same prompts; runs in a child process."""
    from vllm import LLM, SamplingParams

    engine = config.engine
    llm = LLM(
        model=config.target.path,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=engine.prefix_caching,
    )
    requests = [{"prompt_token_ids": ids} for ids, _ in prompts]
    sampling = [SamplingParams(**settings) for _, settings in prompts]
    llm.generate(requests[:64], sampling[:64], use_tqdm=False)
    started = time.perf_counter()
    answers = llm.generate(requests, sampling, use_tqdm=False)
    wall_s = time.perf_counter() - started
    out.send((wall_s, sum(len(a.outputs[0].token_ids) for a in answers)))


def main() -> None:
    """Run both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", "--config", nargs="+", type=Path, required=True)
    arguments = parser.parse_args()
    files = [file for file in arguments.config if "=" not in str(file)]
    overrides = [str(text) for text in arguments.config if "=" in str(text)]
    config = load_config(files, overrides)
    job = [sys.executable, "ray_jobs/rollout.py", "-c", *map(str, files), *overrides]
    subprocess.run(job, cwd=ROOT, check=True)
    paths = RunDir(config.run_path)
    ours = json.loads(paths.rollout_state.read_text())
    samples = [s for s in read_samples(paths.samples) if "-t" not in s.id]
    prompts = []
    for sample in samples:
        sampling = config.rollout.domain_sampling.get(sample.domain, config.rollout.sampling)
        ids = sample.input_ids[: sample.prompt_tokens].tolist()
        settings = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": min(sampling.max_new_tokens, config.corpus.max_len - len(ids)),
        }
        prompts.append((ids, settings))
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(
        target=plain, args=(config, prompts, there)
    )
    child.start()
    wall_s, tokens = here.recv()
    child.join(timeout=60)
    rows = [pq.read_metadata(file).num_rows for file in sorted(paths.samples.glob("*.parquet"))]
    line = {
        "prompts": ours["prompts"],
        "answered": ours["answered"],
        "failed": ours["failed"],
        "finish_reasons": ours["finish_reasons"],
        "shards": len(rows),
        "rows": sum(rows),
        "ours_tokens": ours["output_tokens"],
        "ours_wall_s": ours["wall_s"],
        "ours_tok_s": ours["output_tokens"] / ours["wall_s"],
        "plain_tokens": tokens,
        "plain_wall_s": wall_s,
        "plain_tok_s": tokens / wall_s,
        "ratio": ours["output_tokens"] / ours["wall_s"] / (tokens / wall_s),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=1))


if __name__ == "__main__":
    main()
