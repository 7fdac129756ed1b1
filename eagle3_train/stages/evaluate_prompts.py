"""Which prompts evaluation uses: given sources with their follow-up turns, or what the rollout held out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_train.config import JobConfig
from eagle3_train.corpus.benchmark import HELD_OUT, answer_room, benchmark_prompts
from eagle3_train.corpus.conversation import Conversation
from eagle3_train.corpus.leakage import find_leaks
from eagle3_train.corpus.render import Renderer
from eagle3_train.corpus.split import is_held_out
from eagle3_train.corpus.table import read_messages, read_samples
from eagle3_train.engines.spec import Request
from eagle3_train.records import Generation, Prompt
from eagle3_train.rundir import RunDir
from eagle3_train.runlog import log
from eagle3_train.stages.evaluate_statistics import NEXT_TURN
from eagle3_train.training.initial import renderer_of

Prompts = dict[str, list[Prompt]]
"""Dataset -> prompts."""


def evaluation_prompts(config: JobConfig) -> Prompts:
    """Dataset -> at most evaluate.num_prompts prompts: each file of the sources, the held-out ones by domain.

    A file may be sorted by topic, so what is taken of it is spread evenly over it.
    """
    limit, found = config.evaluate.num_prompts, Prompts()
    # Held-out domains first: a file that is called like one of them is refused below.
    for source in sorted(config.evaluate.sources, key=lambda source: source != HELD_OUT):
        if source == HELD_OUT:
            for prompt in _held_out(config):
                found.setdefault(prompt.domain, []).append(prompt)
            continue
        name = Path(source).name.partition(".")[0]
        if name in found:
            raise ValueError(
                f"evaluate.sources: {source} is the second dataset called {name}; rename the file"
            )
        found[name] = spread(benchmark_prompts(config, source, renderer_of(config)), limit)
    kept = {name: _fitting(config, name, prompts)[:limit] for name, prompts in found.items()}
    kept = {name: prompts for name, prompts in kept.items() if prompts}
    if not kept:
        raise ValueError(
            "no prompt to evaluate on: give evaluate.sources, or raise corpus.held_out_fraction above "
            f"{config.corpus.held_out_fraction}"
        )
    return kept


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """All of them, or `limit` at even distances."""
    count = min(limit, len(prompts))
    return [prompts[number * len(prompts) // count] for number in range(count)]


def _held_out(config: JobConfig) -> Iterator[Prompt]:
    """First turns that the rollout answered but training did not see, in a stable order."""
    folder = RunDir(config.run_path).samples
    messages = read_messages(folder)
    for sample in sorted(read_samples(folder), key=lambda sample: sample.id):
        if is_held_out(sample.id, config.corpus.held_out_fraction):
            said = json.loads(messages[sample.id])
            text = json.dumps(said and said | {"followups": []})
            yield Prompt(sample.id, sample.domain, sample.input_ids[: sample.prompt_tokens], text)


def _fitting(config: JobConfig, name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts that leave room for an answer of full length."""
    room = answer_room(config)
    fitting = [prompt for prompt in prompts if len(prompt.input_ids) <= room]
    if too_long := len(prompts) - len(fitting):
        log.warning("evaluate: %d prompts of %s exceed %d tokens", too_long, name, room)
    return fitting


def leaked(config: JobConfig, prompts: Prompts) -> dict[str, dict[str, Any]]:
    """Of the prompts, and of those with follow-ups: how many there are, and ids of what training repeats in part."""
    folder = RunDir(config.run_path).samples
    trained = [
        messages
        for id, messages in read_messages(folder).items()
        if not is_held_out(id, config.corpus.held_out_fraction)
    ]
    everything = [prompt for group in prompts.values() for prompt in group]
    of = {"prompts": everything, "follow-ups": [p for p in everything if _followups(p)]}
    leaks = dict(zip(of, find_leaks(trained, everything), strict=True))
    return {kind: {"of": len(of[kind]), "leaked": sorted(leaks[kind])} for kind in of}


def with_followups(
    config: JobConfig, ask: Callable[[list[Request]], list[Generation]], prompts: Prompts
) -> Prompts:
    """Every later user turn as a prompt of its own, after the target's own answers to the earlier ones."""
    renderer, complete = renderer_of(config), dict(prompts)
    turn = dict(prompts)
    while any(turn.values()):
        for name, group in turn.items():
            asked = [prompt for prompt in group if _followups(prompt)]
            answers = ask(requests(config, asked))
            following = [
                _next_turn(prompt, generation.text, renderer)
                for prompt, generation in zip(asked, answers, strict=True)
            ]
            turn[name] = _fitting(config, name, following)
            complete[name] = [*complete[name], *turn[name]]
    return complete


def _followups(prompt: Prompt) -> tuple[str, ...]:
    return tuple((json.loads(prompt.messages_json) or {"followups": ()})["followups"])


def _next_turn(prompt: Prompt, answer: str, renderer: Renderer) -> Prompt:
    said = Conversation.from_json(prompt.messages_json).answered(answer)
    ids = np.array(renderer.prompt_ids(said.messages, said.tools), dtype=np.int32)
    return Prompt(f"{prompt.id}{NEXT_TURN}", prompt.domain, ids, said.to_json())


def requests(config: JobConfig, prompts: Sequence[Prompt], seed: int = 0) -> list[Request]:
    """What the engine is asked, each prompt with a seed of its own (from `seed` on) when sampling."""
    sampling = config.evaluate.sampling
    return [
        Request(
            prompt.id,
            tuple(prompt.input_ids.tolist()),
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            seed=number if sampling.temperature else None,
        )
        for number, prompt in enumerate(prompts, seed)
    ]
