"""The three tensors of the target a trainer needs: embedding, head and final norm. Nothing else is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3_train.target.facts import TargetFacts, read_facts

# Wrappers prefix the language model; encoders and MTP layers also hold embeddings and norms, and must not match.
_PREFIX = r"(?:(?:model|language_model|text_model|llm|transformer|decoder|backbone|thinker)\.)*"
_EMBEDDING = re.compile(
    _PREFIX + r"(?:embed_tokens|word_embeddings|tok_embeddings|embeddings|wte)\."
)
_HEAD = re.compile(_PREFIX + r"(?:lm_head|output)\.")
_NORM = re.compile(_PREFIX + r"(?:norm|final_layernorm|norm_f|ln_f)\.")


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
    files = tensor_files(facts.path)
    vocab, hidden = facts.vocab_size, facts.hidden_size
    embed = _read(files, _EMBEDDING, "embedding", (vocab, hidden), dtype)
    norm = _read(files, _NORM, "final norm", (hidden,), dtype)
    if facts.tie_word_embeddings:
        head = embed
    else:
        head = _read(files, _HEAD, "lm_head", (vocab, hidden), dtype)
    if facts.norm_kind == "rms_plus_one":
        norm = norm.float() + 1  # bf16 would round small w away
    if facts.logit_scale != 1.0:
        head = head * facts.logit_scale
    return FrozenWeights(embed, head, norm)


def refuse_nonlinear_head(facts: TargetFacts) -> None:
    """Raise ValueError when the logits are not linear in the RMS-normalised last state."""
    if facts.logit_softcap:
        raise ValueError(
            f"{facts.path}: logits are soft-capped at {facts.logit_softcap} (final_logit_softcapping), which the "
            "teacher does not reproduce; this target cannot be trained against"
        )
    if facts.norm_kind == "layer":
        raise ValueError(
            f"{facts.path}: the final norm is a LayerNorm, the drafter's is an RMSNorm; "
            "this target cannot be trained against"
        )


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it, through the safetensors index when there is one."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
        return {name: directory / file for name, file in names.items()}
    found: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), file))
    if not found:
        raise ValueError(
            f"{directory} holds no safetensors weights; the trainer needs the target's embedding, lm_head and final norm"
        )
    return found


def _read(
    files: dict[str, Path],
    pattern: re.Pattern[str],
    what: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
) -> Tensor:
    names = sorted(
        name for name in files if (m := pattern.match(name)) and "." not in name[m.end() :]
    )
    plain = [name for name in names if name.endswith(".weight")]
    if len(plain) != 1:
        raise ValueError(
            f"expected one {what} weight in {next(iter(files.values())).parent}, found {names}: "
            "quantised (no plain .weight) or an unknown layout; the trainer needs it unquantised"
        )
    file = files[plain[0]]
    if not file.is_file():
        raise ValueError(
            f"{file} is named by the index but absent; download it, it holds {plain[0]}"
        )
    with safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(plain[0])
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(
            f"{plain[0]} in {file} is quantised ({tensor.dtype}); the trainer needs it unquantised"
        )
    if tensor.ndim != len(shape) or tensor.shape[0] < shape[0] or tensor.shape[1:] != shape[1:]:
        raise ValueError(
            f"{plain[0]} in {file} has shape {tuple(tensor.shape)}, expected {shape} from config.json"
        )
    kept = tensor[: shape[0]]
    return kept if dtype is None else kept.to(dtype)
