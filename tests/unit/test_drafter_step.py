"""The fast training step equals its float64 statement, in loss and in every gradient."""

import gc
from dataclasses import replace
from typing import get_args

import pytest
import torch

from eagle3_train.drafter import losses
from eagle3_train.drafter.drafting import draft_logits
from eagle3_train.drafter.losses import LossKind, LossOptions
from eagle3_train.drafter.model import Eagle3Drafter
from eagle3_train.drafter.spec import DrafterSpec, RopeSpec
from eagle3_train.drafter.walk import walk_batch
from tests.unit.drafter_cases import (
    MASKS,
    attention_errors,
    gradients,
    llama_spec,
    make_document,
    make_drafter,
    make_target,
    mla_spec,
    pack,
    twin,
)
from tests.unit.drafter_reference import (
    document_outputs,
    reference_loss,
    step_by_step_drafts,
    supervised,
    target_logits,
)

STEPS = 4


def documents_of(spec: DrafterSpec, masks=MASKS):
    return [make_document(spec, mask, seed) for seed, mask in enumerate(masks, 10)]


def case(spec: DrafterSpec, masks=MASKS):
    return make_drafter(spec), make_target(spec), pack(documents_of(spec, masks), STEPS)


def assert_step_equals_reference(spec: DrafterSpec, options: LossOptions, masks=MASKS, steps=STEPS):
    target, fast = make_target(spec), make_drafter(spec)
    naive, documents = twin(fast), documents_of(spec, masks)
    expected = reference_loss(naive, documents, target, options, steps, normaliser=7.0)
    expected.backward()
    output = fast(pack(documents, steps), target, options, 7.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
    wanted, got = gradients(naive), gradients(fast)
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            got[name], gradient, rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "spec",
    [
        llama_spec(),
        llama_spec(draft_vocab_size=48),
        llama_spec(num_layers=3),
        llama_spec(norm_output=True),
        llama_spec(fc_norm=True, norm_before_fc=True),
        llama_spec(num_aux=1, num_kv_heads=4),
        mla_spec(),
        mla_spec(q_lora_rank=None, fc_norm=True, norm_output=True),
        mla_spec(num_layers=2),
    ],
    ids=lambda spec: (
        f"{spec.attention}-{spec.num_layers}-{spec.draft_vocab_size}-{spec.norm_output}-{spec.fc_norm}"
    ),
)
def test_loss_and_gradients_equal_the_float64_reference(spec):
    assert_step_equals_reference(spec, LossOptions())


@pytest.mark.parametrize("kind", get_args(LossKind))
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_every_loss_equals_the_reference_in_any_chunking(kind, chunk_bytes, monkeypatch):
    monkeypatch.setitem(losses._CHUNK_BYTES, "cpu", chunk_bytes)
    monkeypatch.setitem(losses.MIN_CHUNK_ROWS, "cpu", 5)
    assert_step_equals_reference(llama_spec(), LossOptions(kind=kind, decay=0.7))


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_the_gradient_of_every_row_loss_is_the_derivative_of_its_value(kind):
    g = torch.Generator().manual_seed(3)
    log_p = torch.randn(6, 9, generator=g, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(6, 9, generator=g, dtype=torch.float64, requires_grad=True)
    value, gradient = losses.ROW_LOSSES[kind](log_p, logits.log_softmax(-1))
    if kind == "lk_lambda":  # its blend is a constant in the derivative
        share = torch.exp(
            -3.0 * (1 - losses.ROW_LOSSES["tv"](log_p, logits.log_softmax(-1))[0])
        ).detach()
        tv = losses.ROW_LOSSES["tv"](log_p, logits.log_softmax(-1))[0]
        value = share * (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1) + (1 - share) * tv
    (derived,) = torch.autograd.grad(value.sum(), logits)
    torch.testing.assert_close(gradient.detach(), derived)


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_scaled_rope_is_the_same_in_both(rope_type):
    rope = RopeSpec(
        rope_type=rope_type,
        theta=100.0,
        factor=4.0,
        original_max_position_embeddings=8,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert_step_equals_reference(llama_spec(rope=rope), LossOptions(), MASKS[:2])


def test_one_ttt_step_equals_the_reference():
    assert_step_equals_reference(llama_spec(), LossOptions(), steps=1)
    assert_step_equals_reference(llama_spec(norm_output=True), LossOptions(), steps=1)


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_every_loss_is_finite_where_both_probabilities_underflow(kind):
    teacher = torch.tensor([[0.0, 400.0, 0.0, 0.0], [0.0, 300.0, 0.0, 0.0]])
    logits = torch.tensor([[0.0, 0.0, 0.0, 400.0], [0.0, 300.0, 0.0, 0.0]])
    value, gradient = losses.ROW_LOSSES[kind](teacher.log_softmax(-1), logits.log_softmax(-1))
    assert value.isfinite().all()
    assert gradient.isfinite().all()


def test_a_documents_loss_does_not_change_when_packed_with_others():
    spec = llama_spec()
    target, drafter, documents = make_target(spec), make_drafter(spec), documents_of(spec)
    alone = [drafter(pack([d], STEPS), target, LossOptions(), 1.0).loss.item() for d in documents]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        together = drafter(pack([documents[i] for i in order], STEPS), target, LossOptions(), 1.0)
        assert together.loss.item() == pytest.approx(sum(alone), rel=1e-12)


def test_a_pack_without_supervised_rows_has_zero_loss_and_a_gradient_for_every_parameter():
    drafter, target, batch = case(llama_spec(), [[0, 0, 0], [0, 1, 0]])
    output = drafter(batch, target, LossOptions(), 1.0, metrics=True)
    output.loss.backward()
    assert output.loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())
    assert output.metrics is not None
    assert output.metrics.correct.tolist() == [0] * STEPS


def test_gradients_accumulate_over_packs_as_over_one_big_pack():
    spec = llama_spec()
    target, one, many = make_target(spec), make_drafter(spec), make_drafter(spec)
    documents = documents_of(spec)
    one(pack(documents, STEPS), target, LossOptions(), 5.0).loss.backward()
    for part in (documents[:2], documents[2:]):
        many(pack(part, STEPS), target, LossOptions(), 5.0).loss.backward()
    for name, gradient in gradients(one).items():
        torch.testing.assert_close(gradients(many)[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "spec", [llama_spec(num_layers=2), mla_spec(), llama_spec(norm_output=True)]
)
def test_training_steps_equal_step_by_step_drafting_with_a_cache(spec):
    """The teacher-forced chain at t is what an engine computes when its drafts happen to be x[t+2..]."""
    drafter, target = make_drafter(spec), make_target(spec)
    document = make_document(spec, [1] * 12, 5)
    with torch.no_grad():
        outputs = document_outputs(drafter, document, target.embed, STEPS)
    for start in (0, 3, 6):
        forced = document.ids[start + 2 :]
        ids, aux = document.ids[: start + 2], document.aux[: start + 1]
        _, logits = step_by_step_drafts(drafter, target, ids, aux, STEPS, forced)
        expected = torch.stack([o[start] for o in outputs]) @ drafter.lm_head.weight.detach().t()
        torch.testing.assert_close(logits, expected)
        trained = draft_logits(drafter, target, ids, aux, forced[:STEPS])
        torch.testing.assert_close(trained, expected)


def test_metrics_count_hits_against_the_full_vocabulary_argmax():
    spec = llama_spec()
    drafter, target, documents = make_drafter(spec), make_target(spec), documents_of(spec)
    with torch.no_grad():  # one token that both like, so that there are hits to count
        target.lm_head[target.draft_ids[0]] *= 20
        drafter.lm_head.weight[0] *= 20
    batch = pack(documents, STEPS)
    with torch.no_grad():
        metrics = drafter(batch, target, LossOptions(), 1.0, metrics=True).metrics
    correct, prefix = [0] * STEPS, [0] * STEPS
    for document in documents:
        answers = target_logits(document.last, target).argmax(-1)
        outputs = document_outputs(drafter, document, target.embed, STEPS)
        for t in range(len(document.aux)):
            alive = True
            for k in range(STEPS):
                if not supervised(document.mask, t, k):
                    break
                draft = target.draft_ids[(outputs[k][t] @ drafter.lm_head.weight.t()).argmax()]
                hit = bool(draft == answers[t + 1 + k])
                alive = alive and hit
                correct[k] += hit
                prefix[k] += alive
    assert metrics.correct.tolist() == correct
    assert metrics.prefix.tolist() == prefix
    assert int(metrics.accepted.sum()) == sum(prefix)
    assert sum(correct) > 0


def test_metrics_do_not_change_the_loss_and_evaluation_needs_no_gradient():
    drafter, target, batch = case(llama_spec())
    with torch.no_grad():
        quiet = drafter(batch, target, LossOptions(), 3.0, metrics=True)
    trained = drafter(batch, target, LossOptions(), 3.0)
    assert quiet.loss.item() == pytest.approx(trained.loss.item(), rel=1e-12)
    assert not quiet.loss.requires_grad


def test_row_weights_scale_the_loss_row_by_row():
    drafter, target, batch = case(llama_spec())
    doubled = replace(
        batch, rows=replace(batch.rows, weights=torch.full((sum(batch.rows.counts),), 2.0))
    )
    plain = drafter(batch, target, LossOptions(), 1.0).loss.item()
    assert drafter(doubled, target, LossOptions(), 1.0).loss.item() == pytest.approx(2 * plain)


def test_a_step_leaves_no_tensor_behind():
    drafter, target, batch = case(llama_spec())

    def living() -> int:
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    gc.collect()
    gc.disable()  # reference cycles would hold device memory until a collection
    try:
        drafter(batch, target, LossOptions(), 1.0, metrics=True).loss.backward()
        before = living()
        drafter(batch, target, LossOptions(), 1.0, metrics=True).loss.backward()
        assert living() == before
    finally:
        gc.enable()


def test_fp8_products_are_close_to_plain_ones():
    spec = llama_spec(hidden_size=32, head_dim=16, intermediate_size=48, draft_vocab_size=32)
    target, plain = (
        make_target(spec).to("cpu", torch.bfloat16),
        make_drafter(spec).to(torch.bfloat16),
    )
    rounded = Eagle3Drafter(spec, dtype=torch.bfloat16, fp8=True)
    rounded.load_state_dict(plain.state_dict())
    batch = pack(documents_of(spec), STEPS).to("cpu", torch.bfloat16)
    losses_of = [d(batch, target, LossOptions(), 10.0).loss for d in (plain, rounded)]
    for loss in losses_of:
        loss.backward()
    assert losses_of[1].item() == pytest.approx(losses_of[0].item(), rel=0.02)
    for name, gradient in gradients(plain).items():
        error = (gradients(rounded)[name] - gradient).float().norm() / gradient.float().norm()
        assert 0 < error < 0.25, (name, error)
    walks = [walk_batch(d, target, batch, normaliser=10.0)[0].loss for d in (plain, rounded)]
    assert walks[0] == walks[1] == losses_of[0], "evaluated in fp8, which nobody serves"
    assert rounded.fp8


def test_fp8_refuses_sizes_it_cannot_multiply():
    spec = llama_spec()
    batch = pack(documents_of(spec), STEPS).to("cpu", torch.bfloat16)
    drafter = Eagle3Drafter(spec, dtype=torch.bfloat16, fp8=True)
    with pytest.raises(ValueError, match="multiples of 16"):
        drafter(batch, make_target(spec).to("cpu", torch.bfloat16), LossOptions(), 1.0)


def test_bf16_attention_keeps_its_gradients_where_scores_are_large():
    assert max(attention_errors("cpu")) < 0.2
