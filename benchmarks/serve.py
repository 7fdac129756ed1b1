"""What a drafter is worth served: evaluates a run and appends its rows to benchmarks/results/serve.jsonl.

  python benchmarks/serve.py -c configs/h200-smollm2.yaml \
      'evaluate.sources=[../shared/data/eval/mt_bench.jsonl, ../shared/data/eval/gsm8k.jsonl, ../shared/data/eval/humaneval.jsonl]'

One line per dataset, drafter and concurrency. An evaluation already there is not repeated, only recorded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from eagle3_train.rundir import RunDir
from ray_jobs import cli

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "serve.jsonl"
KEYS = (
    *("dataset", "drafter", "num_speculative_tokens", "concurrency", "temperature", "requests"),
    *("acceptance_length", "acceptance_length_kept", "acceptance_interval"),
    *("expected_acceptance_length", "expected_by_k", "per_position_acceptance"),
    *("tokens_per_s", "tokens_per_s_plain", "speedup", "speedup_interval"),
    *("distinct_bigram", "lossless"),
    *("engine", "engine_dtype", "hardware", "commit", "date"),
)


def main() -> None:
    """Evaluate, append, print."""
    job = [sys.executable, "ray_jobs/evaluate.py", *sys.argv[1:]]
    config = cli.parse(__doc__)
    subprocess.run(job, cwd=ROOT, check=True)
    evaluation = json.loads(RunDir(config.run_path).evaluation.read_text())
    common = {key: evaluation[key] for key in ("expected_in_training", "sampled_agreement")}
    lines = [
        json.dumps({"run": config.name, **{key: row[key] for key in KEYS}, **common})
        for row in evaluation["rows"]
    ]
    with RESULTS.open("a") as file:
        file.writelines(line + "\n" for line in lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
