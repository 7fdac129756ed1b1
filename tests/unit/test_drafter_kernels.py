"""The Triton kernels compute what the plain code computes (interpreted on CPU; the GPU tests run them for real)."""

import math
import os
from typing import get_args

import numpy as np
import pytest
import torch

from eagle3_train.drafter import attention, layers, losses, rope
from eagle3_train.drafter.rows import plan_rows
from tests.unit.drafter_cases import MASKS, llama_spec, mla_spec

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 before Triton is imported",
)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    class Properties:
        multi_processor_count = 2

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)


@pytest.mark.parametrize(("rows_a", "two"), [(21, False), (0, True), (9, True)])
def test_norm_fork_and_its_gradient(rows_a, two):
    from eagle3_train.drafter import kernels

    x, w_a, w_b = (
        normal(21, 40),
        1 + normal(40, seed=1, scale=0.1),
        1 + normal(40, seed=2, scale=0.1),
    )
    for t in (x, w_a, w_b):
        t.requires_grad_()
    outs = layers._NormFork.apply(x, w_a, w_b if two else None, 1e-5, rows_a, None, None, False)
    a, b, rstd = kernels.norm_fork(
        x.detach(), w_a.detach(), w_b.detach() if two else None, 1e-5, rows_a, None, None
    )
    torch.testing.assert_close(a, outs[1].detach())
    grads = [normal(*o.shape, seed=5 + i) for i, o in enumerate(outs) if o is not None]
    torch.autograd.backward([o for o in outs if o is not None], grads)
    d_b = grads[2] if two else None
    dx, dw_a, dw_b = kernels.norm_fork_backward(
        x.detach(), rstd, w_a.detach(), w_b.detach() if two else None, grads[0], grads[1], d_b, None
    )
    torch.testing.assert_close(dx, x.grad)
    torch.testing.assert_close(dw_a, w_a.grad)
    if two:
        torch.testing.assert_close(b, outs[2].detach())
        torch.testing.assert_close(dw_b, w_b.grad)


def test_swiglu_and_its_gradient():
    from eagle3_train.drafter import kernels

    gate, up, d = (
        normal(5, 33).requires_grad_(),
        normal(5, 33, seed=1).requires_grad_(),
        normal(5, 33, seed=2),
    )
    out = torch.nn.functional.silu(gate) * up
    out.backward(d)
    torch.testing.assert_close(kernels.swiglu(gate.detach(), up.detach()), out.detach())
    g, u, product = gate.detach().clone(), up.detach().clone(), d.clone()
    kernels.swiglu_backward(g, u, product)
    torch.testing.assert_close(g, gate.grad)
    torch.testing.assert_close(u, up.grad)
    torch.testing.assert_close(product, out.detach())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_strided_heads_and_back(interleaved):
    from eagle3_train.drafter import kernels

    packed = normal(7, 50)
    x = packed[:, :30].unflatten(1, (3, 10))
    before = packed.clone()
    angle = normal(7, 3, seed=1)
    cos, sin = angle.cos(), angle.sin()
    expected = rope.rotate(x[..., 4:].clone(), cos, sin, interleaved)
    kernels.rotate_(x, cos, sin, interleaved, back=False)
    torch.testing.assert_close(x[..., 4:], expected)
    kernels.rotate_(x, cos, sin, interleaved, back=True)
    torch.testing.assert_close(packed, before)


@pytest.mark.parametrize("kind", get_args(losses.LossKind))
@pytest.mark.parametrize("vocab", [300, 5000])
def test_every_loss_and_gradient(kind, vocab):
    from eagle3_train.drafter import loss_kernels

    logits, table = normal(6, vocab, scale=2.0), normal(4, vocab, seed=1, scale=2.0)
    slots, weights = (
        torch.tensor([3, 0, 1, 1, 2, 0], dtype=torch.int32),
        torch.tensor([1, 0.5, 0, 2, 1, 1.0]),
    )
    lse = loss_kernels.logsumexp(table)
    torch.testing.assert_close(lse, table.logsumexp(-1))
    expected, teacher = logits.clone(), losses.Teacher(table, lse)
    value = losses.loss_and_gradient_(expected, teacher, slots, weights, kind)
    got = loss_kernels.loss_and_gradient_(
        logits, table, lse, slots, weights, kind, losses.LK_LAMBDA_RATE
    )
    torch.testing.assert_close(got.sum(), value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", get_args(losses.LossKind))
def test_every_loss_where_both_probabilities_underflow(kind):
    from eagle3_train.drafter import loss_kernels

    table, logits, weights = torch.zeros(2, 300), torch.zeros(2, 300), torch.ones(2)
    table[:, 7] = logits[1, 7] = logits[0, 9] = 400.0
    slots, lse, expected = torch.arange(2, dtype=torch.int32), table.logsumexp(-1), logits.clone()
    value = losses.loss_and_gradient_(expected, losses.Teacher(table, lse), slots, weights, kind)
    arguments = (slots, weights, kind, losses.LK_LAMBDA_RATE)
    got = loss_kernels.loss_and_gradient_(logits, table, lse, *arguments)
    assert expected.isfinite().all()
    torch.testing.assert_close(got.sum(), value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-6)


def test_rows_are_added_and_scaled_in_place():
    from eagle3_train.drafter import kernels

    total, rows, index = (
        normal(9, 40),
        normal(5, 40, seed=1),
        torch.tensor([8, 0, 3, 4, 7], dtype=torch.int32),
    )
    expected = total.index_add(0, index, rows)
    torch.testing.assert_close(kernels.add_rows_(total, index, rows), expected)
    torch.testing.assert_close(kernels.add_rows_(total[:5], None, rows), expected[:5] + rows)
    torch.testing.assert_close(kernels.scale_(rows.clone(), torch.tensor(3.0)), rows * 3)
    assert torch.equal(kernels.scale_(rows.clone(), torch.tensor(1.0)), rows)


@pytest.mark.parametrize("shape", [(5, 48), (33, 16), (128, 64)])
def test_fp8_rounding_by_row_and_by_column(shape):
    from eagle3_train.drafter import fp8_kernels, matmul

    x = normal(*shape) * torch.logspace(-3, 2, shape[1])
    for kernel, plain in (
        (fp8_kernels.round_rows, matmul.round_rows),
        (fp8_kernels.round_columns, matmul.round_columns),
    ):
        (got, got_scale), (expected, scale) = kernel(x), plain(x)
        torch.testing.assert_close(got_scale, scale)
        wrong = (got.float() - expected.float()).abs() > 0.15 * expected.float().abs() + 0.01
        assert (
            wrong.float().mean() < 0.05
        )  # Triton's interpreter drops the carry when a mantissa rounds up to 2


def attention_state(spec, rows):
    keys = [len(rows.context), *rows.counts[1:]]
    return attention.StepAttention(spec, rows.counts, keys, rows.offsets, torch.zeros(0))


@pytest.mark.parametrize(
    ("spec", "masks", "tile"),
    [
        (llama_spec(head_dim=16), MASKS, None),
        (
            llama_spec(head_dim=16, num_heads=2, num_kv_heads=2),
            [[0] * 20 + [1] * 40, [1] * 9, [0] * 5 + [1] * 60],
            16,
        ),
        (
            llama_spec(head_dim=24, num_heads=4, num_kv_heads=1),
            [[1] * 20 + [0] * 30 + [1] * 15],
            32,
        ),
        (llama_spec(head_dim=48, num_heads=4, num_kv_heads=2), [[0] * 20 + [1] * 20] * 2, 16),
        (llama_spec(head_dim=16, num_heads=6, num_kv_heads=2), [[0] * 30 + [1] * 20] * 2, 16),
        (mla_spec(num_heads=2, num_kv_heads=2), [[0] * 20 + [1] * 20, [0] * 5 + [1] * 30], 16),
    ],
    ids=["short", "documents", "two-turns", "two-parts", "dead-lanes", "mla"],
)
def test_attention_and_its_gradients(spec, masks, tile, monkeypatch):
    """Small tiles, so that few rows make masked heads, unmasked middles and masked tails."""
    from eagle3_train.drafter import attention_launch

    if tile:
        tiles = dict.fromkeys(attention_launch.TILES, (tile, 16, 4, 1))
        monkeypatch.setattr(attention_launch, "TILES", tiles)
    mask_arrays = [np.array(mask, dtype=bool) for mask in masks]
    rows = plan_rows([np.zeros(len(m), int) for m in mask_arrays], mask_arrays, 3)
    tables = rope.rope_tables(spec, rows.max_position, torch.device("cpu"))
    state, kernel_state = attention_state(spec, rows), attention_state(spec, rows)
    saved = []
    for k in range(rows.steps):
        query_rows = attention.QueryRows.of_step(rows, k, tables)
        key_value = normal(*state.store.step(k).shape, seed=k)
        query = normal(rows.counts[k], state.heads, state.qk_dim, seed=100 + k)
        for s in (state, kernel_state):
            s.push(key_value, query_rows.key_angles)
        out, got_out = state.output.step(k), kernel_state.output.step(k)
        lse, got_lse = torch.zeros(2, *query.shape[:2])
        attention._forward(query, state, query_rows, out, lse)
        attention_launch.forward(query, kernel_state, query_rows, got_out, got_lse)
        torch.testing.assert_close(got_lse * math.log(2), lse, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got_out, out, rtol=1e-4, atol=1e-4)
        saved.append(((query, out, lse), (query, got_out, got_lse), query_rows))
    for k, (plain, kernel, query_rows) in reversed(list(enumerate(saved))):
        d_out = normal(*state.output.step(k).shape, seed=200 + k)
        d_query, got = torch.empty(2, *plain[0].shape)
        attention._backward((*plain, d_out), state, query_rows, k, d_query)
        attention_launch.backward((*kernel, d_out), kernel_state, query_rows, k, got)
        torch.testing.assert_close(got, d_query, rtol=1e-3, atol=1e-4)
    grads = kernel_state.grads.whole()
    torch.testing.assert_close(grads, state.grads.whole(), rtol=1e-3, atol=1e-4)


def test_adamw_on_bf16_parameters():
    from eagle3_train.training import optim_kernels
    from eagle3_train.training.optim import AdamW

    ours = normal(40, 50).bfloat16()
    theirs = ours.clone().requires_grad_()
    optimiser = AdamW([theirs], lr=1e-2, weight_decay=0.1)
    state = {n: torch.zeros(40, 50) for n in ("exp_avg", "exp_avg_sq")}
    state |= {"master": ours.float(), "step": torch.zeros(())}

    def update(grad, skip):
        inverse = torch.clamp((grad.float().norm() + 1e-6) / 1.0, min=1.0)
        group = optimiser.param_groups[0]
        optim_kernels.adamw_(ours, grad, state, group, inverse, torch.tensor(skip))

    for seed in range(3):
        theirs.grad = normal(40, 50, seed=seed).bfloat16()
        state["step"] += 1
        update(theirs.grad, skip=0.0)
        optimiser.step()
    master = state["master"]
    torch.testing.assert_close(master, optimiser.state[theirs]["master"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-2, atol=1e-3)
    before = master.clone()
    update(theirs.grad, skip=1.0)
    assert torch.equal(master, before)
