"""The drafter's parameters, named exactly as they are exported (docs/numerics.md, checkpoint contract).

These modules only hold weights; all computation is in `ttt.py`, so that one forward call of the root module
covers everything FSDP2 has to gather.
"""

import torch
from torch import Tensor, nn

from eagle3_train.drafter.spec import DrafterSpec


class RmsNorm(nn.Module):
    """Scale of one RMS norm."""

    def __init__(self, width: int, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))


class Linear(nn.Module):
    """Weight [out, in] of one bias-free projection."""

    def __init__(
        self, inputs: int, outputs: int, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))


class LlamaAttention(nn.Module):
    """Grouped-query attention; layer 0 reads [embedding, hidden], so its inputs are 2 * hidden wide."""

    def __init__(
        self, spec: DrafterSpec, inputs: int, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(inputs, queries, device, dtype)
        self.k_proj = Linear(inputs, keys, device, dtype)
        self.v_proj = Linear(inputs, keys, device, dtype)
        self.o_proj = Linear(queries, spec.hidden_size, device, dtype)


class MlaAttention(nn.Module):
    """Multi-head latent attention as DeepSeek-V2/V3 and Kimi name it; `q_proj` when q is not compressed."""

    def __init__(
        self, spec: DrafterSpec, inputs: int, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert spec.kv_lora_rank is not None
        assert spec.qk_nope_head_dim is not None
        queries = spec.num_heads * spec.qk_head_dim
        if spec.q_lora_rank is None:
            self.q_proj = Linear(inputs, queries, device, dtype)
        else:
            self.q_a_proj = Linear(inputs, spec.q_lora_rank, device, dtype)
            self.q_a_layernorm = RmsNorm(spec.q_lora_rank, device, dtype)
            self.q_b_proj = Linear(spec.q_lora_rank, queries, device, dtype)
        self.kv_a_proj_with_mqa = Linear(inputs, spec.kv_lora_rank + spec.rope_dim, device, dtype)
        self.kv_a_layernorm = RmsNorm(spec.kv_lora_rank, device, dtype)
        expanded = spec.num_heads * (spec.qk_nope_head_dim + spec.value_dim)
        self.kv_b_proj = Linear(spec.kv_lora_rank, expanded, device, dtype)
        self.o_proj = Linear(spec.num_heads * spec.value_dim, spec.hidden_size, device, dtype)


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self, spec: DrafterSpec, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, device, dtype)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, device, dtype)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, device, dtype)


class DecoderLayer(nn.Module):
    """One layer. Layer 0 norms the embedding (input_layernorm) and the state (hidden_norm) separately."""

    def __init__(
        self, spec: DrafterSpec, index: int, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.index = index
        inputs = spec.hidden_size * (1 if index else 2)
        attention = LlamaAttention if spec.attention == "llama" else MlaAttention
        self.self_attn: LlamaAttention | MlaAttention = attention(spec, inputs, device, dtype)
        self.mlp = Mlp(spec, device, dtype)
        self.input_layernorm = RmsNorm(spec.hidden_size, device, dtype)
        if index == 0:
            self.hidden_norm = RmsNorm(spec.hidden_size, device, dtype)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, device, dtype)

    @property
    def state_norm(self) -> RmsNorm:
        """The norm of the residual stream that feeds this layer's attention."""
        return self.input_layernorm if self.index else self.hidden_norm


class DrafterWeights(nn.Module):
    """All parameters of a drafter: fc (with its optional norms), midlayer, layers.1.., norm, lm_head."""

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
        """Multiply the layers' and the head's matrices in fp8 (bf16 weights, CUDA)."""
        aux = spec.num_aux * spec.hidden_size
        self.fc = Linear(aux, spec.hidden_size, device, dtype)
        if spec.norm_before_fc:
            self.input_norm = RmsNorm(aux, device, dtype)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(
                RmsNorm(spec.hidden_size, device, dtype) for _ in range(spec.num_aux)
            )
        self.midlayer = DecoderLayer(spec, 0, device, dtype)
        if spec.num_layers > 1:
            self.layers = nn.ModuleDict(
                {str(i): DecoderLayer(spec, i, device, dtype) for i in range(1, spec.num_layers)}
            )
        self.norm = RmsNorm(spec.hidden_size, device, dtype)
        self.lm_head = Linear(spec.hidden_size, spec.draft_vocab_size, device, dtype)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """Layers in order."""
        deeper = [self.layers[str(i)] for i in range(1, self.spec.num_layers)]
        return [self.midlayer, *deeper]  # type: ignore[list-item]

    @property
    def fc_norms(self) -> list[Tensor]:
        """Per-state norm weights before fc; empty without `fc_norm`."""
        return [norm.weight for norm in self.fc_norm] if self.spec.fc_norm else []  # type: ignore[misc]
