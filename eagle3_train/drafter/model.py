"""`Eagle3Drafter`: the trainable module and its initialisation from the target.

All computation happens inside `forward`, so `fully_shard(drafter)` gathers and scatters at the right moments.
"""

import torch
from torch import Tensor, nn

from eagle3_train.drafter import losses
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.losses import LossOptions
from eagle3_train.drafter.modules import DrafterWeights
from eagle3_train.drafter.rows import PackedBatch
from eagle3_train.drafter.stepwise import wide
from eagle3_train.drafter.ttt import StepOutput, hits, unroll


class Eagle3Drafter(DrafterWeights):
    """The drafter. Its state dict is the exported checkpoint without d2t and t2d."""

    def forward(
        self,
        batch: PackedBatch,
        target: FrozenTarget,
        options: LossOptions,
        normaliser: float | Tensor,
        metrics: bool = False,
    ) -> StepOutput:
        """Loss of one pack: sum over supervised rows of decay**k * loss / normaliser.

        normaliser is the number of supervised starts of the whole window over all ranks. Under FSDP2,
        which averages gradients, multiply the loss by the number of ranks.
        """
        rows = batch.rows
        if rows.steps == 0:
            no_hits = torch.zeros(0, dtype=torch.bool, device=rows.starts.device)
            # Zero with a zero gradient for every parameter, so that a rank without rows joins the collectives.
            untouched = torch.stack([p.flatten()[:1].sum() * 0 for p in self.parameters()]).sum()
            return StepOutput(untouched, hits(rows, no_hits) if metrics else None)
        outputs = unroll(self, batch, target)
        with torch.no_grad():
            states = losses.target_states(batch, target)
            supervision = losses.teacher(states, target)
            weights = losses.row_weights(rows, options.decay, normaliser, wide(states.dtype))
        head = self.lm_head.weight
        loss, drafts = losses.draft_loss(
            outputs, head, supervision, rows, weights, options.kind, metrics, self.multiplies_in_fp8
        )
        if drafts is None:
            return StepOutput(loss, None)
        answers = losses.target_answers(states, target).index_select(0, rows.slots)
        return StepOutput(loss, hits(rows, target.draft_ids.index_select(0, drafts) == answers))


@torch.no_grad()
def init_from_target(
    drafter: Eagle3Drafter, target: FrozenTarget, generator: torch.Generator
) -> None:
    """Initialise in place: head and final norm are the target's, h_0 starts as the highest auxiliary state.

    Measured beside a random fc, the mean of the states and smaller branches (docs/log.md): least held-out
    loss and longest expected acceptance after 60 steps.
    """
    for parameter in drafter.parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
    width = drafter.spec.hidden_size
    drafter.fc.weight.mul_(0.1)[:, -width:].add_(torch.eye(width, device=drafter.fc.weight.device))
    drafter.lm_head.weight.copy_(target.draft_head)
    if target.norm_weight is not None:
        drafter.norm.weight.copy_(target.norm_weight)
