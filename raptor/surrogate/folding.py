"""A paper block's linear layers at every depth of a phase, made once per step.

Each depth on its own would scale and round the tied weights again, and its gradients would be taken apart and added to
the others' one by one. Here a phase's weights are scaled and rounded in one pass, and the gradients of all its depths
are taken back through it in one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raptor.surrogate.adapters import Weights
from raptor.surrogate.blocks import Folded, Modulation, PaperBlock, product_dtype


class FoldedDepths:
    """The layers of one phase's depths; with `compiled`, scaled and rounded in fused kernels."""

    def __init__(self, compiled: bool):
        self._fold: Callable[..., Folded] = torch.compile(_fold) if compiled else _fold

    def __call__(
        self, block: PaperBlock, modulation: Modulation | None, num_depths: int, weights: Weights | None = None
    ) -> list[Folded]:
        """One `Folded` per depth, in the precision of the products.

        `modulation` has factors (num_depths, D); `weights` are those of the layers at each depth, if they differ.
        """
        dtype = product_dtype(block.g1)
        folded = self._fold(block, modulation, weights, dtype)
        tied = [tensor for layer in folded.layers for tensor, differs in _with_depth_axis(layer) if not differs]
        copies = iter(Spread.apply(num_depths, dtype, *tied))
        depths = range(num_depths)
        each = [
            [
                tensor.unbind() if differs else [next(copies) for _ in depths]
                for tensor, differs in _with_depth_axis(layer)
            ]
            for layer in folded.layers
        ]
        t3, shift3 = (v.unbind() if isinstance(v, Tensor) else [v] * num_depths for v in (folded.t3, folded.shift3))
        return [Folded(tuple((weight[n], bias[n]) for weight, bias in each), t3[n], shift3[n]) for n in depths]


def _fold(block: PaperBlock, modulation: Modulation | None, weights: Weights | None, dtype: torch.dtype) -> Folded:
    """All depths' layers; what differs between them is rounded here, what they share by `Spread`."""
    layers, t3, shift3 = block.fold(modulation, weights)
    rounded = [
        [tensor.to(dtype) if differs else tensor for tensor, differs in _with_depth_axis(layer)] for layer in layers
    ]
    return Folded(tuple((weight, bias) for weight, bias in rounded), t3, shift3)


def _with_depth_axis(layer: tuple[Tensor, Tensor]) -> list[tuple[Tensor, bool]]:
    """Weight and bias, each with whether it has a first axis of depths."""
    weight, bias = layer
    return [(weight, weight.ndim == 3), (bias, bias.ndim == 2)]


class Spread(torch.autograd.Function):
    """`num` copies of each tensor in another precision; their gradients are added up at once in the tensor's own."""

    @staticmethod
    def forward(ctx: Any, num: int, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.num, ctx.dtypes = num, [tensor.dtype for tensor in tensors]
        rounded = [tensor.to(dtype) for tensor in tensors]
        return tuple(tensor.detach() for tensor in rounded for _ in range(num))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        parts = [grads[n : n + ctx.num] for n in range(0, len(grads), ctx.num)]
        return None, None, *(torch.stack(part).sum(0, dtype=dtype) for part, dtype in zip(parts, ctx.dtypes))
