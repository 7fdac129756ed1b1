"""The arena the states pass through: bounded, shared, given back whatever happens to a request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from eagle3_train.engines import versions
from eagle3_train.engines.engine import Engine
from eagle3_train.stream.states import decode
from tests import tiny

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def small_arena(tiny_models: Path) -> Iterator[Engine]:
    """Room for 300 tokens; states in FP8."""
    row = 2 * (tiny.HIDDEN + 4)
    engine = Engine(
        tiny.engine_spec(
            tiny_models / "llama",
            "capture",
            (4, 8),
            max_num_seqs=4,
            kv_cache_bytes=16 << 20,
            capture_dtype="float8_e4m3fn",
            arena_bytes=300 * (row + 4),
        )
    )
    yield engine
    engine.close()


def regions(engine: Engine) -> dict[int, int]:
    """What is handed out of the arena: offset -> bytes."""
    assert engine._captures is not None
    return dict(engine._captures._arena._used)


def test_more_states_than_the_arena_holds_wait_for_room_and_all_arrive(small_arena: Engine) -> None:
    before = regions(small_arena)
    seen: list[int] = []

    def consume(seed: int) -> None:
        pack = small_arena.capture([tiny.token_ids(100 + seed, seed)])
        assert pack.bad == {}
        seen.append(len(pack.hidden))
        pack.release()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(consume, range(16)))
    assert sorted(seen) == [100 + seed for seed in range(16)]
    answers = [
        small_arena.submit(tiny.ask(tiny.token_ids(60, seed), max_new_tokens=40, ignore_eos=True))
        for seed in range(8)
    ]
    for answer in answers:  # eight answers of 99 tokens, room for three
        captured = answer.result().captured
        assert captured is not None
        assert len(captured.hidden) == 99
        captured.release()
    assert regions(small_arena) == before


def test_fp8_states_are_the_references_but_for_their_rounding(
    small_arena: Engine, tiny_models: Path
) -> None:
    reference = AutoModel.from_pretrained(tiny_models / "llama", dtype=torch.float32).eval()
    ids = tiny.token_ids(70, 1)
    with torch.no_grad():
        outputs = reference(torch.from_numpy(ids).long()[None], output_hidden_states=True)
    pack = small_arena.capture([ids])
    states = decode(pack.hidden.flatten(1), tiny.HIDDEN, torch.float32)[:, : tiny.HIDDEN]
    pack.release()
    expected = outputs.hidden_states[4][0]
    largest = expected.abs().amax(-1, keepdim=True)
    assert ((states - expected).abs() <= expected.abs() / 16 + largest / 2**18).all()
    assert not torch.equal(states, expected)


def test_a_pack_that_can_never_fit_is_refused_with_the_remedy(small_arena: Engine) -> None:
    with pytest.raises(ValueError, match="arena_bytes"):
        small_arena.capture([tiny.token_ids(200, 1), tiny.token_ids(200, 2)])


def test_a_refused_sample_is_named_and_its_neighbours_are_untouched(small_arena: Engine) -> None:
    before = regions(small_arena)
    pack = small_arena.capture([tiny.token_ids(9, 1), np.array([3, 10_000], dtype=np.int32)])
    assert list(pack.bad) == [1]
    assert not pack.hidden[9:].any()
    assert pack.hidden[:9].abs().amax() > 0
    pack.release()
    assert regions(small_arena) == before


def test_an_aborted_request_yields_no_states_and_frees_its_blocks(small_arena: Engine) -> None:
    before = regions(small_arena)
    small_arena.submit(tiny.ask(tiny.token_ids(10, 1), max_new_tokens=200, ignore_eos=True))
    while not (running := small_arena._call(lambda: list(small_arena._running))):
        pass
    small_arena._call(lambda: small_arena._llm.abort_request(running))
    for seed in range(8):  # as many blocks as the engine has, several times over
        small_arena.capture([tiny.token_ids(250, seed)]).release()
    assert regions(small_arena) == before
    assert not small_arena._call(lambda: versions.core_is_busy(small_arena._llm))
