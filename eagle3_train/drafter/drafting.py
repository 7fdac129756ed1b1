"""Drafting as an engine does it: one sequence, a KV cache, the drafter's own tokens fed back.

Slow and plain; used to compare with the drafts vLLM proposes and to test the training step against serving.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.modules import DrafterWeights
from eagle3_train.drafter.reference import finish_layer, fuse_aux, heads, layer_input, rms
from eagle3_train.drafter.rope import softmax_scale


@torch.no_grad()
def draft_logits(
    drafter: DrafterWeights,
    target: FrozenTarget,
    ids: Int[Tensor, " n"],
    aux: Float[Tensor, "states aux_hidden"],
    start: int,
    num_tokens: int,
    forced: Int[Tensor, " forced"] | None = None,
) -> tuple[list[int], Float[Tensor, "drafts draft_vocab"]]:
    """Target ids of `num_tokens` drafts for x[start+2..], and the logits they were chosen from.

    Needs ids[: start+2] and aux[: start+1]: the engine has verified x[start+1] when it drafts. `forced`
    feeds these target ids back instead of the drafter's own choices (teacher forcing).
    """
    if start + 2 > len(ids) or start + 1 > len(aux):
        raise ValueError(
            f"start {start} needs {start + 2} ids and {start + 1} states, got {len(ids)} and {len(aux)}."
        )
    spec, eps = drafter.spec, drafter.spec.rms_norm_eps
    tokens, h = ids[1 : start + 2], fuse_aux(drafter, aux[: start + 1])
    positions = torch.arange(start + 1)
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in drafter.decoder_layers]
    drafts, logits = [], []
    for k in range(num_tokens):
        embedded = F.embedding(tokens, target.embed)
        for layer, cache in zip(drafter.decoder_layers, caches, strict=True):
            q, key, value = heads(drafter, layer, layer_input(layer, embedded, h, eps), positions)
            cache.append((key, value))
            keys, values = (torch.cat(part) for part in zip(*cache, strict=True))
            seen = torch.arange(len(keys)) <= positions[:, None]
            scores = torch.einsum("thd,jhd->htj", q, keys) * softmax_scale(spec)
            w = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            h = finish_layer(layer, h, torch.einsum("htj,jhd->thd", w, values), eps)
        output = rms(h[-1:], drafter.norm.weight, eps)
        logits.append(F.linear(output[0], drafter.lm_head.weight))
        drafts.append(int(target.draft_ids[logits[-1].argmax()]))
        h = output if spec.norm_output else h[-1:]
        following = drafts[-1] if forced is None else int(forced[k])
        tokens, positions = torch.tensor([following]), positions[-1:] + 1
    return drafts, torch.stack(logits)
