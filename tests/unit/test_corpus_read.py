from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_train.config import CorpusConfig
from eagle3_train.corpus.account import CorpusError, Unusable
from eagle3_train.corpus.conversation import Conversation, parse_row
from eagle3_train.corpus.read import fingerprint, read_rows

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"Question {n}"},
            {"role": "assistant", "content": "A"},
        ]
    }
    for n in range(5)
]
CALL = {"function": {"name": "f", "arguments": {"a": 1}}, "type": "function"}
MIXED = [
    *ROWS[:2],
    {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ]
    },
]


def fields(*sources: str) -> list[dict[str, Any]]:
    found = [row.fields for row in read_rows(sources)]
    assert not any(isinstance(item, Unusable) for item in found)
    return found


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode())
    (tmp_path / "c.json").write_bytes(jsonl(ROWS))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(jsonl(ROWS)))
    (tmp_path / "e.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=2)
    with pa.ipc.new_file(tmp_path / "g.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with pa.ipc.new_stream(tmp_path / "h.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    for file in sorted(tmp_path.iterdir()):
        assert fields(str(file)) == ROWS, file.name


def test_one_object_spread_over_lines_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS[0], indent=2))
    (tmp_path / "b.json").write_bytes(jsonl(ROWS[:1]))
    assert fields(str(tmp_path / "a.json")) == fields(str(tmp_path / "b.json")) == ROWS[:1]


def test_an_edited_file_has_another_fingerprint_a_touched_one_has_not(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(jsonl(ROWS))
    before = fingerprint([str(tmp_path)])
    file.touch()
    assert fingerprint([str(tmp_path)]) == before
    file.write_bytes(jsonl(ROWS).replace(b"Question 3", b"Question 8"))
    assert fingerprint([str(tmp_path)]) != before


def test_nulls_that_arrow_fills_in_are_not_part_of_a_message(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(MIXED), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_bytes(jsonl(MIXED))
    ids = [
        [parse_row(row, CorpusConfig()).id for row in fields(str(tmp_path / name))]
        for name in ("a.parquet", "a.jsonl")
    ]
    assert ids[0] == ids[1]


def test_directories_globs_and_urls_are_read_in_name_order_once(tmp_path: Path) -> None:
    for name, row in zip(("b", "a/z", "c"), ROWS, strict=False):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(jsonl([row]))
    (tmp_path / ".hidden.jsonl").write_bytes(jsonl(ROWS))
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "dataset_info.json").write_text("{}")
    expected = [ROWS[1], ROWS[0], ROWS[2]]
    assert fields(str(tmp_path)) == expected
    assert fields(f"file://{tmp_path}") == expected
    assert fields(str(tmp_path / "*.jsonl"), str(tmp_path)) == [ROWS[0], ROWS[2], ROWS[1]]


def test_any_fsspec_url_is_a_source() -> None:
    with fsspec.open("memory://corpus/a.jsonl.gz", "wb") as file:
        file.write(gzip.compress(jsonl(ROWS)))
    assert fields("memory://corpus") == fields("memory://corpus/*.gz") == ROWS


def test_bad_lines_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    content = (
        b"\xef\xbb\xbf"
        + jsonl(ROWS[:1]).replace(b"\n", b"\r\n")
        + b"\n  \n[1]\n\xff\n"
        + b"[" * 10**5
    )
    (tmp_path / "a.jsonl").write_bytes(content)
    rows = list(read_rows([str(tmp_path)]))
    assert rows[0].fields == ROWS[0]
    problems = [(row.where.rpartition(":")[2], row.fields.reason) for row in rows[1:]]
    assert problems == [("4", "not_an_object"), ("5", "invalid_utf8"), ("6", "invalid_json")]


def test_a_line_of_two_megabytes_is_a_line(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "word " * 400_000}]}
    (tmp_path / "a.jsonl").write_bytes(jsonl([row, *ROWS]))
    assert fields(str(tmp_path)) == [row, *ROWS]


def test_a_truncated_gzip_gives_what_it_holds_and_one_named_problem(tmp_path: Path) -> None:
    content = gzip.compress(jsonl([{"n": f"{n:09d}" * 50} for n in range(3000)]))
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    rows = list(read_rows([str(tmp_path)]))
    assert len(rows) > 100
    assert rows[-1].fields.reason == "truncated_file"
    assert not any(isinstance(row.fields, Unusable) for row in rows[:-1])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x", "no reader for .*a.csv; understood: .jsonl"),
        ("a.json", b"[1, 2", "starts like one JSON array"),
        ("a.json", b"{\n 1", "starts like one JSON array or object"),
        ("a.parquet", b"nope", "not a readable .parquet"),
        ("a.arrow", b"nope", "not a readable .arrow"),
    ],
)
def test_files_that_cannot_be_read_stop_the_job(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        list(read_rows([str(tmp_path / name)]))


def test_missing_sources_stop_the_job(tmp_path: Path) -> None:
    for sources, message in (
        ((), "is empty"),
        ((str(tmp_path / "no"),), "does not exist"),
        ((str(tmp_path),), "is an empty directory"),
    ):
        with pytest.raises(CorpusError, match=message):
            list(read_rows(sources))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": "not json"}, "bad_conversation"),
        ({"messages": {"role": "user"}}, "malformed_conversation"),
        ({"messages": ["hi"]}, "malformed_turn"),
        ({"messages": [{"role": 3, "content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": 3}]}, "malformed_content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "malformed_content"),
        ({"messages": [{"role": "assistant", "tool_calls": "[1"}]}, "bad_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": 1}]}]}, "bad_tool_call"),
        ({"messages": ROWS[0]["messages"], "image": "x.png"}, "multimodal"),
        ({"messages": ROWS[0]["messages"], "tools": "3"}, "bad_tools"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "turn_weight"),
        ({"turns": "text"}, "malformed_turn"),
        ({"input_ids": "1 2"}, "malformed_ids"),
        ({"input_ids": [1, True]}, "malformed_ids"),
        ({"input_ids": [-1, 2], "loss_mask": [0, 1]}, "id_out_of_range"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "malformed_mask"),
    ],
)
def test_rows_of_unexpected_shape_are_refused_by_name(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as problem:
        parse_row(row, CorpusConfig())
    assert problem.value.reason == reason


def test_conversations_stored_as_json_text_and_agreeing_keys_are_read() -> None:
    turns = ROWS[0]["messages"]
    sharegpt = [{"from": "human", "value": "Question 0"}, {"from": "gpt", "value": "A"}]
    ids = {
        parse_row(row, CorpusConfig()).id
        for row in (
            {"messages": turns},
            {"messages": json.dumps(turns)},
            {"conversations": sharegpt, "messages": None},
            {"conversations": sharegpt, "messages": turns},
        )
    }
    assert len(ids) == 1


def test_conversations_survive_their_json_text() -> None:
    talk = parse_row({**MIXED[2], "tools": [{"type": "function"}]}, CorpusConfig())
    assert isinstance(talk, Conversation)
    again = Conversation.from_json(talk.to_json())
    assert (again.messages, again.tools, again.id) == (talk.messages, talk.tools, talk.id)
