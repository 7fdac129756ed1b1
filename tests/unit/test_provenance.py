"""What a run directory says of how it was made."""

from __future__ import annotations

from pathlib import Path

from eagle3_train import provenance
from eagle3_train.config_file import load_config
from eagle3_train.rundir import RunDir, write_atomic
from tests.unit.test_config import DEMO


def test_a_finished_training_keeps_its_own_record(tmp_path: Path) -> None:
    def record(epochs: int) -> str:
        config = load_config([DEMO], [f"runs_dir={tmp_path}", f"train.epochs={epochs}"])
        provenance.record(config)
        return RunDir(config.run_path).config.read_text()

    assert "epochs: 1" in record(1)
    assert "epochs: 9" in record(9)
    write_atomic(RunDir(tmp_path / "demo").train_result, "{}")
    assert "epochs: 9" in record(1)
