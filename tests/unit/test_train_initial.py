"""What training starts from is one thing: first weights, checkpoints and draft vocabulary belong together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_train.config import JobConfig
from eagle3_train.records import Sample
from eagle3_train.rundir import RunDir
from eagle3_train.training.initial import frozen_target, write_initial
from tests.tiny import AUX, VOCAB, write_target


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "unit",
            "runs_dir": tmp_path,
            "target": {"path": str(write_target(tmp_path / "target", "llama"))},
            "drafter": {"aux_layers": AUX["llama"], "draft_vocab_size": VOCAB // 4},
            "stream": {"max_bytes_in_flight": 2**20},
        }
    )


def samples(first: int) -> list[Sample]:
    ids = np.arange(first, first + VOCAB // 4, dtype=np.int32)
    return [Sample("a", "chat", ids, np.ones(len(ids), bool), "stop")]


def test_weights_that_began_with_another_draft_vocabulary_are_refused(config: JobConfig) -> None:
    run = RunDir(config.run_path)
    write_initial(config, samples(0))
    write_initial(config, samples(VOCAB // 2))  # a restart keeps what is there
    begun = frozen_target(config, torch.float32).d2t
    run.draft_vocab.unlink()
    with pytest.raises(ValueError, match=r"new name, or delete .*train too"):
        write_initial(config, samples(VOCAB // 2))
    write_initial(config, samples(0))  # the same vocabulary again
    torch.testing.assert_close(frozen_target(config, torch.float32).d2t, begun)
    other = config.model_copy(update={"name": "other"})
    write_initial(other, samples(VOCAB // 2))
    RunDir(other.run_path).draft_vocab.replace(run.draft_vocab)
    with pytest.raises(ValueError, match="another draft vocabulary"):
        write_initial(config, samples(0))


def test_weights_that_name_no_vocabulary_are_refused(config: JobConfig) -> None:
    run = RunDir(config.run_path)
    write_initial(config, samples(0))
    save_file(load_file(run.initial_weights), run.initial_weights)
    with pytest.raises(ValueError, match="or to none"):
        write_initial(config, samples(0))


def test_checkpoints_without_their_first_weights_are_refused(config: JobConfig) -> None:
    run = RunDir(config.run_path)
    write_initial(config, samples(0))
    (run.train_storage / "ray_train" / "checkpoint_1").mkdir(parents=True)
    run.initial_weights.unlink()
    with pytest.raises(ValueError, match="checkpoints but not the weights"):
        write_initial(config, samples(0))
