"""The metrics record survives kills."""

from pathlib import Path

from eagle3_train.config_file import load_config
from eagle3_train.rundir import RunDir
from eagle3_train.runlog import MetricsLog, read_metrics

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
