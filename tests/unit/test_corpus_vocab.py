from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eagle3_train.config import CorpusConfig
from eagle3_train.corpus.conversation import parse_row
from eagle3_train.corpus.leakage import find_leaks
from eagle3_train.corpus.split import is_held_out
from eagle3_train.corpus.table import (
    committed_ids,
    read_messages,
    read_samples,
    write_shard,
)
from eagle3_train.corpus.vocab import most_supervised
from eagle3_train.records import Prompt, Sample


def sample(id: str, ids: list[int], mask: list[int], domain: str = "chat") -> Sample:
    return Sample(id, domain, np.array(ids, np.int32), np.array(mask, bool), "stop")


SAMPLES = [
    sample("a", [9, 9, 9, 3, 3, 5], [0, 0, 0, 1, 1, 1]),
    sample("b", [9, 7, 7, 7, 5], [0, 1, 1, 1, 1], "code"),
]


def vocab(size: int = 4, always: tuple[int, ...] = (0, 11)) -> list[int]:
    ids, _ = most_supervised(SAMPLES, size, 12, always)
    assert ids.dtype == np.int64
    return ids.tolist()


def test_the_draft_vocabulary_holds_the_most_supervised_tokens_and_every_special_one() -> None:
    assert vocab() == [0, 3, 7, 11]  # 5 and 3 tie at 2: the lower id wins
    assert vocab(5) == [0, 3, 5, 7, 11]
    assert vocab(6) == [0, 1, 3, 5, 7, 11]
    assert vocab(12) == list(range(12))


def test_coverage_is_the_share_of_supervised_tokens_per_domain() -> None:
    _, coverage = most_supervised(SAMPLES, 4, 12, (0, 11))
    assert coverage == {"chat": 2 / 3, "code": 3 / 4, "all": 5 / 7}


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="must hold the 2 special tokens"):
        vocab(1)
    with pytest.raises(ValueError, match="not exceed"):
        vocab(13)
    with pytest.raises(ValueError, match="no supervised token"):
        most_supervised([sample("a", [1, 2], [0, 0])], 4, 12, ())


def test_samples_survive_their_shards_bit_for_bit(tmp_path: Path) -> None:
    assert committed_ids(tmp_path / "none") == set()
    write_shard(tmp_path, SAMPLES, ["{}", '{"a": 1}'])
    write_shard(tmp_path, [replace(SAMPLES[0], id="c")], ["null"])
    read = read_samples(tmp_path)
    assert [s.id for s in read] == ["a", "b", "c"]
    for before, after in zip([*SAMPLES, SAMPLES[0]], read, strict=True):
        assert after.input_ids.dtype == np.int32
        assert after.loss_mask.dtype == np.bool_
        assert before.input_ids.tolist() == after.input_ids.tolist()
        assert before.loss_mask.tolist() == after.loss_mask.tolist()
        assert (before.domain, before.finish_reason) == (after.domain, after.finish_reason)
    assert committed_ids(tmp_path) == {"a", "b", "c"}
    assert read_messages(tmp_path)["b"] == '{"a": 1}'


def test_a_half_written_shard_is_no_shard_and_a_repeated_sample_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, SAMPLES, ["", ""])
    (tmp_path / ".samples-000001.parquet.77.tmp").write_bytes(b"half")
    assert len(read_samples(tmp_path)) == 2
    write_shard(tmp_path, SAMPLES[:1], [""])
    assert (tmp_path / "samples-000001.parquet").exists()
    with pytest.raises(ValueError, match="repeats sample a"):
        read_samples(tmp_path)
    with pytest.raises(ValueError, match="no sample shards"):
        read_samples(tmp_path / "empty")


def identity(question: str, answer: str, system: str | None = None) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if system:
        turns.insert(0, {"role": "system", "content": system})
    return parse_row({"messages": turns}, CorpusConfig()).id


def test_one_question_never_falls_on_both_sides_of_the_split() -> None:
    for n in range(200):
        ids = {identity(f"Q {n}", "A"), identity(f" q  {n}", "B"), identity(f"Q {n}", "A", "S")}
        assert len(ids) == 3
        assert len({is_held_out(id, 0.3) for id in (*ids, f"{min(ids)}-t1")}) == 1


def test_the_split_takes_its_fraction_and_grows_without_moving_anyone() -> None:
    ids = [identity(f"Question {n}", "A") for n in range(3000)]
    small, large = ({id for id in ids if is_held_out(id, f)} for f in (0.05, 0.2))
    assert 100 < len(small) < 200
    assert 500 < len(large) < 700
    assert small < large
    assert not any(is_held_out(id, 0) for id in ids)


def prompt(id: str, text: str) -> Prompt:
    content = {"messages": [{"role": "user", "content": text}], "tools": None, "followups": []}
    return Prompt(id, "chat", np.array([1], np.int32), json.dumps(content))


def test_leaks_are_found_through_case_punctuation_and_padding() -> None:
    exam = (
        "If a train leaves at nine and walks at four miles an hour, when does it arrive at the sea?"
    )
    other = (
        "Write a poem about a lamp that nobody lights and the moth which waits for it every night."
    )
    exams = [prompt("exam", exam), prompt("tiny", "Hi"), prompt("marks", "!!!")]
    for trained, leaked in (
        (exam.upper().replace(",", ""), {"exam"}),
        (f"Please answer. {exam} Think first.", {"exam"}),
        (other, set()),
        ("hi!", {"tiny"}),
        ("???", set()),
    ):
        assert find_leaks([prompt("trained", trained).messages_json], exams) == (leaked, set())


OPENINGS = [f"Tell me of {thing}, please." for thing in ("tides", "moths", "lamps", "bread")]
REWRITE = "Now take your answer and write it again as a ballad for a child who sleeps at noon"


def said(*turns: str, asked: int = 1) -> str:
    """A conversation whose first `asked` turns are answered, and the others follow."""
    messages = [
        {"role": role, "content": text} for text in turns[:asked] for role in ("user", "tool")
    ]
    return json.dumps({"messages": messages, "tools": None, "followups": turns[asked:]})


def test_first_turns_and_follow_ups_leak_apart() -> None:
    """Short first turns have no 13-gram, and a long follow-up must not hide that they are the same."""
    exams = [
        replace(prompt(opening, ""), messages_json=said(opening, f"{REWRITE} {opening}"))
        for opening in OPENINGS
    ]
    ids = set(OPENINGS)
    assert find_leaks([said(opening.upper()) for opening in OPENINGS], exams) == (ids, set())
    assert find_leaks([said(OPENINGS[0], f"{REWRITE} {OPENINGS[0]}")], exams)[0] == {OPENINGS[0]}
    assert find_leaks([said("Hello", OPENINGS[1], asked=2)], exams) == ({OPENINGS[1]}, set())
    assert find_leaks([said(REWRITE)], exams) == (set(), ids)


def test_a_short_follow_up_leaks_only_with_what_it_follows() -> None:
    exam = replace(prompt("exam", ""), messages_json=said(OPENINGS[0], "Why?"))
    assert find_leaks([said(OPENINGS[1], "Why?")], [exam]) == (set(), set())
    for asked in (1, 2):
        trained = said(OPENINGS[0], "why", asked=asked)
        assert find_leaks([trained], [exam]) == ({"exam"}, {"exam"})


def test_two_prompts_of_the_same_words_leak_both() -> None:
    exams = [prompt("one", OPENINGS[0]), prompt("two", OPENINGS[0].upper())]
    assert find_leaks([said(OPENINGS[0])], exams)[0] == {"one", "two"}
