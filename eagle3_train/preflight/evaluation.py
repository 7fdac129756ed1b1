"""Static depth, evaluation's half: the prompts it will ask, the drafter it will compare with.

Both are needed only after training, which is when a wrong path would be found out.
"""

from __future__ import annotations

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
from eagle3_train.corpus.render import Renderer
from eagle3_train.corpus.split import is_held_out
from eagle3_train.drafter.checkpoint import read_checkpoint
from eagle3_train.drafter.checkpoint_format import read_tensors
from eagle3_train.preflight.check import Check, attempt
from eagle3_train.rundir import reading
from eagle3_train.target.facts import TargetFacts, resolve_boundaries

LEAK_ROWS = 20_000
"""Rows of the corpus that are compared with the prompts: a few seconds."""


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
    first, later = find_leaks(_trained(config, renderer.vocab_size), prompts)
    counts = ", ".join(f"{Path(source).name} {len(group)}" for source, group in found.items())
    reason = f"prompts that fit: {counts}"
    if first or later:
        reason += f"; {len(first)} resemble corpus.sources, and follow-ups of {len(later)} do"
        return Check(name, "warn", reason, "take them out of the corpus, or measure on others")
    return Check(name, "ok", reason)


def _trained(config: JobConfig, vocab_size: int) -> Iterator[str]:
    """The first conversations that the corpus names for training, as far as they are files."""
    local = [source for source in config.corpus.sources if "://" not in source]
    with suppress(CorpusError):  # the corpus check names it
        for row in islice(read_rows(local), LEAK_ROWS):
            if isinstance(row.fields, Unusable):
                continue
            with suppress(Unusable):
                said = parse_row(row.fields, config.corpus, vocab_size)
                held_out = is_held_out(said.id, config.corpus.held_out_fraction)
                if isinstance(said, Conversation) and not held_out:
                    yield said.to_json()


def evaluate_against(config: JobConfig, facts: TargetFacts) -> Check:
    """Whether the other drafter can be read and served for this target."""
    if (against := config.evaluate.against) is None:
        return Check("evaluate_against", "ok", "no other drafter is measured")
    fix = "name a drafter of this target in evaluate.against"
    return attempt("evaluate_against", fix, lambda: fitting(Path(against), config, facts))


def fitting(directory: Path, config: JobConfig, facts: TargetFacts) -> str:
    """What the drafter in `directory` is. Raises ValueError unless it can be served for this target."""
    with reading(directory):
        spec, _, _, boundaries = read_checkpoint(directory)
        named = any(name.endswith("d2t") for name in read_tensors(directory))
    if not spec.full_vocab and not named:
        raise ValueError(
            f"{directory} holds no d2t, which vLLM then takes for zeros: it would propose other tokens than it means; "
            "write the map that t2d implies into its safetensors"
        )
    try:
        layers = resolve_boundaries(boundaries, facts.num_layers)[:-1]
    except ValueError as error:
        raise ValueError(
            f"{directory} reads layers {boundaries or 'by default'}, which do not exist in this target of "
            f"{facts.num_layers}"
        ) from error
    pairs = {
        "hidden_size": (spec.hidden_size, facts.hidden_size),
        "vocab_size": (spec.vocab_size, facts.vocab_size),
        "num_aux_hidden_states": (spec.num_aux, len(layers)),
    }
    differing = [f"{key} {own}, not {ours}" for key, (own, ours) in pairs.items() if own != ours]
    if spec.max_position_embeddings < config.engine.max_model_len:
        differing.append(
            f"max_position_embeddings {spec.max_position_embeddings} for engine.max_model_len="
            f"{config.engine.max_model_len}"
        )
    if differing:
        raise ValueError(f"{directory} is no drafter of this target: {'; '.join(differing)}")
    return f"{spec.attention} drafter of {spec.draft_vocab_size} tokens, reading layers {layers}"
