"""`export`: the trained drafter, and the same drafter before its first step, as directories vLLM and SGLang load.

Consumes train/result.json, the checkpoint it names, and train/initial.safetensors, which has the draft vocabulary;
produces export/drafter and export/untrained, validated, with a model card. Needs neither Ray nor an engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3_train import provenance
from eagle3_train.config import JobConfig
from eagle3_train.drafter.checkpoint import validate_checkpoint, write_checkpoint
from eagle3_train.drafter.checkpoint_format import ServedTarget, read_config
from eagle3_train.drafter.model_card import write_card
from eagle3_train.engines.resolve import engine_index, resolve_target
from eagle3_train.rundir import RunDir, reading
from eagle3_train.runlog import log
from eagle3_train.target.facts import TargetFacts, read_facts, resolve_boundaries
from eagle3_train.training.checkpoint import STATE, WEIGHTS
from eagle3_train.training.initial import renderer_of, spec_of

Json = dict[str, Any]


def run(config: JobConfig) -> Path:
    """Export what training left and return the drafter's directory; what is there and valid stays.

    Raises ValueError when training has not finished, ExportError when the result is not servable.
    """
    paths = RunDir(config.run_path)
    if not paths.train_result.is_file():
        raise ValueError(f"no {paths.train_result}: run ray_jobs/train.py first")
    result = json.loads(paths.train_result.read_text())
    checkpoint = Path(result[f"{config.export.checkpoint}_checkpoint"])
    state = json.loads((checkpoint / STATE).read_text())
    target = served_target(config)
    metadata = _metadata(config, result, state)
    _export(config, checkpoint / WEIGHTS, paths.drafter, target, metadata)
    if config.evaluate.untrained:
        untrained = metadata | {"steps": 0, "epochs": 0, "samples": 0}
        _export(config, paths.initial_weights, paths.untrained_drafter, target, untrained)
    return paths.drafter


def _export(
    config: JobConfig, weights: Path, directory: Path, target: ServedTarget, metadata: Json
) -> None:
    """Write, validate and describe one directory unless it already holds exactly this."""
    spec, layers = spec_of(config), read_facts(config.target.path).num_layers
    boundaries = resolve_boundaries(config.drafter.aux_layers, layers)[:-1]
    initial = RunDir(config.run_path).initial_weights
    made_of = provenance.digests([weights, initial])
    source = f"{weights.parent.name}/{weights.name} as {config.export.dtype} {config.export.format}"
    made = {"source": source, "made_of": made_of, "shard_bytes": config.export.max_shard_bytes}
    metadata = metadata | made
    if _described(directory) == metadata | {"commit": None}:
        validate_checkpoint(directory, spec, boundaries, target)
        log.info("export: %s is current", directory)
        return
    with reading(initial), safe_open(initial, "pt") as file:
        d2t = None if spec.full_vocab else file.get_tensor("d2t")
    write_checkpoint(
        directory,
        spec,
        load_file(weights),
        d2t,
        boundaries,
        target,
        config.export.dtype,
        config.export.max_shard_bytes,
        metadata,
        config.export.format,
    )
    write_card(directory)
    log.info("export: %s from %s, step %d", directory, source, metadata["steps"])


def _described(directory: Path) -> Json | None:
    """What an export says of itself, whichever commit wrote it; None of one that is not whole."""
    if not all((directory / name).is_file() for name in ("config.json", "README.md")):
        return None
    return {**read_config(directory).get("eagle3_train", {}), "commit": None}


def served_target(config: JobConfig) -> ServedTarget:
    """What the drafter's directory must agree with, from the target's own files."""
    facts, renderer = read_facts(config.target.path), renderer_of(config)
    # A warm start keeps its own draft vocabulary; only what ends an answer is indispensable there.
    required = renderer.stop_ids if config.drafter.init_from else renderer.always_drafted
    return ServedTarget(
        num_layers=facts.num_layers,
        serving_len=max(
            config.engine.max_model_len,
            config.drafter.max_position_embeddings or facts.max_position_embeddings,
        ),
        sglang_ids=_sglang_reading(facts),
        required_tokens=tuple(sorted(required)),
    )


def _sglang_reading(facts: TargetFacts) -> Any:
    """How SGLang reads aux layer ids of this target; for one it does not serve, how most classes do."""
    index = engine_index("sglang")
    assert index is not None, "a table of SGLang's classes ships with the engines package"
    reading = resolve_target(facts, index).layer_ids
    if reading not in ("boundary", "output", "output_always", "deepseek"):
        log.warning(
            "export: SGLang %s does not tap layers of %s", index.version, facts.architectures
        )
        return "output"
    return reading


def _metadata(config: JobConfig, result: Json, state: Json) -> Json:
    """What config.json and the model card say of the training."""
    facts, path = read_facts(config.target.path), RunDir(config.run_path).config
    given = Path(config.target.path).expanduser()  # a hub id, or a directory of this machine
    # Overrides of this job say nothing of how the drafter came about.
    made = JobConfig.model_validate(yaml.safe_load(path.read_text())) if path.is_file() else config
    samples = result["samples_expected"] // made.train.epochs
    answered = "with the answers they came with"
    if made.corpus.answers == "target":
        answered = f"answered by the target at temperature {made.rollout.sampling.temperature:g}"
    return {
        "run": config.name,
        "commit": provenance.commit(),
        "target": given.name if given.is_dir() else config.target.path,
        "quantisation": facts.quantisation,
        "trust_remote_code": config.target.trust_remote_code,
        "tensor_parallel": config.engine.tensor_parallel,
        "num_speculative_tokens": config.evaluate.num_speculative_tokens,
        "steps": state["step"],
        "epochs": round(int(state["ledger"], 16).bit_count() / samples, 2),
        "samples": samples,
        "data": ", ".join(Path(source).name for source in made.corpus.sources)
        or "self-synthesised prompts",
        "sampling": answered,
        "trained_len": made.corpus.max_len,
    }
