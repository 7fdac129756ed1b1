"""`Eagle3Drafter`: the trainable module, its initialisation from the target, and warm starts.

All computation happens inside `forward`, so `fully_shard(drafter)` gathers and scatters at the right moments.
"""

from collections.abc import Mapping

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


@torch.no_grad()
def load_weights(drafter: Eagle3Drafter, tensors: Mapping[str, Tensor]) -> None:
    """Warm start from a drafter checkpoint's tensors; d2t, t2d and embeddings are not the drafter's.

    Accepts `midlayer.*` and `layers.0.*`. Raises ValueError on missing, unknown or misshapen tensors.
    """
    skipped = ("d2t", "t2d", "embed_tokens.weight")
    given = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor
        for name, tensor in tensors.items()
        if name.removeprefix("model.") not in skipped
    }
    own = dict(drafter.named_parameters())
    missing, unknown = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    shapes = {
        name: (tuple(given[name].shape), tuple(own[name].shape))
        for name in set(own) & set(given)
        if given[name].shape != own[name].shape
    }
    if missing or unknown or shapes:
        raise ValueError(
            f"the checkpoint does not fit the drafter: missing {missing}, unknown {unknown}, "
            f"(given, expected) shapes {shapes}; take the drafter's spec from that checkpoint's config."
        )
    for name, parameter in own.items():
        parameter.copy_(given[name])
