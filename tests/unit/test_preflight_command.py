"""The command line as a user runs it: what it imports, prints, writes and returns."""

import subprocess
import sys
from pathlib import Path

import yaml

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
