"""EAGLE-3 checkpoints: written whole or not at all, validated fault by fault, imported from other projects."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3_train.drafter.checkpoint_format import (
    LLAMA,
    MLA,
    MLA_MODEL_TYPES,
    SIZES,
    SWITCHES,
    Dtype,
    ExportError,
    Json,
    Layout,
    ServedTarget,
    engine_config,
    expected_tensors,
    layout_of,
    read_config,
    read_tensors,
    save_shards,
    sglang_layer_ids,
    spec_from_config,
    speculators_config,
    tensor_names,
    twins,
)
from eagle3_train.drafter.spec import DrafterSpec

log = logging.getLogger(__name__)

_REQUIRED = (
    "architectures",
    "model_type",
    *SIZES.values(),
    "draft_vocab_size",
    "num_aux_hidden_states",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    *SWITCHES,
    "rms_norm_eps",
    "dtype",
)
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_PREFIXES = ("draft_model.", "module.", "eagle_module.", "model.")


def write_checkpoint(
    directory: Path,
    spec: DrafterSpec,
    weights: Mapping[str, Tensor],
    d2t: Int[Tensor, " draft_vocab"] | None,
    boundaries: tuple[int, ...],
    target: ServedTarget,
    dtype: Dtype = "bfloat16",
    max_shard_bytes: int = 5_000_000_000,
    metadata: Json | None = None,
    layout: Layout = "eagle3",
) -> None:
    """Write `directory` whole or not at all, replacing an older one; d2t is None for the full vocabulary.

    `weights` are those of `expected_tensors`; `metadata` goes into config.json under "eagle3_train". The speculators
    layout takes its verifier and draft tokens from metadata's "target" and "num_speculative_tokens".
    """
    assert (d2t is None) == spec.full_vocab, (
        "d2t belongs to a reduced draft vocabulary, and only there"
    )
    facts, kind = metadata or {}, getattr(torch, dtype)
    config = engine_config(spec, boundaries, target, dtype)
    if layout == "speculators":
        config = speculators_config(config, facts["target"], facts["num_speculative_tokens"])
    config["eagle3_train"] = facts
    tensors = {
        name: weights[own].detach().to(kind, copy=name in twins(spec))
        for name, own in tensor_names(spec, layout).items()
    }
    if d2t is not None:
        tensors["d2t"] = d2t.to(torch.int64)
        tensors["t2d"] = membership(d2t, spec.vocab_size)
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_shards(temporary, tensors, max_shard_bytes)
    for file in temporary.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if directory.exists():
        old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
        directory.rename(old)
        temporary.rename(directory)
        shutil.rmtree(old)
    else:
        temporary.rename(directory)


def membership(d2t: Int[Tensor, " draft_vocab"], vocab_size: int) -> Bool[Tensor, " vocab"]:
    """t2d: which target tokens the drafter may propose."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t.cpu()] = True
    return t2d


def validate_checkpoint(
    directory: Path, target: ServedTarget, spec: DrafterSpec | None = None
) -> None:
    """Raise ExportError naming the first fault of a directory that `write_checkpoint` should have written.

    spec: the drafter that was trained; every number of config.json must agree with it.
    """
    config = read_config(directory)
    _check_config(config, target)
    _check_boundaries(config, target)
    found = spec_from_config(config)
    if spec is not None and found != spec:
        wrong = [f.name for f in fields(spec) if getattr(found, f.name) != getattr(spec, f.name)]
        raise ExportError(
            f"config.json: {', '.join(wrong)} differ from the drafter that was trained"
        )
    tensors = read_tensors(directory)
    _check_weights(tensors, found, config)
    _check_vocabulary(tensors, found, target)


def _check_config(config: Json, target: ServedTarget) -> None:
    if missing := [key for key in _REQUIRED if key not in config]:
        raise ExportError(f"config.json: no {', '.join(missing)}")
    if missing := [key for key in _ROPE if key not in config]:
        raise ExportError(
            f"config.json: one RoPE schema is missing ({', '.join(missing)}); engines differ in which they read"
        )
    if config["architectures"] not in ([LLAMA], [MLA]):
        raise ExportError(
            f"config.json: architectures {config['architectures']} is not [{LLAMA}] or [{MLA}]"
        )
    if config["architectures"] == [MLA] and config["model_type"] not in MLA_MODEL_TYPES:
        raise ExportError(
            f"config.json: model_type {config['model_type']} is loaded as MTP, not EAGLE-3"
        )
    for key, value in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        if config[key] != value:
            raise ExportError(f"config.json: {key} is {config[key]}, the target's is {value}")
    if config["norm_before_residual"] is not False:
        raise ExportError(
            "config.json: norm_before_residual must be false, SGLang does not support it"
        )
    if config["max_position_embeddings"] < target.serving_len:
        raise ExportError(
            f"config.json: max_position_embeddings {config['max_position_embeddings']} is below the serving "
            f"length {target.serving_len}: positions beyond it crash the engine"
        )
    scaling = {k: v for k, v in (config["rope_scaling"] or {}).items() if k != "type"}
    if config["rope_parameters"] != (scaling or {"rope_type": "default"}) | {
        "rope_theta": config["rope_theta"]
    }:
        raise ExportError("config.json: rope_parameters and rope_theta + rope_scaling disagree")


def _check_boundaries(config: Json, target: ServedTarget) -> None:
    ids = config["eagle_aux_hidden_state_layer_ids"]
    if ids != sorted(set(ids)) or not ids or ids[0] < 0 or ids[-1] >= target.num_layers:
        raise ExportError(
            f"config.json: aux boundaries {ids} do not rise strictly within 0..{target.num_layers - 1}"
        )
    if config["num_aux_hidden_states"] != len(ids):
        raise ExportError(
            f"config.json: num_aux_hidden_states is {config['num_aux_hidden_states']} for boundaries {ids}"
        )
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested != sglang_layer_ids(tuple(ids), target):
        raise ExportError(f"config.json: SGLang would read aux layers {nested} as other than {ids}")


def _check_weights(tensors: dict[str, Tensor], spec: DrafterSpec, config: Json) -> None:
    own, dtype = expected_tensors(spec), str(config["dtype"])
    shapes = {name: own[origin] for name, origin in tensor_names(spec, layout_of(config)).items()}
    vocabulary = set() if spec.full_vocab else {"d2t", "t2d"}
    if missing := sorted((shapes.keys() | vocabulary) - tensors.keys()):
        raise ExportError(f"missing tensor {', '.join(missing)}")
    if extra := sorted(tensors.keys() - shapes.keys() - vocabulary):
        raise ExportError(f"extra tensor {', '.join(extra)}: engines would ignore or misplace it")
    for name, shape in shapes.items():
        found = tensors[name]
        if tuple(found.shape) != shape:
            raise ExportError(f"tensor {name} has shape {tuple(found.shape)}, expected {shape}")
        if found.dtype != getattr(torch, dtype):
            raise ExportError(f"tensor {name} is {found.dtype}, config.json says {dtype}")
        if not found.isfinite().all():
            raise ExportError(f"tensor {name} holds values that are not finite")


def _check_vocabulary(tensors: dict[str, Tensor], spec: DrafterSpec, target: ServedTarget) -> None:
    if spec.full_vocab:
        return
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if d2t.dtype != torch.int64 or tuple(d2t.shape) != (spec.draft_vocab_size,):
        raise ExportError(
            f"d2t is {d2t.dtype} {tuple(d2t.shape)}, expected int64 ({spec.draft_vocab_size},)"
        )
    if not d2t.any():
        raise ExportError(
            "d2t is all zeros: the drafter would propose the first ids of the vocabulary"
        )
    ids = torch.arange(len(d2t)) + d2t
    if not (ids.diff() > 0).all():
        raise ExportError("d2t is unsorted: target ids i + d2t[i] must rise strictly")
    if ids[0] < 0 or ids[-1] >= target.vocab_size:
        raise ExportError(
            f"d2t leaves the target vocabulary: ids {ids[0]}..{ids[-1]} of {target.vocab_size}"
        )
    if t2d.dtype != torch.bool or not torch.equal(t2d, membership(d2t, spec.vocab_size)):
        raise ExportError("t2d is not the bool mask of the ids that d2t reaches")
    absent = [token for token in target.required_tokens if not t2d[token]]
    if absent:
        raise ExportError(
            f"the draft vocabulary lacks special tokens {absent}: they could never be drafted"
        )


class Checkpoint(NamedTuple):
    """A drafter as read from disk.

    lm_head may be absent from `weights` (shared with the target), d2t is None for the full vocabulary, boundaries is
    None when the checkpoint leaves them to the engine's default.
    """

    spec: DrafterSpec
    weights: dict[str, Tensor]
    d2t: Int[Tensor, " draft_vocab"] | None
    boundaries: tuple[int, ...] | None


def read_checkpoint(directory: Path, spec: DrafterSpec | None = None) -> Checkpoint:
    """An EAGLE-3 checkpoint of ours or of another project.

    Understood: midlayer. and layers.0. names, wrapper prefixes, safetensors only, plain and speculators
    configurations, absent maps for a full vocabulary. Raises ExportError for architectures this project does not
    train, and, when `spec` is given, for another shape than it.
    """
    config = read_config(directory)
    tensors = {_canonical(name): tensor for name, tensor in read_tensors(directory).items()}
    if tensors.pop("embed_tokens.weight", None) is not None:
        log.warning("%s: its embedding is ignored, a served drafter shares the target's", directory)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if "fc.weight" not in tensors:
        raise ExportError(f"{directory} holds no fc.weight: not an EAGLE-3 drafter")
    config.setdefault(
        "num_aux_hidden_states", tensors["fc.weight"].shape[1] // config["hidden_size"]
    )
    found = spec_from_config(config)
    if spec is not None:
        _check_shape(directory, found, spec)
    if found.full_vocab:
        d2t = None
    elif d2t is None:
        if t2d is None:
            raise ExportError(f"{directory}: a reduced draft vocabulary without d2t or t2d")
        d2t = t2d.nonzero().flatten() - torch.arange(found.draft_vocab_size)
    for copy in twins(found):
        tensors.pop(copy, None)
    _check_tensors(directory, tensors, expected_tensors(found))
    return Checkpoint(found, tensors, d2t, _boundaries(config))


def _check_tensors(
    directory: Path, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]
) -> None:
    if unknown := sorted(tensors.keys() - shapes.keys()):
        raise ExportError(
            f"{directory}: tensors this project's drafter has no place for: {unknown}"
        )
    if missing := sorted(shapes.keys() - tensors.keys() - {"lm_head.weight"}):
        raise ExportError(f"{directory}: missing tensor {', '.join(missing)}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise ExportError(
                f"{directory}: {name} has shape {tuple(tensor.shape)}, not {shapes[name]}"
            )


def _check_shape(directory: Path, found: DrafterSpec, wanted: DrafterSpec) -> None:
    """How far positions reach may differ, what the weights are may not."""
    free = ("max_position_embeddings", "rope")
    differing = [
        f"{f.name}: {getattr(found, f.name)} there, {getattr(wanted, f.name)} here"
        for f in fields(wanted)
        if f.name not in free and getattr(found, f.name) != getattr(wanted, f.name)
    ]
    if differing:
        raise ExportError(
            f"{directory} has another shape ({'; '.join(differing)}); set the drafter section to its sizes"
        )


def _boundaries(config: Json) -> tuple[int, ...] | None:
    """Top-level ids are boundaries. Nested ones are SGLang's: a first id of 1 counts layers by their output."""
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []
        ids = [i + 1 for i in ids] if ids and ids[0] == 1 else ids
    return tuple(ids) or None


def _canonical(name: str) -> str:
    """A tensor name as we write it."""
    while prefix := next((p for p in _PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
