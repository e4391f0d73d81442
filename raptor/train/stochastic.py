"""Stochastic depth as the paper uses it: a whole block is dropped, per sample, with one probability at every depth.

timm's `drop_path_rate` rises over depth and drops attention and MLP separately. Kept updates are not rescaled by
default: at p = .9 the factor would be 10.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raptor.data.stream import stable_seed
from raptor.vit.calls import first_tensor


class StochasticBlock(nn.Module):
    """A block that is skipped, in training, for the samples whose `keep` is False.

    Args:
        batch_size: samples on this rank.
        scale: what a kept update is multiplied by.
    """

    keep: Tensor

    def __init__(self, block: nn.Module, batch_size: int, scale: float):
        super().__init__()
        self.block = block
        self.scale = scale
        # Not saved, because it is drawn anew for every step.
        self.register_buffer("keep", torch.ones(batch_size, 1, 1, dtype=torch.bool), persistent=False)

    def forward(self, x_btd: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out_btd = first_tensor(self.block(x_btd, *args, **kwargs))
        if not self.training:
            return out_btd
        if self.scale != 1:
            out_btd = x_btd + self.scale * (out_btd - x_btd)
        return torch.where(self.keep, out_btd, x_btd)


class StochasticDepth:
    """Whole-block stochastic depth over a model's blocks, as a function of (seed, step).

    Args:
        p: probability that a sample skips a block, below 1.
        batch_size: samples over all ranks.
        rescale: divide kept updates by 1 - p.
        rows: this rank's samples of the batch; by default all.
    """

    def __init__(
        self,
        blocks: nn.Sequential | nn.ModuleList,
        p: float,
        batch_size: int,
        rescale: bool,
        seed: int,
        rows: slice = slice(None),
    ):
        self.blocks = blocks
        self.p = p
        self.seed = seed
        self.batch_size = batch_size
        self.rows = rows
        scale = 1.0
        if rescale:
            scale = 1 / (1 - p)
        for name, block in list(blocks.named_children()):
            setattr(blocks, name, StochasticBlock(block, len(range(batch_size)[rows]), scale))

    def draw(self, step: int) -> None:
        """Set which samples keep which block at this step: drawn for the whole batch, then cut to this rank's rows."""
        first = next(self.blocks.children())
        assert isinstance(first, StochasticBlock)
        # On the CPU, where every machine draws the same numbers.
        generator = torch.Generator().manual_seed(stable_seed(self.seed, "stochastic depth", step))
        keep_lb = torch.rand(len(self.blocks), self.batch_size, generator=generator) >= self.p
        keep_lb = keep_lb[:, self.rows].to(first.keep.device, non_blocking=True)
        for block, keep_b in zip(self.blocks.children(), keep_lb):
            block.keep.copy_(keep_b[:, None, None])  # type: ignore[union-attr, operator]

    def remove(self) -> None:
        """Put the plain blocks back."""
        for name, block in list(self.blocks.named_children()):
            setattr(self.blocks, name, block.block)
