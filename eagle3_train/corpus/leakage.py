"""Overlap of training prompts with evaluation prompts: a leaked benchmark measures memory."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from eagle3_train.records import Prompt

WORD = re.compile(r"\w+")
NGRAM = 13
LEAK_SHARE = 0.3


def find_leaks(train: Iterable[str], evaluation: Sequence[Prompt]) -> set[str]:
    """Ids of the evaluation prompts that a training prompt (its messages_json) repeats, or 30 % of their 13-grams.

    Compared are the words of the user turns, case and punctuation aside.
    """
    texts = {prompt.id: _words(prompt.messages_json) for prompt in evaluation}
    same = {words: id for id, words in texts.items()}
    grams = {id: _ngrams(words) for id, words in texts.items()}
    owners: dict[tuple[str, ...], list[str]] = {}
    for id, found in grams.items():
        for gram in found:
            owners.setdefault(gram, []).append(id)
    leaks: set[str] = set()
    for messages in train:
        words = _words(messages)
        if words and words in same:
            leaks.add(same[words])
        shared = Counter(id for gram in _ngrams(words) for id in owners.get(gram, []))
        leaks.update(id for id, count in shared.items() if count / len(grams[id]) >= LEAK_SHARE)
    return leaks


def _words(messages_json: str) -> tuple[str, ...]:
    """Lower-case words of all user turns, follow-ups included."""
    content = json.loads(messages_json) or {"messages": [], "followups": []}
    turns = [m["content"] for m in content["messages"] if m["role"] == "user"]
    return tuple(WORD.findall(" ".join([*turns, *content["followups"]]).casefold()))


def _ngrams(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {words[start : start + NGRAM] for start in range(len(words) - NGRAM + 1)}
