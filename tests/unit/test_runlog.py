"""The metrics record survives kills, and a file is written whole or not at all."""

from pathlib import Path

import pytest

from eagle3_train.config_file import load_config
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.runlog import MetricsLog, read_metrics, reason

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    record = tmp_path / "metrics.jsonl"
    record.write_text('{"step": 1, "train/loss": 2.0}\n{"step": 2, "train/lo')
    assert read_metrics(record) == [{"step": 1, "train/loss": 2.0}]


def test_a_resumed_run_drops_the_steps_that_were_lost(tmp_path: Path) -> None:
    config = load_config([DEMO], [f"runs_dir={tmp_path}", "log.wandb_mode=disabled"])
    record = RunDir(config.run_path).metrics
    record.parent.mkdir(parents=True)
    record.write_text('{"step": 4, "a": 1}\n{"step": 5, "a": 2}\n{"step": 6, "a"')
    log = MetricsLog(config, resume_step=4)
    log.write(5, {"note": [1, 2]})
    log.close()
    assert read_metrics(record) == [{"step": 4, "a": 1}, {"step": 5, "note": [1, 2]}]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(tmp_path / "file", "\ud800")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder", b"new")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}
    assert (tmp_path / "file").read_text() == "old"


def test_what_a_worker_said_is_read_without_the_traceback_around_it() -> None:
    traceback = 'ray::f() (pid=7)\n  File "a.py", line 1, in f\n    raise {0}({1!r})\n{0}: {1}\n'
    user_error = ValueError(traceback.format("eagle3_train.x.EngineError", "no room; buy some"))
    assert reason(user_error) == "no room; buy some"
    began = traceback.format("ValueError", "packs do not fit; lower them")
    chained = RuntimeError(
        began + "\nThe above exception was the direct cause\nray.UserCodeException: UDF"
    )
    assert reason(chained) == "packs do not fit; lower them"
    assert reason(RuntimeError(traceback.format("KeyError", "'a'"))) == "KeyError: 'a'"
    assert reason(ValueError("two\nlines: of ours")) == "two\nlines: of ours"
