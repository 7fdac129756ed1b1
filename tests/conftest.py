"""Session fixtures: tiny models and one Ray cluster, each built once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # spinning threads of several processes stall each other
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

# A folder of the tests' own: one of them compares what a run leaves behind there.
tempfile.tempdir = str(Path(tempfile.gettempdir(), f"eagle3-tests-{os.getuid()}"))
Path(tempfile.tempdir).mkdir(mode=0o700, exist_ok=True)
os.environ["TMPDIR"] = tempfile.tempdir


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a target per family and random drafters `<family>-drafter`."""
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3", "mla", "glm"):
        tiny.write_target(root / family, family)
        attention = "mla" if family == "mla" else "llama"
        tiny.write_drafter(root / f"{family}-drafter", root / family, family, attention=attention)
    return root


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Dashboard address of one local cluster, with more logical CPUs than this machine may have."""
    import ray

    from eagle3_train.stream.store import FREE_AT_ONCE

    folders = (Path(__file__).parent.parent, Path(__file__).parent / "integration")
    context = ray.init(
        "local",  # whatever cluster an earlier process may have announced
        num_cpus=4,
        include_dashboard=True,
        object_store_memory=512 << 20,
        log_to_driver=False,
        _system_config=FREE_AT_ONCE,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(map(str, folders))}},
    )
    yield f"http://{context.dashboard_url}"
    ray.shutdown()
