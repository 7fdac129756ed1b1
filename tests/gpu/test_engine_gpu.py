"""Capture on CUDA: states equal Hugging Face's, delivery costs little. Run by hand on a GPU:

bash benchmarks/h200.sh capture OUT

vLLM computes MLA only in 16 bits on CUDA, and float32 only in Triton's attention, exactly when TRITON_F32_DEFAULT=ieee. So
float32 shows that every row is the right one to the last digits, and bfloat16 that it is no other row: on these targets
bfloat16 moves a row by at most 5 % of its norm (Hugging Face, CPU), and the next boundary is at least 25 % away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3_train.engines.engine import Engine
from eagle3_train.engines.spec import EngineSpec, Purpose, Request
from tests import tiny

os.environ["TRITON_F32_DEFAULT"] = "ieee"  # before Triton compiles anything
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDARIES = {"llama": tuple(range(1, 9)), "mla": tuple(range(1, 7))}
ERROR = {"float32": 1e-3, "bfloat16": 0.1}  # of a row's norm


def spec(target: Path, boundaries: tuple[int, ...], **values: Any) -> EngineSpec:
    sizes: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,  # prompts are prefilled in parts
        "prefix_caching": True,
        "kv_cache_bytes": 256 << 20,
        "gpu_memory_utilization": 0.2,
    }
    return tiny.spec_of(target, "capture", boundaries, **(sizes | values))


def write(directory: Path, family: tiny.Family) -> Path:
    if family == "mla":
        return tiny.write_deepseek(directory, "cuda")
    return tiny.write_target(directory, family)


def expected(reference: Any, ids: list[int], boundaries: tuple[int, ...]) -> Tensor:
    unnormed: list[Tensor] = []
    hook = reference.model.norm.register_forward_pre_hook(lambda _, x: unnormed.append(x[0]))
    with torch.no_grad():
        output = reference(torch.tensor([ids], device="cuda"), output_hidden_states=True)
    hook.remove()
    states = [*output.hidden_states[:-1], unnormed[0]]
    return torch.stack([states[k][0] for k in boundaries], dim=1).cpu()


def assert_rows(what: str, got: Tensor, wanted: Tensor, dtype: str) -> None:
    """Every row (one token, one boundary) is the reference's up to what the dtype allows."""
    assert got.shape == wanted.shape, what
    error = (got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    print(f"\n{what} {dtype}: largest error {float(error.max()):.2e} of a row's norm")
    token, boundary = divmod(int(error.argmax()), error.shape[1])
    assert float(error.max()) < ERROR[dtype], (what, "token", token, "boundary column", boundary)


@pytest.mark.parametrize(
    ("family", "dtype", "handed_over", "enforce_eager"),
    [
        ("llama", "float32", "float32", True),
        ("mla", "bfloat16", "float32", True),  # converted on the way out
        ("llama", "bfloat16", "bfloat16", False),
        ("mla", "bfloat16", "bfloat16", False),
    ],
)
def test_chunked_cached_and_decoded_states_are_the_references(
    family: tiny.Family, dtype: str, handed_over: str, enforce_eager: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    target, boundaries = write(tmp_path / family, family), BOUNDARIES[family]
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = Engine(
        spec(
            target, boundaries, dtype=dtype, capture_dtype=handed_over, enforce_eager=enforce_eager
        )
    )
    try:
        shared = tiny.token_ids(120, 1)
        samples = [tiny.token_ids(n, n) for n in (1, 17, 64, 200)]
        samples += [np.concatenate([shared, tiny.token_ids(n, n)[2:]]) for n in (10, 50)]
        pack = engine.capture(samples)
        assert pack.bad == {}
        packed = pack.hidden.clone()
        pack.release()
        asked = [
            Request(str(i), tuple(tiny.token_ids(20 + i, i).tolist()), 40,
                    temperature=float(i % 2), ignore_eos=True, capture=True)
            for i in range(8)
        ]  # fmt: skip
        answers = [future.result() for future in [engine.submit(request) for request in asked]]
        states = []
        for answer in answers:
            assert answer.captured is not None
            states.append(answer.captured.hidden.clone())
            answer.captured.release()
    finally:
        engine.close()
    reference = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    ).cuda()
    wanted = torch.cat([expected(reference, s.tolist(), boundaries) for s in samples])
    assert_rows(f"{family} prefill", packed, wanted, dtype)
    wanted = torch.cat(
        [
            expected(
                reference, [*a.generation.prompt_ids, *a.generation.output_ids][:-1], boundaries
            )
            for a in answers
        ]
    )
    assert_rows(f"{family} decode", torch.cat(states), wanted, dtype)


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-8B's sizes; weights are random (load_format=dummy), so only the configuration is written."""
    from transformers import LlamaConfig

    directory = tmp_path_factory.mktemp("wide")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        dtype="bfloat16",
    ).save_pretrained(directory)
    tiny.write_tokenizer(directory)
    return directory


def wide_engine(target: Path, purpose: Purpose) -> Iterator[Engine]:
    taps: dict[str, Any] = {"boundaries": (2, 16, 29, 32)} if purpose == "capture" else {}
    engine = Engine(
        tiny.spec_of(
            target, purpose, load_format="dummy", enforce_eager=True,
            max_model_len=4096, max_num_batched_tokens=16384, gpu_memory_utilization=0.6, **taps,
        )
    )  # fmt: skip
    yield engine
    engine.close()


def prefill_rate(engine: Engine, packs: list[list[np.ndarray[Any, Any]]], capture: bool) -> float:
    """Tokens per second with eight packs in flight."""

    def read(pack: list[np.ndarray[Any, Any]]) -> int:
        if not capture:
            engine.generate([Request("r", tuple(sample.tolist())) for sample in pack])
            return sum(map(len, pack))
        states = engine.capture(pack)
        assert states.bad == {}
        states.release()
        return sum(map(len, pack))

    read(packs[0])
    started = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        tokens = sum(threads.map(read, packs))
    return tokens / (time.perf_counter() - started)


def test_handing_states_over_costs_at_most_three_percent_of_prefill(wide_target: Path) -> None:
    packs = [[tiny.token_ids(2048, 8 * i + j) for j in range(8)] for i in range(24)]
    rates = {}
    for purpose in ("plain", "capture"):
        for engine in wide_engine(wide_target, purpose):
            rates[purpose] = prefill_rate(engine, packs, purpose == "capture")
    print(f"\nprefill tok/s: {rates}, ratio {rates['capture'] / rates['plain']:.3f}")
    assert rates["capture"] >= 0.97 * rates["plain"]
