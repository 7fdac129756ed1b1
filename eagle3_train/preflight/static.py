"""Static depth: does this target fit this engine version and this drafter? Seconds, no engine, no weights read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eagle3_train.config import JobConfig
from eagle3_train.engines.resolve import EngineIndex, Resolution, resolve_target
from eagle3_train.preflight.check import Check, attempt
from eagle3_train.preflight.drafter import (
    boundaries,
    drafter,
    evaluate_against,
    positions,
)
from eagle3_train.preflight.text import corpus, tokenizer
from eagle3_train.target.facts import INDEX, TargetFacts
from eagle3_train.target.weights import locate_frozen, refuse_nonlinear_head

# A tail of an architecture's name says what kind of model it is not.
_NO_LANGUAGE_MODEL = re.compile(r"(Classification|QuestionAnswering|MaskedLM|RewardModel)$")


def static_checks(
    config: JobConfig, facts: TargetFacts, engines: Sequence[EngineIndex]
) -> list[Check]:
    """Every static check, in reading order; engines[0] captures and serves, the others only serve."""
    captures, *serves = (resolve_target(facts, index) for index in engines)
    return [
        target(facts),
        engine_class(facts, captures),
        remote_code(config, facts, captures),
        capture(config, captures, serves),
        *(serving(resolution) for resolution in serves),
        boundaries(config, facts, [captures, *serves]),
        head(facts),
        *weights(facts),
        corpus(config),
        *tokenizer(config, facts),
        *drafter(config, facts, engines),
        positions(config, facts),
        tensor_parallel(config, facts),
        evaluate_against(config, facts),
    ]


def target(facts: TargetFacts) -> Check:
    """What the target is."""
    wraps = f" wrapping {facts.text_architectures[0]}" if facts.text_architectures else ""
    kinds = [
        "VLM (text is trained, images are not)" if facts.is_multimodal else "",
        f"MLA (latent {facts.mla.kv_lora_rank})" if facts.mla else "",
        f"MoE ({facts.moe.num_experts} experts, {facts.moe.experts_per_token} per token)"
        if facts.moe
        else "",
        f"quantised ({facts.quantisation})" if facts.quantisation else "",
    ]
    name = ", ".join(facts.architectures) or "no architecture named"
    sizes = f"{facts.num_layers} layers, hidden {facts.hidden_size}, vocabulary {facts.vocab_size}"
    reason = "; ".join([name + wraps, sizes, *filter(None, kinds)])
    if any(map(_NO_LANGUAGE_MODEL.search, facts.architectures)):
        return Check("target", "fail", f"{reason}: writes no text", "name a language model")
    if facts.quantisation and facts.quantised_bits is None:
        fix = "compare the plan's memory with the size of its files"
        return Check("target", "warn", f"{reason}; how many bits is not known", fix)
    return Check("target", "ok", reason)


def engine_class(facts: TargetFacts, found: Resolution) -> Check:
    """Which class the capturing engine would load."""
    engine = f"{found.engine} {found.version} ({found.origin})"
    if found.backend == "unsupported":
        asked = ", ".join(facts.architectures) or "a config.json without architectures"
        reason = (
            f"{engine} has no class for {asked}, neither has transformers, and the target ships no code that an "
            "engine could run"
        )
        fix = "use an engine version that knows it (preflight.vllm_version)"
        return Check("engine_class", "fail", reason, fix)
    if found.backend == "transformers":
        reason = (
            f"{engine} would run it on its Transformers backend as {found.resolved_class}: slower than a native "
            "class, and only the live depth proves its states"
        )
        return Check("engine_class", "warn", reason, "run the live depth before anything long")
    return Check("engine_class", "ok", f"{engine} loads {found.resolved_class}")


def remote_code(config: JobConfig, facts: TargetFacts, found: Resolution) -> Check:
    """Whether the target's own Python files would run, and whether that was agreed to."""
    if found.needs_code and not config.target.trust_remote_code:
        reason = f"the model would execute {', '.join(sorted(set(facts.auto_map.values())))}"
        fix = "read those files, then set target.trust_remote_code=true"
        return Check("remote_code", "fail", reason, fix)
    if config.target.trust_remote_code:
        return Check("remote_code", "warn", "target.trust_remote_code=true: its files may run")
    return Check("remote_code", "ok", "the model needs no code of its own, and none is run")


def capture(config: JobConfig, found: Resolution, serves: Sequence[Resolution]) -> Check:
    """Whether the engine can hand out the target's hidden states."""
    name = found.resolved_class.rpartition(".")[2]
    if found.supports_eagle3:
        return Check("capture", "ok", f"{name} supports EAGLE-3 capture")
    if name and config.target.tap_by_hooks == name:
        reason = f"{name} has no taps; forward hooks read its layers, by target.tap_by_hooks"
        if not config.engine.enforce_eager:
            return Check("capture", "fail", reason, "set engine.enforce_eager=true")
        return Check("capture", "warn", reason, "run --depth live, which proves the layers")
    if not found.resolved_class:
        return Check("capture", "fail", "no class to tap", "see engine_class")
    able = [f"{other.engine} {other.version}" for other in serves if other.supports_eagle3]
    reason = f"{name} in {found.engine} {found.version} does not implement SupportsEagle3, so its layers cannot be tapped"
    if able:
        reason += f"; {', '.join(able)} could serve a drafter of it, but does not capture"
    fix = (
        f"set target.tap_by_hooks={name} and engine.enforce_eager=true to read its layers with forward hooks, or "
        "use a vLLM version whose class implements it"
    )
    return Check("capture", "fail", reason, fix)


def serving(found: Resolution) -> Check:
    """Whether another engine could serve an EAGLE-3 drafter of this target."""
    engine, name = f"{found.engine} {found.version} ({found.origin})", f"serve_{found.engine}"
    if found.supports_eagle3:
        return Check(name, "ok", f"{engine} serves EAGLE-3 on {found.resolved_class}")
    missing = found.resolved_class or "its architecture"
    return Check(name, "warn", f"{engine} cannot serve EAGLE-3 on {missing}", "serve with vLLM")


def head(facts: TargetFacts) -> Check:
    """Whether the teacher (final norm and head) can be reproduced from the last state."""

    def describe() -> str:
        refuse_nonlinear_head(facts)
        folded = [
            f"logit scale {facts.logit_scale:g}" if facts.logit_scale != 1 else "",
            "(1 + w) norm" if facts.norm_kind == "rms_plus_one" else "",
        ]
        used = ", ".join(filter(None, folded))
        return f"RMS norm and linear head{f'; {used} folded into the weights' if used else ''}"

    return attempt("head", "choose another target", describe)


def weights(facts: TargetFacts) -> list[Check]:
    """Whether the three tensors the trainer reads are there, unquantised and of the right shape."""
    if facts.weight_bytes is None and not (facts.path / INDEX).is_file():
        reason = f"{facts.path} holds no safetensors: embedding, head and final norm unchecked"
        return [Check("weights", "warn", reason, "download the weights before training")]

    def describe() -> str:
        names = ", ".join(name for name, _ in locate_frozen(facts).values())
        tied = "; the head is tied to the embedding" if facts.tie_word_embeddings else ""
        return f"{names}: plain and complete{tied}"

    return [attempt("weights", "download the checkpoint again, or use another", describe)]


def tensor_parallel(config: JobConfig, facts: TargetFacts) -> Check:
    """Whether heads, and the blocks of a block-quantised target, divide among the GPUs of a replica."""
    tp, own, block = config.engine.tensor_parallel, config.drafter, facts.quantised_block
    heads = {"target": facts.num_heads, "drafter": own.num_heads or facts.num_heads}
    kv_heads = {} if facts.mla else {"target": facts.num_kv_heads}
    if own.attention != "mla":
        kv_heads["drafter"] = own.num_kv_heads or min(facts.num_kv_heads, heads["drafter"])
    mlp = facts.moe.intermediate_size if facts.moe else facts.intermediate_size

    def uneven(size: int) -> list[str]:
        found = [f"the {who}'s {count} heads" for who, count in heads.items() if count % size]
        # vLLM divides key/value heads, or copies each of them equally often.
        found += [
            f"the {who}'s {count} key/value heads"
            for who, count in kv_heads.items()
            if count % size and size % count
        ]
        if block and mlp % (size * block):
            found.append(f"an MLP of {mlp} in blocks of {block}")
        return found

    if found := uneven(tp):
        sizes = [size for size in range(1, facts.num_heads + 1) if not uneven(size)]
        fix = f"use one of {sizes[:8]}" if sizes else "change the drafter's heads"
        reason = f"engine.tensor_parallel={tp} does not divide {' and '.join(found)}"
        return Check("tensor_parallel", "fail", reason, fix)
    return Check(
        "tensor_parallel", "ok", f"TP {tp}, PP 1 (capture over pipeline stages is not used)"
    )
