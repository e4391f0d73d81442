"""A surrogate at its teacher's speed: everything that depends only on depth is computed once.

Otherwise each call makes the factors of each layer again, because weights may change between two calls. On a GPU these
small operations take longer to launch than the layer's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raptor.devices import torch_defaults
from raptor.surrogate.block import Modulation, fast_is_on
from raptor.surrogate.fast import AtDepth
from raptor.surrogate.surrogate import Step, shared_blocks
from raptor.vit.calls import copied
from raptor.vit.view import ViT


@torch_defaults()
def at_speed(vit: ViT) -> ViT:
    """A copy of a surrogate for inference, with the factors of each depth computed once. The blocks stay tied.

    The copy takes no gradients, and weights that are changed later do not reach all of it. It may be compiled as a
    whole: `torch.compile(at_speed(vit).model)`.
    """
    shared_blocks(vit)  # ValueError for a model that is not a surrogate
    fixed = vit.around(copied(vit.model, vit.name).requires_grad_(False).eval())
    for n, step in enumerate(fixed.blocks):
        assert isinstance(step, Step)
        fixed.blocks[n] = FixedStep(step)
    return fixed


class FixedStep(Step):
    """A step that holds the factors of its depth, in the form that its block or the block's fast view takes."""

    @torch.no_grad()
    def __init__(self, step: Step):
        super().__init__(step.tied, int(step.depth), step.returns_tuple)
        self.depth = step.depth  # on the device of the model
        self._view = (step.tied.fast,)
        modulation = step.tied.modulation(step.depth)
        factors: Modulation | AtDepth | None = None
        if step.tied.fast is not None:
            factors = step.tied.fast.at_depth(modulation, None, scale_weights=False)._replace(layers=None)
        elif modulation is not None:
            factors = modulation.flattened(0)
        self._kind: type[Modulation] | type[AtDepth] | None = None
        if factors is None:  # a block without modulation
            return
        self._kind = type(factors)
        for name, factor in factors._asdict().items():
            # A copy, because a view would keep the whole row of the table in memory.
            if factor is not None:
                factor = factor.clone()
            # Buffers, so that they move with the model; not saved, because they are made of the weights.
            self.register_buffer(f"factor_{name}", factor, persistent=False)

    def next_state(self, x_btd: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weights = self.tied.weights(self.depth)
        view = self._view[0]
        if view is not None and fast_is_on() and view.takes(args, kwargs):
            at = self._factors()._replace(layers=view.weights_with(weights))
            return view.run(x_btd, at, fused=True)
        modulation = self._factors()
        if view is not None:  # the factors are the view's own, which the block does not take
            modulation = self.tied.modulation(self.depth)
        if weights is not None:
            kwargs["weights"] = weights
        return self.tied.block(x_btd, modulation, *args, **kwargs)

    def _factors(self) -> Any:
        if self._kind is None:
            return None
        return self._kind(*[getattr(self, f"factor_{name}") for name in self._kind._fields])
