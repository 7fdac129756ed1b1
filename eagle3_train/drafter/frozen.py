"""The three frozen tensors of the target that training reads, and the draft-vocabulary mapping.

They are inputs of the training step, never parameters: nothing here is in the drafter's state dict, in its
optimiser or sharded with it.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class FrozenTarget:
    """Embedding, output head and final norm of the target; draft id i stands for target id i + d2t[i].

    norm_weight None means the captured last states are already normed (as HF hands them out).
    d2t is None exactly when the drafter proposes from the whole vocabulary.
    """

    embed: Float[Tensor, "vocab hidden"]
    lm_head: Float[Tensor, "vocab hidden"]
    norm_weight: Float[Tensor, " hidden"] | None
    norm_eps: float
    d2t: Int[Tensor, " draft_vocab"] | None = None

    @cached_property
    def draft_ids(self) -> Int[Tensor, " draft_vocab"]:
        """Target id of every draft id."""
        if self.d2t is None:
            return torch.arange(len(self.lm_head), device=self.lm_head.device)
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @cached_property
    def draft_head(self) -> Float[Tensor, "draft_vocab hidden"]:
        """The head's rows of the draft vocabulary; the head itself for the full vocabulary."""
        return self.lm_head if self.d2t is None else self.lm_head[self.draft_ids].contiguous()

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "FrozenTarget":
        """Copy to a device, floating-point tensors as `dtype`."""
        return FrozenTarget(
            embed=self.embed.to(device, dtype),
            lm_head=self.lm_head.to(device, dtype),
            norm_weight=None if self.norm_weight is None else self.norm_weight.to(device, dtype),
            norm_eps=self.norm_eps,
            d2t=None if self.d2t is None else self.d2t.to(device),
        )
