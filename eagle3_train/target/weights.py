"""The three tensors of the target a trainer needs: embedding, head and final norm. Nothing else is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3_train.rundir import reading
from eagle3_train.target.facts import INDEX, TargetFacts, read_facts

# Wrappers prefix the language model; encoders and MTP layers also hold embeddings and norms, and must not match.
_PREFIX = r"(?:(?:model|language_model|text_model|llm|transformer|decoder|backbone|thinker)\.)*"
_NAMES = {
    "embedding": _PREFIX + r"(?:embed_tokens|word_embeddings|tok_embeddings|embeddings|wte)\.",
    "final norm": _PREFIX + r"(?:norm|final_layernorm|norm_f|ln_f)\.",
    "lm_head": _PREFIX + r"(?:lm_head|output)\.",
}


class FrozenWeights(NamedTuple):
    """embed [V, H] as stored; lm_head [V, H] and norm_weight [H] such that the target's logits are
    rms_norm(last_state) * norm_weight @ lm_head.T: (1 + w) norms and logit scales are folded in."""

    embed: Tensor
    lm_head: Tensor
    norm_weight: Tensor


def read_frozen(path: str | Path, dtype: torch.dtype | None = None) -> FrozenWeights:
    """Read the three tensors of the target at `path`, in `dtype` (None: as stored).

    Rows beyond the vocabulary (padding) are dropped. Raises ValueError for weights that are missing,
    quantised or of the wrong shape, and for heads that no linear layer can express.
    """
    facts = read_facts(path)
    refuse_nonlinear_head(facts)
    tensors = {}
    for what, (name, file) in locate_frozen(facts).items():
        with safe_open(file, framework="pt") as stored:
            tensor = stored.get_tensor(name)
        if tensor.ndim == 2:
            tensor = tensor[: facts.vocab_size]
        tensors[what] = tensor if dtype is None else tensor.to(dtype)
    embed, norm = tensors["embedding"], tensors["final norm"]
    head = tensors.get("lm_head", embed)
    if facts.norm_kind == "rms_plus_one":
        norm = norm.float() + 1  # bf16 would round small w away
    if facts.logit_scale != 1.0:
        head = head * facts.logit_scale
    return FrozenWeights(embed, head, norm)


def refuse_nonlinear_head(facts: TargetFacts) -> None:
    """Raise ValueError when the logits are not linear in the RMS-normalised last state."""
    if facts.logit_softcap:
        raise ValueError(
            f"logits are soft-capped at {facts.logit_softcap} (final_logit_softcapping), which the teacher "
            "does not reproduce; this target cannot be trained against"
        )
    if facts.norm_kind == "layer":
        raise ValueError(
            "the final norm is a LayerNorm, the drafter's is an RMSNorm; this target cannot be trained against"
        )


def locate_frozen(facts: TargetFacts) -> dict[str, tuple[str, Path]]:
    """Role -> (tensor name, file) of the embedding, final norm and, unless tied, lm_head; no values are read.

    Raises ValueError for tensors that are missing, quantised or of the wrong shape.
    """
    files = _tensor_files(facts.path)
    matrix = (facts.vocab_size, facts.hidden_size)
    shapes = {"embedding": matrix, "final norm": matrix[1:], "lm_head": matrix}
    if facts.tie_word_embeddings:
        del shapes["lm_head"]
    return {what: _locate(facts.path, files, what, shape) for what, shape in shapes.items()}


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it, through the safetensors index when there is one."""
    index = directory / INDEX
    if index.is_file():
        with reading(index):
            names = json.loads(index.read_text())["weight_map"]
            return {name: directory / file for name, file in names.items()}
    found: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with reading(file), safe_open(file, framework="pt") as stored:
            found.update(dict.fromkeys(stored.keys(), file))
    if not found:
        raise ValueError(
            f"{directory} holds no safetensors weights; the trainer needs the embedding, lm_head and final norm"
        )
    return found


def _locate(
    where: Path, files: dict[str, Path], what: str, shape: tuple[int, ...]
) -> tuple[str, Path]:
    """The one plain weight of that role, its type and shape checked."""
    names = [name for name in files if re.fullmatch(_NAMES[what] + r"[^.]*", name)]
    plain = [name for name in names if name.endswith(".weight")]
    if len(plain) != 1:
        raise ValueError(
            f"{where}: expected one plain {what} weight, found {', '.join(sorted(names)) or 'none'}; the trainer "
            "needs it, unquantised"
        )
    name, file = plain[0], files[plain[0]]
    if not file.is_file():
        raise ValueError(f"{file} is named by the index but absent; download it, it holds {name}")
    with reading(file), safe_open(file, framework="pt") as stored:
        view = stored.get_slice(name)
        stored_shape, stored_type = tuple(view.get_shape()), str(view.get_dtype())
    if stored_type not in ("F64", "F32", "F16", "BF16"):
        raise ValueError(
            f"{name} in {file} is quantised ({stored_type}); the trainer needs it unquantised"
        )
    # Rows beyond the vocabulary are padding; a norm has none.
    padded = len(shape) == 2 and stored_shape[1:] == shape[1:] and stored_shape[0] > shape[0]
    if stored_shape != shape and not padded:
        raise ValueError(f"{name} in {file} has shape {stored_shape}, config.json says {shape}")
    return name, file
