"""Static depth, text half: corpus, tokenizer, chat template and draft vocabulary."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from eagle3_train.config import JobConfig
from eagle3_train.corpus.account import Unusable
from eagle3_train.corpus.read import data_files
from eagle3_train.corpus.render import Renderer, load_tokenizer
from eagle3_train.preflight.check import Check, attempt
from eagle3_train.preflight.evaluation import evaluate_sources
from eagle3_train.rundir import RunDir, reading
from eagle3_train.target.facts import TargetFacts, code_map
from eagle3_train.training.initial import check_initial

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
_PROBE = "Why is the sky blue?"


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
    except ValueError as error:
        fix = "repair it, or name another in target.tokenizer"
        code = own_code(directory, "AutoConfig", "AutoTokenizer")
        if code and not config.target.trust_remote_code:
            fix = f"read {code}, then set target.trust_remote_code=true; or {fix}"
        return [Check("tokenizer", "fail", str(error), fix), evaluate_sources(config, None)]
    return [
        _same_tokenizer(renderer, config, facts),
        _template(renderer),
        draft_vocabulary(config, renderer),
        evaluate_sources(config, renderer),
    ]


def own_code(directory: Path, *keys: str) -> str:
    """Python in the directory that transformers would run for these Auto classes; empty for none."""
    named: dict[str, str] = {}
    for file in (directory / "config.json", directory / "tokenizer_config.json"):
        if file.is_file():
            with suppress(ValueError), reading(file):  # a broken one fails the tokenizer
                named.update(code_map(json.loads(file.read_text())))
    return ", ".join(named[key] for key in keys if key in named)


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def _same_tokenizer(renderer: Renderer, config: JobConfig, facts: TargetFacts) -> Check:
    vocabulary = renderer.tokenizer.get_vocab()
    ids, rows = max(vocabulary.values()) + 1, facts.vocab_size
    fix = "point target.tokenizer at the target's own tokenizer"
    if ids > rows:
        reason = f"wrong tokenizer: it has id {ids - 1}, the target's vocabulary ends at {rows - 1}"
        return Check("tokenizer", "fail", reason, fix)
    beyond = [id for id in facts.special_ids if id >= ids]
    if beyond:
        reason = f"wrong tokenizer: config.json names BOS or EOS {beyond}, it ends at {ids - 1}"
        return Check("tokenizer", "fail", reason, fix)
    if config.target.tokenizer is not None and _has_tokenizer(facts.path):
        own = load_tokenizer(str(facts.path), config.target.trust_remote_code)
        if own.get_vocab() != vocabulary:
            reason = f"wrong tokenizer: {config.target.tokenizer} and {facts.path} number tokens differently"
            return Check("tokenizer", "fail", reason, fix)
    special = renderer.tokenizer.added_tokens_decoder
    plain = [id for id in facts.special_ids if id not in special]
    if plain:
        reason = f"config.json names BOS or EOS {plain}, ordinary tokens of this tokenizer"
        return Check("tokenizer", "warn", reason, "make sure that it is the target's own")
    if ids < 0.9 * rows:
        reason = f"{ids} ids for a vocabulary of {rows}"
        return Check("tokenizer", "warn", reason, "make sure that it is the target's own")
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
