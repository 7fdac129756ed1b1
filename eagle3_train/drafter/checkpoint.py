"""EAGLE-3 checkpoints: written whole or not at all, validated fault by fault, imported from other projects."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3_train.drafter.checkpoint_format import (
    Dtype,
    ExportError,
    Json,
    Layout,
    ServedTarget,
    engine_config,
    expected_tensors,
    layout_of,
    read_config,
    read_json,
    read_tensors,
    spec_from_config,
    tensor_names,
    twins,
)
from eagle3_train.drafter.spec import DrafterSpec

log = logging.getLogger(__name__)

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
    """Write `directory` whole and valid or not at all, replacing an older one; d2t is None for the full vocabulary.

    `weights` are those of `expected_tensors`; `metadata` goes into config.json under "eagle3_train". The speculators
    layout takes its verifier and draft tokens from metadata's "target" and "num_speculative_tokens".
    """
    assert (d2t is None) == spec.full_vocab, (
        "d2t belongs to a reduced draft vocabulary, and only there"
    )
    config = engine_config(spec, boundaries, target, dtype, layout, metadata or {})
    tensors = {
        name: weights[own].detach().to(getattr(torch, dtype), copy=name in twins(spec))
        for name, own in tensor_names(spec, layout).items()
    }
    if d2t is not None:
        tensors["d2t"] = d2t.to(torch.int64)
        tensors["t2d"] = membership(d2t, spec.vocab_size)
    # One name each, so that what a killed export left is found by the next.
    temporary, older = (directory.with_name(f".{directory.name}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_torch_state_dict(tensors, temporary, max_shard_size=max_shard_bytes)
    for file in temporary.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    try:
        validate_checkpoint(temporary, spec, boundaries, target)
    except ValueError:
        shutil.rmtree(temporary)
        raise
    if directory.exists():
        shutil.rmtree(older, ignore_errors=True)
        directory.rename(older)
    temporary.rename(directory)
    shutil.rmtree(older, ignore_errors=True)


def membership(d2t: Int[Tensor, " draft_vocab"], vocab_size: int) -> Bool[Tensor, " vocab"]:
    """t2d: which target tokens the drafter may propose."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t.cpu()] = True
    return t2d


def validate_checkpoint(
    directory: Path, spec: DrafterSpec, boundaries: tuple[int, ...], target: ServedTarget
) -> None:
    """Raise ExportError naming the first fault of a directory that `write_checkpoint` should have written.

    spec, boundaries: those of the drafter that was trained.
    """
    if spec.max_position_embeddings < target.serving_len:
        raise ExportError(
            f"config.json: max_position_embeddings {spec.max_position_embeddings} is below the serving "
            f"length {target.serving_len}: positions beyond it crash the engine"
        )
    config = read_json(directory)
    dtype: Any = config.get("torch_dtype")
    layout, facts = layout_of(config), config.get("eagle3_train", {})
    wanted = engine_config(spec, boundaries, target, dtype, layout, facts)
    for key, value in {"eagle_config": None, **wanted}.items():
        if config.get(key) != value:
            raise ExportError(f"config.json: {key} is {config.get(key)}, must be {value}")
    if unknown := sorted(config.keys() - wanted.keys()):  # an engine may obey it
        raise ExportError(f"config.json: {', '.join(unknown)} is no part of this drafter")
    tensors, own = read_tensors(directory), expected_tensors(spec)
    shapes = {name: own[origin] for name, origin in tensor_names(spec, layout).items()}
    maps = {"d2t": (spec.draft_vocab_size,), "t2d": (spec.vocab_size,)}
    _check_shapes(directory, tensors, shapes if spec.full_vocab else {**shapes, **maps})
    for name in shapes:
        if str(tensors[name].dtype) != f"torch.{dtype}":
            raise ExportError(f"tensor {name} is {tensors[name].dtype}, config.json says {dtype}")
    _check_finite(directory, tensors)
    if not spec.full_vocab:
        _check_vocabulary(tensors["d2t"], tensors["t2d"], spec.vocab_size)
        if absent := [token for token in target.required_tokens if not tensors["t2d"][token]]:
            raise ExportError(
                f"the draft vocabulary lacks special tokens {absent}: they could never be drafted"
            )


def _check_shapes(
    directory: Path, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]
) -> None:
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise ExportError(f"{directory}: missing tensor {', '.join(missing)}")
    if extra := sorted(tensors.keys() - shapes.keys()):
        raise ExportError(f"{directory}: extra tensor {', '.join(extra)}: no part of this drafter")
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape)
        if found != shape:
            raise ExportError(f"{directory}: {name} has shape {found}, expected {shape}")


def _check_finite(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    if wrong := sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all()):
        raise ExportError(
            f"{directory}: {', '.join(wrong)} holds values that are not finite; name another checkpoint"
        )


def _check_vocabulary(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> None:
    if d2t.dtype != torch.int64:
        raise ExportError(f"d2t is {d2t.dtype}, expected int64")
    if not d2t.any():
        raise ExportError(
            "d2t is all zeros: the drafter would propose the first ids of the vocabulary"
        )
    ids = torch.arange(len(d2t)) + d2t
    if not (ids.diff() > 0).all():
        raise ExportError("d2t is unsorted: target ids i + d2t[i] must rise strictly")
    if ids[0] < 0 or ids[-1] >= vocab_size:
        raise ExportError(
            f"d2t leaves the target vocabulary: ids {ids[0]}..{ids[-1]} of {vocab_size}"
        )
    mask = membership(d2t, vocab_size)
    if t2d is not None and (t2d.dtype != torch.bool or not torch.equal(t2d, mask)):
        raise ExportError("t2d is not the bool mask of the ids that d2t reaches")


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
    train, for quantised or non-finite weights, for a draft vocabulary that no engine could map, and, when `spec` is
    given, for another shape than it.
    """
    config = read_config(directory)
    tensors = {_canonical(name): tensor for name, tensor in read_tensors(directory).items()}
    if tensors.pop("embed_tokens.weight", None) is not None:
        log.warning("%s: its embedding is ignored, a served drafter shares the target's", directory)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    _check_plain(directory, config, tensors)
    if "fc.weight" not in tensors:
        raise ExportError(f"{directory} holds no fc.weight: not an EAGLE-3 drafter")
    found = spec_from_config(config, tensors["fc.weight"].shape[1])
    if spec is not None:
        _check_same(directory, found, spec)
    try:
        d2t = _imported_vocabulary(found, d2t, t2d)
    except ExportError as error:
        raise ExportError(f"{directory}: {error}") from error
    for copy in twins(found):
        tensors.pop(copy, None)
    shapes = expected_tensors(found)
    if "lm_head.weight" not in tensors:
        del shapes["lm_head.weight"]
    _check_shapes(directory, tensors, shapes)
    _check_finite(directory, tensors)
    return Checkpoint(found, tensors, d2t, _boundaries(config))


def _check_plain(directory: Path, config: Json, tensors: dict[str, Tensor]) -> None:
    """The weights must be numbers as they are, for the activation that the drafter has."""
    if (activation := config.get("hidden_act") or "silu") != "silu":
        raise ExportError(
            f"{directory}: hidden_act is {activation}, drafters here have silu; name another checkpoint"
        )
    quantised = [
        f"tensor {name} ({str(tensor.dtype).removeprefix('torch.')})"
        for name, tensor in tensors.items()
        if "_scale" in name or tensor.dtype.itemsize == 1 or not tensor.is_floating_point()
    ]
    if config.get("quantization_config"):
        quantised.append("quantization_config in config.json")
    if quantised:
        raise ExportError(
            f"{directory} is quantised: {', '.join(quantised[:3])}; name the checkpoint it was made from, or "
            "multiply its scales in, save bfloat16 weights and drop quantization_config"
        )


def _imported_vocabulary(
    spec: DrafterSpec, d2t: Tensor | None, t2d: Tensor | None
) -> Int[Tensor, " draft_vocab"] | None:
    """d2t as we write it, from either map or both, which may be integers of any width."""
    if spec.full_vocab:
        if d2t is not None and d2t.any():
            raise ExportError("d2t renumbers a draft vocabulary that is the whole one")
        return None
    if t2d is not None:
        t2d = t2d.bool()
    if d2t is None:
        if t2d is None:
            raise ExportError("a reduced draft vocabulary without d2t or t2d")
        ids = t2d.nonzero().flatten()
        d2t = ids - torch.arange(len(ids))
    if len(d2t) != spec.draft_vocab_size:
        raise ExportError(f"it maps {len(d2t)} draft tokens of {spec.draft_vocab_size}")
    d2t = d2t if d2t.is_floating_point() else d2t.long()
    _check_vocabulary(d2t, t2d, spec.vocab_size)
    return d2t


def _check_same(directory: Path, found: DrafterSpec, wanted: DrafterSpec) -> None:
    """How far positions reach and the norms' epsilon may differ, what the weights are may not."""
    free = ("max_position_embeddings", "rope", "rms_norm_eps")
    differing = [
        f"{f.name}: {getattr(found, f.name)} there, {getattr(wanted, f.name)} here"
        for f in fields(wanted)
        if f.name not in free and getattr(found, f.name) != getattr(wanted, f.name)
    ]
    if differing:
        raise ExportError(
            f"{directory} has another shape ({'; '.join(differing)}); set the drafter section to its sizes"
        )
    if found.rope != wanted.rope:
        log.warning(
            "%s was trained with RoPE %s; the target's is used instead: %s",
            directory,
            found.rope.parameters(),
            wanted.rope.parameters(),
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
