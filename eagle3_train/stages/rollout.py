"""`rollout`: the target answers the prompts, once each. Produces committed shards in rollout/samples/.

Prompts come from the corpus and, if asked for, from the target itself; every user turn of a conversation is
answered in order. A kill costs at most `rollout.shard_rows` answers and what was in flight: run again, only
prompts without a committed sample are asked. A prompt that cannot be answered is counted, never fatal.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from eagle3_train.config import JobConfig, SamplingConfig
from eagle3_train.corpus.account import Unusable
from eagle3_train.corpus.load import load_given, load_prompts
from eagle3_train.corpus.render import Renderer
from eagle3_train.corpus.split import is_held_out
from eagle3_train.corpus.table import committed_ids, next_index, write_shard
from eagle3_train.engines.answers import Answers
from eagle3_train.engines.spec import Request
from eagle3_train.records import Generation, Prompt
from eagle3_train.rundir import RunDir
from eagle3_train.runlog import log
from eagle3_train.stages.rollout_dialogue import Dialogue
from eagle3_train.stages.rollout_inputs import (
    Json,
    check_unchanged,
    is_complete,
    record_complete,
    record_start,
)
from eagle3_train.stages.rollout_synthesis import synthesise

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
        done: Json = json.loads(paths.rollout_state.read_text())
        log.info("rollout: complete, %d prompts answered", done["answered"])
        return done
    if config.corpus.answers == "given":
        return _keep_given(config)
    tokenizer, remote = _tokenizer(config), config.target.trust_remote_code
    renderer = Renderer.load(tokenizer, remote, config.corpus.template_kwargs)
    answers = Answers(pool, config.engine)
    record_start(config)
    prompts = _prompts(config, renderer, answers)
    _warn_unused_sampling(config, prompts)
    committed = committed_ids(paths.samples)
    missing = [prompt for prompt in prompts if prompt.id not in committed]
    log.info("rollout: %d prompts, %d already answered", len(prompts), len(prompts) - len(missing))
    progress = Progress(total=len(prompts), answered=len(prompts) - len(missing))
    _answer(config, renderer, answers, missing, progress)
    state = record_complete(config, progress.as_dict())
    log.info("rollout: done | %s", progress.line())
    if progress.cut_share > CUT_SHARE_TO_WARN:
        log.warning(
            "rollout: %.0f %% of the answers were cut; raise rollout.sampling.max_new_tokens or corpus.max_len",
            100 * progress.cut_share,
        )  # fmt: skip
    return state


def _keep_given(config: JobConfig) -> Json:
    """Commit conversations with the answers they came with; needs no engine."""
    paths, rows = RunDir(config.run_path), config.rollout.shard_rows
    samples, accounting = load_given(
        config.corpus, _tokenizer(config), config.target.trust_remote_code, paths.quarantine
    )
    accounting.save(paths.accounting)
    record_start(config)
    done = committed_ids(paths.samples)
    missing = [sample for sample in samples if sample.id not in done]
    for start in range(0, len(missing), rows):
        shard = missing[start : start + rows]
        write_shard(paths.samples, next_index(paths.samples), shard, ["null"] * len(shard))
    state = record_complete(config, {"answered": len(samples)})
    log.info("rollout: kept %d given answers", len(samples))
    return state


def check(config: JobConfig) -> None:
    """Raise ValueError when the corpus is unusable or answers of other settings exist; needs no engine."""
    check_unchanged(config)
    if config.corpus.answers == "target":
        _given_prompts(config)


def _given_prompts(config: JobConfig) -> list[Prompt]:
    """Prompts of the sources, accounted for; none when the target writes all of them."""
    paths = RunDir(config.run_path)
    if config.rollout.self_synthesised and not config.corpus.sources:
        return []
    prompts, accounting = load_prompts(
        config.corpus, _tokenizer(config), config.target.trust_remote_code, paths.quarantine
    )
    accounting.save(paths.accounting)
    return prompts


def _prompts(config: JobConfig, renderer: Renderer, answers: Answers) -> list[Prompt]:
    """What the sources hold and what the target writes itself, each once."""
    given = _given_prompts(config)
    own = synthesise(
        config.rollout,
        renderer,
        config.corpus.max_len,
        answers.all,
        RunDir(config.run_path).synthesised,
    )
    return list({prompt.id: prompt for prompt in [*given, *own]}.values())


def _answer(
    config: JobConfig,
    renderer: Renderer,
    answers: Answers,
    prompts: list[Prompt],
    progress: Progress,
) -> None:
    """Keep the engines busy until every prompt is answered; commit a shard whenever one is full."""
    shard = Shard(RunDir(config.run_path), config.rollout.shard_rows)
    dialogues = {prompt.id: Dialogue.start(prompt) for prompt in prompts}
    answers.ask([_request(config, dialogue) for dialogue in dialogues.values()])
    while dialogues:
        for generation in answers.completed(timeout_s=LOG_EVERY_S):
            dialogue = dialogues[generation.id]
            if _take(dialogue, generation, renderer, config.corpus.max_len, progress):
                answers.ask([_request(config, dialogue)])
                continue
            del dialogues[generation.id]
            shard.add(dialogue)
            progress.answered += bool(dialogue.samples)
        _check_failures(config, progress)
        progress.log()
    shard.commit()


def _take(
    dialogue: Dialogue,
    generation: Generation,
    renderer: Renderer,
    max_len: int,
    progress: Progress,
) -> bool:
    """Count an answer; whether the conversation goes on. A turn of no use ends it."""
    progress.output_tokens += len(generation.output_ids)
    if generation.finish_reason == "error":
        problem = Unusable(generation.text.partition(":")[0][:40], generation.text)
    else:
        try:
            more = dialogue.take(generation, renderer, max_len)
        except Unusable as unusable:
            problem = unusable
        else:
            progress.finish_reasons[dialogue.samples[-1].finish_reason] += 1
            return more
    if not dialogue.samples:
        progress.failures[problem.reason] += 1
        log.warning("rollout: prompt %s: %s", dialogue.prompt.id, problem)
    return False


def _request(config: JobConfig, dialogue: Dialogue) -> Request:
    """The turn that waits for an answer; it may fill the sample up to corpus.max_len."""
    sampling = _sampling(config, dialogue.prompt.domain)
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


def _sampling(config: JobConfig, domain: str) -> SamplingConfig:
    return config.rollout.domain_sampling.get(domain, config.rollout.sampling)


class Shard:
    """Answered conversations until there are enough for a file; one conversation is never split."""

    def __init__(self, paths: RunDir, rows: int) -> None:
        self._folder = paths.samples
        self._rows = rows
        self._dialogues: list[Dialogue] = []

    def add(self, dialogue: Dialogue) -> None:
        """Keep a conversation's samples, if it has any."""
        if dialogue.samples:
            self._dialogues.append(dialogue)
        if len(self._dialogues) >= self._rows:
            self.commit()

    def commit(self) -> None:
        """Write what is kept."""
        if self._dialogues:
            rows = [
                (sample, d.prompt.messages_json) for d in self._dialogues for sample in d.samples
            ]
            samples, messages = zip(*rows, strict=True)
            write_shard(self._folder, next_index(self._folder), samples, messages)
            self._dialogues = []


@dataclass(slots=True)
class Progress:
    """Counts of one run of the stage; `answered` includes what earlier runs committed."""

    total: int
    answered: int
    output_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)
    _before: int = -1
    _logged: float = field(default_factory=time.monotonic)
    _logged_tokens: int = 0

    def __post_init__(self) -> None:
        self._before = self.answered

    @property
    def cut_share(self) -> float:
        """Share of answers that ended at a limit."""
        return self.finish_reasons["length"] / max(self.finish_reasons.total(), 1)

    def line(self) -> str:
        """Counts and the mean rate since the start."""
        wall_s = time.monotonic() - self.started
        reasons = ", ".join(f"{name} {count}" for name, count in self.failures.most_common())
        return (
            f"{self.answered}/{self.total} prompts | {self.output_tokens} tokens in {wall_s:.0f} s, "
            f"{self.output_tokens / max(wall_s, 1e-9):.0f} tok/s | failed {self.failures.total()}"
            f"{f' ({reasons})' if reasons else ''} | cut {100 * self.cut_share:.0f} %"
        )

    def log(self) -> None:
        """One line every few seconds: rate of the last ones, time left."""
        now = time.monotonic()
        if now - self._logged < LOG_EVERY_S:
            return
        rate = (self.output_tokens - self._logged_tokens) / (now - self._logged)
        finished = self.answered + self.failures.total()
        fresh = finished - self._before
        left = self.total - finished
        eta = f"{left * (now - self.started) / fresh / 60:.1f} min" if fresh else "unknown"
        log.info(
            "rollout %d/%d %.0f%% | %.0f tok/s | failed %d | cut %.0f %% | eta %s",
            finished, self.total, 100 * finished / max(self.total, 1), rate,
            self.failures.total(), 100 * self.cut_share, eta,
        )  # fmt: skip
        self._logged, self._logged_tokens = now, self.output_tokens

    def as_dict(self) -> Json:
        """What rollout/state.json keeps."""
        return {
            "prompts": self.total,
            "answered": self.answered,
            "failed": dict(self.failures),
            "finish_reasons": dict(self.finish_reasons),
            "output_tokens": self.output_tokens,
            "wall_s": round(time.monotonic() - self.started, 2),
        }


def _check_failures(config: JobConfig, progress: Progress) -> None:
    """Stop when too many prompts could not be answered."""
    failed = progress.failures.total()
    allowed = config.rollout.max_failures * progress.total
    if failed > max(allowed, FAILURES_BEFORE_GIVING_UP) or (
        failed > allowed and failed + progress.answered == progress.total
    ):
        raise ValueError(
            f"{failed} of {progress.total} prompts could not be answered: {dict(progress.failures)}; "
            "mend the prompts or the engine, or raise rollout.max_failures"
        )


def _warn_unused_sampling(config: JobConfig, prompts: list[Prompt]) -> None:
    unused = set(config.rollout.domain_sampling) - {prompt.domain for prompt in prompts}
    if unused:
        log.warning("rollout.domain_sampling names domains without prompts: %s", sorted(unused))


def _tokenizer(config: JobConfig) -> str:
    return config.target.tokenizer or config.target.path
