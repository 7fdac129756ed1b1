"""On a CUDA device the step equals its float64 statement to bf16 accuracy, for every drafter and every loss.

Run by hand on a GPU host: python -m pytest tests/gpu/test_step_gpu.py
"""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from eagle3_train.drafter.losses import LossKind, LossOptions
from eagle3_train.drafter.matmul import Fp8Weight
from eagle3_train.drafter.model import Eagle3Drafter
from eagle3_train.drafter.rows import PackedBatch
from eagle3_train.drafter.spec import DrafterSpec, RopeSpec
from eagle3_train.training.optim import AdamW
from tests.unit.drafter_cases import (
    attention_errors,
    gradients,
    llama_spec,
    make_document,
    make_drafter,
    make_target,
    mla_spec,
    pack,
)
from tests.unit.drafter_reference import reference_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 4
MASKS = (
    [0] * 40 + [1] * 90,
    [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0],
    [1] * 200,
    [0] * 5,
    [0] * 70 + [1] * 3 + [0] * 20 + [1] * 60,
)


def llama(**changes: object) -> DrafterSpec:
    fields = {
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 512,
        "draft_vocab_size": 256,
    }
    return llama_spec(**{**fields, **changes})


def mla(**changes: object) -> DrafterSpec:
    fields = {
        "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "draft_vocab_size": 256, "head_dim": 48,
        "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    }  # fmt: skip
    return mla_spec(**{**fields, **changes})


def rounded(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """bf16-representable float64 weights, so that only arithmetic differs."""
    with torch.no_grad():
        for p in drafter.parameters():
            p.copy_(p.bfloat16())
    return drafter


def compare(spec: DrafterSpec, options: LossOptions, loss_tolerance=5e-3, gradient_tolerance=3e-2):
    naive, target = rounded(make_drafter(spec)), make_target(spec)
    documents = [make_document(spec, mask, 10 + i) for i, mask in enumerate(MASKS)]
    documents = [
        replace(d, aux=d.aux.bfloat16().double(), last=d.last.bfloat16().double())
        for d in documents
    ]
    target = target.to("cpu", torch.bfloat16).to("cpu", torch.float64)
    expected = reference_loss(naive, documents, target, options, STEPS, 100.0)
    expected.backward()
    fast = Eagle3Drafter(spec, torch.device("cuda"), torch.bfloat16)
    fast.load_state_dict(naive.state_dict())
    batch = pack(documents, STEPS).to("cuda", torch.bfloat16)
    output = fast(batch, target.to("cuda", torch.bfloat16), options, 100.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected.item(), rel=loss_tolerance)
    got = {name: g.double().cpu() for name, g in gradients(fast).items()}
    errors = {
        n: ((got[n] - g).norm() / g.norm()).item() for n, g in gradients(naive).items() if g.any()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < gradient_tolerance, (worst, errors)
    return output, batch, fast, target


@pytest.mark.parametrize(
    "spec",
    [
        llama(),
        llama(hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=128),
        llama(draft_vocab_size=512, num_kv_heads=4, num_layers=2),
        llama(norm_output=True, fc_norm=True, norm_before_fc=True),
        llama(head_dim=48, num_heads=8, rope=RopeSpec(theta=100.0)),
        mla(),
        mla(q_lora_rank=None),
    ],
)  # fmt: skip
def test_loss_and_gradients_equal_the_float64_reference_in_bf16(spec):
    compare(spec, LossOptions())


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_every_loss_equals_the_reference_in_bf16(kind):
    # bf16 teacher logits flip some argmaxes (hard_ce) and the sign of p - q where the two are close (tv, lk)
    rough = kind in ("hard_ce", "tv", "lk_alpha", "lk_lambda")
    compare(llama(), LossOptions(kind=kind), 2e-2 if rough else 5e-3, 0.3 if rough else 3e-2)


def test_bf16_attention_keeps_its_gradients_where_scores_are_large():
    assert max(attention_errors("cuda")) < 0.2


def test_metrics_on_the_gpu_count_every_supervised_row():
    _, batch, drafter, target = compare(llama(), LossOptions())
    with torch.no_grad():
        metrics = drafter(
            batch, target.to("cuda", torch.bfloat16), LossOptions(), 1.0, metrics=True
        ).metrics
    assert metrics is not None
    assert metrics.supervised == batch.rows.counts
    assert int(metrics.accepted.sum()) == int(metrics.prefix.sum())


def test_a_pack_without_rows_trains_nothing_on_the_gpu():
    spec = llama()
    drafter = Eagle3Drafter(spec, torch.device("cuda"), torch.bfloat16)
    batch: PackedBatch = pack([make_document(spec, [0, 0, 0], 1)], STEPS).to("cuda", torch.bfloat16)
    output = drafter(batch, make_target(spec).to("cuda", torch.bfloat16), LossOptions(), 1.0)
    output.loss.backward()
    assert output.loss.item() == 0


@pytest.mark.parametrize("rows", [24, 1000, 16_400])
def test_fp8_gradients_are_those_of_products_summed_in_fp32(rows):
    """Of the same rounded values. Means are not zero: sums grow, which is where short accumulators lose."""
    g = torch.Generator().manual_seed(0)
    weight, x, dy = (
        (torch.randn(n, m, generator=g) + 1).bfloat16()
        for n, m in ((512, 256), (rows, 256), (rows, 512))
    )
    found, expected = Fp8Weight(weight.cuda()), Fp8Weight(weight)
    there = x.cuda(), dy.cuda()
    # Rows somewhere inside a larger buffer, as a step of a Stack is.
    y, dx = (there[0].new_zeros(2 * rows, width)[rows:] for width in (512, 256))
    found.forward(there[0], None, y)
    found.input_gradient(there[1], dx)
    for name, ours, right, tolerance in (
        ("forward", y, expected.forward(x, None, None), 2e-2),
        ("input", dx, expected.input_gradient(dy, None), 4e-3),
        ("weight", found.weight_gradient([there], None), expected.weight_gradient([(x, dy)], None), 4e-3),
    ):  # fmt: skip
        error = (ours.cpu().float() - right.float()).norm() / right.float().norm()
        print(f"fp8 {name}, {rows} rows: {float(error):.1e}")
        assert error < tolerance, name


def test_the_step_never_waits_for_the_device():
    spec = llama()
    drafter = Eagle3Drafter(spec, torch.device("cuda"), torch.bfloat16)
    drafter.load_state_dict(make_drafter(spec).state_dict())
    optimizer, target = (
        AdamW(drafter.parameters(), lr=1e-3),
        make_target(spec).to("cuda", torch.bfloat16),
    )
    batch = pack([make_document(spec, mask, i) for i, mask in enumerate(MASKS)], STEPS).to(
        "cuda", torch.bfloat16
    )
    losses = []
    for i in range(4):
        torch.cuda.set_sync_debug_mode(
            "error" if i > 0 else "default"
        )  # the first step compiles kernels
        try:
            output = drafter(batch, target, LossOptions(), 100.0)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(output.loss.detach())
    assert float(losses[-1]) < float(losses[0])
