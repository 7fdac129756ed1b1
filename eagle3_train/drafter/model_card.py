"""README.md of an exported drafter: what it is, what was measured, how to launch it. A function of the directory."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle3_train.drafter.checkpoint_format import Json, layout_of, read_config
from eagle3_train.rundir import write_atomic


def write_card(directory: Path, rows: Sequence[Json] = ()) -> None:
    """Write README.md from the directory's config.json and served measurements (evaluation.json's rows)."""
    config = read_config(directory)
    facts = config["eagle3_train"]
    measured = [row for row in rows if row["drafter"] == "trained"]
    acceptance = ["Not measured yet: run the evaluate stage."]
    if measured:
        acceptance = [
            markdown_table([served(row) for row in measured]),
            f"Measured in the engine ({measured[0]['hardware']}, {measured[0]['engine']}). Acceptance length counts "
            "the bonus token; expected is the estimate from walking the same answers.",
        ]
    parts = [
        f"# EAGLE-3 drafter for {facts['target']}",
        markdown_table([{"fact": k, "value": v} for k, v in _facts(config, facts).items()]),
        "## Acceptance",
        *acceptance,
        "## Launch",
        *_launch(directory.name, config, facts),
    ]
    write_atomic(directory / "README.md", "\n\n".join(parts) + "\n")


def _facts(config: Json, facts: Json) -> dict[str, str]:
    attention = "latent (MLA)" if config.get("kv_lora_rank") else "grouped-query"
    return {
        "architecture": f"{config['architectures'][0]}, {attention} attention",
        "reads": f"boundaries {config['eagle_aux_hidden_state_layer_ids']} of the target"
        " (boundary k = residual stream after k layers)",
        "draft vocabulary": f"{config['draft_vocab_size']} of {config['vocab_size']} tokens",
        "serves": f"{config['max_position_embeddings']} positions",
        "trained on": f"{facts['samples']} samples of {facts['data']}, {facts['sampling']}",
        "trained at": f"up to {facts['trained_len']} tokens per sample; "
        "longer contexts are extrapolation",
        "steps": f"{facts['steps']} optimiser steps, {facts['epochs']:g} epochs",
        "made by": f"eagle3-train {facts['commit']}, run {facts['run']}",
    }


def served(row: Json) -> dict[str, str]:
    """One row of evaluation.json in words: column -> cell."""
    return {
        "dataset": row["dataset"],
        "prompts": str(row["prompts"]),
        "drafter": row["drafter"],
        "draft tokens": str(row["num_speculative_tokens"]),
        "concurrency": str(row["concurrency"]),
        "temperature": f"{row['temperature']:g}",
        "acceptance length": number(row["acceptance_length"]),
        "95 % interval": interval(row["acceptance_interval"]),
        "expected": number(row["expected_acceptance_length"]),
        "per position": shares(row["per_position_acceptance"]),
        "tokens/s": number(row["tokens_per_s"]),
        "plain tokens/s": number(row["tokens_per_s_plain"]),
        "speedup": number(row["speedup"], "x"),
        "its 95 % interval": interval(row["speedup_interval"]),
        "distinct bigrams": number(row["distinct_bigram"]),
        "lossless": yes(row["lossless"]),
    }


def number(value: float | None, unit: str = "") -> str:
    """Two decimals, or a dash for what was not measured."""
    return "-" if value is None else f"{value:.2f}{unit}"


def interval(edges: Sequence[float] | None) -> str:
    """Both ends, or a dash."""
    return "-" if edges is None else " to ".join(map(number, edges))


def shares(values: Sequence[float]) -> str:
    """Shares between 0 and 1, one for each draft position."""
    return " ".join(map(number, values))


def yes(value: bool | None) -> str:
    """Words for a verdict that may be missing."""
    return {True: "yes", False: "NO", None: "not checked"}[value]


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of column -> cell, the columns being those of the first."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(c.replace("|", "/") for c in line) + " |" for line in lines)


def _launch(name: str, config: Json, facts: Json) -> list[str]:
    """Commands for both engines; `name` stands for this directory's path."""
    k, ranks, target = facts["num_speculative_tokens"], facts["tensor_parallel"], facts["target"]
    code = ["--trust-remote-code"] if facts["trust_remote_code"] else []
    speculative = {"method": "eagle3", "model": name, "num_speculative_tokens": k}
    vllm = _command(
        ["vllm", "serve", target, "--tensor-parallel-size", ranks, *code],
        ["--speculative-config", json.dumps(speculative)],
    )
    sglang = _command(
        ["python", "-m", "sglang.launch_server", "--model-path", target, "--tp-size", ranks, *code],
        ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", name],
        ["--speculative-num-steps", k, "--speculative-eagle-topk", 1],
        ["--speculative-num-draft-tokens", k + 1],
        ["--speculative-draft-model-quantization", "unquant"],
    )
    text = [
        f"`{name}` is the path of this directory, `{target}` the target's path or hub id. vLLM:",
        vllm,
    ]
    if layout_of(config) == "speculators":
        return [*text, "This layout is vLLM's; export with `export.format=eagle3` for SGLang."]
    if config.get("kv_lora_rank") and (
        not config["q_lora_rank"] or config["num_hidden_layers"] > 1
    ):
        return [
            *text,
            "SGLang serves latent-attention drafters of one layer with q_lora_rank only: not this one.",
        ]
    stored = f" (this target is stored as {facts['quantisation']})" if facts["quantisation"] else ""
    return [
        *text,
        "SGLang:",
        sglang,
        "The weights here are not quantised. vLLM reads that in config.json; SGLang would apply the target's "
        f"`--quantization`{stored} to the drafter, hence `unquant`.",
    ]


def _command(*lines: Sequence[object]) -> str:
    """A shell command over several lines, whatever its words contain."""
    return "```bash\n" + " \\\n  ".join(shlex.join(map(str, line)) for line in lines) + "\n```"
