"""The parts of a drafter stated naively: dense tensors of one document, plain autograd.

Drafting (`drafting.py`) is written with them, and so is the definition that the fast path (`ttt.py`) is tested against
in float64 (tests/unit/drafter_reference.py). They share no code with it but the rotary tables.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3_train.drafter.modules import DecoderLayer, DrafterWeights, LlamaAttention
from eagle3_train.drafter.rope import rope_tables, rotate


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
    nope, eps = spec.head_dim - spec.rope_dim, spec.rms_norm_eps
    if spec.q_lora_rank is None:
        q = F.linear(z, attn.q_proj.weight)
    else:
        low = rms(F.linear(z, attn.q_a_proj.weight), attn.q_a_layernorm.weight, eps)
        q = F.linear(low, attn.q_b_proj.weight)
    q = q.unflatten(1, (spec.num_heads, -1))
    latent, shared = F.linear(z, attn.kv_a_proj_with_mqa.weight).split(
        [attn.kv_a_layernorm.weight.shape[0], spec.rope_dim], 1
    )
    kv = F.linear(rms(latent, attn.kv_a_layernorm.weight, eps), attn.kv_b_proj.weight)
    k, v = kv.unflatten(1, (spec.num_heads, -1)).split([nope, spec.value_dim], -1)
    shared = rotate(shared[:, None], cos, sin, spec.rope.interleaved).expand(-1, spec.num_heads, -1)
    q = torch.cat([q[..., :nope], rotate(q[..., nope:], cos, sin, spec.rope.interleaved)], -1)
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
