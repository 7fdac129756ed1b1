"""Engines start, end and refuse cleanly, in the caller's process or in one of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_train.engines.engine import Engine
from eagle3_train.engines.launch import EngineError
from eagle3_train.engines.spec import Request
from tests import tiny

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def ask(length: int, **values: Any) -> Request:
    return tiny.ask(tiny.token_ids(length, 1), **values)


def test_a_process_holds_one_engine_which_closed_leaves_no_file_and_fails_what_waits(
    tiny_models: Path,
) -> None:
    before = shared_memory()
    spec = tiny.engine_spec(tiny_models / "llama", "capture", (4, 8))
    engine = Engine(spec)
    assert shared_memory() == before
    with pytest.raises(EngineError, match="one engine"):
        Engine(spec)
    waiting = engine.submit(ask(10, max_new_tokens=200, ignore_eos=True))
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        waiting.result(timeout=30)
    with pytest.raises(EngineError, match="closed"):
        engine.submit(ask(10)).result(timeout=30)
    assert shared_memory() == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"boundaries": (2, 4)}, "end with L=8"),
        ({"boundaries": (4, 8), "max_model_len": 4096}, "512 positions"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    tiny_models: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny.engine_spec(tiny_models / "llama", "capture", **values))


def test_a_core_in_its_own_process_hands_over_the_same_states(tiny_models: Path) -> None:
    states = []
    for own_process in (False, True):
        spec = tiny.engine_spec(tiny_models / "llama", "capture", (4, 8), own_process=own_process)
        engine = Engine(spec)
        pack = engine.capture([tiny.token_ids(length, length) for length in (3, 150, 40)])
        states.append(pack.hidden.clone())
        pack.release()
        captured = engine.submit(ask(10, max_new_tokens=20, ignore_eos=True)).result().captured
        assert captured is not None
        states[-1] = torch.cat([states[-1], captured.hidden])
        captured.release()
        engine.close()
    torch.testing.assert_close(states[0], states[1], atol=1e-5, rtol=1e-5)
