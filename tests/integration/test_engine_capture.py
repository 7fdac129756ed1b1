"""Hidden states captured by vLLM are Hugging Face's, boundary by boundary, however they were computed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from eagle3_train.engines.capture import Completion
from eagle3_train.engines.engine import Engine
from eagle3_train.engines.spec import Request
from tests import tiny

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

BLOCK = 32
# Every boundary that can be tapped: neither vLLM's DeepSeek class nor a hook taps the embedding.
BOUNDARIES = {
    "llama": tuple(range(9)),
    "qwen3": tuple(range(7)),
    "mla": tuple(range(1, 7)),
    "glm": tuple(range(1, 7)),
}


@dataclass(frozen=True)
class Tapped:
    """A capture engine and the same model in Hugging Face."""

    engine: Engine
    reference: Any
    boundaries: tuple[int, ...]

    def expected(self, ids: npt.NDArray[np.int32]) -> Tensor:
        """[tokens, boundaries, hidden]; the last boundary is taken before the final norm."""
        unnormed: list[Tensor] = []
        hook = self.reference.model.norm.register_forward_pre_hook(
            lambda _, inputs: unnormed.append(inputs[0])
        )
        with torch.no_grad():
            output = self.reference(torch.from_numpy(ids).long()[None], output_hidden_states=True)
        hook.remove()
        states = [*output.hidden_states[:-1], unnormed[0]]
        return torch.stack([states[k][0] for k in self.boundaries], dim=1)

    def assert_captured(self, completion: Completion) -> None:
        """The states of prompt and answer but the last token are the reference's."""
        generation, captured = completion.generation, completion.captured
        assert captured is not None
        ids = np.array([*generation.prompt_ids, *generation.output_ids][:-1], dtype=np.int32)
        np.testing.assert_array_equal(captured.token_ids.numpy(), ids)
        torch.testing.assert_close(captured.hidden, self.expected(ids), atol=1e-4, rtol=1e-4)
        captured.release()


@pytest.fixture(scope="module", params=["llama", "qwen3", "mla", "glm"])
def tapped(request: pytest.FixtureRequest, tiny_models: Path) -> Iterator[Tapped]:
    from transformers import AutoModelForCausalLM

    family = request.param
    # vLLM's MLA on CPU computes whole prompts and keeps no prefixes.
    traits: dict[str, Any] = (
        {}
        if family == "mla"
        else {
            "chunked_prefill": True,
            "prefix_caching": True,
            "max_num_batched_tokens": 48,
            "block_size": BLOCK,
        }
    )
    if family == "glm":  # vLLM's class has no taps
        traits["tap_by_hooks"] = "Glm4MoeForCausalLM"
    engine = Engine(tiny.engine_spec(tiny_models / family, "capture", BOUNDARIES[family], **traits))
    reference = AutoModelForCausalLM.from_pretrained(
        tiny_models / family, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    yield Tapped(engine, reference, BOUNDARIES[family])
    engine.close()


def test_a_pack_of_prompts_longer_than_an_engine_step_equals_the_reference(tapped: Tapped) -> None:
    samples = [tiny.token_ids(length, length) for length in (1, 20, BLOCK, 90, 200)]
    pack = tapped.engine.capture(samples)
    assert pack.bad == {}
    expected = torch.cat([tapped.expected(sample) for sample in samples])
    torch.testing.assert_close(pack.hidden, expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(pack.token_ids.numpy(), np.concatenate(samples))
    pack.release()


def test_a_prefix_that_is_cached_is_captured_whole(tapped: Tapped) -> None:
    shared = tiny.token_ids(100, 7)
    for tail in (10, 10, 60):
        ids = np.concatenate([shared, tiny.token_ids(tail + 2, tail)[2:]])
        tapped.assert_captured(tapped.engine.submit(tiny.ask(ids)).result())


def test_states_of_an_answer_come_from_the_request_that_wrote_it(tapped: Tapped) -> None:
    requests = [
        tiny.ask(tiny.token_ids(15, 1), max_new_tokens=24, ignore_eos=True),
        tiny.ask(tiny.token_ids(40, 2), max_new_tokens=40, ignore_eos=True, temperature=1.0),
        tiny.ask(tiny.token_ids(33, 3), max_new_tokens=1),
    ]
    for future in [tapped.engine.submit(request) for request in requests]:
        tapped.assert_captured(future.result())


def test_an_answer_that_stops_early_has_states_up_to_its_stop_token(tapped: Tapped) -> None:
    ids = tiny.token_ids(15, 1)
    free = tapped.engine.generate([Request("r", tuple(ids.tolist()), 8, ignore_eos=True)])[0]
    stop = free.output_ids[4]
    completion = tapped.engine.submit(
        tiny.ask(ids, max_new_tokens=8, ignore_eos=True, stop_token_ids=(stop,))
    ).result()
    generation = completion.generation
    assert generation.finish_reason == "stop"
    assert generation.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]
    tapped.assert_captured(completion)


def test_callers_on_many_threads_each_get_their_own_states(tapped: Tapped) -> None:
    samples = [tiny.token_ids(30 + 7 * i, 50 + i) for i in range(12)]
    with ThreadPoolExecutor(6) as threads:
        packs = list(threads.map(lambda sample: tapped.engine.capture([sample]), samples))
    for pack, sample in zip(packs, samples, strict=True):
        torch.testing.assert_close(pack.hidden, tapped.expected(sample), atol=1e-4, rtol=1e-4)
        pack.release()
