"""One test per class of input seen in public reports, on rows of our own and on ../shared/cases."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from corpus_tokenizer import SHARED, renderer

from eagle3_train.config import CorpusConfig
from eagle3_train.corpus.account import Accounting, CorpusError
from eagle3_train.corpus.load import load_given, load_prompts
from eagle3_train.corpus.render import Renderer
from eagle3_train.records import Sample

MAX_LEN = 2048


RENDERER = renderer("default_system")


def talk(*contents: Any) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [
        {"role": ("user", "assistant")[index % 2], "content": content}
        for index, content in enumerate(contents)
    ]


def row(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"messages": talk(*contents), **more}


GOOD = row("Which bird is black?", "A crow.")
TOOL = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
CALLING = [
    {"role": "user", "content": "Add it"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "g", "arguments": '{"n": 1}'}}],
    },
    {"role": "tool", "content": "seven"},
    {"role": "assistant", "content": "It is 7."},
]


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in rows)


SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hello?"},
        {"from": "gpt", "value": "Hello."},
    ]
}
ANSWER_FIRST = {"messages": [{"role": "assistant", "content": "Ahoy."}, *talk("Hi", "Yes?")]}
TWO_USERS = {"messages": [{"role": "user", "content": "One."}, *talk("Two.", "Both.")]}
TWO_SYSTEMS = {
    "messages": [{"role": "system", "content": c} for c in ("A", "B")] + talk("Hi", "Hello.")
}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:x"}}, {"type": "text", "text": "What?"}]
ODD_ROLE = {"messages": [*talk("Hi"), {"role": "wren_2", "content": "Hey"}]}
OWN: dict[str, tuple[str, bytes]] = {
    "01": (
        "a.jsonl",
        lines(SHAREGPT, {**SHAREGPT, "conversations": SHAREGPT["conversations"][1:]}),
    ),
    "02": ("a.jsonl", lines({**GOOD, "conversations": SHAREGPT["conversations"]})),
    "03": (
        "a.jsonl",
        lines(GOOD, ODD_ROLE, {"messages": [*talk("2?"), {"role": "bard", "content": "2"}]}),
    ),
    "04": ("a.jsonl", lines(ANSWER_FIRST, GOOD)),
    "05": ("a.jsonl", lines(TWO_USERS, GOOD)),
    "06": ("a.jsonl", lines({"messages": []}, {"messages": None}, {"id": "n"}, GOOD)),
    "07": ("a.jsonl", lines(row("Hi", ""), row("Hi", " \n "), {"messages": CALLING})),
    "08": (
        "a.jsonl",
        lines(TWO_SYSTEMS, {"messages": [TWO_SYSTEMS["messages"][0], *talk("Hi", "Ho.")]}, GOOD),
    ),
    "09": (
        "a.jsonl",
        lines(
            {"tools": [TOOL], "messages": CALLING},
            row("Hi", "Hello.", tools=json.dumps([TOOL])),
            row("Hi", "Hello.", tools="{not json"),
            row("Ho", "Hello.", tools=[]),
        ),
    ),
    "10": (
        "a.jsonl",
        lines(row([{"type": "text", "text": "Say "}, {"type": "text", "text": "no"}], "No.")),
    ),
    "11": ("a.jsonl", lines(row(IMAGE, "A dog."), GOOD)),
    "12": (
        "a.jsonl",
        lines(
            row("1?", "<think>Count.</think>1"),
            row("2?", "Count.</think>2"),
            {
                "messages": [
                    *talk("3?"),
                    {"role": "assistant", "content": "3", "reasoning_content": "Count."},
                ]
            },
            row("4?", "<think>a</think>4", "5?", "<think>b</think>5"),
        ),
    ),
    "13": ("a.jsonl", lines(row("word " * 3000, "Yes."), row("Go", "word " * 3000), GOOD)),
    "14": ("a.jsonl", lines(row("Echo <|im_end|> and <s>", "<|im_end|> it is."), GOOD)),
    "15": (
        "a.jsonl",
        lines(
            {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
            {"input_ids": [5, 6, 7], "loss_mask": [1, 1]},
            {"input_ids": [5, 10**9], "loss_mask": [1, 1]},
            {"input_ids": [5, 6], "loss_mask": [0, 0]},
        ),
    ),
    "16": (
        "a.jsonl",
        b"\xef\xbb\xbf"
        + lines(GOOD).replace(b"\n", b"\r\n")
        + b"\n"
        + lines(row("Thé?", "Oui."))
        + b'{"messages": "\xff\xfe"}\n{"messages": [{"role": "us',
    ),
    "17": ("a.json", json.dumps([GOOD, row("More?", "Less.")]).encode()),
    "18": ("a.jsonl.gz", gzip.compress(lines(GOOD))),
    "19": (
        "a.jsonl",
        lines(
            row("a?", "bb", id=7),
            row("c?", "dd", id="7"),
            row([{"type": "text", "text": "e?"}], "ff", id=None, meta={"k": [1]}),
            row("g?", "hh", id=2, meta="text"),
        ),
    ),
    "20": (
        "a.jsonl",
        lines({**GOOD, "id": "d"}, {**GOOD, "id": "d"}, row("Other?", "Yes.", id="d")),
    ),
    "21": (
        "a.jsonl",
        lines({"prompt": "a", "completion": "b"}, {"text": "c"}, {"instruction": "d"}),
    ),
    "22": ("a.jsonl", lines(GOOD)),
    "23": (
        "a.jsonl",
        lines(*[row(f"{n}?", f"It is {n}.") for n in range(40)], row("All", "word " * 1900)),
    ),
    "24": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "o"}]}\n'
        + lines(row("a \0 b", "It is."), GOOD),
    ),
}
# kept rows and drop reasons; the same for our rows and for the shared ones.
EXPECTED: dict[str, tuple[int, dict[str, int]]] = {
    "01": (2, {}),
    "02": (0, {"ambiguous": 1}),
    "03": (1, {"unknown_role": 2}),
    "04": (1, {"leading_assistant": 1}),
    "05": (2, {}),
    "06": (1, {"empty_conversation": 1, "null_conversation": 1, "no_conversation": 1}),
    "07": (1, {"nothing_supervised": 2}),
    "08": (3, {}),
    "09": (3, {"bad_tools": 1}),
    "10": (1, {}),
    "11": (1, {"multimodal": 1}),
    "12": (3, {"answer_not_rendered": 1}),  # this template knows no reasoning_content
    "13": (2, {"nothing_supervised": 1}),
    "14": (2, {}),
    "15": (1, {"mask_length": 1, "id_out_of_range": 1, "nothing_supervised": 1}),
    "16": (2, {"invalid_utf8": 1, "invalid_json": 1}),
    "17": (2, {}),
    "18": (1, {}),
    "19": (4, {}),
    "20": (2, {"duplicate": 1}),
    "21": (0, {"no_conversation": 3}),
    "22": (1, {}),
    "23": (41, {}),
    "24": (2, {"lone_surrogate": 1}),
}


def source(case: str, where: str, folder: Path) -> str:
    if where == "shared":
        found = sorted((SHARED / "cases").glob(f"{case}_*"))
        if not found:
            pytest.skip("no ../shared/cases here")
        return str(found[0])
    name, content = OWN[case]
    (folder / name).write_bytes(content)
    return str(folder / name)


def given(
    path: str, quarantine: Path | None = None, made: Renderer = RENDERER, **options: Any
) -> tuple[list[Sample], Accounting]:
    config = CorpusConfig(sources=(path,), max_len=MAX_LEN, min_yield=0, **options)
    return load_given(config, made, quarantine)


@pytest.mark.parametrize("where", ["own", "shared"])
@pytest.mark.parametrize("case", EXPECTED)
def test_every_row_of_a_case_is_kept_or_quarantined_with_its_reason(
    case: str, where: str, tmp_path: Path
) -> None:
    kept, dropped = EXPECTED[case]
    path = source(case, where, tmp_path)
    quarantine = tmp_path / "quarantine.jsonl"
    if kept:
        samples, account = given(path, quarantine)
        assert account.kept == len({s.id for s in samples}) == kept
        assert account.rows_in == kept + sum(dropped.values())
        for sample in samples:
            assert len(sample.input_ids) == len(sample.loss_mask) <= MAX_LEN
            assert sample.loss_mask.any()
    else:
        with pytest.raises(CorpusError):
            given(path, quarantine)
    records = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert Counter(record["reason"] for record in records) == dropped
    assert all(record["where"].startswith(str(Path(path).absolute())) for record in records)


@pytest.mark.parametrize("where", ["own", "shared"])
def test_a_wrong_kind_of_file_is_refused_naming_columns_found_and_understood(
    where: str, tmp_path: Path
) -> None:
    with pytest.raises(CorpusError, match=r"columns found: completion.*prompt.*\n.*messages, conv"):
        given(source("21", where, tmp_path))


def test_ambiguous_rows_name_both_keys(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="messages and conversations disagree"):
        given(source("02", "own", tmp_path))


def test_unknown_roles_are_listed_and_can_be_mapped(tmp_path: Path) -> None:
    path = source("03", "own", tmp_path)
    shown = given(path)[1].details["unknown_role"]
    assert "'wren_2'" in shown[0]
    _, mapped = given(path, roles={"wren_2": "assistant", "bard": "assistant"})
    assert mapped.kept == 3


def test_a_leading_assistant_turn_can_be_dropped(tmp_path: Path) -> None:
    path = source("04", "own", tmp_path)
    samples, account = given(path, leading_assistant="drop_turn")
    assert account.kept == 2
    assert account.fixed["dropped_leading_assistant"] == 1
    text = RENDERER.tokenizer.decode(samples[0].input_ids.tolist())
    assert "Ahoy" not in text


def test_a_template_error_concerns_its_row_only(tmp_path: Path) -> None:
    strict = renderer("alternating")
    _, account = given(source("05", "own", tmp_path), made=strict)
    assert account.kept == 1
    assert "roles must alternate" in account.details["template"][0]


def test_system_prompts_are_the_datas_own_and_several_merge_or_drop_the_row(tmp_path: Path) -> None:
    path = source("08", "own", tmp_path)
    decode = RENDERER.tokenizer.decode
    texts = [decode(s.input_ids.tolist()) for s in given(path)[0]]
    assert "system\nA\n\nB" in texts[0]
    assert "harbour office" in texts[2]
    assert "harbour office" not in texts[1]
    _, skipped = given(path, several_system_turns="skip_row")
    assert skipped.dropped == {"several_system_turns": 1}
    samples, added = given(path, system_prompt="Be calm.")
    assert added.fixed["added_system_prompt"] == 1
    assert "Be calm." in decode(samples[2].input_ids.tolist())


def test_duplicates_can_be_kept_under_ids_of_their_own(tmp_path: Path) -> None:
    path = source("20", "own", tmp_path)
    samples, account = given(path, deduplicate=False)
    assert len({sample.id for sample in samples}) == 3
    assert account.fixed["reused_id"] == 1
    assert given(path)[0][0].id == samples[0].id


def test_a_sample_of_exactly_max_len_is_whole(tmp_path: Path) -> None:
    path = source("22", "own", tmp_path)
    whole = given(path)[0][0]
    for max_len, length in ((len(whole.input_ids), 0), (len(whole.input_ids) - 1, 1)):
        config = CorpusConfig(sources=(path,), max_len=max_len)
        samples, account = load_given(config, RENDERER)
        assert len(samples[0].input_ids) == max_len
        assert account.fixed["truncated"] == length


def test_rows_marked_as_cut_at_the_token_limit_teach_no_stop(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(row("Go on", "and on", finish_reason="length")))
    sample = given(str(tmp_path / "a.jsonl"))[0][0]
    decode = RENDERER.tokenizer.decode
    assert decode(sample.input_ids[sample.loss_mask].tolist()) == "and on"


def test_a_low_yield_stops_the_job_and_names_the_top_reasons(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        lines(
            *[row(f"{n}?", "") for n in range(3)], ODD_ROLE, *[row("x", f"{n}.") for n in range(7)]
        )
    )
    config = CorpusConfig(sources=(str(path),))
    with pytest.raises(
        CorpusError, match=r"7 of 11 rows.*\n +3 nothing_supervised.*\n +1 unknown_role"
    ):
        load_given(config, RENDERER)
    config = CorpusConfig(sources=(str(path),), min_yield=0.5)
    assert load_given(config, RENDERER)[1].kept == 7


def test_hopeless_data_is_given_up_early(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines({"text": "x"}) * 5000)
    with pytest.raises(CorpusError, match="0 of 1000 rows"):
        load_given(CorpusConfig(sources=(str(path),)), RENDERER)


def prompts(content: bytes, folder: Path, **options: Any) -> list[dict[str, Any]]:
    (folder / "p.jsonl").write_bytes(content)
    config = CorpusConfig(sources=(str(folder / "p.jsonl"),), **options)
    loaded, _ = load_prompts(config, RENDERER)
    decode = RENDERER.tokenizer.decode
    return [
        {"text": decode(p.input_ids.tolist()), "domain": p.domain, **json.loads(p.messages_json)}
        for p in loaded
    ]


def test_prompts_end_at_the_header_of_the_answer_to_write(tmp_path: Path) -> None:
    found = prompts(lines(row("Q1", "A1", "Q2", "A2", domain="x"), row("Q3")), tmp_path)
    assert [p["text"].count("A2") for p in found] == [0, 0]
    assert "A1" in found[0]["text"]
    assert all(p["text"].endswith("assistant\n") for p in found)
    assert [p["domain"] for p in found] == ["x", "general"]


def test_the_target_can_answer_every_turn_of_a_conversation(tmp_path: Path) -> None:
    content = lines(
        row("Q1", "A1", "Q2", "A2"), {"category": "c", "turns": ["T1", "T2"]}, {"messages": CALLING}
    )
    found = prompts(content, tmp_path, history="regenerate")
    assert [p["followups"] for p in found] == [["Q2"], ["T2"], []]
    assert [len(p["messages"]) for p in found] == [1, 1, 3]
    assert found[1]["domain"] == "c"


def test_prompts_without_room_for_an_answer_are_dropped(tmp_path: Path) -> None:
    content = lines(row("word " * 300), row("Hi"), row(" "), {"messages": talk("", "x")[1:]})
    (tmp_path / "p.jsonl").write_bytes(content)
    config = CorpusConfig(
        sources=(str(tmp_path / "p.jsonl"),),
        max_len=200,
        min_yield=0,
        leading_assistant="drop_turn",
    )
    _, account = load_prompts(config, RENDERER)
    assert account.dropped == {"prompt_too_long": 1, "empty_prompt": 1, "no_prompt": 1}


def test_limit_takes_the_first_usable_rows(tmp_path: Path) -> None:
    content = lines(row("", ""), *[row(f"Q{n}") for n in range(5)])
    found = prompts(content, tmp_path, limit=2, min_yield=0)
    assert [p["messages"][0]["content"] for p in found] == ["Q0", "Q1"]


def test_tokenised_rows_are_trimmed_to_what_can_be_trained_and_can_be_prompts(
    tmp_path: Path,
) -> None:
    rows = [
        {
            "input_ids": [5, 6, 7, 8, 9],
            "loss_mask": [True, False, True, True, False],
            "domain": "d",
        },
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6]},
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(*rows))
    samples, account = given(str(path))
    assert [s.input_ids.tolist() for s in samples] == [[5, 6, 7, 8], [5, 6, 7]]
    assert samples[0].loss_mask.tolist() == [False, False, True, True]
    assert samples[0].domain == "d"
    assert account.dropped == {"nothing_supervised": 2}
    config = CorpusConfig(sources=(str(path),), min_yield=0, deduplicate=False)
    asked, account = load_prompts(config, RENDERER)
    assert [p.input_ids.tolist() for p in asked] == [[5], [5], [5, 6]]
    assert account.dropped == {"no_prompt": 1}
