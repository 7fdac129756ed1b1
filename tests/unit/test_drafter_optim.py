"""The optimiser is AdamW on fp32 masters, clips by the global norm, and skips non-finite updates."""

import pytest
import torch

from eagle3_train.training.optim import AdamW, learning_rate


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in ((5, 7), (7,))]


def give_gradients(params, seed: int, scale: float = 1.0) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=g)).to(p.dtype)


def test_fp32_updates_equal_torch_adamw_with_clipping():
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    mine = AdamW(ours, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, max_grad_norm=0.5)
    groups = [
        {"params": theirs[:1], "weight_decay": 0.1},
        {"params": theirs[1:], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99))
    for step in range(5):
        give_gradients(ours, step, scale=0.01 if step == 2 else 3.0)
        give_gradients(theirs, step, scale=0.01 if step == 2 else 3.0)
        expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        torch.testing.assert_close(mine.step(), expected)
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_bf16_parameters_follow_their_fp32_masters():
    low, high = (
        parameters(torch.bfloat16),
        [p.detach().float().requires_grad_() for p in parameters(torch.bfloat16)],
    )
    a, b = AdamW(low, lr=1e-4), AdamW(high, lr=1e-4)
    for step in range(20):
        give_gradients(low, step)
        for p, q in zip(low, high, strict=True):
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(low, high, strict=True):
        assert torch.equal(
            a.state[p]["master"], q
        )  # steps of 1e-4 are below bf16 resolution, and not lost
        assert torch.equal(p.detach(), q.detach().to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_non_finite_gradient_changes_nothing(dtype):
    params = parameters(dtype)
    optimiser = AdamW(params, lr=1e-2)
    give_gradients(params, 0)
    optimiser.step()
    before = [p.detach().clone() for p in params]
    moments = [optimiser.state[p]["exp_avg"].clone() for p in params]
    give_gradients(params, 1)
    params[0].grad[0, 0] = float("nan")
    assert not optimiser.step().isfinite()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert all(
        torch.equal(optimiser.state[p]["exp_avg"], m) for p, m in zip(params, moments, strict=True)
    )


def test_the_optimiser_resumes_bit_exactly_from_its_state():
    straight, resumed = parameters(torch.bfloat16), parameters(torch.bfloat16)
    a, b = AdamW(straight, lr=1e-3), AdamW(resumed, lr=1e-3)
    for step in range(3):
        give_gradients(straight, step)
        a.step()
    with torch.no_grad():
        for p, q in zip(straight, resumed, strict=True):
            q.copy_(p)
    b.load_state_dict(a.state_dict())
    assert b.state[resumed[0]]["master"].dtype == torch.float32
    for step in range(3, 6):
        for params, optimiser in ((straight, a), (resumed, b)):
            give_gradients(params, step)
            optimiser.step()
    assert all(torch.equal(p, q) for p, q in zip(straight, resumed, strict=True))


def test_the_schedule_warms_up_then_decays_to_its_floor():
    kinds = {"peak": 2.0, "warmup": 10.0, "total": 110.0, "floor": 0.1}
    for done, rate in ((5, 1.0), (10, 2.0), (60, 1.1), (110, 0.2), (500, 0.2)):
        assert learning_rate(done, **kinds) == pytest.approx(rate)
    assert learning_rate(0, peak=1.0, warmup=0, total=0, floor=0.1) == pytest.approx(1.0)
