"""A phase's layers made at once for all of its depths, for training.

Each depth on its own would scale and round the tied weights again, and its gradients would be taken apart and added to
the others' one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raptor.surrogate.adapters import Weights, at_each_depth
from raptor.surrogate.block import Modulation
from raptor.surrogate.fast import FastBlock, Folded, product_dtype


class LayerCall(NamedTuple):
    """What a phase's block takes at one of its layers, beside the state and the teacher's own arguments.

    Attributes:
        modulation: its factors as vectors (D,); None for a fast block, whose folded layers have them.
        kwargs: the folded layers, or the weights of that depth where it has its own.
    """

    modulation: Modulation | None
    kwargs: dict[str, Any]


def fold_depths(block: FastBlock, modulation: Modulation | None, weights: Weights | None, dtype: torch.dtype) -> Folded:
    """All depths' layers, where `modulation` has factors (n, D) and `weights` are of n depths.

    Tensors that differ between depths are rounded to `dtype` here, where a compiler fuses it, shared ones by `Spread`.
    """
    layers, t3, shift3 = block.fold(modulation, weights)
    rounded = []
    for weight, bias in layers:
        if weight.ndim == 3:
            weight = weight.to(dtype)
        if bias.ndim == 2:
            bias = bias.to(dtype)
        rounded.append((weight, bias))
    return Folded(tuple(rounded), t3, shift3)


def layer_calls(
    tied: Any, block: nn.Module, depth_n: Tensor, fold: Callable[..., Folded] = fold_depths
) -> list[LayerCall]:
    """How the tied block of a phase is called at each of the depths (n,) of its layers.

    Everything is made for the whole phase here, because a compiled block that read a table would be compiled again for
    each phase.

    Args:
        block: what runs: the block's fast view, or the block itself.
        fold: `fold_depths`, or its compiled form, which scales and rounds in fused kernels.
    """
    num_depths = len(depth_n)
    modulation = tied.modulation(depth_n)
    if modulation is not None:
        modulation = modulation.flattened(1)
    weights = tied.weights(depth_n)
    if isinstance(block, FastBlock):
        dtype = product_dtype(block.norm1.weight)
        folded = fold(block, modulation, weights, dtype)
        return [LayerCall(None, {"folded": one}) for one in _each_depth(folded, num_depths, dtype)]
    factors: Sequence[Modulation | None] = [None] * num_depths
    if modulation is not None:
        factors = modulation.unbind()
    if weights is None:
        return [LayerCall(one, {}) for one in factors]
    return [LayerCall(one, {"weights": own}) for one, own in zip(factors, at_each_depth(weights))]


def _each_depth(folded: Folded, num_depths: int, dtype: torch.dtype) -> list[Folded]:
    """The layers of n depths as one `Folded` for each."""
    own: list[bool] = []  # whether weight and bias of each layer differ between depths
    tensors: list[Tensor] = []
    for weight, bias in folded.layers:
        own += [weight.ndim == 3, bias.ndim == 2]
        tensors += [weight, bias]
    shared = [tensor for tensor, differs in zip(tensors, own) if not differs]
    # All in one call, because each call of the function is a node of the graph.
    copies = Spread.apply(num_depths, dtype, *shared)
    by_depth: list[Sequence[Tensor]] = []
    num_taken = 0
    for tensor, differs in zip(tensors, own):
        if differs:
            by_depth.append(tensor.unbind())
        else:
            by_depth.append(copies[num_taken : num_taken + num_depths])
            num_taken += num_depths
    t3_n: Sequence[Any] = [folded.t3] * num_depths
    if isinstance(folded.t3, Tensor):
        t3_n = folded.t3.unbind()
    shift3_n: Sequence[Any] = [folded.shift3] * num_depths
    if isinstance(folded.shift3, Tensor):
        shift3_n = folded.shift3.unbind()
    each = []
    for n in range(num_depths):
        here = [depths[n] for depths in by_depth]
        layers = tuple(zip(here[0::2], here[1::2]))
        each.append(Folded(layers, t3_n[n], shift3_n[n]))
    return each


class Spread(torch.autograd.Function):
    """`num` copies of each tensor in another precision; their gradients are added up at once in the tensor's own.

    Autograd would add them one by one, in bf16, where a gradient of 1/512 beside 1 is lost.
    """

    @staticmethod
    def forward(ctx: Any, num: int, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.num = num
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        copies = []
        for tensor in tensors:
            rounded = tensor.to(dtype)
            # Own tensors over one memory: autograd tells the outputs apart by the tensor, and nothing is copied.
            copies += [rounded.detach() for _ in range(num)]
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        sums = []
        for n, dtype in enumerate(ctx.dtypes):
            part = grads[n * ctx.num : (n + 1) * ctx.num]
            sums.append(torch.stack(part).sum(0, dtype=dtype))
        return None, None, *sums
