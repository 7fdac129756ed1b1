"""The drafter's parameters, named exactly as they are exported (docs/numerics.md, Served forms).

These modules only hold weights; all computation is in `model.py` and what it calls, so that one forward call of the
root module covers everything FSDP2 has to gather.
"""

import torch
from torch import Tensor, nn

from eagle3_train.drafter.spec import DrafterSpec, MlaShape


class Weight(nn.Module):
    """One uninitialised parameter: the scale [width] of an RMS norm, or a bias-free projection [out, in]."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class LlamaAttention(nn.Module):
    """Grouped-query attention; layer 0 reads [embedding, hidden], so its inputs are 2 * hidden wide."""

    def __init__(self, spec: DrafterSpec, inputs: int) -> None:
        super().__init__()
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Weight(queries, inputs)
        self.k_proj = Weight(keys, inputs)
        self.v_proj = Weight(keys, inputs)
        self.o_proj = Weight(spec.hidden_size, queries)


class MlaAttention(nn.Module):
    """Multi-head latent attention as DeepSeek-V2/V3 and Kimi name it; `q_proj` when q is not compressed."""

    def __init__(self, spec: DrafterSpec, mla: MlaShape, inputs: int) -> None:
        super().__init__()
        self.mla = mla
        queries, values = spec.num_heads * mla.head_dim, spec.num_heads * mla.v_head_dim
        if mla.q_lora_rank is None:
            self.q_proj = Weight(queries, inputs)
        else:
            self.q_a_proj = Weight(mla.q_lora_rank, inputs)
            self.q_a_layernorm = Weight(mla.q_lora_rank)
            self.q_b_proj = Weight(queries, mla.q_lora_rank)
        self.kv_a_proj_with_mqa = Weight(mla.kv_lora_rank + mla.qk_rope_head_dim, inputs)
        self.kv_a_layernorm = Weight(mla.kv_lora_rank)
        self.kv_b_proj = Weight(spec.num_heads * mla.qk_nope_head_dim + values, mla.kv_lora_rank)
        self.o_proj = Weight(spec.hidden_size, values)


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = Weight(spec.intermediate_size, spec.hidden_size)
        self.up_proj = Weight(spec.intermediate_size, spec.hidden_size)
        self.down_proj = Weight(spec.hidden_size, spec.intermediate_size)


class DecoderLayer(nn.Module):
    """One layer. Layer 0 norms the embedding (input_layernorm) and the state (hidden_norm) separately."""

    def __init__(self, spec: DrafterSpec, index: int) -> None:
        super().__init__()
        self.index = index
        inputs = spec.hidden_size * (1 if index else 2)
        self.self_attn = (
            MlaAttention(spec, spec.mla, inputs) if spec.mla else LlamaAttention(spec, inputs)
        )
        self.mlp = Mlp(spec)
        self.input_layernorm = Weight(spec.hidden_size)
        if index == 0:
            self.hidden_norm = Weight(spec.hidden_size)
        self.post_attention_layernorm = Weight(spec.hidden_size)

    @property
    def state_norm(self) -> Weight:
        """The norm of the residual stream that feeds this layer's attention."""
        return self.input_layernorm if self.index else self.hidden_norm


class DrafterWeights(nn.Module):
    """All parameters of a drafter: fc (with its optional norms), midlayer, layers.1.., norm, lm_head.

    Nothing is initialised: see `model.init_from_target`, or load a state dict.
    """

    def __init__(
        self,
        spec: DrafterSpec,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.fp8 = fp8
        """Train with the layers' and the head's matrices multiplied in fp8 (bf16 weights)."""
        aux = spec.num_aux * spec.hidden_size
        with torch.device("meta"):  # the memory comes once, in the right dtype and place
            self.fc = Weight(spec.hidden_size, aux)
            if spec.norm_before_fc:
                self.input_norm = Weight(aux)
            if spec.fc_norm:
                self.fc_norm = nn.ModuleList(Weight(spec.hidden_size) for _ in range(spec.num_aux))
            self.midlayer = DecoderLayer(spec, 0)
            if spec.num_layers > 1:
                deeper = {str(i): DecoderLayer(spec, i) for i in range(1, spec.num_layers)}
                self.layers = nn.ModuleDict(deeper)
            self.norm = Weight(spec.hidden_size)
            self.lm_head = Weight(spec.draft_vocab_size, spec.hidden_size)
        self.to(dtype).to_empty(device=device or "cpu")

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """Layers in order."""
        deeper = [self.layers[str(i)] for i in range(1, self.spec.num_layers)]
        return [self.midlayer, *deeper]  # type: ignore[list-item]

    @property
    def multiplies_in_fp8(self) -> bool:
        """Not when evaluated: a drafter is exported, and served, without fp8."""
        return self.fp8 and torch.is_grad_enabled()

    @property
    def fc_norms(self) -> list[Tensor]:
        """Per-state norm weights before fc; empty without `fc_norm`."""
        return [norm.weight for norm in self.fc_norm] if self.spec.fc_norm else []  # type: ignore[misc]
