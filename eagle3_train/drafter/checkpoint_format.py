"""What an EAGLE-3 checkpoint directory looks like to vLLM and SGLang: tensors, config.json, files.

What bites: `d2t` holds offsets (target id = draft id + d2t) and a missing one loads silently as zeros; aux layer ids
are boundaries for vLLM (top level) and something else for SGLang (nested); both spellings of RoPE must be there.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_train.drafter.modules import DrafterWeights
from eagle3_train.drafter.spec import DrafterSpec, MlaShape, RopeSpec
from eagle3_train.rundir import reading

Json = dict[str, Any]
Dtype = Literal["float32", "bfloat16"]
Layout = Literal["eagle3", "speculators"]
SglangIds = Literal["boundary", "output", "output_always", "deepseek"]
"""How SGLang reads explicit aux layer ids of a target: `boundary` as they are, `output` id + 1, `output_always`
id + 1 and so on its own default too, `deepseek` id + 1 only when the first id is 1."""

LLAMA, MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
SWITCHES = ("norm_output", "fc_norm", "norm_before_fc")
_SIZES = {  # spec field -> config.json key
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "num_kv_heads": "num_key_value_heads",
    "draft_vocab_size": "draft_vocab_size",
    "num_aux": "num_aux_hidden_states",
}


class ExportError(ValueError):
    """A checkpoint no engine should be given; the message names the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTarget:
    """What a checkpoint must agree with, beside its drafter. serving_len: longest sequence served, tokens.

    required_tokens: target ids the drafter must be able to propose (stop tokens, tokens of the chat template).
    """

    num_layers: int
    serving_len: int = 0
    sglang_ids: SglangIds = "output"
    required_tokens: tuple[int, ...] = ()


def expected_tensors(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight a drafter of this shape has; d2t, t2d and the shared embedding apart."""
    weights = DrafterWeights(spec, torch.device("meta"))
    return {name: tuple(weight.shape) for name, weight in weights.named_parameters()}


def engine_config(
    spec: DrafterSpec,
    boundaries: tuple[int, ...],
    target: ServedTarget,
    dtype: Dtype,
    layout: Layout,
    facts: Json,
) -> Json:
    """config.json as the engines read it. `boundaries` are the aux ones, rising, without L; `facts` go under
    "eagle3_train"."""
    mla = spec.mla
    rope = spec.rope.parameters()
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config: Json = {
        "architectures": [MLA if mla else LLAMA],
        # vLLM turns a drafter of model_type deepseek_v3 into an MTP model; kimi_k2 parses as the same configuration.
        "model_type": "kimi_k2" if mla else "llama",
        **{key: getattr(spec, name) for name, key in _SIZES.items()},
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
        "eagle3_train": facts,
    }
    config |= asdict(mla) if mla else {"head_dim": spec.head_dim}
    ids = sglang_layer_ids(boundaries, target.num_layers, target.sglang_ids)
    if ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    return config if layout == "eagle3" else _speculators_config(config)


def sglang_layer_ids(
    boundaries: tuple[int, ...], layers: int, reads: SglangIds
) -> list[int] | None:
    """SGLang's spelling of the boundaries of a target; None when its default already means them.

    Raises ExportError when it has none.
    """
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


def spec_from_config(config: Json, fc_inputs: int) -> DrafterSpec:
    """The spec a flattened configuration describes; fc_inputs, the width fc reads, counts the auxiliary states where
    it does not. Raises ExportError if we do not train it."""
    if config.get("norm_before_residual", False):
        raise ExportError("norm_before_residual=true is not an architecture this project trains")
    given = {key: value for key, value in config.items() if value is not None}
    mla: MlaShape | None = None
    try:
        heads = given["num_attention_heads"]
        config = {
            "num_key_value_heads": heads,
            "head_dim": given["hidden_size"] // heads,
            "draft_vocab_size": given["vocab_size"],
            "num_aux_hidden_states": fc_inputs // given["hidden_size"],
            **given,
        }
        if "kv_lora_rank" in given:
            sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            mla = MlaShape(given.get("q_lora_rank"), *(given[size] for size in sizes))
            config |= {"num_key_value_heads": heads, "head_dim": mla.head_dim}
        rope = {"rope_theta": given.get("rope_theta"), **given.get("rope_scaling", {})}
        return DrafterSpec(
            **{name: config[key] for name, key in _SIZES.items()},
            mla=mla,
            head_dim=config["head_dim"],
            rms_norm_eps=given.get("rms_norm_eps", 1e-6),
            rope=RopeSpec.from_parameters(given.get("rope_parameters", rope)),
            **{switch: bool(given.get(switch)) for switch in SWITCHES},
        )
    except KeyError as error:
        raise ExportError(f"config.json names no {error}") from error


def _speculators_config(config: Json) -> Json:
    """The same in the layout of the speculators library, which vLLM also serves by itself.

    Raises ExportError for latent attention: vLLM builds only Llama and Qwen3 drafters from that layout.
    """
    if config["architectures"] != [LLAMA]:
        raise ExportError(
            "the speculators layout holds no latent-attention (MLA) drafter; set export.format=eagle3"
        )
    outer = ["draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"]
    outer += [*SWITCHES, "tie_word_embeddings", "dtype", "torch_dtype", "eagle3_train"]
    layer = {k: v for k, v in config.items() if k not in (*outer, "architectures")}
    facts = config["eagle3_train"]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": facts.get("num_speculative_tokens"),
    }
    return {
        **{key: config[key] for key in outer},
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": facts.get("target"), "architectures": []},
        },
        "transformer_layer_config": layer,
    }


def read_json(directory: Path) -> Json:
    """config.json of a checkpoint as it stands. Raises ExportError when there is none."""
    path = directory / "config.json"
    if not path.is_file():
        raise ExportError(f"{directory} holds no config.json: not a checkpoint")
    with reading(path):
        config: Json = json.loads(path.read_text())
    return config


def read_config(directory: Path) -> Json:
    """config.json of a checkpoint; the speculators layout flattened, so that its keys stand where ours do."""
    config = read_json(directory)
    layer = config.pop("transformer_layer_config", None)
    if layer is None:
        return config
    outer = {key: value for key, value in config.items() if value is not None}
    outer.setdefault("norm_before_residual", True)  # what vLLM takes an absent key for
    return {**layer, **outer, "architectures": [LLAMA]}


def layout_of(config: Json) -> Layout:
    """Which layout a configuration belongs to, flattened or not."""
    return "speculators" if "speculators_model_type" in config else "eagle3"


def twins(spec: DrafterSpec) -> dict[str, str]:
    """Copies on disk -> the weight they repeat: deeper layers norm their state by `input_layernorm` in vLLM
    and by `hidden_norm` in SGLang."""
    return {
        f"layers.{layer}.hidden_norm.weight": f"layers.{layer}.input_layernorm.weight"
        for layer in range(1, spec.num_layers)
    }


def tensor_names(spec: DrafterSpec, layout: Layout) -> dict[str, str]:
    """Name on disk -> the drafter's own name, copies included."""
    names = {name: name for name in expected_tensors(spec)} | twins(spec)
    if layout == "eagle3":
        return names
    return {name.replace("midlayer.", "layers.0."): own for name, own in names.items()}


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the directory's safetensors, through the index when there is one."""
    index = directory / "model.safetensors.index.json"
    files = {path.name for path in directory.glob("*.safetensors")}
    named = files if len(files) == 1 else {"model.safetensors"} & files
    listed: dict[str, str] | None = None
    if index.is_file():
        with reading(index):
            listed = json.loads(index.read_text())["weight_map"]
            named = set(listed.values())
    if extra := sorted(files - named):
        raise ExportError(
            f"{directory}: extra weight file {', '.join(extra)}: no index names it, yet an engine may read it"
        )
    tensors: dict[str, Tensor] = {}
    for name in sorted(named):
        with reading(directory / name):
            tensors |= load_file(directory / name)
    if not tensors:
        pickled = "; pytorch_model.bin is a pickle and is not opened, convert it to safetensors"
        advice = pickled if (directory / "pytorch_model.bin").is_file() else ""
        raise ExportError(f"{directory} holds no weights (*.safetensors){advice}")
    if listed is not None and (differing := sorted(listed.keys() ^ tensors.keys())):
        raise ExportError(
            f"{directory}: {', '.join(differing)} is in the index or in its files, not in both"
        )
    return tensors
