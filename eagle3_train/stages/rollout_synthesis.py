"""Prompts the target writes itself: sample the user turn after the bare user header, keep what reads like one."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence, Set
from itertools import pairwise
from pathlib import Path

import numpy as np

from eagle3_train.config import RolloutConfig
from eagle3_train.corpus.conversation import Conversation
from eagle3_train.corpus.render import Renderer
from eagle3_train.engines.spec import Request
from eagle3_train.records import Generation, Prompt
from eagle3_train.rundir import write_atomic
from eagle3_train.runlog import log

DOMAIN = "self_synthesised"
PROBE = "user turn goes here"
LEAST_WORDS = 3
LEAST_DISTINCT_BIGRAMS = 0.5
TRIES_PER_PROMPT = 4

Ask = Callable[[Sequence[Request]], list[Generation]]


def synthesise(
    config: RolloutConfig, renderer: Renderer, max_len: int, ask: Ask, path: Path
) -> list[Prompt]:
    """The run's self-synthesised prompts; made once, then read back from `path`.

    Fewer than asked for when the target does not produce enough usable ones (logged).
    """
    if config.self_synthesised == 0:
        return []
    if not path.is_file():
        turns = _sample(config, renderer, ask)
        write_atomic(path, "".join(json.dumps(turn) + "\n" for turn in turns))
    prompts = []
    for domain, text in map(json.loads, path.read_text().splitlines()):
        said = Conversation([{"role": "user", "content": text}], domain=domain)
        ids = np.array(renderer.prompt_ids(said.messages), dtype=np.int32)
        if len(ids) + 1 < max_len:
            prompts.append(Prompt(said.id, domain, ids, said.to_json()))
    return prompts


def user_header(renderer: Renderer) -> list[int]:
    """Token ids up to where a first user turn begins. Raises ValueError when the template hides that place."""
    text = renderer.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROBE}], tokenize=False, **renderer.template_kwargs
    )
    header, found, _ = text.partition(PROBE)
    if not found or not header:
        raise ValueError(
            "this chat template does not show where a user turn begins; set rollout.self_synthesised=0"
        )
    ids: list[int] = renderer.tokenizer.encode(header, add_special_tokens=False)
    return ids


def unlike_a_prompt(generation: Generation, control_ids: Set[int]) -> str | None:
    """Why a sampled user turn is of no use, or None. control_ids: tokens a user cannot type."""
    text = generation.text
    words = text.split()
    bigrams = list(pairwise(words))
    if generation.finish_reason != "stop":
        return "unfinished"
    if len(words) < LEAST_WORDS:
        return "too_short"
    if control_ids & set(generation.output_ids[:-1]) or "\ufffd" in text:
        return "markup"
    if not any(character.isalpha() for character in text):
        return "no_words"
    if len(set(bigrams)) < LEAST_DISTINCT_BIGRAMS * len(bigrams):
        return "repeats_itself"
    return None


def _sample(config: RolloutConfig, renderer: Renderer, ask: Ask) -> list[tuple[str, str]]:
    """(domain, user turn), distinct; asks again until there are enough or the tries are used up."""
    wanted, sampling = config.self_synthesised, config.synthesis
    header, encode = user_header(renderer), renderer.tokenizer.encode
    given = [(domain, text) for domain, texts in config.openers.items() for text in texts]
    beginnings = given or [(DOMAIN, "")]
    starts = [(*header, *encode(text, add_special_tokens=False)) for _, text in beginnings]
    kept: dict[str, tuple[str, str]] = {}
    reasons: Counter[str] = Counter()
    number = 0
    while len(kept) < wanted and number < TRIES_PER_PROMPT * wanted:
        share = max(len(kept) / number, 1 / TRIES_PER_PROMPT) if number else 1.0
        batch = math.ceil((wanted - len(kept)) / share)
        numbers = range(number, min(number + batch, TRIES_PER_PROMPT * wanted))
        number = numbers.stop
        requests = [
            Request(
                f"synthesis-{n}", starts[n % len(starts)], sampling.max_new_tokens,
                sampling.temperature, sampling.top_p, sampling.top_k,
                stop_token_ids=tuple(renderer.stop_ids),
            )
            for n in numbers
        ]  # fmt: skip
        for n, generation in zip(numbers, ask(requests), strict=True):
            domain, beginning = beginnings[n % len(beginnings)]
            text = (beginning + generation.text).strip()
            key = " ".join(text.casefold().split())
            reason = unlike_a_prompt(generation, renderer.always_drafted)
            if reason := reason or ("duplicate" if key in kept else None):
                reasons[reason] += 1
            else:
                kept[key] = domain, text
    log.info(
        "rollout: %d user turns sampled, %d kept; dropped: %s",
        number, len(kept), ", ".join(f"{r} {n}" for r, n in reasons.most_common()) or "none",
    )  # fmt: skip
    if len(kept) < wanted:
        log.warning(
            "rollout: only %d of rollout.self_synthesised=%d prompts; raise rollout.synthesis.temperature "
            "or max_new_tokens",
            len(kept), wanted,
        )  # fmt: skip
    return list(kept.values())[:wanted]
