"""What a run directory says of how it was made."""

from __future__ import annotations

from pathlib import Path

from eagle3_train import provenance
from eagle3_train.config import JobConfig
from eagle3_train.rundir import RunDir, write_atomic


def test_a_finished_training_keeps_its_own_record(tmp_path: Path) -> None:
    config = JobConfig.model_validate(
        {
            "name": "unit",
            "runs_dir": tmp_path,
            "target": {"path": "models/target-a"},
            "engine": {"max_model_len": 256},
            "corpus": {"max_len": 256},
            "stream": {"max_bytes_in_flight": 2**20},
        }
    )
    run = RunDir(config.run_path)
    provenance.record(config)
    assert "epochs: 1" in run.config.read_text()
    later = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 9})})
    provenance.record(later)
    assert "epochs: 9" in run.config.read_text()
    write_atomic(run.train_result, "{}")
    provenance.record(config)
    assert "epochs: 9" in run.config.read_text()
