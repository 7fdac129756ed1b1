"""Overlap of training prompts with evaluation prompts: a leaked benchmark measures memory."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

from eagle3_train.records import Prompt

WORD = re.compile(r"\w+")
NGRAM = 13
LEAK_SHARE = 0.3
Words = tuple[str, ...]


def find_leaks(train: Iterable[str], evaluation: Sequence[Prompt]) -> tuple[set[str], set[str]]:
    """Ids of the evaluation prompts that a training conversation (its messages_json) repeats, and of those of which
    it repeats a follow-up.

    Compared are the words of the user turns, case and punctuation aside. A prompt, and each follow-up by itself, is
    repeated when 30 % of its 13-grams are, or when all that the user said up to there is, or is one training turn.
    """
    same: dict[Words, list[tuple[str, int]]] = {}
    owners: dict[Words, list[tuple[str, int]]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for prompt in evaluation:
        said, followups = _turns(prompt.messages_json)
        turns = [tuple(chain(*said)), *followups]
        for number, (words, everything) in enumerate(zip(turns, accumulate(turns), strict=True)):
            turn, grams = (prompt.id, number), _ngrams(words)
            sizes[turn] = len(grams)
            for found, keys in ((same, {everything} if words else ()), (owners, grams)):
                for key in keys:
                    found.setdefault(key, []).append(turn)
    leaks: set[tuple[str, int]] = set()
    for messages in train:
        trained = [*chain(*_turns(messages))]
        for words in {*trained, *accumulate(trained)}:
            leaks.update(same.get(words, ()))
        grams = _ngrams(tuple(chain(*trained)))
        shared = Counter(turn for gram in grams for turn in owners.get(gram, ()))
        leaks.update(turn for turn, count in shared.items() if count / sizes[turn] >= LEAK_SHARE)
    return {id for id, number in leaks if not number}, {id for id, number in leaks if number}


def _turns(messages_json: str) -> tuple[list[Words], list[Words]]:
    """Lower-case words of the user turns: those that were asked, those that follow."""
    content = json.loads(messages_json) or {"messages": [], "followups": []}
    asked = [m["content"] for m in content["messages"] if m["role"] == "user"]
    return [_words(text) for text in asked], [_words(text) for text in content["followups"]]


def _words(text: str) -> Words:
    return tuple(WORD.findall(text.casefold()))


def _ngrams(words: Words) -> set[Words]:
    return {words[start : start + NGRAM] for start in range(len(words) - NGRAM + 1)}
