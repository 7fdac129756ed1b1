"""Configuration: every shipped file parses, every mistake is named, nothing heavy is imported."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_train.config import JobConfig
from eagle3_train.config_file import load_config
from ray_jobs import cli

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo.yaml"


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_shipped_configuration_is_valid(file: Path) -> None:
    assert load_config([file]).name


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"train\.lrr: unknown key"):
        load_config([DEMO], ["train.lrr=1"])


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    file = tmp_path / "half.yaml"
    file.write_text("name: half\nstream: {max_bytes_in_flight: 1}\n")
    with pytest.raises(ValueError, match="target: required, not given"):
        load_config([file])


def test_a_value_out_of_range_is_named_with_what_was_given() -> None:
    with pytest.raises(ValueError, match=r"train\.lr: .*got -1"):
        load_config([DEMO], ["train.lr=-1"])


def test_a_missing_file_and_broken_yaml_say_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no configuration file"):
        load_config([tmp_path / "none.yaml"])
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_config([broken])


def test_an_override_that_is_no_yaml_is_named() -> None:
    with pytest.raises(ValueError, match="the value is not valid YAML"):
        load_config([DEMO], ["corpus.sources=[a"])


def test_the_command_line_passes_overrides_through_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    override = "corpus.sources=[s3://bucket/a//b.jsonl]"
    monkeypatch.setattr(sys, "argv", ["job.py", "-c", str(DEMO), override, "--train.epochs=2"])
    config = cli.parse("")
    assert config.corpus.sources == ("s3://bucket/a//b.jsonl",)
    assert config.train.epochs == 2


def test_files_compose_left_to_right_and_overrides_win(tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("train: {epochs: 9, lr: 0.5}\n")
    config = load_config([DEMO, more], ["train.lr=0.25"])
    assert (config.train.epochs, config.train.lr) == (9, 0.25)
    assert config.train.workers == load_config([DEMO]).train.workers


def test_a_sample_longer_than_a_pack_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"raise stream\.tokens_per_pack"):
        load_config([DEMO], ["stream.tokens_per_pack=16"])


def test_evaluations_that_miss_the_checkpoints_are_refused() -> None:
    for every in (20, 240):  # of the demo's 80
        assert load_config([DEMO], [f"train.checkpoint_every={every}"]).train.eval_every == 80
    with pytest.raises(ValueError, match="one must be a multiple of the other"):
        load_config([DEMO], ["train.checkpoint_every=30"])


def test_directories_mean_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "smollm2-135m-instruct").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config = load_config([DEMO])
    assert config.run_path == tmp_path / "runs" / "demo"
    assert config.target.path == str(tmp_path / "models" / "smollm2-135m-instruct")
    assert load_config([DEMO], ["target.path=org/model"]).target.path == "org/model"


def test_a_mistyped_target_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [f"runs_dir={tmp_path}/runs", f"target.path={tmp_path}/typo"]
    monkeypatch.setattr(sys, "argv", ["job", "-c", str(DEMO), *paths])
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="typo' is no directory"):
        cli.run("a job", lambda _: None)
    assert not (tmp_path / "runs").exists()


def test_configuration_survives_json_and_is_frozen() -> None:
    config = load_config([DEMO])
    assert JobConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(ValueError, match="frozen"):
        config.name = "other"  # type: ignore[misc]


def test_every_field_is_documented_and_the_document_is_current() -> None:
    docs = runpy.run_path(str(ROOT / "docs" / "write_config.py"))
    assert [key for key, _, text in docs["fields"]() if not text] == []
    assert (ROOT / "docs" / "config.md").read_text() == docs["document"](), "run `make docs`"


def test_configuration_imports_nothing_heavy() -> None:
    code = (
        "import sys, eagle3_train.config_file, eagle3_train.records, eagle3_train.rundir\n"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'wandb') if m in sys.modules])"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"
