"""Static depth, text half: corpus, tokenizer, chat template, draft vocabulary and evaluation's prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from eagle3_train.config import JobConfig
from eagle3_train.corpus.account import CorpusError, Unusable
from eagle3_train.corpus.benchmark import HELD_OUT, answer_room, benchmark_prompts
from eagle3_train.corpus.conversation import Conversation, parse_row
from eagle3_train.corpus.leakage import find_leaks
from eagle3_train.corpus.read import data_files, read_rows
from eagle3_train.corpus.render import Renderer, load_tokenizer
from eagle3_train.corpus.split import is_held_out
from eagle3_train.preflight.check import Check, attempt
from eagle3_train.rundir import RunDir, reading
from eagle3_train.target.facts import TargetFacts, code_map
from eagle3_train.training.initial import check_initial

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
_PROBE = "Why is the sky blue?"
LEAK_ROWS = 20_000
"""Rows of the corpus that are compared with the prompts: a few seconds."""


def corpus(config: JobConfig) -> Check:
    """Whether the sources are there; nothing is read."""
    sources = config.corpus.sources
    if RunDir(config.run_path).samples.is_dir():
        return Check("corpus", "ok", "this run has answers already")
    if not sources and config.rollout.self_synthesised:
        return Check("corpus", "ok", "the target writes every prompt")
    if not sources:
        fix = "name files, directories, globs or URLs in corpus.sources"
        return Check("corpus", "warn", "corpus.sources is empty: no data to check", fix)
    local = [source for source in sources if "://" not in source]

    def describe() -> str:
        found = f"{len(data_files(local))} files" if local else "no local file"
        remote = len(sources) - len(local)
        return found + (f"; {remote} URLs, not looked at" if remote else "")

    return attempt("corpus", "correct corpus.sources", describe)


def tokenizer(config: JobConfig, facts: TargetFacts) -> list[Check]:
    """Tokenizer, chat template, draft vocabulary and evaluation's prompts: present, the target's own, and of one age."""
    directory = Path(config.target.tokenizer or facts.path)
    if not _has_tokenizer(directory):
        reason = f"{directory} holds no tokenizer"
        missing = Check("tokenizer", "fail", reason, "set target.tokenizer")
        if facts.weight_bytes is None:
            missing = Check("tokenizer", "warn", reason, "unchecked until it is downloaded")
        return [missing, evaluate_sources(config, None)]
    try:
        renderer = Renderer.load(
            str(directory), config.target.trust_remote_code, config.corpus.template_kwargs
        )
        same = _same_tokenizer(renderer, config, facts)
    except ValueError as error:
        fix = "repair it, or name another in target.tokenizer"
        code = _own_code(directory)
        if code and not config.target.trust_remote_code:
            fix = f"read {code}, then set target.trust_remote_code=true; or {fix}"
        return [Check("tokenizer", "fail", str(error), fix), evaluate_sources(config, None)]
    return [
        same,
        _template(renderer),
        draft_vocabulary(config, renderer),
        evaluate_sources(config, renderer),
    ]


def _own_code(directory: Path) -> str:
    """Python in the directory that transformers would run for a tokenizer; empty for none."""
    named: dict[str, str] = {}
    for file in (directory / "config.json", directory / "tokenizer_config.json"):
        if file.is_file():
            with suppress(ValueError), reading(file):  # a broken one fails the tokenizer
                named.update(code_map(json.loads(file.read_text())))
    return ", ".join(named[key] for key in ("AutoConfig", "AutoTokenizer") if key in named)


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def _same_tokenizer(renderer: Renderer, config: JobConfig, facts: TargetFacts) -> Check:
    """Whether the tokenizer is the target's. Raises ValueError when the target's own cannot be read."""
    vocabulary = renderer.tokenizer.get_vocab()
    ids, rows = max(vocabulary.values()) + 1, facts.vocab_size
    special = renderer.tokenizer.added_tokens_decoder
    wrong = odd = ""
    if ids > rows:
        wrong = f"it has id {ids - 1}, the target's vocabulary ends at {rows - 1}"
    elif beyond := [id for id in facts.special_ids if id >= ids]:
        wrong = f"config.json names BOS or EOS {beyond}, it ends at {ids - 1}"
    elif config.target.tokenizer is not None and _has_tokenizer(facts.path):
        own = load_tokenizer(str(facts.path), config.target.trust_remote_code)
        if own.get_vocab() != vocabulary:
            wrong = f"{config.target.tokenizer} and {facts.path} number tokens differently"
    if wrong:
        fix = "point target.tokenizer at the target's own tokenizer"
        return Check("tokenizer", "fail", f"wrong tokenizer: {wrong}", fix)
    if plain := [id for id in facts.special_ids if id not in special]:
        odd = f"config.json names BOS or EOS {plain}, ordinary tokens of this tokenizer"
    elif ids < 0.9 * rows:
        odd = f"{ids} ids for a vocabulary of {rows}"
    if odd:
        return Check("tokenizer", "warn", odd, "make sure that it is the target's own")
    return Check("tokenizer", "ok", f"{ids} ids of {rows}")


def _template(renderer: Renderer) -> Check:
    """Whether the chat template renders a question."""
    try:
        prompt = renderer.prompt_ids([{"role": "user", "content": _PROBE}])
    except Unusable as error:
        return Check("chat_template", "fail", str(error), "repair the chat template")
    reason = f"a question takes {len(prompt)} tokens; answers stop at {sorted(renderer.stop_ids)}"
    return Check("chat_template", "ok", reason)


def draft_vocabulary(config: JobConfig, renderer: Renderer) -> Check:
    """Whether the weights that training began with, if it did, and their draft vocabulary belong to this job."""
    run, size = RunDir(config.run_path), config.drafter.draft_vocab_size
    if size is None:
        return Check("draft_vocabulary", "ok", "the whole vocabulary")
    if not run.initial_weights.is_file():
        return Check("draft_vocabulary", "ok", f"{size} tokens, chosen after the rollout")
    fix = f"give the run a new name, or delete {run.train_storage}"
    return attempt(
        "draft_vocabulary",
        fix,
        lambda: f"{size} tokens, covering {check_initial(config, renderer)}",
    )


def evaluate_sources(config: JobConfig, renderer: Renderer | None) -> Check:
    """Whether every file of prompts holds some that fit and that the corpus does not train on; URLs are not read."""
    name, files = "evaluate_sources", [s for s in config.evaluate.sources if s != HELD_OUT]
    local = [source for source in files if "://" not in source]
    if not files and not config.corpus.held_out_fraction:
        fix = "raise corpus.held_out_fraction, or name files in evaluate.sources"
        return Check(name, "warn", "no prompt to evaluate on: nothing is held out", fix)
    if not local and answer_room(config) < 1:
        reason = "no prompt to evaluate on: answers fill engine.max_model_len"
        return Check(name, "warn", reason, "lower evaluate.sampling.max_new_tokens")
    if not local:
        return Check(name, "ok", "no local file: " + ", ".join(config.evaluate.sources))
    try:
        data_files(local)
        if renderer is None:
            return Check(name, "warn", "not read, for want of a tokenizer", "see tokenizer")
        found = {source: benchmark_prompts(config, source, renderer) for source in local}
    except ValueError as error:
        fix = "correct evaluate.sources, or leave prompts room: engine.max_model_len, evaluate.sampling.max_new_tokens"
        return Check(name, "fail", str(error), fix)
    prompts = [prompt for group in found.values() for prompt in group]
    first, later = find_leaks(_trained(config), prompts)
    counts = ", ".join(f"{Path(source).name} {len(group)}" for source, group in found.items())
    reason = f"prompts that fit: {counts}"
    if first or later:
        reason += f"; {len(first)} resemble corpus.sources, and follow-ups of {len(later)} do"
        return Check(name, "warn", reason, "take them out of the corpus, or measure on others")
    return Check(name, "ok", reason)


def _trained(config: JobConfig) -> Iterator[str]:
    """The first conversations that the corpus names for training, as far as they are files."""
    local = [source for source in config.corpus.sources if "://" not in source]
    with suppress(CorpusError):  # the corpus check names it
        for row in islice(read_rows(local), LEAK_ROWS):
            if isinstance(row.fields, Unusable):
                continue
            with suppress(Unusable):
                said = parse_row(row.fields, config.corpus)
                held_out = is_held_out(said.id, config.corpus.held_out_fraction)
                if isinstance(said, Conversation) and not held_out:
                    yield said.to_json()
