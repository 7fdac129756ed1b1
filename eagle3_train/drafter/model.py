"""`Eagle3Drafter`: the trainable module and its initialisation from the target.

All computation happens inside `forward`, so `fully_shard(drafter)` gathers and scatters at the right moments.
"""

import torch
from torch import Tensor, nn

from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.losses import LossOptions
from eagle3_train.drafter.modules import DrafterWeights
from eagle3_train.drafter.rows import PackedBatch
from eagle3_train.drafter.ttt import StepOutput, training_step


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
        """Loss of one pack, to be summed over the packs of an optimiser window.

        normaliser is the number of supervised starts of the whole window over all ranks. Under FSDP2,
        which averages gradients, multiply the loss by the number of ranks.
        """
        return training_step(self, batch, target, options, normaliser, metrics)


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
