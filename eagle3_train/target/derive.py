"""The drafter a target asks for: every size that the configuration does not name comes from the target."""

from __future__ import annotations

from eagle3_train.config import DrafterConfig
from eagle3_train.drafter.spec import DrafterSpec, RopeSpec
from eagle3_train.target.facts import TargetFacts, resolve_boundaries


def drafter_spec(facts: TargetFacts, config: DrafterConfig) -> DrafterSpec:
    """Shape of the drafter for this target. Raises ValueError when the two do not go together.

    A target that rotates part of each head gets a drafter that rotates all of it.
    """
    mla = facts.mla if config.attention == "mla" else None
    if config.attention == "mla" and mla is None:
        raise ValueError(
            f"drafter.attention is mla but {facts.path} has no latent attention; use drafter.attention=llama"
        )
    heads = config.num_heads or facts.num_heads
    if mla is not None:
        kv_heads, head_dim = heads, mla.head_dim
    else:
        kv_heads = config.num_kv_heads or min(facts.num_kv_heads, heads)
        # hidden / heads means nothing in an MLA target; its value width is a width kernels support.
        head_dim = facts.mla.v_head_dim if facts.mla else facts.head_dim
    return DrafterSpec(
        hidden_size=facts.hidden_size,
        intermediate_size=config.intermediate_size or facts.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=config.draft_vocab_size or facts.vocab_size,
        max_position_embeddings=config.max_position_embeddings or facts.max_position_embeddings,
        mla=mla,
        num_layers=config.num_layers,
        num_aux=len(resolve_boundaries(config.aux_layers, facts.num_layers)) - 1,
        rms_norm_eps=facts.rms_norm_eps,
        rope=RopeSpec.from_parameters(facts.rope),
        norm_output=config.norm_output,
        fc_norm=config.fc_norm,
        norm_before_fc=config.norm_before_fc,
    )
