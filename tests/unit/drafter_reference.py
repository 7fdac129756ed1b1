"""The training step stated naively: one document at a time, dense attention, full logits, plain autograd.

docs/numerics.md in code. It shares nothing with the fast path but the rotary tables and the row losses. Below it: drafting with a cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.losses import ROW_LOSSES, LossOptions
from eagle3_train.drafter.modules import DecoderLayer, DrafterWeights, LlamaAttention
from eagle3_train.drafter.rope import rope_tables, rotate, softmax_scale


@dataclass(frozen=True, slots=True)
class Document:
    """One captured document: n ids and mask, n-1 states."""

    ids: Int[Tensor, " n"]
    mask: Bool[Tensor, " n"]
    aux: Float[Tensor, "states aux_hidden"]
    last: Float[Tensor, "states hidden"]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in x's dtype."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def fuse_aux(drafter: DrafterWeights, aux: Tensor) -> Tensor:
    """h_0."""
    spec = drafter.spec
    if spec.norm_before_fc:
        aux = rms(aux, drafter.input_norm.weight, spec.rms_norm_eps)
    if spec.fc_norm:
        parts = zip(aux.chunk(spec.num_aux, -1), drafter.fc_norms, strict=True)
        aux = torch.cat([rms(part, w, spec.rms_norm_eps) for part, w in parts], -1)
    return F.linear(aux, drafter.fc.weight)


def heads(
    drafter: DrafterWeights, layer: DecoderLayer, z: Tensor, at: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [rows, heads, dim] of inputs z at positions `at`, rotated, kv heads repeated."""
    spec, attn = drafter.spec, layer.self_attn
    table = rope_tables(spec, int(at.max()) + 1, z.device, z.dtype)
    cos, sin = table[0][at], table[1][at]
    if isinstance(attn, LlamaAttention):
        q, k, v = (
            F.linear(z, proj.weight).unflatten(1, (-1, spec.head_dim))
            for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        repeat = spec.num_heads // spec.num_kv_heads
        q, k = rotate(q, cos, sin, False), rotate(k, cos, sin, False)
        return q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    mla, eps = attn.mla, spec.rms_norm_eps
    nope = mla.qk_nope_head_dim
    if mla.q_lora_rank is None:
        q = F.linear(z, attn.q_proj.weight)
    else:
        low = rms(F.linear(z, attn.q_a_proj.weight), attn.q_a_layernorm.weight, eps)
        q = F.linear(low, attn.q_b_proj.weight)
    q = q.unflatten(1, (spec.num_heads, -1))
    latent, shared = F.linear(z, attn.kv_a_proj_with_mqa.weight).split(
        [mla.kv_lora_rank, mla.qk_rope_head_dim], 1
    )
    kv = F.linear(rms(latent, attn.kv_a_layernorm.weight, eps), attn.kv_b_proj.weight)
    k, v = kv.unflatten(1, (spec.num_heads, -1)).split([nope, mla.v_head_dim], -1)
    shared = rotate(shared[:, None], cos, sin, True).expand(-1, spec.num_heads, -1)
    q = torch.cat([q[..., :nope], rotate(q[..., nope:], cos, sin, True)], -1)
    return q, torch.cat([k, shared], -1), v


def layer_input(layer: DecoderLayer, embedded: Tensor, h: Tensor, eps: float) -> Tensor:
    """What the layer's attention projects: layer 0 sees the embedding first, then the state."""
    state = rms(h, layer.state_norm.weight, eps)
    if layer.index:
        return state
    return torch.cat([rms(embedded, layer.input_layernorm.weight, eps), state], -1)


def finish_layer(layer: DecoderLayer, h: Tensor, attended: Tensor, eps: float) -> Tensor:
    """Output projection, MLP and both residual additions."""
    r = h + F.linear(attended.flatten(1), layer.self_attn.o_proj.weight)
    n = rms(r, layer.post_attention_layernorm.weight, eps)
    mlp = layer.mlp
    gated = F.silu(F.linear(n, mlp.gate_proj.weight)) * F.linear(n, mlp.up_proj.weight)
    return r + F.linear(gated, mlp.down_proj.weight)


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


@torch.no_grad()
def step_by_step_drafts(
    drafter: DrafterWeights,
    target: FrozenTarget,
    ids: Int[Tensor, " n"],
    aux: Float[Tensor, "states aux_hidden"],
    num_tokens: int,
    forced: Int[Tensor, " forced"] | None = None,
) -> tuple[list[int], Float[Tensor, "drafts draft_vocab"]]:
    """Target ids of `num_tokens` drafts for x[n..], and the logits they were chosen from, as an engine drafts:
    one sequence, a KV cache, the drafter's own tokens fed back.

    aux are the states of x[:-1]. `forced` feeds these target ids back instead (teacher forcing).
    """
    spec, eps = drafter.spec, drafter.spec.rms_norm_eps
    tokens, h = ids[1:], fuse_aux(drafter, aux)
    positions = torch.arange(len(aux))
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
