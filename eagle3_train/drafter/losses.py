"""The draft head and its loss, chunk by chunk: [all rows, vocabulary] never exists, least of all in fp32.

The teacher's logits are computed once per supervised target token and read by every step that needs them.
For each chunk of rows: logits, loss and the loss gradient (written over the logits), then at once both matmuls
that consume that gradient. Backward therefore has nothing left to compute but a scaling.

With q = softmax(logits), p = teacher: forward_kl is the soft cross-entropy -sum p log q (its gradient is that of
the KL divergence), hard_ce the cross-entropy of the teacher's argmax; reverse_kl, jsd and tv are the divergences;
lk_alpha is -log sum min(p, q), the negative log acceptance rate; lk_lambda blends KL and TV by exp(-3 alpha).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.layers import rms_norm
from eagle3_train.drafter.matmul import merged_runs, weight_ops
from eagle3_train.drafter.rows import PackedBatch, RowPlan
from eagle3_train.drafter.stepwise import wide

LossKind = Literal["forward_kl", "hard_ce", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda"]
LK_LAMBDA_RATE = 3.0
MIN_CHUNK_ROWS = {"cuda": 4096, "cpu": 64}
_CHUNK_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What is minimised: the kind of loss, and decay**k as the weight of step k."""

    kind: LossKind = "forward_kl"
    decay: float = 0.8


@dataclass(frozen=True, slots=True)
class Teacher:
    """Target logits over the draft vocabulary, one row per supervised target token, and their log-sum-exp."""

    logits: Float[Tensor, "slots draft_vocab"]
    lse: Float[Tensor, " slots"]


@torch.no_grad()
def target_states(batch: PackedBatch, target: FrozenTarget) -> Float[Tensor, "slots hidden"]:
    """The target's normed last states at the supervised target tokens."""
    states = batch.last_hidden_states.index_select(0, batch.rows.target_rows)
    if target.norm_weight is None:
        return states
    return rms_norm(states, target.norm_weight, target.norm_eps)


def teacher(states: Float[Tensor, "slots hidden"], target: FrozenTarget) -> Teacher:
    """Teacher distribution of each slot."""
    logits = states @ target.draft_head.t()
    if logits.is_cuda:
        from eagle3_train.drafter import loss_kernels

        return Teacher(logits, loss_kernels.logsumexp(logits))
    return Teacher(logits, logits.to(wide(logits.dtype)).logsumexp(-1))


@torch.no_grad()
def target_answers(
    states: Float[Tensor, "slots hidden"], target: FrozenTarget
) -> Int[Tensor, " slots"]:
    """The target's own next token (argmax over its full vocabulary) of each slot."""
    parts = states.split(chunk_rows(states, len(target.lm_head)))
    return torch.cat([(part @ target.lm_head.t()).argmax(-1) for part in parts])


def chunk_rows(like: Tensor, vocab: int) -> int:
    """Rows per chunk: as many equal chunks as bring the logits of one close to the budget."""
    device = like.device.type
    wanted = max(MIN_CHUNK_ROWS[device], _CHUNK_BYTES[device] // (vocab * like.element_size()))
    chunks = max(1, round(len(like) / wanted))
    return max(1, -(-len(like) // chunks))


def row_weights(
    rows: RowPlan, decay: float, normaliser: float | Tensor, dtype: torch.dtype
) -> Float[Tensor, " flat"]:
    """decay**k / normaliser of every flat row, times the plan's own weights."""
    out = torch.empty(len(rows.slots), dtype=dtype, device=rows.slots.device)
    for k in range(rows.steps):
        rows.at(out, k).fill_(decay**k)
    out /= normaliser
    return out if rows.weights is None else out * rows.weights


class _DraftHead(Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        supervision: Teacher,
        slots: Tensor,
        weights: Tensor,
        kind: LossKind,
        with_grad: bool,
        with_argmax: bool,
        fp8: bool,
        *pieces: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        hidden = _joined(pieces)
        ctx.sizes = [len(piece) for piece in pieces]
        loss = torch.zeros((), dtype=wide(hidden.dtype), device=hidden.device)
        argmax = hidden.new_empty(len(hidden), dtype=torch.long) if with_argmax else None
        total: Tensor | None = None
        ops, step = weight_ops(weight, fp8), chunk_rows(hidden, len(weight))
        for a in range(0, len(hidden), step):
            here = slice(a, a + step)
            part = hidden[here]
            logits = ops.forward(part, None, None)
            if argmax is not None:
                torch.argmax(logits, -1, out=argmax[here])
            loss += loss_and_gradient_(logits, supervision, slots[here], weights[here], kind)
            if with_grad:
                total = ops.weight_gradient([(part, logits)], total)
                ops.input_gradient(logits, part)
        ctx.d_hidden, ctx.d_weight = hidden, total
        if argmax is not None:
            ctx.mark_non_differentiable(argmax)
        return loss, argmax

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.d_hidden, ctx.d_weight
        ctx.d_hidden = ctx.d_weight = None
        if d_hidden.is_cuda:
            from eagle3_train.drafter import kernels

            d_weight, d_hidden = kernels.scale_(d_weight, d_loss), kernels.scale_(d_hidden, d_loss)
        else:
            d_weight, d_hidden = d_weight.mul_(d_loss), d_hidden.mul_(d_loss)
        nothing = (None,) * 7  # supervision, slots, weights, kind, with_grad, with_argmax, fp8
        return d_weight, *nothing, *d_hidden.split(ctx.sizes)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """One tensor of all pieces' rows, to be overwritten: their Stack if they fill one, else a copy."""
    runs = list(merged_runs([(piece.detach(),) for piece in pieces]))
    return runs[0][0] if len(runs) == 1 else torch.cat(list(pieces))


def draft_loss(
    head_inputs: Sequence[Float[Tensor, "_ hidden"]],
    weight: Float[Tensor, "draft_vocab hidden"],
    supervision: Teacher,
    rows: RowPlan,
    weights: Float[Tensor, " flat"],
    kind: LossKind,
    with_argmax: bool,
    fp8: bool,
) -> tuple[Float[Tensor, ""], Int[Tensor, " flat"] | None]:
    """Weighted sum of the loss over all flat rows, and the draft argmax of each row if asked.

    Overwrites `head_inputs` (all steps' normed outputs, step after step) with their gradients.
    """
    with_grad = torch.is_grad_enabled()
    out: tuple[Tensor, Tensor | None] = _DraftHead.apply(  # type: ignore[no-untyped-call]
        weight, supervision, rows.slots, weights, kind, with_grad, with_argmax, fp8, *head_inputs
    )
    return out


def loss_and_gradient_(
    logits: Float[Tensor, "rows draft_vocab"],
    supervision: Teacher,
    slots: Int[Tensor, " rows"],
    weights: Float[Tensor, " rows"],
    kind: LossKind,
) -> Float[Tensor, ""]:
    """Weighted loss of these rows; `logits` become its gradient, computed in fp32 (float64 for float64)."""
    if logits.is_cuda:
        from eagle3_train.drafter import loss_kernels

        return loss_kernels.loss_and_gradient_(
            logits, supervision.logits, supervision.lse, slots, weights, kind, LK_LAMBDA_RATE
        ).sum()
    z = logits.to(wide(logits.dtype))
    log_q = z - z.logsumexp(-1, keepdim=True)
    t = supervision.logits.index_select(0, slots).to(z.dtype)
    log_p = t - supervision.lse.index_select(0, slots)[:, None]
    values, gradient = ROW_LOSSES[kind](log_p, log_q)
    logits.copy_(gradient.mul_(weights[:, None]))
    return (values * weights).sum()


RowLoss = tuple[Tensor, Tensor]
"""(loss of each row, its gradient with respect to the logits)."""


def _through_softmax(q: Tensor, d_q: Tensor) -> Tensor:
    return q * (d_q - (q * d_q).sum(-1, keepdim=True))


def _positive(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny)


def _forward_kl(log_p: Tensor, log_q: Tensor) -> RowLoss:
    p = log_p.exp()
    return -(p * log_q).sum(-1), log_q.exp() - p


def _hard_ce(log_p: Tensor, log_q: Tensor) -> RowLoss:
    answer = log_p.argmax(-1, keepdim=True)
    gradient = log_q.exp()
    gradient.scatter_add_(-1, answer, -torch.ones_like(answer, dtype=gradient.dtype))
    return -log_q.gather(-1, answer).squeeze(-1), gradient


def _reverse_kl(log_p: Tensor, log_q: Tensor) -> RowLoss:
    q, gap = log_q.exp(), log_q - log_p
    return (q * gap).sum(-1), _through_softmax(q, gap)


def _jsd(log_p: Tensor, log_q: Tensor) -> RowLoss:
    p, q = log_p.exp(), log_q.exp()
    log_m = _positive((p + q) / 2).log()  # both underflow where neither model puts anything
    value = ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2
    return value, _through_softmax(q, (log_q - log_m) / 2)


def _tv(log_p: Tensor, log_q: Tensor) -> RowLoss:
    p, q = log_p.exp(), log_q.exp()
    return (p - q).abs().sum(-1) / 2, _through_softmax(q, (q - p).sign() / 2)


def _lk_alpha(log_p: Tensor, log_q: Tensor) -> RowLoss:
    p, q = log_p.exp(), log_q.exp()
    alpha = _positive(torch.minimum(p, q).sum(-1, keepdim=True))
    return -alpha.log().squeeze(-1), _through_softmax(q, -(q < p).to(q.dtype) / alpha)


def _lk_lambda(log_p: Tensor, log_q: Tensor) -> RowLoss:
    p, q = log_p.exp(), log_q.exp()
    tv, d_tv = _tv(log_p, log_q)
    share = torch.exp(-LK_LAMBDA_RATE * (1 - tv)).detach()
    kl = (p * (log_p - log_q)).sum(-1)
    return share * kl + (1 - share) * tv, share[:, None] * (q - p) + (1 - share[:, None]) * d_tv


ROW_LOSSES: dict[LossKind, Callable[[Tensor, Tensor], RowLoss]] = {
    "forward_kl": _forward_kl,
    "hard_ce": _hard_ce,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "tv": _tv,
    "lk_alpha": _lk_alpha,
    "lk_lambda": _lk_lambda,
}
