"""`rollout`: the target answers the prompts, once each. Produces committed shards in rollout/samples/.

Prompts come from the corpus and, if asked for, from the target itself; every user turn of a conversation is
answered in order. A kill costs at most `rollout.shard_rows` answers and what was in flight: run again, only
prompts without a committed sample are asked. A prompt that cannot be answered is counted, never fatal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from eagle3_train.config import JobConfig
from eagle3_train.corpus.account import Accounting, Unusable
from eagle3_train.corpus.load import load_given, load_prompts
from eagle3_train.corpus.render import Renderer
from eagle3_train.corpus.split import is_held_out
from eagle3_train.corpus.table import committed_ids, write_shard
from eagle3_train.engines.answers import Answers
from eagle3_train.engines.spec import Request
from eagle3_train.records import Generation, Prompt, Sample
from eagle3_train.rundir import RunDir
from eagle3_train.runlog import log
from eagle3_train.stages.rollout_dialogue import Dialogue
from eagle3_train.stages.rollout_inputs import (
    Json,
    check_unchanged,
    is_complete,
    record,
    record_start,
    recorded,
)
from eagle3_train.stages.rollout_synthesis import synthesise
from eagle3_train.training.initial import renderer_of

Item = TypeVar("Item", Prompt, Sample)

LOG_EVERY_S = 10.0
FAILURES_BEFORE_GIVING_UP = 20
CUT_SHARE_TO_WARN = 0.1


def run(config: JobConfig, pool: Any) -> Json:
    """Ask what has no committed answer yet; the stage's counts.

    Raises ValueError when settings changed under committed answers, when the corpus is unusable, or when
    more than `rollout.max_failures` of the prompts could not be answered.
    """
    paths = RunDir(config.run_path)
    check_unchanged(config)
    if is_complete(config):
        done = recorded(config)
        log.info("rollout: complete, %d prompts answered", done["answered"])
        return done
    if config.corpus.answers == "given":
        return _keep_given(config)
    renderer, answers = renderer_of(config), Answers(pool, config.engine)
    record_start(config)
    prompts = _prompts(config, renderer, answers)
    committed = committed_ids(paths.samples)
    missing = [prompt for prompt in prompts if prompt.id not in committed]
    progress = Progress(total=len(prompts), before=len(prompts) - len(missing))
    log.info("rollout: %d prompts, %d already answered", progress.total, progress.before)
    _answer(config, renderer, answers, missing, progress)
    state = record(config, {"complete": True} | progress.as_dict())
    log.info("rollout: done | %s", progress.line())
    if progress.cut_share > CUT_SHARE_TO_WARN:
        log.warning(
            "rollout: %.0f %% of the answers were cut; raise rollout.sampling.max_new_tokens or corpus.max_len",
            100 * progress.cut_share,
        )  # fmt: skip
    return state


def _keep_given(config: JobConfig) -> Json:
    """Commit conversations with the answers they came with; needs no engine."""
    folder, rows = RunDir(config.run_path).samples, config.rollout.shard_rows
    samples = _load(config, load_given)
    record_start(config)
    done = committed_ids(folder)
    missing = [sample for sample in samples if sample.id not in done]
    for start in range(0, len(missing), rows):
        shard = missing[start : start + rows]
        write_shard(folder, shard, ["null"] * len(shard))
    state = record(config, {"complete": True, "answered": len(samples)})
    log.info("rollout: kept %d given answers", len(samples))
    return state


def check(config: JobConfig) -> None:
    """Raise ValueError when the corpus, if still needed, is unusable or answers of other settings exist; needs no engine."""
    check_unchanged(config)
    if config.corpus.answers == "target" and not is_complete(config):
        _given_prompts(config)


def _given_prompts(config: JobConfig) -> list[Prompt]:
    """Prompts of the sources, accounted for; none when the target writes all of them."""
    if config.rollout.self_synthesised and not config.corpus.sources:
        return []
    return _load(config, load_prompts)


def _load(config: JobConfig, load: Callable[..., tuple[list[Item], Accounting]]) -> list[Item]:
    """What the sources hold, accounted for in files of the run."""
    paths = RunDir(config.run_path)
    items, accounting = load(config.corpus, renderer_of(config), paths.quarantine)
    accounting.save(paths.accounting)
    return items


def _prompts(config: JobConfig, renderer: Renderer, answers: Answers) -> list[Prompt]:
    """What the sources hold and what the target writes itself, each once."""
    given, path = _given_prompts(config), RunDir(config.run_path).synthesised
    own = synthesise(config.rollout, renderer, config.corpus.max_len, answers.all, path)
    prompts = list({prompt.id: prompt for prompt in [*given, *own]}.values())
    if unused := set(config.rollout.domain_sampling) - {prompt.domain for prompt in prompts}:
        log.warning("rollout.domain_sampling names domains without prompts: %s", sorted(unused))
    return prompts


def _answer(
    config: JobConfig,
    renderer: Renderer,
    answers: Answers,
    prompts: list[Prompt],
    progress: Progress,
) -> None:
    """Keep the engines busy until every prompt is answered; commit a shard whenever one is full."""
    folder = RunDir(config.run_path).samples
    shard: list[Dialogue] = []
    max_len, allowed = config.corpus.max_len, config.rollout.max_failures * progress.total
    dialogues = {prompt.id: Dialogue.start(prompt, renderer, max_len) for prompt in prompts}
    answers.ask([_request(config, dialogue) for dialogue in dialogues.values()])
    while dialogues:
        for generation in answers.completed(timeout_s=LOG_EVERY_S):
            dialogue = dialogues[generation.id]
            if _take(dialogue, generation, progress):
                answers.ask([_request(config, dialogue)])
                continue
            del dialogues[generation.id]
            if dialogue.samples:
                shard.append(dialogue)
                progress.answered += 1
            if len(shard) == config.rollout.shard_rows:
                _commit(folder, shard)
                shard = []
        progress.check(max(allowed, FAILURES_BEFORE_GIVING_UP))
        progress.log()
    if shard:
        _commit(folder, shard)
    progress.check(allowed)


def _commit(folder: Path, dialogues: list[Dialogue]) -> None:
    """Write answered conversations as one file."""
    rows = [(sample, d.prompt.messages_json) for d in dialogues for sample in d.samples]
    samples, messages = zip(*rows, strict=True)
    write_shard(folder, samples, messages)


def _take(dialogue: Dialogue, generation: Generation, progress: Progress) -> bool:
    """Count an answer; whether the conversation goes on. A turn of no use ends it."""
    progress.output_tokens += len(generation.output_ids)
    try:
        if generation.finish_reason == "error":
            raise Unusable(generation.text.partition(":")[0][:40], generation.text)
        more = dialogue.take(generation)
    except Unusable as problem:
        if not dialogue.samples:
            progress.failures[problem.reason] += 1
            log.warning("rollout: prompt %s: %s", dialogue.prompt.id, problem)
        return False
    progress.finish_reasons[dialogue.samples[-1].finish_reason] += 1
    return more


def _request(config: JobConfig, dialogue: Dialogue) -> Request:
    """The turn that waits for an answer; it may fill the sample up to corpus.max_len."""
    sampling = config.rollout.domain_sampling.get(dialogue.prompt.domain, config.rollout.sampling)
    # The expected acceptance length walks held-out answers, which only greedy ones allow.
    greedy = is_held_out(dialogue.prompt.id, config.corpus.held_out_fraction)
    ids = tuple(dialogue.asked.input_ids.tolist())
    return Request(
        id=dialogue.prompt.id,
        prompt_ids=ids,
        max_new_tokens=min(sampling.max_new_tokens, config.corpus.max_len - len(ids)),
        temperature=0.0 if greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


@dataclass(slots=True)
class Progress:
    """Counts of one run of the stage, after `before` prompts that earlier runs answered."""

    total: int
    before: int
    answered: int = 0
    output_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)
    logged: float = field(default_factory=time.monotonic)

    @property
    def cut_share(self) -> float:
        """Share of answers that ended at a limit."""
        return self.finish_reasons["length"] / max(self.finish_reasons.total(), 1)

    def check(self, allowed: float) -> None:
        """Raise ValueError when more than `allowed` prompts could not be answered."""
        if self.failures.total() > allowed:
            raise ValueError(
                f"{self.failures.total()} of {self.total} prompts could not be answered: {dict(self.failures)}; "
                "mend the prompts or the engine, or raise rollout.max_failures"
            )

    def line(self) -> str:
        """Counts and the mean rate since the start."""
        wall_s = time.monotonic() - self.started
        reasons = ", ".join(f"{name} {count}" for name, count in self.failures.most_common())
        return (
            f"{self.before + self.answered}/{self.total} prompts | {self.output_tokens} tokens in {wall_s:.0f} s, "
            f"{self.output_tokens / max(wall_s, 1e-9):.0f} tok/s | failed {self.failures.total()}"
            f"{f' ({reasons})' if reasons else ''} | cut {100 * self.cut_share:.0f} %"
        )

    def log(self) -> None:
        """One line every few seconds, with the time left."""
        now = time.monotonic()
        if now - self.logged < LOG_EVERY_S:
            return
        self.logged = now
        finished = self.answered + self.failures.total()
        left = self.total - self.before - finished
        each_s = (now - self.started) / max(finished, 1)  # before the first, at least so long
        log.info("rollout: %s | eta %.1f min", self.line(), left * each_s / 60)

    def as_dict(self) -> Json:
        """What rollout/state.json keeps."""
        return {
            "prompts": self.total,
            "answered": self.before + self.answered,
            "failed": dict(self.failures),
            "finish_reasons": dict(self.finish_reasons),
            "output_tokens": self.output_tokens,
            "wall_s": round(time.monotonic() - self.started, 2),
        }
