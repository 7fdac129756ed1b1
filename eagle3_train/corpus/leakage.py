"""Overlap of training prompts with evaluation prompts: a leaked benchmark measures memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle3_train.records import Prompt

WORD = re.compile(r"\w+")
NGRAM = 13
LEAK_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Leak:
    """A training prompt that contains an evaluation prompt.

    share: part of the evaluation prompt's word 13-grams found in the training prompt; 1 when the
    normalised texts are equal.
    """

    train_id: str
    eval_id: str
    share: float
    text: str


def find_leaks(train: Iterable[Prompt], evaluation: Sequence[Prompt]) -> list[Leak]:
    """Training prompts that repeat an evaluation prompt, or at least 30 % of its 13-grams.

    Compared are the words of the user turns, case and punctuation aside.
    """
    texts = {prompt.id: _words(prompt) for prompt in evaluation}
    same = {words: id for id, words in texts.items()}
    grams = {id: _ngrams(words) for id, words in texts.items()}
    owners: dict[tuple[str, ...], list[str]] = {}
    for id, found in grams.items():
        for gram in found:
            owners.setdefault(gram, []).append(id)
    leaks = []
    for prompt in train:
        words = _words(prompt)
        shared: dict[str, float] = {same[words]: 1.0} if words and words in same else {}
        for gram in _ngrams(words):
            for id in owners.get(gram, []):
                shared[id] = shared.get(id, 0.0) + 1 / len(grams[id])
        for id, share in shared.items():
            if share >= LEAK_SHARE:
                leaks.append(Leak(prompt.id, id, min(share, 1.0), " ".join(words)[:200]))
    return leaks


def _words(prompt: Prompt) -> tuple[str, ...]:
    """Lower-case words of all user turns, follow-ups included."""
    content = json.loads(prompt.messages_json) or {"messages": [], "followups": []}
    turns = [m["content"] for m in content["messages"] if m["role"] == "user"]
    return tuple(WORD.findall(" ".join([*turns, *content["followups"]]).casefold()))


def _ngrams(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {words[start : start + NGRAM] for start in range(len(words) - NGRAM + 1)}
