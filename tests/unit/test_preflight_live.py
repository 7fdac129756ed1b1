"""The live checks name what is wrong with an engine's states; Transformers stands in for the engine."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.model import Eagle3Drafter, init_from_target
from eagle3_train.drafter.spec import DrafterSpec
from eagle3_train.engines.capture import StatesError
from eagle3_train.engines.launch import EngineError
from eagle3_train.engines.spec import Drafted
from eagle3_train.preflight import states
from eagle3_train.preflight.live import failure
from eagle3_train.preflight.nodes import compare_versions
from eagle3_train.target.weights import FrozenWeights
from tests.unit.drafter_reference import step_by_step_drafts

LAYERS, EPS = 6, 1e-5


@pytest.fixture(scope="module")
def engine():
    """(weights, every boundary's states [tokens, L+1, hidden], answer) of a small random target."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        rms_norm_eps=EPS,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(shape).eval()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3.0)
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    ids = torch.randint(64, (1, 12))
    with torch.no_grad():
        for _ in range(40):
            logits = model(ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        hidden = model(ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states
    every = torch.stack([*hidden[:-1], before_norm[-1]], dim=2)[0]
    weights = FrozenWeights(
        model.model.embed_tokens.weight.data,
        model.lm_head.weight.data,
        model.model.norm.weight.data,
    )
    return weights, every, tuple(ids[0].tolist())


def answer(engine, boundaries):
    _, every, ids = engine
    return states.Answer(ids, 12, every[:, list(boundaries)])


def test_the_right_states_pass_every_check(engine):
    right = answer(engine, (1, 2, 4, LAYERS))
    assert states.teacher_parity([right], engine[0], EPS, states.EXACT).verdict == "ok"
    assert states.agreement("batched", [right.states], [right.states], states.EXACT).verdict == "ok"


def test_layer_ids_off_by_one_are_caught(engine):
    check = states.teacher_parity(
        [answer(engine, (0, 1, 3, LAYERS - 1))], engine[0], EPS, states.EXACT
    )
    assert (check.name, check.verdict) == ("teacher_parity", "fail")


def test_a_missing_final_norm_is_caught(engine):
    without = engine[0]._replace(norm_weight=torch.ones(32))
    check = states.teacher_parity([answer(engine, (1, 2, 4, LAYERS))], without, EPS, states.EXACT)
    assert (check.name, check.verdict) == ("teacher_parity", "fail")


def test_states_that_are_not_finite_never_agree(engine):
    right = answer(engine, (1, 2, 4, LAYERS))
    broken = right.states.clone()
    broken[3, 1, 5] = float("nan")
    assert states.agreement("batched", [right.states], [broken], states.EXACT).verdict == "fail"


def test_states_of_another_sample_are_caught(engine):
    right = answer(engine, (1, 2, 4, LAYERS))
    check = states.agreement(
        "prefix_hit", [right.states], [right.states.roll(1, 0)], states.ROUNDED
    )
    assert (check.name, check.verdict) == ("prefix_hit", "fail")


def drafts(engine, boundaries):
    """Draft lists of an engine that taps `boundaries`."""
    weights, _, ids = engine
    spec = DrafterSpec(
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=64,
        draft_vocab_size=64,
        max_position_embeddings=128,
    )
    drafter, target = Eagle3Drafter(spec), FrozenTarget(*weights, norm_eps=EPS)
    init_from_target(drafter, target, torch.Generator().manual_seed(0))
    aux = answer(engine, boundaries).states[:, :-1].flatten(1)
    lists = []
    for t in range(11, 40):
        known = torch.tensor(ids[: t + 2])
        drafted, _ = step_by_step_drafts(drafter, target, known, aux[: t + 1], 3)
        lists.append(Drafted("0", t, ids[t + 1], tuple(drafted)))
    return lists, drafter, target


def test_drafts_from_other_layers_while_serving_are_caught(engine):
    right = answer(engine, (1, 2, 4, LAYERS))
    lists, drafter, target = drafts(engine, (1, 2, 4, LAYERS))
    assert states.draft_parity([(right, lists)], drafter, target, states.EXACT).verdict == "ok"
    shifted, *_ = drafts(engine, (2, 3, 5, LAYERS))
    check = states.draft_parity([(right, shifted)], drafter, target, states.ROUNDED)
    assert (check.name, check.verdict) == ("draft_parity", "fail")
    assert states.draft_parity([(right, [])], drafter, target, states.ROUNDED).verdict == "fail"


def test_an_answer_may_part_only_where_two_tokens_tie(engine):
    weights, _, ids = engine
    right = answer(engine, (1, 2, 4, LAYERS))
    assert states.lossless([right], [ids], weights, EPS, states.EXACT).verdict == "ok"
    logits = states.teacher_logits(right.states[29:30], weights, EPS)
    second, last = (int(logits.argsort(descending=True)[0, place]) for place in (1, -1))
    gap = float((logits[0, ids[30]] - logits[0, second]) / logits.abs().max())
    tied = states.Rounding(1.01 * gap, 0.99)
    for token, rounding, verdict in (
        (second, tied, "ok"),
        (second, states.EXACT, "fail"),
        (last, tied, "fail"),
    ):
        changed = (*ids[:30], token, *ids[31:])
        assert states.lossless([right], [changed], weights, EPS, rounding).verdict == verdict
    assert states.lossless([right], [ids[:30]], weights, EPS, states.ROUNDED).verdict == "fail"


def test_rounded_states_pass_and_wrong_ones_still_fail(engine):
    right = answer(engine, (1, 2, 4, LAYERS))
    rounded = replace(right, states=right.states.bfloat16().float())
    assert states.teacher_parity([rounded], engine[0], EPS, states.ROUNDED).verdict == "ok"
    assert (
        states.agreement("decoded", [right.states], [rounded.states], states.ROUNDED).verdict
        == "ok"
    )
    wrong = answer(engine, (0, 1, 3, LAYERS - 1))
    assert states.teacher_parity([wrong], engine[0], EPS, states.ROUNDED).verdict == "fail"
    assert (
        states.agreement("decoded", [right.states], [wrong.states], states.ROUNDED).verdict
        == "fail"
    )


def test_a_node_with_other_versions_is_named():
    same = {"ray": "2.60.0", "python": "3.11.7"}
    assert compare_versions({"10.0.0.1": same, "10.0.0.2": same}).verdict == "ok"
    check = compare_versions({"10.0.0.1": same, "10.0.0.2": {**same, "ray": "2.59.0"}})
    assert check.verdict == "fail"
    assert "2.59.0 on 10.0.0.2" in check.reason


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (StatesError("61 tokens captured, 77 expected"), "states"),
        (EngineError("vLLM died"), "drafter_start"),
        (ValueError("the drafter does not load"), "drafter_start"),
        (RuntimeError("CUDA out of memory"), "drafter_start"),
    ],
)
def test_whatever_an_engine_raises_is_a_failed_check_of_the_right_name(error, name):
    check = failure("drafter_start", error)
    assert (check.name, check.verdict, bool(check.action)) == (name, "fail", True)
    assert str(error) in check.reason


def test_no_hit_and_nothing_compared_are_not_ok(engine):
    right = answer(engine, (1, 2, 4, LAYERS))
    twice = [right.states], [right.states]
    assert states.prefix_hit(*twice, 32, states.EXACT).verdict == "ok"
    assert states.prefix_hit(*twice, 0, states.EXACT).verdict == "warn"
    silent = replace(right, ids=right.ids[:12], states=right.states[:11])
    assert states.teacher_parity([silent], engine[0], EPS, states.EXACT).verdict == "fail"
    empty = [right.states[:0]]
    assert states.agreement("batched", empty, empty, states.EXACT).verdict == "fail"
    assert states.lossless([], [], engine[0], EPS, states.EXACT).verdict == "fail"
