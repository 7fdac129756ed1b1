"""From configured sources to prompts for rollouts, or to samples whose answers came with the data."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from eagle3_train.config import CorpusConfig
from eagle3_train.corpus.account import Accounting, Unusable
from eagle3_train.corpus.conversation import Conversation, cut_for_answer, parse_row
from eagle3_train.corpus.read import read_rows
from eagle3_train.corpus.render import Renderer
from eagle3_train.records import Prompt, Sample

log = logging.getLogger(__name__)

LOG_EVERY_S = 30.0
HOPELESS_ROWS = 1000
NOWHERE = Path(os.devnull)
Item = TypeVar("Item", Prompt, Sample)


def load_prompts(
    config: CorpusConfig, renderer: Renderer, quarantine: Path = NOWHERE
) -> tuple[list[Prompt], Accounting]:
    """Conversations cut before the answer that the target shall write, in source order; all rows accounted for.

    Raises CorpusError for unreadable sources, no usable row, or a yield below config.min_yield.
    """
    return _load(config, renderer, quarantine, lambda row: [_prompt(row, renderer, config)])


def load_given(
    config: CorpusConfig, renderer: Renderer, quarantine: Path = NOWHERE
) -> tuple[list[Sample], Accounting]:
    """Answered conversations and pre-tokenised rows, off-policy, in source order; all rows accounted for.

    Raises CorpusError as load_prompts does.
    """
    return _load(config, renderer, quarantine, lambda row: _samples(row, renderer, config))


def _load(
    config: CorpusConfig,
    renderer: Renderer,
    quarantine: Path,
    convert: Callable[[Conversation | Sample], list[Item]],
) -> tuple[list[Item], Accounting]:
    """Read, convert and account for every row; one bad row never stops the others."""
    items: list[Item] = []
    seen: Counter[str] = Counter()
    logged = time.monotonic()
    quarantine.parent.mkdir(parents=True, exist_ok=True)
    with quarantine.open("w", encoding="utf-8") as file:
        accounting = Accounting(file)
        for row in read_rows(config.sources):
            if time.monotonic() - logged > LOG_EVERY_S:
                logged = time.monotonic()
                log.info("reading %s | %s", row.where, accounting.summary())
            try:
                if isinstance(row.fields, Unusable):
                    raise row.fields
                parsed = parse_row(row.fields, config, renderer.vocab_size)
                found = _with_unique_ids(convert(parsed), seen, config.deduplicate)
            except Unusable as problem:
                accounting.drop(row.where, problem)
                if accounting.rows_in == HOPELESS_ROWS and not accounting.kept:
                    break
                continue
            accounting.keep(found)
            items.extend(found)
            if accounting.kept == config.limit:
                break
    log.info("%s", accounting.summary())
    accounting.check(config.min_yield, config.sources)
    return items, accounting


def _with_unique_ids(items: list[Item], seen: Counter[str], deduplicate: bool) -> list[Item]:
    """Drop, or give another id to, content that was seen before."""
    first = items[0].id
    copy = seen[first]
    if copy and deduplicate:
        raise Unusable("duplicate", first)
    seen[first] += 1
    return [replace(item, id=f"{item.id}-d{copy}") for item in items] if copy else items


def _prompt(row: Conversation | Sample, renderer: Renderer, config: CorpusConfig) -> Prompt:
    if isinstance(row, Sample):
        ids, id, messages_json = row.input_ids[: row.prompt_tokens], row.id, "null"
    else:
        conversation = cut_for_answer(row, config.history)
        id, messages_json = conversation.id, conversation.to_json()
        ids = np.array(renderer.prompt_ids(conversation.messages, conversation.tools))
    if not len(ids):
        raise Unusable("no_prompt", "the first token is supervised already")
    if len(ids) >= config.max_len:
        raise Unusable("prompt_too_long", f"{len(ids)} tokens leave no room in {config.max_len}")
    return Prompt(id, row.domain, ids.astype(np.int32), messages_json)


def _samples(row: Conversation | Sample, renderer: Renderer, config: CorpusConfig) -> list[Sample]:
    if isinstance(row, Sample):
        rows = [(row.input_ids.tolist(), row.loss_mask.tolist())]
    else:
        rows = renderer.answered_rows(row, config.supervise_inserted_think)
    samples = []
    for turn, (ids, flags) in enumerate(rows):
        id = f"{row.id}-t{turn}" if len(rows) > 1 else row.id
        mask = np.array(flags[: config.max_len], dtype=np.bool_)
        mask[0] = False  # nothing precedes the first token: no state to draft it from
        ended = "length" if any(flags[config.max_len :]) else "given"
        # A draft step needs two supervised tokens in a row: one to start from, one to predict.
        if (mask[1:] & mask[:-1]).any():
            end = int(np.flatnonzero(mask)[-1]) + 1
            kept_ids = np.array(ids[:end], dtype=np.int32)
            samples.append(Sample(id, row.domain, kept_ids, mask[:end], ended))
    if not samples:
        raise Unusable("nothing_supervised", f"no answer within max_len={config.max_len}")
    return samples
