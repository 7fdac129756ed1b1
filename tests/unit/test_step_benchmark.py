"""The step benchmark's accounting against what the step really runs."""

from dataclasses import replace

import pytest
import torch

from benchmarks import step_flops
from benchmarks.step_ours import SHAPES, Shape, build, make_documents, make_weights, our_packs
from eagle3_train.drafter.losses import LossOptions

SMALL = replace(
    SHAPES["ragged"], hidden=64, inter=128, heads=4, kv_heads=2, head_dim=16, vocab=512, draft_vocab=128,
    lengths=(9, 60, 33, 17, 100),
)  # fmt: skip
MLA = replace(SMALL, kv_heads=4, head_dim=24, mla=(32, 24, 8, 16))


@pytest.mark.parametrize("small", [SMALL, MLA])
@pytest.mark.parametrize(("budget", "packs"), [(219, 1), (120, 2)])
@pytest.mark.parametrize("fraction", [0.35, 0.9])
def test_a_step_multiplies_what_the_roofline_says_it_needs_and_no_more(
    small: Shape, budget: int, packs: int, fraction: float
) -> None:
    shape = replace(small, budget=budget)
    drafter, target = build(shape, make_weights(shape, "cpu"), "cpu", torch.float32)
    batches = [
        pack.to("cpu", torch.float32)
        for pack in our_packs(shape, make_documents(shape, fraction, "cpu"))
    ]
    assert len(batches) == packs

    def step() -> None:
        for batch in batches:
            drafter(batch, target, LossOptions(), 1.0).loss.backward()

    needed = [step_flops.needed(shape.spec, batch.rows) for batch in batches]
    products = sum(work.total - work.attention for work in needed)
    assert step_flops.products_done(step) == pytest.approx(products, rel=0.01)


def test_packing_a_step_leaves_its_rows_and_its_loss_alone() -> None:
    drafter, target = build(SMALL, make_weights(SMALL, "cpu"), "cpu", torch.float32)
    documents = make_documents(SMALL, 0.6, "cpu")
    losses, rows = [], []
    for budget, packs in ((219, 1), (100, 3)):
        batches = [
            pack.to("cpu", torch.float32)
            for pack in our_packs(replace(SMALL, budget=budget), documents)
        ]
        assert len(batches) == packs
        rows.append(sum(sum(batch.rows.counts) for batch in batches))
        losses.append(
            sum(drafter(batch, target, LossOptions(), 1.0).loss.item() for batch in batches)
        )
    assert rows[0] == rows[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
