"""Conversations being answered: what is asked next, and what the samples and masks become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from eagle3_train.config import JobConfig, RolloutConfig
from eagle3_train.corpus.account import Unusable
from eagle3_train.corpus.conversation import Conversation
from eagle3_train.corpus.render import Renderer
from eagle3_train.corpus.table import read_samples
from eagle3_train.engines.spec import Request
from eagle3_train.records import Generation, Prompt
from eagle3_train.rundir import RunDir
from eagle3_train.stages import rollout
from eagle3_train.stages.rollout_dialogue import Dialogue
from eagle3_train.stages.rollout_synthesis import synthesise, unlike_a_prompt, user_header
from tests import tiny

# Keeps nothing but the first word of earlier answers, as templates do that drop earlier thinking.
REWRITES_HISTORY = tiny.TEMPLATE.replace(
    "{{ m['content'] }}{{ eos_token }}",
    "{{ m['content'] if loop.last else m['content'].split()[0] }}{{ eos_token }}",
)
MAX_LEN = 200


def renderer(directory: Path, template: str = tiny.TEMPLATE) -> Renderer:
    tiny.write_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = template
    return Renderer(tokenizer, frozenset({tiny.EOS}))


def dialogue(render: Renderer, *turns: str) -> Dialogue:
    said = Conversation([{"role": "user", "content": turns[0]}], followups=turns[1:])
    ids = np.array(render.prompt_ids(said.messages), dtype=np.int32)
    return Dialogue.start(Prompt("p", "chat", ids, said.to_json()), render, MAX_LEN)


def answer(asked: Dialogue, text: str, finish_reason: str = "stop") -> Generation:
    ids = asked.renderer.tokenizer.encode(text, add_special_tokens=False)
    ids += [tiny.EOS] if finish_reason == "stop" else []
    prompt_ids = tuple(asked.asked.input_ids.tolist())
    return Generation("p", prompt_ids, tuple(ids), finish_reason, text)


def supervised_text(asked: Dialogue, sample: int) -> str:
    taken = asked.samples[sample]
    return str(asked.renderer.tokenizer.decode(taken.input_ids[taken.loss_mask]))


def test_one_turn_gives_one_sample_supervised_where_the_target_wrote(tmp_path: Path) -> None:
    asked = dialogue(renderer(tmp_path), "hi there")
    assert not asked.take(answer(asked, "well met"))
    assert [s.id for s in asked.samples] == ["p"]
    assert supervised_text(asked, 0) == "well met<|eos|>"


def test_turns_of_an_appending_template_share_a_sample_with_every_answer_supervised(
    tmp_path: Path,
) -> None:
    asked = dialogue(renderer(tmp_path), "one", "two", "three")
    assert asked.take(answer(asked, "first answer"))
    assert asked.take(answer(asked, "second answer"))
    assert not asked.take(answer(asked, "third answer"))
    assert [s.id for s in asked.samples] == ["p"]
    whole = str(asked.renderer.tokenizer.decode(asked.samples[0].input_ids))
    assert whole.count("<|user|>") == 3
    expected = "first answer<|eos|>second answer<|eos|>third answer<|eos|>"
    assert supervised_text(asked, 0) == expected


def test_a_template_that_rewrites_history_gives_a_sample_per_answer(tmp_path: Path) -> None:
    asked = dialogue(renderer(tmp_path, REWRITES_HISTORY), "one", "two")
    assert asked.take(answer(asked, "first answer"))
    assert not asked.take(answer(asked, "second answer"))
    assert [s.id for s in asked.samples] == ["p", "p-t1"]
    assert supervised_text(asked, 0) == "first answer<|eos|>"
    assert supervised_text(asked, 1) == "second answer<|eos|>"
    assert "first<|eos|>" in asked.renderer.tokenizer.decode(asked.samples[1].input_ids)


def test_an_answer_that_was_cut_ends_the_conversation(tmp_path: Path) -> None:
    asked = dialogue(renderer(tmp_path), "one", "two")
    assert not asked.take(answer(asked, "endless", "length"))
    assert [s.finish_reason for s in asked.samples] == ["length"]


def test_a_turn_without_room_is_not_asked(tmp_path: Path) -> None:
    asked = dialogue(renderer(tmp_path), "one", "x" * MAX_LEN)
    assert not asked.take(answer(asked, "fine"))
    assert len(asked.samples) == 1


def test_an_empty_answer_is_of_no_use(tmp_path: Path) -> None:
    asked = dialogue(renderer(tmp_path), "one")
    with pytest.raises(Unusable, match="nothing_supervised"):
        asked.take(answer(asked, ""))
    assert asked.samples == []


def test_the_user_header_is_what_comes_before_a_first_user_turn(tmp_path: Path) -> None:
    assert user_header(renderer(tmp_path)) == [tiny.BOS, tiny.USER]


@pytest.mark.parametrize(
    ("text", "ids", "finish_reason", "problem"),
    [
        ("Why is the sky blue?", (9, 1), "stop", None),
        ("Why is the sky", (9, 9), "length", "unfinished"),
        ("Why?", (9, 1), "stop", "too_short"),
        ("1 2 3 4 5", (9, 1), "stop", "no_words"),
        ("tell me what <|user|>", (9, tiny.USER, 1), "stop", "markup"),
        ("so so so so so so so so", (9, 1), "stop", "repeats_itself"),
    ],
)
def test_only_what_reads_like_a_prompt_is_kept(
    text: str, ids: tuple[int, ...], finish_reason: str, problem: str | None
) -> None:
    generation = Generation("s", (), ids, finish_reason, text)
    assert unlike_a_prompt(generation, frozenset({tiny.EOS, tiny.USER})) == problem


def test_synthesised_prompts_are_distinct_asked_for_until_enough_and_made_once(
    tmp_path: Path,
) -> None:
    render = renderer(tmp_path)
    asked: list[Request] = []

    def ask(requests: Sequence[Request]) -> list[Generation]:
        asked.extend(requests)
        return [
            Generation(r.id, r.prompt_ids, (9, tiny.EOS), "stop", f"What is item {i // 2} of it?")
            for i, r in enumerate(requests, start=len(asked) - len(requests))
        ]

    settings = RolloutConfig(self_synthesised=10)
    path = tmp_path / "synthesised.jsonl"
    prompts = synthesise(settings, render, MAX_LEN, ask, path)
    assert len({p.id for p in prompts}) == 10
    assert 20 <= len(asked) <= 40  # every second text repeats the one before it
    assert len({r.id for r in asked}) == len(asked)
    assert all(r.temperature == 1.0 and r.prompt_ids == (tiny.BOS, tiny.USER) for r in asked)
    before = len(asked)
    assert [p.id for p in synthesise(settings, render, MAX_LEN, ask, path)] == [
        p.id for p in prompts
    ]
    assert len(asked) == before


def test_openers_share_the_prompts_and_give_them_their_domain(tmp_path: Path) -> None:
    render = renderer(tmp_path)
    asked: list[Request] = []

    def ask(requests: Sequence[Request]) -> list[Generation]:
        asked.extend(requests)
        return [
            Generation(r.id, r.prompt_ids, (9, tiny.EOS), "stop", f" thing number {r.id} please")
            for r in requests
        ]

    openers = {"code": ("Write a",), "chat": ("Tell me", "Why is")}
    settings = RolloutConfig(self_synthesised=9, openers=openers)
    prompts = synthesise(settings, render, MAX_LEN, ask, tmp_path / "synthesised.jsonl")
    assert [p.domain for p in prompts] == ["code", "chat", "chat"] * 3
    assert "Write a thing number" in prompts[0].messages_json
    assert all(r.prompt_ids[:2] == (tiny.BOS, tiny.USER) for r in asked)
    assert len({r.prompt_ids for r in asked}) == 3, "the target continues each opener"


def test_given_answers_are_committed_without_an_engine_and_only_once(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text('{"vocab_size": 512}')
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for i in range(5)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = JobConfig.model_validate(
        {
            "name": "given",
            "runs_dir": str(tmp_path),
            "target": {"path": str(tmp_path / "target")},
            "corpus": {"sources": [str(tmp_path / "data.jsonl")], "answers": "given"},
            "rollout": {"shard_rows": 2},
            "stream": {"max_bytes_in_flight": 1},
        }
    )
    mistaken = config.corpus.model_copy(update={"sources": (str(tmp_path / "typo.jsonl"),)})
    with pytest.raises(ValueError, match="does not exist"):
        rollout.run(config.model_copy(update={"corpus": mistaken}), None)
    assert rollout.run(config, None)["answered"] == 5, (
        "a failed attempt does not bind its correction"
    )
    samples = read_samples(RunDir(config.run_path).samples)
    assert len(samples) == 5
    assert all(s.finish_reason == "given" and s.loss_mask.any() for s in samples)
    assert rollout.is_complete(config)
    assert rollout.run(config, None)["answered"] == 5
    assert len(read_samples(RunDir(config.run_path).samples)) == 5
    (tmp_path / "data.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert not rollout.is_complete(config)
    with pytest.raises(ValueError, match=r"other contents of corpus\.sources"):
        rollout.run(config, None)
    (tmp_path / "data.jsonl").unlink()
    assert rollout.is_complete(config), "answers outlive the data they were asked with"
