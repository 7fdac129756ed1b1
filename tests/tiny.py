"""Tiny random targets and drafters that behave like the real families; built in a second, never committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

Family = Literal["llama", "qwen3", "mla"]

VOCAB = 512
HIDDEN = 64
LAYERS = {"llama": 8, "qwen3": 6, "mla": 6}
AUX = {"llama": (2, 4, 5), "qwen3": (1, 3, 4), "mla": (2, 3, 4)}
BOS, EOS, PAD, USER, ASSISTANT = range(5)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}"
    "{{ eos_token }}{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer with a two-role chat template; unused ids are filler words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *alphabet]
    words += [f"w{number}" for number in range(VOCAB - len(words))]
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=special[3:],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


def _model(family: Family) -> Any:
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS[family],
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
        "dtype": torch.float32,
    }
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, head_dim=32))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32))
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **sizes,
            num_key_value_heads=4,
            moe_intermediate_size=64,
            n_shared_experts=1,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=512,  # the CPU MLA kernel knows only Kimi's and DeepSeek's sizes
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
        )
    )


def write_target(directory: Path, family: Family) -> Path:
    """A random target whose layers visibly change the residual stream; float32."""
    torch.manual_seed(0)
    model = _model(family).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0 if family == "mla" else 6.0)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.05)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    if family == "mla":
        config = json.loads((directory / "config.json").read_text())
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_drafter(
    directory: Path,
    target: Path,
    family: Family,
    seed: int = 0,
    attention: Literal["llama", "mla"] = "llama",
) -> Path:
    """A random drafter of `target` over a quarter of its vocabulary, in the exported form; float32."""
    from eagle3_train.config import DrafterConfig
    from eagle3_train.drafter.checkpoint import write_checkpoint
    from eagle3_train.drafter.checkpoint_format import ServedTarget
    from eagle3_train.drafter.model import Eagle3Drafter
    from eagle3_train.target.derive import drafter_spec
    from eagle3_train.target.facts import read_facts

    facts = read_facts(target)
    config = DrafterConfig(
        attention=attention,
        aux_layers=AUX[family],
        draft_vocab_size=VOCAB // 4,
        intermediate_size=128,
    )
    spec = drafter_spec(facts, config)
    generator = torch.Generator().manual_seed(seed)
    drafter = Eagle3Drafter(spec)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=2 * parameter.shape[1] ** -0.5, generator=generator)
    kept = torch.randperm(VOCAB, generator=generator)[: spec.draft_vocab_size].sort().values
    served = ServedTarget(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=LAYERS[family], serving_len=512
    )
    d2t = kept - torch.arange(len(kept))
    write_checkpoint(
        directory, spec, drafter.state_dict(), d2t, AUX[family], served, dtype="float32"
    )
    return directory


def token_ids(count: int, seed: int) -> npt.NDArray[np.int32]:
    """A prompt of ordinary tokens."""
    random = np.random.default_rng(seed)
    ids = random.integers(5, VOCAB, count).astype(np.int32)
    ids[:2] = (BOS, USER)[:count]
    return ids
