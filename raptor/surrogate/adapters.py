"""Low-rank adapters: at each depth a tied block's matrices are `W + B_l A_l`, with `W` shared and `B_l A_l` of rank r.

The sum is taken before the product with the states. It costs `r D_in D_out` multiply-adds a depth, whatever the batch;
`(x A^T) B^T` would cost `r (D_in + D_out)` per token, a hundred times as much at 128 images of 261 tokens and D = 384,
and further passes over the states. For a single image both cost about the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = list[tuple[Tensor, Tensor | None]]
"""Weight and bias of each adapted layer: (out, in) and (out,) at one depth, (n, out, in) and (n, out) at n depths."""


class DepthLinear(nn.Linear):
    """A linear layer that takes the weight and bias in `now` instead of its own, if there are any when it is called.

    With weights of n depths the rows of the input are n equal runs, one after the other.
    """

    now: tuple[Tensor, Tensor | None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.now is None:
            return super().forward(x)
        weight, bias = self.now
        if weight.ndim == 2:
            return F.linear(x, weight, bias)
        runs = x.reshape(len(weight), -1, x.shape[-1])
        if bias is None:
            y = torch.bmm(runs, weight.mT)
        else:
            y = torch.baddbmm(bias[:, None], runs, weight.mT)
        return y.view(*x.shape[:-1], -1)


class _Adapter(nn.Module):
    """The adapter of one linear layer.

    `up` and `down` have r rows for each depth, so that int8 rounds each of them by its own scale; `bias` is what each
    depth adds to the layer's own.
    """

    def __init__(self, layer: nn.Linear, rank: int, num_depths: int):
        super().__init__()
        self.rank = rank
        weight = layer.weight
        num_out, num_in = weight.shape
        self.down = nn.Parameter(weight.new_empty(num_depths * rank, num_in))
        self.up = nn.Parameter(weight.new_zeros(num_depths * rank, num_out))
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(weight.new_zeros(num_depths, num_out))
        # Only `up` starts at zero: with both factors at zero neither would have a gradient.
        nn.init.normal_(self.down, std=num_in**-0.5)

    def forward(self, layer: nn.Linear, row_n: Tensor) -> tuple[Tensor, Tensor | None]:
        down = self.down.unflatten(0, (-1, self.rank)).index_select(0, row_n)
        up = self.up.unflatten(0, (-1, self.rank)).index_select(0, row_n)
        # Not in bf16: the sum is rounded once, when it is used.
        with torch.autocast(down.device.type, enabled=False):
            weight = torch.baddbmm(layer.weight.expand(len(row_n), -1, -1), up.mT, down)
        if self.bias is None:
            return weight, None
        return weight, layer.bias + self.bias.index_select(0, row_n)


class DepthAdapters(nn.Module):
    """Adapters of rank `rank` of the linear layers of a block, one for each depth `first..last`.

    Past the last depth its adapter is held.
    """

    first: Tensor
    last: Tensor

    def __init__(self, layers: Sequence[nn.Linear], rank: int, first: int, last: int):
        super().__init__()
        self.register_buffer("first", torch.tensor(float(first)), persistent=False)
        self.register_buffer("last", torch.tensor(float(last)), persistent=False)
        self.matrices = nn.ModuleList(_Adapter(layer, rank, last - first + 1) for layer in layers)

    def forward(self, layers: Sequence[nn.Linear], depth: Tensor) -> Weights:
        """Weights of `layers` at the depths `(n,)`, or at one that is a 0-d tensor."""
        row_n = (depth.reshape(-1).clamp(self.first, self.last) - self.first).long()  # no index on the host: no sync
        weights: Weights = [adapter(layer, row_n) for adapter, layer in zip(self.matrices, layers)]
        if depth.ndim == 0:
            return at_each_depth(weights)[0]
        return weights


def at_each_depth(weights: Weights) -> list[Weights]:
    """The weights of n depths, one depth after the other."""
    by_layer = []
    for weight, bias in weights:
        biases: Sequence[Tensor | None] = [None] * len(weight)
        if bias is not None:
            biases = bias.unbind()
        by_layer.append(zip(weight.unbind(), biases))
    return [list(layers) for layers in zip(*by_layer)]


def adapt(block: nn.Module, names: Sequence[str]) -> list[DepthLinear]:
    """Make the linear layers `names` of a block take the weights of a depth; they keep their parameters."""
    made = []
    for name in names:
        old = block.get_submodule(name)
        assert isinstance(old, nn.Linear)
        new = DepthLinear(old.in_features, old.out_features, device="meta")  # without weights: it takes the old ones
        new.weight = old.weight
        new.bias = old.bias
        parent, _, child = name.rpartition(".")
        setattr(block.get_submodule(parent), child, new)
        made.append(new)
    return made
