"""A byte-level BPE tokenizer built in code, with a chat template: what the corpus tests tokenise with."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eagle3_train.corpus.render import Renderer

TEMPLATES = Path(__file__).parents[1] / "templates"
SHARED = Path(__file__).parents[3] / "shared"
# Stop tokens by template; real families by the name of their file in ../shared/templates.
STOPS = {
    "plain": ["<|im_end|>"],
    "default_system": ["<|im_end|>"],
    "thinking_dropped": ["<|im_end|>"],
    "thinking_emptied": ["<|endoftext|>", "<|user|>", "<|tool|>"],
    "alternating": ["</turn>"],
    "headers": ["<|stop|>", "<|call|>"],
    "gemma-it": ["<end_of_turn>"],
    "glm-4.6": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "granite-3.0-instruct": ["<|end_of_text|>"],
    "kimi-k2": ["<|im_end|>"],
    "kimi-k2-thinking": ["<|im_end|>"],
    "llama-3-instruct": ["<|eot_id|>"],
    "mistral-instruct": ["</s>"],
    "phi-3": ["<|end|>"],
    "qwen2.5-instruct": ["<|im_end|>"],
    "qwen3-coder": ["<|im_end|>"],
}
CONTROL = re.compile(r"<\|[\w/]+\|>|\[gMASK\]|<sop>|</?turn>|<(?:start|end)_of_turn>")
TEXT = [
    "Name a fruit and a word of one number.",
    "word " * 50,
    "def add(a, b): return a + b",
    "What is 2 + 3?",
]


@cache
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes, some merges, the control tokens that `template` mentions, and think/tool tags as words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<s>", "</s>"],
    )
    backend.train_from_iterator(TEXT, trainer)
    text = template_text(template)
    control = {*CONTROL.findall(text), *STOPS[template], "<|im_end|>", "<|endoftext|>"} - {"</s>"}
    roles = {f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
    backend.add_special_tokens(sorted(control | roles))
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=STOPS[template][0], chat_template=text
    )


def template_text(template: str) -> str:
    own = TEMPLATES / f"{template}.jinja"
    return (own if own.exists() else SHARED / "templates" / own.name).read_text()


def renderer(template: str = "plain", copy: bool = False, **template_kwargs: Any) -> Renderer:
    made = deepcopy(tokenizer(template)) if copy else tokenizer(template)
    stops = frozenset(made.convert_tokens_to_ids(STOPS[template]))
    return Renderer(made, stops, template_kwargs)


def save(directory: Path, template: str = "default_system") -> str:
    """Write the tokenizer as a directory that Renderer.load reads; returns its path."""
    made = tokenizer(template)
    made.save_pretrained(directory)
    stops = made.convert_tokens_to_ids(STOPS[template])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return str(directory)


def marked(made: Renderer, ids: list[int], mask: list[bool]) -> str:
    """The text of a row with every supervised stretch in [[ ]]."""
    parts: list[str] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            text = made.tokenizer.decode(ids[start:end], skip_special_tokens=False)
            parts.append(f"[[{text}]]" if mask[start] else text)
            start = end
    return "".join(parts)
