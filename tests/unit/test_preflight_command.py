"""The command line as a user runs it: what it imports, prints, writes and returns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eagle3_train.stages import preflight
from ray_jobs.preflight import main
from tests.unit.test_preflight_static import config, target

__all__ = ["target"]
ROOT = Path(__file__).parents[2]
ENGINES = {"vllm_version": "0.23.0", "sglang_version": "0.5.23"}


def written(folder, **sections):
    """A configuration file whose job passes the static depth."""
    job = config(folder, preflight=ENGINES | sections.pop("preflight", {}), **sections)
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    return file


def report_of(arguments, monkeypatch, capsys):
    """(exit status, what was printed)."""
    monkeypatch.setattr(sys, "argv", ["preflight.py", *map(str, arguments)])
    status = main()
    return status, capsys.readouterr().out


def test_the_static_depth_imports_no_engine_no_ray_and_no_model_code(target, tmp_path):
    command = ["ray_jobs/preflight.py", "-c", str(written(tmp_path)), "--depth", "static"]
    code = (
        f"import runpy, sys; sys.argv = {command}\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('MODULES', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    modules = done.stdout.partition("MODULES ")[2].split()
    assert "eagle3_train.preflight.static" in modules
    heavy = ("ray", "vllm", "wandb", "transformers.modeling_utils", "eagle3_train.preflight.live")
    assert [name for name in heavy if name in modules] == []
    assert [name for name in modules if ".modeling_llama" in name] == []


@pytest.mark.parametrize("fault", ["engine.tensor_parallel=-1", "tarfet.path=x"])
def test_an_unusable_configuration_is_a_failed_check_and_leaves_json(
    fault, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "report.json"
    arguments = ["-c", written(tmp_path), fault, "--json", file]
    status, text = report_of(arguments, monkeypatch, capsys)
    assert (status, "failed: configuration" in text) == (1, True)
    (check,) = json.loads(file.read_text())["checks"]
    assert fault.split("=")[0].split(".")[0] in check["reason"]


def test_a_report_that_cannot_be_written_is_still_printed(target, tmp_path, monkeypatch, capsys):
    arguments = ["-c", written(tmp_path), "--depth", "static", "--json", tmp_path]
    with pytest.raises(SystemExit, match=r"error: .* cannot be written"):
        report_of(arguments, monkeypatch, capsys)
    assert "nothing failed" in capsys.readouterr().out


def test_a_skipped_failure_is_named_and_nothing_failed_only_without_any(
    target, tmp_path, monkeypatch, capsys
):
    sections = {"engine": {"tensor_parallel": 3}, "preflight": {"skip": ("tensor_parallel",)}}
    arguments = ["-c", written(tmp_path, **sections), "--depth", "static"]
    status, text = report_of(arguments, monkeypatch, capsys)
    assert status == 0
    assert text.splitlines()[-1] == "failed, but preflight.skip names it: tensor_parallel"


def test_a_name_in_skip_that_is_no_check_lets_nothing_pass(target, tmp_path):
    sections = {"engine": {"tensor_parallel": 3}, "preflight": {"skip": ("tensor_paralel",)}}
    report = preflight.run(config(tmp_path, **sections), "static", tmp_path)
    assert "tensor_parallel" in [check.name for check in report.blocking]


def test_a_plan_survives_a_skipped_failure_or_says_why_it_is_left_out(target, tmp_path):
    sections = {"engine": {"gpus_per_worker": 0}, "train": {"gpus_per_worker": 0}}
    skip = {"skip": ("boundaries",), **ENGINES}
    at_the_end = config(tmp_path, drafter={"aux_layers": (2, 4, 7)}, preflight=skip, **sections)
    beyond = config(tmp_path, drafter={"aux_layers": (2, 4, 8)}, preflight=skip, **sections)
    assert preflight.run(at_the_end, "plan", tmp_path).plan is not None
    report = preflight.run(beyond, "plan", tmp_path)
    (check,) = [check for check in report.blocking if check.name == "plan"]
    assert "left out" in check.reason


def test_an_sglang_nobody_knows_is_not_dropped_in_silence(target, tmp_path):
    job = config(tmp_path, preflight={**ENGINES, "sglang_version": "0.99.0"})
    report = preflight.run(job, "static", tmp_path)
    assert [check.name for check in report.blocking] == ["serve_sglang"]


def test_a_missing_warm_start_is_told_by_its_own_key(target, tmp_path):
    job = config(tmp_path, drafter={"init_from": str(tmp_path / "absent")}, preflight=ENGINES)
    (check,) = preflight.run(job, "static", tmp_path).blocking
    assert check.name == "boundaries"
    assert "drafter.init_from" in check.action


def test_outside_a_cluster_the_live_depth_says_what_it_leaves_out(target, tmp_path):
    (target / "tokenizer.json").unlink()  # so that no engine starts
    cpu = {"gpus_per_worker": 0}
    job = config(tmp_path, preflight={**ENGINES, "skip": ("tokenizer",)}, engine=cpu, train=cpu)
    live = {check.name: check for check in preflight.run(job, "live", tmp_path).depths["live"]}
    assert "no cluster joined" in live["versions"].reason
    assert (live["engine_start"].verdict, "tokenizer" in live["engine_start"].reason) == (
        "fail",
        True,
    )


def test_a_live_depth_that_does_not_start_says_so(target, tmp_path):
    job = config(tmp_path, preflight=ENGINES, engine={"tensor_parallel": 3})
    report = preflight.run(job, "live", tmp_path / "target")
    assert "tensor_parallel" in report.summary()
    assert "not run" in report.depths["live"][0].reason
