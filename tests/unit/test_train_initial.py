"""What training starts from is one thing: first weights, checkpoints and draft vocabulary belong together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_train.config import JobConfig
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.model import Eagle3Drafter
from eagle3_train.records import Sample
from eagle3_train.rundir import RunDir
from eagle3_train.training.initial import (
    check_initial,
    load_initial,
    renderer_of,
    spec_of,
    write_initial,
)
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


def begun(config: JobConfig) -> FrozenTarget:
    drafter = Eagle3Drafter(spec_of(config))
    frozen = load_initial(config, drafter, torch.float32)
    torch.testing.assert_close(drafter.lm_head.weight.detach(), frozen.draft_head)
    return frozen


def test_first_weights_keep_the_draft_vocabulary_they_began_with(config: JobConfig) -> None:
    write_initial(config, samples(0))
    assert begun(config).draft_ids.tolist() == list(range(VOCAB // 4))
    assert check_initial(config, renderer_of(config)) == {"chat": 1.0, "all": 1.0}
    write_initial(config, samples(VOCAB // 2))  # a restart keeps what is there
    assert begun(config).draft_ids.tolist() == list(range(VOCAB // 4))
    wide = config.drafter.model_copy(update={"draft_vocab_size": None})
    whole = config.model_copy(update={"name": "whole", "drafter": wide})
    write_initial(whole, samples(0))
    assert begun(whole).d2t is None


def test_weights_that_began_with_another_draft_vocabulary_are_refused(config: JobConfig) -> None:
    write_initial(config, samples(0))
    small = config.drafter.model_copy(update={"draft_vocab_size": VOCAB // 8})
    with pytest.raises(
        ValueError, match=r"began with 128; give the run a new name, or delete .*train"
    ):
        write_initial(config.model_copy(update={"drafter": small}), samples(0))
    template = Path(config.target.path) / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    with pytest.raises(
        ValueError, match=r"hash of tokenizer and template is \w+, but this run began"
    ):
        write_initial(config, samples(0))


def test_weights_that_name_no_vocabulary_are_refused(config: JobConfig) -> None:
    run = RunDir(config.run_path)
    write_initial(config, samples(0))
    save_file(load_file(run.initial_weights), run.initial_weights)
    with pytest.raises(ValueError, match="safetensors cannot be used"):
        write_initial(config, samples(0))
    run.initial_weights.write_bytes(b"junk")
    with pytest.raises(ValueError, match="safetensors cannot be used"):
        write_initial(config, samples(0))


def test_checkpoints_without_their_first_weights_are_refused(config: JobConfig) -> None:
    run = RunDir(config.run_path)
    write_initial(config, samples(0))
    (run.train_storage / "ray_train" / "checkpoint_1").mkdir(parents=True)
    run.initial_weights.unlink()
    with pytest.raises(ValueError, match="checkpoints but not the weights"):
        write_initial(config, samples(0))
