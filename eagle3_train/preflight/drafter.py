"""Static depth, drafter's half: the layers it reads, its class and reach, and the other drafter it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle3_train.config import JobConfig
from eagle3_train.drafter.checkpoint import read_checkpoint
from eagle3_train.drafter.checkpoint_format import (
    LLAMA,
    MLA,
    SWITCHES,
    read_tensors,
    sglang_layer_ids,
)
from eagle3_train.drafter.spec import DrafterSpec
from eagle3_train.engines.resolve import EngineIndex, Resolution
from eagle3_train.preflight.check import Check, Verdict, attempt
from eagle3_train.rundir import reading
from eagle3_train.target.derive import drafter_spec
from eagle3_train.target.facts import TargetFacts, resolve_boundaries

# Beyond this a drafter's cos/sin cache costs gigabytes, so fewer positions are a choice, not a mistake.
_MOST_POSITIONS = 1_048_576


def boundaries(config: JobConfig, facts: TargetFacts, engines: Sequence[Resolution]) -> Check:
    """Whether trainer and engines mean the same layers by the configured aux boundaries."""
    fix = "set drafter.aux_layers to boundaries every engine can tap"
    if config.drafter.init_from:
        fix = f"name a checkpoint with the job's boundaries in drafter.init_from, or {fix}"
    try:
        every = resolve_boundaries(config.drafter.aux_layers, facts.num_layers)
        aux, last = every[:-1], every[-1]
        hooks = bool(config.target.tap_by_hooks) and not engines[0].supports_eagle3
        refusals = {
            "by forward hooks": hooks,
            "on DeepSeek-like models": facts.mla,
            "on a GPU": config.engine.gpus_per_worker,
        }
        where = next((where for where, refused in refusals.items() if refused), None)
        if aux[0] == 0 and where:
            raise ValueError(f"boundary 0 (the embeddings) cannot be tapped {where}")
        if config.drafter.init_from:
            _check_warm_start(Path(config.drafter.init_from), config, facts, aux)
        who = ["trainer", *(["vllm by forward hooks"] if hooks else [])]
        for engine in engines:
            if engine.supports_eagle3:
                who.append(engine.engine)
                # Raises where no ids mean these boundaries; vLLM reads boundaries as they are.
                sglang_layer_ids(aux, facts.num_layers, engine.layer_ids or "output")
    except ValueError as error:
        return Check("boundaries", "fail", str(error), fix)
    reason = f"{aux} and {last} (after the last layer) for {', '.join(who)}"
    return Check("boundaries", "ok", reason)


def _check_warm_start(
    directory: Path, config: JobConfig, facts: TargetFacts, aux: tuple[int, ...]
) -> None:
    """Raise ValueError unless the checkpoint has the drafter's shape and reads the boundaries `aux`."""
    with reading(directory):
        checkpoint = read_checkpoint(directory, drafter_spec(facts, config.drafter))
        trained = resolve_boundaries(checkpoint.boundaries, facts.num_layers)[:-1]
    if trained != aux:
        raise ValueError(
            f"drafter.init_from was trained on boundaries {trained}, this job would feed it {aux}"
        )


def drafter(config: JobConfig, facts: TargetFacts, engines: Sequence[EngineIndex]) -> list[Check]:
    """Whether the drafter can be built, each engine knows its class and switches, and its sizes suit training."""
    try:
        spec = drafter_spec(facts, config.drafter)
    except ValueError as error:
        return [Check("drafter", "fail", str(error), "change the drafter section")]
    checks = _servable(config, spec, engines)
    if spec.intermediate_size < spec.hidden_size:
        reason = (
            f"intermediate_size {spec.intermediate_size} (an expert's width) is below hidden_size"
        )
        fix = "set drafter.intermediate_size, e.g. to four times hidden_size"
        checks.append(Check("drafter_width", "warn", reason, fix))
    sizes = (spec.hidden_size, spec.intermediate_size, spec.draft_vocab_size)
    if config.train.fp8 and any(size % 16 for size in sizes):
        reason = (
            f"train.fp8 multiplies sizes of 16 only; hidden, MLP and draft vocabulary are {sizes}"
        )
        checks.append(Check("fp8", "fail", reason, "set train.fp8=false, or change those sizes"))
    elif config.train.fp8 and not config.train.gpus_per_worker:
        reason = "workers without a GPU emulate train.fp8: the same rounding, multiplied in float32, so slower than without"
        checks.append(Check("fp8", "warn", reason, "set train.fp8=false, or give workers a GPU"))
    return checks


def _servable(config: JobConfig, spec: DrafterSpec, engines: Sequence[EngineIndex]) -> list[Check]:
    """What each engine lacks, or what the drafter is; engines[0] captures, too."""
    architecture = MLA if spec.attention == "mla" else LLAMA
    wanted = {switch for switch in SWITCHES if getattr(config.drafter, switch)}
    checks = []
    for index in engines:
        known = index.find(architecture)
        lacks = wanted - set(known.options) if known else {architecture}
        if known and "deepseek_yarn" in known.options and spec.rope.rope_type != "yarn":
            lacks.add(f"{architecture} with {spec.rope.rope_type} RoPE (it takes YaRN only)")
        if lacks:
            reason = f"{index.engine} {index.version} does not serve {', '.join(sorted(lacks))}"
            fix = "leave it out of the drafter section, or serve with another version"
            verdict: Verdict = "fail" if index is engines[0] else "warn"
            checks.append(Check("drafter", verdict, reason, fix))
    shape = f"{spec.num_heads} heads ({spec.num_kv_heads} kv) of {spec.head_dim}, MLP {spec.intermediate_size}"
    stretch = f" x{spec.rope.factor:g}" if spec.rope.factor != 1 else ""
    rope = f"{spec.rope.rope_type}{stretch} RoPE of theta {spec.rope.theta:g}, as the target's"
    reason = f"{architecture}: {shape}, {spec.num_aux} aux states, {rope}"
    return checks or [Check("drafter", "ok", reason)]


def positions(config: JobConfig, facts: TargetFacts) -> Check:
    """Whether the drafter's rotary cache reaches as far as the target is served."""
    given = config.drafter.max_position_embeddings or facts.max_position_embeddings
    needed = max(config.engine.max_model_len, min(facts.max_position_embeddings, _MOST_POSITIONS))
    if config.engine.max_model_len > facts.max_position_embeddings:
        reason = f"engine.max_model_len={config.engine.max_model_len} exceeds the target's {facts.max_position_embeddings}"
        return Check("positions", "fail", reason, "lower engine.max_model_len")
    if given < needed:
        reason = f"a drafter of {given} positions crashes the engine beyond them; the target serves {needed}"
        return Check("positions", "fail", reason, "leave drafter.max_position_embeddings out")
    if given > _MOST_POSITIONS:
        reason = f"a rotary cache of {given} positions costs gigabytes in every engine"
        fix = "set drafter.max_position_embeddings to the longest sequence that will be served"
        return Check("positions", "warn", reason, fix)
    return Check("positions", "ok", f"the drafter serves {given} positions")


def evaluate_against(config: JobConfig, facts: TargetFacts) -> Check:
    """Whether the other drafter can be read and served for this target."""
    if (against := config.evaluate.against) is None:
        return Check("evaluate_against", "ok", "no other drafter is measured")
    fix = "name a drafter of this target in evaluate.against"
    return attempt("evaluate_against", fix, lambda: fitting(Path(against), config, facts))


def fitting(directory: Path, config: JobConfig, facts: TargetFacts) -> str:
    """What the drafter in `directory` is. Raises ValueError unless it can be served for this target."""
    with reading(directory):
        spec, _, _, boundaries = read_checkpoint(directory)
        named = any(name.endswith("d2t") for name in read_tensors(directory))
    if not spec.full_vocab and not named:
        raise ValueError(
            f"{directory} holds no d2t, which vLLM then takes for zeros: it would propose other tokens than it means; "
            "write the map that t2d implies into its safetensors"
        )
    try:
        layers = resolve_boundaries(boundaries, facts.num_layers)[:-1]
    except ValueError as error:
        raise ValueError(
            f"{directory} reads layers {boundaries or 'by default'}, which do not exist in this target of "
            f"{facts.num_layers}"
        ) from error
    pairs = {
        "hidden_size": (spec.hidden_size, facts.hidden_size),
        "vocab_size": (spec.vocab_size, facts.vocab_size),
        "num_aux_hidden_states": (spec.num_aux, len(layers)),
    }
    differing = [f"{key} {own}, not {ours}" for key, (own, ours) in pairs.items() if own != ours]
    if spec.max_position_embeddings < config.engine.max_model_len:
        differing.append(
            f"max_position_embeddings {spec.max_position_embeddings} for engine.max_model_len="
            f"{config.engine.max_model_len}"
        )
    if differing:
        raise ValueError(f"{directory} is no drafter of this target: {'; '.join(differing)}")
    return f"{spec.attention} drafter of {spec.draft_vocab_size} tokens, reading layers {layers}"
