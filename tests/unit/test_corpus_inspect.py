from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from corpus_tokenizer import renderer, save

from eagle3_train.corpus.table import write_shard
from eagle3_train.records import Sample

SCRIPT = Path(__file__).parents[2] / "data" / "inspect_corpus.py"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["inspect_corpus.py", *map(str, arguments)])
    return runpy.run_path(str(SCRIPT))["main"]()


def test_conversations_are_shown_with_their_masks_and_drop_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save(tmp_path / "tokenizer", "plain")
    turns = [
        {"role": "user", "content": "Is <b> bold?"},
        {"role": "assistant", "content": "It is <b>."},
    ]
    rows = [{"messages": turns}, {"messages": []}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    code = run(
        monkeypatch,
        tmp_path / "a.jsonl",
        "--tokenizer",
        directory,
        "--html",
        page,
        "--png",
        picture,
    )
    shown = capsys.readouterr().out
    assert code == 0
    assert "[[It is <b>.<|im_end|>]]" in shown
    assert "2 = 1 kept + 1 dropped" in shown
    assert "dropped empty_conversation" in shown
    assert "Is <b>" not in page.read_text()  # escaped, token by token
    assert page.read_text().count("<b title=") > 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rollout_shards_are_shown_and_an_implausible_mask_is_an_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save(tmp_path / "tokenizer", "plain")
    ids = np.array(renderer("plain").prompt_ids([{"role": "user", "content": "Hi"}]), np.int32)
    good, bad = (np.arange(len(ids)) >= start for start in (len(ids) - 4, 0))
    for name, mask in (("good", good), ("bad", bad)):
        write_shard(tmp_path / name, [Sample("a", "chat", ids, mask, "stop")], ["null"])
    assert run(monkeypatch, tmp_path / "good", "--tokenizer", directory) == 0
    assert run(monkeypatch, tmp_path / "bad", "--tokenizer", directory) == 1
    assert "100.0% of the tokens are supervised" in capsys.readouterr().err
    assert run(monkeypatch, tmp_path / "absent", "--tokenizer", directory) == 1
    assert "does not exist" in capsys.readouterr().err
