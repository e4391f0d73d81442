"""A surrogate at its teacher's speed: everything that depends only on depth is computed once.

Otherwise each call makes the factors of each layer again, because weights may change between two calls. On a GPU these
small operations take longer to launch than the layer's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from raptor.devices import torch_defaults
from raptor.surrogate import fast
from raptor.surrogate.block import Modulation
from raptor.surrogate.fast import AtDepth
from raptor.surrogate.surrogate import Step, TiedBlock, shared_blocks
from raptor.vit.calls import copied
from raptor.vit.view import ViT


@torch_defaults()
def at_speed(vit: ViT) -> ViT:
    """A copy of a surrogate for inference, with the factors of each depth computed once. The blocks stay tied.

    The copy takes no gradients, and weights that are changed later do not reach all of it. It may be compiled as a
    whole: `torch.compile(at_speed(vit).model)`.
    """
    shared_blocks(vit)  # ValueError for a model that is not a surrogate
    model = copied(vit.model, vit.name).requires_grad_(False).eval()
    fixed = dataclasses.replace(vit, model=model, norm=_same_module(vit, model))
    for n, step in enumerate(fixed.blocks):
        assert isinstance(step, Step)
        fixed.blocks[n] = FixedStep(step)
    return fixed


def _same_module(vit: ViT, model: nn.Module) -> nn.Module:
    """The final norm in a copy of the model; an identity outside the model stays."""
    for name, module in vit.model.named_modules():
        if module is vit.norm:
            return model.get_submodule(name)
    return vit.norm


class FixedStep(nn.Module):
    """The block of one layer with the factors of its depth, or with those of its fast view. It owns no weights."""

    depth: Tensor

    @torch.no_grad()
    def __init__(self, step: Step):
        super().__init__()
        self._tied = (step.tied,)  # in a tuple, so that it is not registered a second time
        self._view = (step.tied.fast,)
        self.returns_tuple = step.returns_tuple
        self.register_buffer("depth", step.depth, persistent=False)
        modulation = step.tied.modulation(step.depth)
        factors: Modulation | AtDepth | None = modulation
        if step.tied.fast is not None:
            factors = step.tied.fast.at_depth(modulation, None, scale_weights=False)._replace(layers=None)
        elif modulation is not None:
            factors = modulation.flattened(0)
        # The class that holds the factors, None for a step without modulation.
        self._kind: type[Modulation] | type[AtDepth] | None = None
        if factors is not None:
            self._kind = type(factors)
            for name, factor in factors._asdict().items():
                # A copy, because a view would keep the whole row of the table in memory.
                if factor is not None:
                    factor = factor.clone()
                # Buffers, so that they move with the model; not saved, because they are made of the weights.
                self.register_buffer(f"factor_{name}", factor, persistent=False)

    @property
    def tied(self) -> TiedBlock:
        return self._tied[0]

    def forward(self, x_btd: Tensor, *args: Any, **kwargs: Any) -> Any:
        weights = self.tied.weights(self.depth)
        view = self._view[0]
        if view is not None and fast.is_on() and view.takes(args, kwargs):
            at = self._factors()._replace(layers=view.weights_with(weights))
            state_btd = view.run(x_btd, at, fused=True)
        else:
            modulation = self._factors()
            if view is not None:  # the factors are the view's own, which the block does not take
                modulation = self.tied.modulation(self.depth)
            if weights is not None:
                kwargs["weights"] = weights
            state_btd = self.tied.block(x_btd, modulation, *args, **kwargs)
        if self.returns_tuple:
            return (state_btd,)
        return state_btd

    def _factors(self) -> Any:
        if self._kind is None:
            return None
        return self._kind(*[getattr(self, f"factor_{name}") for name in self._kind._fields])
