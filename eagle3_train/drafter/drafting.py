"""The logits behind an engine's drafts, computed by the training step: preflight compares the two."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.modules import DrafterWeights
from eagle3_train.drafter.rows import PackedBatch, plan_rows
from eagle3_train.drafter.ttt import unroll


@torch.no_grad()
def draft_logits(
    drafter: DrafterWeights,
    target: FrozenTarget,
    ids: Int[Tensor, " n"],
    aux: Float[Tensor, "states aux_hidden"],
    drafts: Int[Tensor, " drafts"],
) -> Float[Tensor, "drafts draft_vocab"]:
    """The logits that each of `drafts`, target ids for x[n..], was chosen from; each draft is fed to the next.

    ids are those the engine had verified when it drafted, aux the states of all of them but the last.
    """
    chain, known, steps = torch.cat([ids, drafts]).numpy(), len(aux), len(drafts)
    rows = plan_rows([chain], [np.arange(len(chain)) >= known], steps)
    # Rows after the first start lend it their tokens, nothing else: they need no states.
    padded = F.pad(aux, (0, 0, 0, steps - 1))
    outputs = unroll(drafter, PackedBatch(rows, padded, padded), target)
    return F.linear(torch.stack([output[0] for output in outputs]), drafter.lm_head.weight)
