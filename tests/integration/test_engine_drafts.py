"""Draft parity: every list of draft tokens vLLM proposes is the one our drafter computes from captured states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_train.drafter.checkpoint import read_checkpoint
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.model import Eagle3Drafter
from eagle3_train.engines.engine import Engine
from eagle3_train.engines.spec import Drafted, Request
from eagle3_train.records import Generation
from eagle3_train.target.weights import read_frozen
from tests import tiny
from tests.unit.drafter_reference import step_by_step_drafts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

K, PROMPTS, NEW_TOKENS = 4, 8, 40


@dataclass(frozen=True)
class Round:
    """One list of drafts with the request it belongs to."""

    answer: int
    drafted: Drafted


def requests(capture: bool) -> list[Request]:
    return [
        Request(
            str(i), tuple(tiny.token_ids(10 + 3 * i, i).tolist()), NEW_TOKENS,
            ignore_eos=True, capture=capture,
        )
        for i in range(PROMPTS)
    ]  # fmt: skip


def capture(target: Path, boundaries: tuple[int, ...]) -> tuple[list[Generation], list[Tensor]]:
    """Greedy answers and the aux states [tokens, 3 * hidden] of everything that was read."""
    engine = Engine(tiny.engine_spec(target, "capture", boundaries, max_model_len=128))
    answers, states = [], []
    for future in [engine.submit(request) for request in requests(capture=True)]:
        completion = future.result()
        assert completion.captured is not None
        answers.append(completion.generation)
        states.append(completion.captured.hidden[:, :-1].flatten(1).clone())
        completion.captured.release()
    engine.close()
    return answers, states


def serve(
    target: Path, drafters: Sequence[Path]
) -> list[tuple[list[Generation], list[Round], Any]]:
    """What one engine answers and drafts with each of the drafters, swapped in place."""
    values = {"drafter": str(drafters[0]), "num_speculative_tokens": K}
    engine = Engine(tiny.engine_spec(target, "serve", max_model_len=128, **values))
    engine.record_drafts()
    served = []
    for drafter in drafters:
        engine.load_drafter(str(drafter))
        before = engine.acceptance()
        answers = engine.generate(requests(capture=False))
        drafted = engine.take_drafts()
        order = sorted({d.request_id for d in drafted}, key=lambda key: int(key.split("-")[0]))
        rounds = [Round(order.index(d.request_id), d) for d in drafted]
        served.append((answers, rounds, engine.acceptance() - before))
    engine.close()
    return served


def ours(directory: Path, target: Path) -> tuple[Eagle3Drafter, FrozenTarget]:
    """The drafter of a checkpoint and the target tensors it shares."""
    spec, tensors, d2t, _ = read_checkpoint(directory)
    drafter = Eagle3Drafter(spec)
    drafter.load_state_dict(tensors)
    weights = read_frozen(target, torch.float32)
    frozen = FrozenTarget(
        weights.embed, weights.lm_head, weights.norm_weight, spec.rms_norm_eps, d2t
    )
    return drafter, frozen


@pytest.mark.parametrize("family", ["llama", "qwen3", "mla"])
def test_every_list_of_drafts_is_ours_for_each_drafter_and_the_answers_are_the_targets(
    family: tiny.Family, tiny_models: Path, tmp_path: Path
) -> None:
    target = tiny_models / family
    first = tiny_models / f"{family}-drafter"
    attention = "mla" if family == "mla" else "llama"
    second = tiny.write_drafter(tmp_path / "second", target, family, seed=1, attention=attention)
    plain, states = capture(target, (*tiny.AUX[family], tiny.LAYERS[family]))

    for directory, (answers, rounds, acceptance) in zip(
        (first, second), serve(target, [first, second]), strict=True
    ):
        assert [a.output_ids for a in answers] == [a.output_ids for a in plain]
        drafter, frozen = ours(directory, target)
        compared = 0
        for round_ in rounds:
            generation, drafted = plain[round_.answer], round_.drafted
            ids = torch.tensor([*generation.prompt_ids, *generation.output_ids])
            at = drafted.position + 1
            if at >= len(ids):  # drafted past the end of the answer
                continue
            assert drafted.next_token == int(ids[at])
            aux = states[round_.answer][:at]
            expected, _ = step_by_step_drafts(drafter, frozen, ids[: at + 1], aux, K)
            assert list(drafted.draft_ids) == expected, (family, round_.answer, at)
            compared += 1
        assert compared >= PROMPTS * NEW_TOKENS // 2
        assert {r.drafted.position for r in rounds} >= {len(g.prompt_ids) - 1 for g in plain}
        counters = [acceptance.num_drafts, *acceptance.accepted_per_position]
        assert counters == sorted(counters, reverse=True)
        assert counters[0] > 0
