"""From captured states to a served drafter: trained on a few answers, exported, validated, loaded by vLLM.

The drafter memorises the answers, so long drafts are accepted and rejected; losslessness then means something.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from eagle3_train.config import DrafterConfig
from eagle3_train.drafter.checkpoint import read_checkpoint, validate_checkpoint, write_checkpoint
from eagle3_train.drafter.checkpoint_format import Layout, ServedTarget
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.losses import LossOptions
from eagle3_train.drafter.model import Eagle3Drafter, init_from_target
from eagle3_train.drafter.rows import PackedBatch, plan_rows
from eagle3_train.drafter.spec import DrafterSpec
from eagle3_train.drafter.walk import walk_batch
from eagle3_train.engines.engine import Engine
from eagle3_train.engines.spec import Acceptance, Request
from eagle3_train.records import Generation
from eagle3_train.target.derive import drafter_spec
from eagle3_train.target.facts import read_facts
from eagle3_train.target.weights import read_frozen
from tests.tiny import AUX, LAYERS, VOCAB, engine_spec, token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

K, NEW_TOKENS, PROMPTS, DRAFT_VOCAB = 3, 40, 8, 256
Family = Literal["llama", "mla"]


@dataclass(frozen=True)
class Served:
    """What happened to one family. batch: all answers as one pack, with their states."""

    directory: Path
    spec: DrafterSpec
    served_target: ServedTarget
    frozen: FrozenTarget
    batch: PackedBatch
    plain: list[Generation]
    trained: list[Generation]
    untrained: list[Generation]
    counters: Acceptance
    untrained_counters: Acceptance


def requests(capture: bool) -> list[Request]:
    return [
        Request(
            str(i),
            tuple(token_ids(12 + i, i).tolist()),
            NEW_TOKENS,
            ignore_eos=True,
            capture=capture,
        )
        for i in range(PROMPTS)
    ]


def captured(
    target: Path, boundaries: tuple[int, ...]
) -> tuple[list[Generation], list[torch.Tensor]]:
    engine = Engine(engine_spec(target, "capture", boundaries, max_model_len=128))
    try:
        done = [engine.submit(request).result() for request in requests(capture=True)]
        states = []
        for completion in done:
            assert completion.captured is not None
            states.append(completion.captured.hidden.flatten(1).clone())
            completion.captured.release()
        return [completion.generation for completion in done], states
    finally:
        engine.close()


def packed(
    generations: list[Generation], states: list[torch.Tensor], spec: DrafterSpec
) -> PackedBatch:
    ids = [np.array([*g.prompt_ids, *g.output_ids], dtype=np.int32) for g in generations]
    masks = [np.arange(len(x)) >= len(g.prompt_ids) for x, g in zip(ids, generations, strict=True)]
    rows = torch.cat(states)
    width = spec.num_aux * spec.hidden_size
    return PackedBatch(plan_rows(ids, masks, K), rows[:, :width], rows[:, width:])


def train(drafter: Eagle3Drafter, frozen: FrozenTarget, batch: PackedBatch, steps: int) -> None:
    optimizer = torch.optim.Adam(drafter.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        drafter(
            batch, frozen, LossOptions(), float(batch.rows.supervised_starts), False
        ).loss.backward()
        optimizer.step()


@pytest.fixture(scope="module", params=["llama", "mla"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_models: Path
) -> Served:
    family: Family = request.param
    folder, target = tmp_path_factory.mktemp(family), tiny_models / family
    config = DrafterConfig(
        attention=family,
        aux_layers=AUX[family],
        draft_vocab_size=DRAFT_VOCAB,
        intermediate_size=128,
    )
    spec = drafter_spec(read_facts(target), config)
    plain, states = captured(target, (*AUX[family], LAYERS[family]))
    produced = torch.tensor([token for g in plain for token in g.output_ids]).unique()
    rest = torch.tensor([i for i in range(VOCAB) if i not in set(produced.tolist())])
    ids = torch.cat([produced, rest])[:DRAFT_VOCAB].sort().values
    weights = read_frozen(target, torch.float32)
    d2t = ids - torch.arange(DRAFT_VOCAB)
    eps = spec.rms_norm_eps
    frozen = FrozenTarget(weights.embed, weights.lm_head, weights.norm_weight, eps, d2t)
    batch = packed(plain, states, spec)
    drafter = Eagle3Drafter(spec)
    init_from_target(drafter, frozen, torch.Generator().manual_seed(0))
    reads = "deepseek" if family == "mla" else "output"
    served_target = ServedTarget(num_layers=LAYERS[family], serving_len=128, sglang_ids=reads)

    def export(name: str, layout: Layout = "eagle3") -> Path:
        directory, state = folder / name, drafter.state_dict()
        write_checkpoint(
            directory,
            spec,
            state,
            d2t,
            AUX[family],
            served_target,
            "float32",
            metadata={"target": str(target), "num_speculative_tokens": K},
            layout=layout,
        )
        validate_checkpoint(directory, spec, AUX[family], served_target)
        return directory

    before = export("untrained")
    train(drafter, frozen, batch, steps=100)
    after = export("trained")
    if family == "llama":  # the engine starts from the other layout, and must draft the same
        after = export("speculators", "speculators")
    values = {"drafter": str(after), "num_speculative_tokens": K}
    engine = Engine(engine_spec(target, "serve", max_model_len=128, **values))
    try:
        trained = engine.generate(requests(capture=False))
        counters = engine.acceptance()
        engine.load_drafter(str(before))
        untrained = engine.generate(requests(capture=False))
        later = engine.acceptance() - counters
    finally:
        engine.close()
    return Served(
        after, spec, served_target, frozen, batch, plain, trained, untrained, counters, later
    )


def outputs(generations: list[Generation]) -> list[tuple[int, ...]]:
    return [generation.output_ids for generation in generations]


def test_outputs_are_those_of_the_target_alone_token_for_token(served: Served) -> None:
    assert outputs(served.trained) == outputs(served.plain)
    assert outputs(served.untrained) == outputs(served.plain)


def test_the_trained_drafter_is_accepted_where_the_untrained_one_was_not(served: Served) -> None:
    trained, untrained = (
        1 + sum(counters.accepted_per_position) / counters.num_drafts
        for counters in (served.counters, served.untrained_counters)
    )
    assert trained > 1.5
    assert untrained < trained - 0.3


def test_the_engine_drafts_exactly_the_rounds_that_the_exported_weights_predict(
    served: Served,
) -> None:
    spec, tensors, d2t, boundaries = read_checkpoint(served.directory, served.spec)
    assert (spec, d2t is not None) == (served.spec, True)
    assert boundaries is not None
    drafter = Eagle3Drafter(spec)
    drafter.load_state_dict(tensors)
    walked = walk_batch(drafter, served.frozen, served.batch)[1]
    assert served.counters.num_drafts == walked.rounds[K - 1]
    # vLLM also counts drafts accepted beyond max_tokens: at most K for each answer.
    surplus = sum(served.counters.accepted_per_position) - walked.accepted[K - 1]
    assert 0 <= surplus <= K * PROMPTS
