"""Taps that vLLM's own classes lack, added by our worker while vLLM's files stay as they are.

A class with no taps at all is used only when it is named in `target.tap_by_hooks`: our worker registers a subclass
of it before it loads the model, and forward hooks on its decoder layers collect the states. A hook is Python, so
nothing may be compiled.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import SupportsEagle3


def tapped(found: type[nn.Module]) -> type[nn.Module]:
    """Subclass of `found` that implements vLLM's EAGLE-3 interface: its forward also returns boundary states."""

    class Tapped(found, SupportsEagle3):  # type: ignore[misc, valid-type]
        boundaries: tuple[int, ...] = ()
        collected: dict[int, Tensor]

        def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
            self.boundaries, self.collected = tuple(sorted(set(layers))), {}
            blocks = decoder_layers(self)
            if self.boundaries[0] < 1:
                raise ValueError("boundary 0 (the embeddings) cannot be tapped by hooks")
            for boundary in self.boundaries:
                blocks[boundary - 1].register_forward_hook(partial(self._collect, boundary))

        def _collect(self, boundary: int, _layer: nn.Module, _inputs: Any, output: Any) -> None:
            self.collected[boundary] = stream(output)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if not self.boundaries:
                return output
            return output, [self.collected.pop(boundary) for boundary in self.boundaries]

    Tapped.__name__ = found.__name__
    return Tapped


def stream(output: Any) -> Tensor:
    """Residual stream after a decoder layer, which returns it whole or as (branch, residual)."""
    if isinstance(output, Tensor):
        return output.clone()  # the next layer may write into it
    branch, residual = output
    return torch.add(branch, residual)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The target's decoder layers: the one list of modules that is called `layers`."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "layers"
    }
    if len(found) != 1:
        raise ValueError(
            f"expected one list of decoder layers, found {sorted(found)}; hooks cannot tap it"
        )
    return next(iter(found.values()))
