"""Triton kernels of the draft head's loss: one program per row, logits stay in their dtype, sums are fp32.

The formulas are those of `losses.ROW_LOSSES`. A row is read twice (three times for the losses other than cross-entropy);
the second read is served by L2 up to vocabularies of about 100k.
"""

# Triton functions are typed by Triton.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _part(row, cols, vocab, fill):
    """Columns of one row in fp32; `fill` past the vocabulary."""
    return tl.load(row + cols, mask=cols < vocab, other=fill).to(tl.float32)


@triton.jit
def _grow(top, total, z):
    """Running log-sum-exp: maximum and sum of exponentials after a block."""
    higher = tl.maximum(top, tl.max(z, 0))
    return higher, total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)


@triton.jit
def _row_logsumexp(row, vocab, BLOCK: tl.constexpr):
    top = -float("inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        top, total = _grow(top, total, _part(row, cols, vocab, -float("inf")))
    return top + tl.log(total)


@triton.jit
def _logsumexp(logits, out, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, _row_logsumexp(logits + row * vocab, vocab, BLOCK))


def logsumexp(logits: Tensor) -> Tensor:
    """fp32 log-sum-exp of each row."""
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _logsumexp[(len(logits),)](logits, out, logits.shape[1], BLOCK=_BLOCK, num_warps=8)
    return out


@triton.jit
def _cross_entropy(
    logits, teacher, teacher_lse, slots, weights, values, vocab, HARD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Soft (forward KL) or hard cross-entropy: gradient q - p, or q - onehot(argmax p)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    weight = tl.load(weights + row)
    lse_p = tl.load(teacher_lse + slot)
    z_row, t_row = logits + row * vocab, teacher + slot * vocab
    top = -float("inf")
    total = 0.0
    dot = 0.0
    best = -float("inf")
    answer = 0
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = _part(z_row, cols, vocab, -float("inf"))
        t = _part(t_row, cols, vocab, -float("inf"))
        top, total = _grow(top, total, z)
        if HARD:
            peak = tl.max(t, 0)
            where = tl.min(tl.where(t == peak, cols, vocab), 0)
            answer = tl.where(peak > best, where, answer)
            best = tl.maximum(peak, best)
        else:
            dot += tl.sum(tl.where(cols < vocab, tl.exp(t - lse_p) * z, 0.0), 0)
    lse_q = top + tl.log(total)
    if HARD:
        dot = tl.load(z_row + answer).to(tl.float32)
    tl.debug_barrier()
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = _part(z_row, cols, vocab, -float("inf"))
        if HARD:
            p = tl.where(cols == answer, 1.0, 0.0)
        else:
            p = tl.exp(_part(t_row, cols, vocab, -float("inf")) - lse_p)
        tl.store(z_row + cols, weight * (tl.exp(z - lse_q) - p), mask=cols < vocab)
    tl.store(values + row, weight * (lse_q - dot))


@triton.jit
def _terms(log_p, log_q, KIND: tl.constexpr):
    """(d value / d q, term of the value, term of the KL divergence) of one block."""
    p, q = tl.exp(log_p), tl.exp(log_q)
    kl = p * (log_p - log_q)
    if KIND == "reverse_kl":
        return log_q - log_p, q * (log_q - log_p), kl
    elif KIND == "jsd":
        log_m = tl.log(tl.maximum((p + q) * 0.5, _TINY))
        return 0.5 * (log_q - log_m), 0.5 * (p * (log_p - log_m) + q * (log_q - log_m)), kl
    elif KIND == "lk_alpha":
        return tl.where(q < p, -1.0, 0.0), tl.minimum(p, q), kl
    else:  # tv, lk_lambda
        return tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0)), 0.5 * tl.abs(p - q), kl


@triton.jit
def _divergence(
    logits, teacher, teacher_lse, slots, weights, values, vocab, rate, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The losses whose gradient goes through the softmax: q * (g - sum q g), g = d value / d q."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    weight = tl.load(weights + row)
    lse_p = tl.load(teacher_lse + slot)
    z_row, t_row = logits + row * vocab, teacher + slot * vocab
    lse_q = _row_logsumexp(z_row, vocab, BLOCK)
    inner, value, divergence = 0.0, 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < vocab
        log_q, log_p = (
            _part(z_row, cols, vocab, 0.0) - lse_q,
            _part(t_row, cols, vocab, 0.0) - lse_p,
        )
        slope, term, kl = _terms(log_p, log_q, KIND)
        inner += tl.sum(tl.where(inside, tl.exp(log_q) * slope, 0.0), 0)
        value += tl.sum(tl.where(inside, term, 0.0), 0)
        divergence += tl.sum(tl.where(inside, kl, 0.0), 0)
    share, gain = 0.0, weight
    if KIND == "lk_alpha":
        value = tl.maximum(value, _TINY)
        gain = weight / value
        value = -tl.log(value)
    if KIND == "lk_lambda":
        share = tl.exp(-rate * (1 - value))
        gain = weight * (1 - share)
        value = share * divergence + (1 - share) * value
    tl.debug_barrier()
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        log_q, log_p = (
            _part(z_row, cols, vocab, 0.0) - lse_q,
            _part(t_row, cols, vocab, 0.0) - lse_p,
        )
        slope, _, _ = _terms(log_p, log_q, KIND)
        q = tl.exp(log_q)
        gradient = gain * q * (slope - inner) + weight * share * (q - tl.exp(log_p))
        tl.store(z_row + cols, gradient, mask=cols < vocab)
    tl.store(values + row, weight * value)


def loss_and_gradient_(
    logits: Tensor,
    teacher: Tensor,
    teacher_lse: Tensor,
    slots: Tensor,
    weights: Tensor,
    kind: str,
    rate: float,
) -> Tensor:
    """Weighted loss of each row (fp32); `logits` become the gradient of their sum. `rate` is lk_lambda's."""
    rows, vocab = logits.shape
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return values
    args = (logits, teacher, teacher_lse, slots, weights, values, vocab)
    if kind in ("forward_kl", "hard_ce"):
        _cross_entropy[(rows,)](*args, HARD=kind == "hard_ce", BLOCK=_BLOCK, num_warps=8)
    else:
        _divergence[(rows,)](*args, rate, KIND=kind, BLOCK=_BLOCK, num_warps=8)
    return values
