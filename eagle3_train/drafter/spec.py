"""What a drafter is: its shape, its switches and its rotary embedding, as frozen records.

A `DrafterSpec` holds numbers only; the weights are in `modules.py`. It refuses impossible values on construction, a
`RopeSpec` when it is read from a configuration.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]
_ORIGINAL = "original_max_position_embeddings"
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
_OPTIONS = {"yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")}  # fmt: skip
# Text tokens have equal positions on all three mRoPE axes, so mRoPE is plain RoPE here.
_IGNORED_KEYS = {"type", "rope_type", "rope_theta", "mrope_section", "mrope_interleaved"}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one attention layer, in the terms of a model's `rope_parameters`."""

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @classmethod
    def from_parameters(cls, parameters: dict[str, Any]) -> RopeSpec:
        """Read a transformers-5 `rope_parameters` dict, or `rope_scaling` with `rope_theta` merged in.

        Raises ValueError for a rotary embedding that no drafter has.
        """
        given = {key: value for key, value in parameters.items() if value is not None}
        rope_type = given.get("rope_type", given.get("type", "default"))
        rope_type = {"deepseek_yarn": "yarn", "mrope": "default"}.get(rope_type, rope_type)
        if (share := given.pop("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError(f"partial_rotary_factor={share}: drafters rotate all of each head.")
        if rope_type not in _NEEDED:
            raise ValueError(f"rope_type is {rope_type!r}; drafters know {sorted(_NEEDED)}.")
        if missing := [key for key in _NEEDED[rope_type] if key not in given]:
            raise ValueError(f"rope_type {rope_type!r} needs {missing}; add them.")
        known = {*_NEEDED[rope_type], *_OPTIONS.get(rope_type, ())}
        unknown = given.keys() - known - _IGNORED_KEYS
        if rope_type == "default":
            unknown -= {"factor", _ORIGINAL}
        if unknown:
            raise ValueError(f"unknown rope parameters {sorted(unknown)} for {rope_type!r}.")
        theta = float(given.get("rope_theta", 10000.0))
        named = {key: given[key] for key in known & given.keys()}
        rope = cls(rope_type, theta, **named)
        if rope.theta <= 0 or rope.factor <= 0:
            raise ValueError(f"theta={rope.theta}, factor={rope.factor}: both must be positive.")
        return rope

    def parameters(self) -> dict[str, Any]:
        """The same facts as a transformers-5 `rope_parameters` dict."""
        keys = _NEEDED[self.rope_type] + _OPTIONS.get(self.rope_type, ())
        named = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        return {"rope_type": self.rope_type, "rope_theta": self.theta, **named}


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek, Kimi); q_lora_rank is None when queries are not compressed."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """Shape and switches of an EAGLE-3 drafter. Sizes are counts of elements.

    hidden_size is also the width of the captured states: drafter and target share the embedding. Without `mla` attention
    has grouped-query heads of `head_dim`; with it `num_kv_heads` equals `num_heads` and `head_dim` is `mla.head_dim`.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    mla: MlaShape | None = None
    num_layers: int = 1
    num_aux: int = 3
    rms_norm_eps: float = 1e-5
    rope: RopeSpec = RopeSpec()
    norm_output: bool = False
    """Feed the normed output, not the residual stream, to the next step (EAGLE-3.1)."""
    fc_norm: bool = False
    """Normalise each auxiliary state on its own before `fc`."""
    norm_before_fc: bool = False
    """Normalise the concatenated auxiliary states before `fc` (Llama-style drafters only)."""

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "int"}
        sizes |= asdict(self.mla) if self.mla else {}
        if bad := {name: size for name, size in sizes.items() if size is not None and size < 1}:
            raise ValueError(f"sizes must be at least 1, got {bad}.")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.vocab_size}; "
                "draft at most the target's vocabulary."
            )
        if self.mla is not None:
            if self.norm_before_fc:
                raise ValueError("norm_before_fc is not served for MLA drafters; use fc_norm.")
            assert (self.num_kv_heads, self.head_dim) == (self.num_heads, self.mla.head_dim)
        elif self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}."
            )
        if self.rope_dim % 2:
            raise ValueError(f"head_dim={self.rope_dim} must be even for RoPE.")

    @property
    def attention(self) -> Literal["llama", "mla"]:
        """The kind of attention, as the configuration names it."""
        return "mla" if self.mla else "llama"

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Rotated width of one head, which it ends with."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def full_vocab(self) -> bool:
        """Whether the drafter proposes from the whole target vocabulary."""
        return self.draft_vocab_size == self.vocab_size
