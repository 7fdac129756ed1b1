"""From configured sources to prompts for rollouts, or to samples whose answers came with the data."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
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
Item = TypeVar("Item", Prompt, Sample)


def load_prompts(
    config: CorpusConfig, renderer: Renderer, quarantine: Path | None = None
) -> tuple[list[Prompt], Accounting]:
    """Conversations cut before the answer that the target shall write, in source order; all rows accounted for.

    Raises CorpusError for unreadable sources, no usable row, or a yield below config.min_yield.
    """
    return _load(config, quarantine, lambda row, _: [_prompt(row, renderer, config)])


def load_given(
    config: CorpusConfig, renderer: Renderer, quarantine: Path | None = None
) -> tuple[list[Sample], Accounting]:
    """Answered conversations and pre-tokenised rows, off-policy, in source order; all rows accounted for.

    Raises CorpusError as load_prompts does.
    """
    return _load(config, quarantine, lambda row, account: _samples(row, renderer, config, account))


def _load(
    config: CorpusConfig,
    quarantine: Path | None,
    convert: Callable[[Conversation | Sample, Accounting], list[Item]],
) -> tuple[list[Item], Accounting]:
    """Read, convert and account for every row; one bad row never stops the others."""
    items: list[Item] = []
    seen: Counter[str] = Counter()
    given_ids: dict[str, str] = {}
    logged = time.monotonic()
    if quarantine is not None:
        quarantine.parent.mkdir(parents=True, exist_ok=True)
    with quarantine.open("w", encoding="utf-8") if quarantine else nullcontext() as file:
        accounting = Accounting(file)
        for row in read_rows(config.sources):
            if time.monotonic() - logged > LOG_EVERY_S:
                logged = time.monotonic()
                log.info("reading %s | %s", row.where, accounting.summary())
            try:
                if isinstance(row.fields, Unusable):
                    raise row.fields
                accounting.columns.update(row.fields)
                parsed = parse_row(row.fields, config)
                found = convert(parsed, accounting)
                fresh = _with_unique_ids(found, seen, config.deduplicate)
            except Unusable as problem:
                accounting.drop(row.where, problem)
                if accounting.rows_in == HOPELESS_ROWS and not accounting.kept:
                    break
                continue
            _note_reused_id(row.fields.get("id"), found[0].id, given_ids, accounting)
            if isinstance(parsed, Conversation):
                accounting.fixed.update(parsed.fixes)
            accounting.keep(fresh)
            items.extend(fresh)
            if config.limit is not None and accounting.kept >= config.limit:
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


def _note_reused_id(
    given: object, id: str, given_ids: dict[str, str], accounting: Accounting
) -> None:
    """Count rows whose own id names other content too; ours are content hashes, so none is lost."""
    if given is not None and given_ids.setdefault(repr(given), id) != id:
        if not accounting.fixed["reused_id"]:
            log.warning(
                "id %r names different conversations; content hashes are used instead", given
            )
        accounting.fixed["reused_id"] += 1


def _prompt(row: Conversation | Sample, renderer: Renderer, config: CorpusConfig) -> Prompt:
    if isinstance(row, Sample):
        _check_range(row, renderer)
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


def _samples(
    row: Conversation | Sample, renderer: Renderer, config: CorpusConfig, accounting: Accounting
) -> list[Sample]:
    if isinstance(row, Sample):
        _check_range(row, renderer)
        rows = [(row.input_ids.tolist(), row.loss_mask.tolist())]
    else:
        rows = renderer.answered_rows(row, config.supervise_inserted_think)
    samples = []
    truncated = False
    for turn, (ids, flags) in enumerate(rows):
        id = f"{row.id}-t{turn}" if len(rows) > 1 else row.id
        mask = np.array(flags[: config.max_len], dtype=np.bool_)
        mask[0] = False  # nothing precedes the first token: no state to draft it from
        truncated |= any(flags[config.max_len :])
        # A draft step needs two supervised tokens in a row: one to start from, one to predict.
        if (mask[1:] & mask[:-1]).any():
            end = int(np.flatnonzero(mask)[-1]) + 1
            kept_ids = np.array(ids[:end], dtype=np.int32)
            samples.append(Sample(id, row.domain, kept_ids, mask[:end]))
    if not samples:
        raise Unusable("nothing_supervised", f"no answer within max_len={config.max_len}")
    if truncated:
        accounting.fixed["truncated"] += 1
    if len(rows) > 1:
        accounting.fixed["one_row_per_turn"] += 1
    return samples


def _check_range(row: Sample, renderer: Renderer) -> None:
    if int(row.input_ids.max()) >= renderer.vocab_size:
        highest = int(row.input_ids.max())
        raise Unusable("id_out_of_range", f"id {highest}, vocabulary {renderer.vocab_size}")
