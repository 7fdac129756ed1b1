"""The training step stated naively: one document at a time, dense attention, full logits, plain autograd.

docs/numerics.md in code. It shares nothing with the fast path but the rotary tables and the row losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.losses import ROW_LOSSES, LossOptions
from eagle3_train.drafter.modules import DrafterWeights
from eagle3_train.drafter.reference import finish_layer, fuse_aux, heads, layer_input, rms
from eagle3_train.drafter.rope import softmax_scale


@dataclass(frozen=True, slots=True)
class Document:
    """One captured document: n ids and mask, n-1 states."""

    ids: Int[Tensor, " n"]
    mask: Bool[Tensor, " n"]
    aux: Float[Tensor, "states aux_hidden"]
    last: Float[Tensor, "states hidden"]


def document_outputs(
    drafter: DrafterWeights, document: Document, embed: Tensor, steps: int
) -> list[Float[Tensor, "states hidden"]]:
    """Normed output of every step at every state row (rows past the end are computed and meaningless)."""
    spec, eps = drafter.spec, drafter.spec.rms_norm_eps
    h = fuse_aux(drafter, document.aux)
    rows = torch.arange(len(h))
    causal = rows[None] > rows[:, None]
    padded = torch.cat([document.ids, document.ids.new_zeros(steps)])
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in drafter.decoder_layers]
    outputs = []
    for k in range(steps):
        embedded = F.embedding(padded[rows + 1 + k], embed)
        for layer, cache in zip(drafter.decoder_layers, caches, strict=True):
            q, key, value = heads(drafter, layer, layer_input(layer, embedded, h, eps), rows + k)
            cache.append((key, value))
            scores = torch.einsum("thd,jhd->htj", q, cache[0][0]).masked_fill(causal, float("-inf"))
            diagonal = [torch.einsum("thd,thd->ht", q, old)[..., None] for old, _ in cache[1:]]
            w = (torch.cat([scores, *diagonal], -1) * softmax_scale(spec)).softmax(-1)
            out = torch.einsum("htj,jhd->thd", w[..., : len(h)], cache[0][1])
            for j, (_, old) in enumerate(cache[1:], len(h)):
                out = out + w[..., j].t()[..., None] * old
            h = finish_layer(layer, h, out, eps)
        outputs.append(rms(h, drafter.norm.weight, eps))
        h = outputs[-1] if spec.norm_output else h
    return outputs


def target_logits(last: Float[Tensor, "states hidden"], target: FrozenTarget) -> Tensor:
    """Full-vocabulary logits of the target at every state row."""
    states = last if target.norm_weight is None else rms(last, target.norm_weight, target.norm_eps)
    return F.linear(states, target.lm_head)


def supervised(mask: Bool[Tensor, " n"], t: int, k: int) -> bool:
    """Whether (k, t) is trained: x[t+1] .. x[t+2+k] exist and were all produced by the target."""
    return t + 2 + k < len(mask) and bool(mask[t + 1 : t + 3 + k].all())


def reference_loss(
    drafter: DrafterWeights,
    documents: Sequence[Document],
    target: FrozenTarget,
    options: LossOptions,
    ttt_steps: int,
    normaliser: float,
) -> Float[Tensor, ""]:
    """The loss that `Eagle3Drafter` must return for these documents packed together."""
    total = drafter.fc.weight.new_zeros(())
    for document in documents:
        logits = target_logits(document.last, target)
        log_p = logits[:, target.draft_ids].log_softmax(-1)
        outputs = document_outputs(drafter, document, target.embed, ttt_steps)
        for k, output in enumerate(outputs):
            for t in range(len(document.aux)):
                if not supervised(document.mask, t, k):
                    continue
                log_q = F.linear(output[t], drafter.lm_head.weight).log_softmax(-1)
                value, _ = ROW_LOSSES[options.kind](log_p[None, t + 1 + k], log_q[None])
                total = total + options.decay**k * value[0] / normaliser
    return total
