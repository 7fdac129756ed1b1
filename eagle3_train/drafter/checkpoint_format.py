"""What an EAGLE-3 checkpoint directory looks like to vLLM and SGLang: tensors, config.json, files.

What bites: `d2t` holds offsets (target id = draft id + d2t) and a missing one loads silently as zeros; aux layer ids
are boundaries for vLLM (top level) and something else for SGLang (nested); both spellings of RoPE must be there.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3_train.drafter.modules import DrafterWeights
from eagle3_train.drafter.spec import DrafterSpec, RopeSpec

Json = dict[str, Any]
Dtype = Literal["float32", "bfloat16"]
Layout = Literal["eagle3", "speculators"]

LLAMA, MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
# vLLM turns a drafter of model_type deepseek_v3 into an MTP model; kimi_k2 parses as the same configuration.
MLA_MODEL_TYPES = ("kimi_k2", "deepseek_v2")
SWITCHES = ("norm_output", "fc_norm", "norm_before_fc")
SIZES = {  # spec field -> config.json key
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
}
_MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class ExportError(ValueError):
    """A checkpoint no engine should be given; the message names the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTarget:
    """What a checkpoint must agree with. serving_len: longest sequence served, tokens.

    sglang_ids: how SGLang reads explicit aux layer ids of this target: `boundary` as they are, `output` id + 1,
    `output_always` id + 1 and so on its own default too, `deepseek` id + 1 only when the first id is 1.
    required_tokens: target ids the drafter must be able to propose (stop tokens, tokens of the chat template).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    serving_len: int
    sglang_ids: Literal["boundary", "output", "output_always", "deepseek"] = "output"
    required_tokens: tuple[int, ...] = ()


def expected_tensors(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight a drafter of this shape has; d2t, t2d and the shared embedding apart."""
    weights = DrafterWeights(spec, torch.device("meta"))
    return {name: tuple(weight.shape) for name, weight in weights.named_parameters()}


def twins(spec: DrafterSpec) -> dict[str, str]:
    """Copies on disk -> the weight they repeat: deeper layers norm their state by `input_layernorm` in vLLM
    and by `hidden_norm` in SGLang."""
    return {
        f"layers.{layer}.hidden_norm.weight": f"layers.{layer}.input_layernorm.weight"
        for layer in range(1, spec.num_layers)
    }


def engine_config(
    spec: DrafterSpec, boundaries: tuple[int, ...], target: ServedTarget, dtype: Dtype
) -> Json:
    """config.json as both engines read it. `boundaries` are the aux ones, rising, without L."""
    mla = spec.attention == "mla"
    rope = spec.rope.parameters()
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config: Json = {
        "architectures": [MLA if mla else LLAMA],
        "model_type": MLA_MODEL_TYPES[0] if mla else "llama",
        **{key: getattr(spec, name) for name, key in SIZES.items()},
        "num_key_value_heads": spec.num_kv_heads,
        "draft_vocab_size": spec.draft_vocab_size,
        "num_aux_hidden_states": spec.num_aux,
        "eagle_aux_hidden_state_layer_ids": list(boundaries),
        "norm_before_residual": False,
        **{switch: getattr(spec, switch) for switch in SWITCHES},
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "rope_theta": spec.rope.theta,
        "rope_scaling": None
        if spec.rope.rope_type == "default"
        else scaling | {"type": spec.rope.rope_type},
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if mla:
        config |= {key: getattr(spec, key) for key in _MLA_SIZES}
    else:
        config["head_dim"] = spec.head_dim
    ids = sglang_layer_ids(boundaries, target)
    if ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    return config


def sglang_layer_ids(boundaries: tuple[int, ...], target: ServedTarget) -> list[int] | None:
    """SGLang's spelling of the boundaries; None when its default already means them."""
    layers, reads = target.num_layers, target.sglang_ids
    if boundaries == (2, layers // 2, layers - 3) and reads != "output_always":
        return None
    if reads == "boundary" or (reads == "deepseek" and boundaries[0] not in (1, 2)):
        return list(boundaries)
    if boundaries[0] == 0 or (reads == "deepseek" and boundaries[0] == 1):
        raise ExportError(
            f"aux boundaries {boundaries} cannot be spelt for SGLang on this target; "
            "choose drafter.aux_layers whose first is at least 2"
        )
    return [boundary - 1 for boundary in boundaries]


def spec_from_config(config: Json) -> DrafterSpec:
    """The spec a plain (not speculators) configuration describes. Raises ExportError if we do not train it."""
    if config.get("norm_before_residual", False):
        raise ExportError("norm_before_residual=true is not an architecture this project trains")
    mla = bool(config.get("kv_lora_rank"))
    try:
        rope = config.get("rope_parameters") or {
            "rope_theta": config.get("rope_theta", 10_000.0),
            **(config.get("rope_scaling") or {}),
        }
        heads = config["num_attention_heads"]
        sizes = {name: config[key] for name, key in SIZES.items()}
        latent: Json = {key: config.get(key) for key in _MLA_SIZES} if mla else {}
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        if mla:
            head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        return DrafterSpec(
            **sizes,
            **latent,
            attention="mla" if mla else "llama",
            head_dim=head_dim,
            num_kv_heads=heads if mla else config.get("num_key_value_heads") or heads,
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            num_aux=config["num_aux_hidden_states"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=RopeSpec.from_parameters(rope, interleaved=mla),
            **{switch: bool(config.get(switch, False)) for switch in SWITCHES},
        )
    except KeyError as error:
        raise ExportError(f"config.json names no {error}") from error


def speculators_config(config: Json, target_name: str, num_speculative_tokens: int) -> Json:
    """What `engine_config` says in the layout of the speculators library, which vLLM also serves by itself.

    Raises ExportError for latent attention: vLLM builds only Llama and Qwen3 drafters from that layout.
    """
    if config["architectures"] != [LLAMA]:
        raise ExportError(
            "the speculators layout holds no latent-attention (MLA) drafter; set export.format=eagle3"
        )
    outer = ["draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"]
    outer += [*SWITCHES, "tie_word_embeddings", "dtype", "torch_dtype", "architectures"]
    layer = {key: value for key, value in config.items() if key not in outer}
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}
    return {
        **{key: config[key] for key in outer},
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "transformer_layer_config": layer,
    }


def read_config(directory: Path) -> Json:
    """config.json of a checkpoint; the speculators layout flattened, so that its keys stand where ours do.

    Raises ExportError when there is none.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ExportError(f"{directory} holds no config.json: not a checkpoint")
    try:
        config: Json = json.loads(path.read_text())
    except ValueError as error:
        raise ExportError(f"{path} is not JSON: {error}") from error
    layer = config.pop("transformer_layer_config", None)
    if layer is None:
        return config
    outer = {key: value for key, value in config.items() if value is not None}
    outer.setdefault("norm_before_residual", True)  # what vLLM takes an absent key for
    return {**layer, **outer, "architectures": [LLAMA]}


def layout_of(config: Json) -> Layout:
    """Which layout a configuration belongs to, flattened or not."""
    return "speculators" if "speculators_model_type" in config else "eagle3"


def tensor_names(spec: DrafterSpec, layout: Layout) -> dict[str, str]:
    """Name on disk -> the drafter's own name, copies included."""
    names = {name: name for name in expected_tensors(spec)} | twins(spec)
    if layout == "eagle3":
        return names
    return {name.replace("midlayer.", "layers.0."): own for name, own in names.items()}


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the directory's safetensors, through the index when there is one."""
    index = directory / "model.safetensors.index.json"
    files = sorted(directory.glob("*.safetensors"))
    if index.is_file():
        files = sorted(
            {directory / f for f in json.loads(index.read_text())["weight_map"].values()}
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise ExportError(f"shard {file.name} is missing")
        try:
            with safe_open(file, framework="pt") as content:
                tensors |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ExportError(f"{file.name} is not a readable safetensors file: {error}") from error
    if not tensors:
        pickled = (directory / "pytorch_model.bin").is_file()
        advice = (
            "; pytorch_model.bin is a pickle and is not opened, convert it to safetensors"
            if pickled
            else ""
        )
        raise ExportError(f"{directory} holds no weights (*.safetensors){advice}")
    return tensors


def save_shards(directory: Path, tensors: dict[str, Tensor], max_shard_bytes: int) -> None:
    """One file, or numbered files with an index; a tensor larger than a shard gets one of its own."""
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor.cpu().contiguous()
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", {"format": "pt"})
        return
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, directory / file, {"format": "pt"})
    weight_map = {n: file for file, shard in zip(names, shards, strict=True) for n in shard}
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": weight_map,
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
