"""Depth on demand: each image takes as many steps of each phase as its rule asks for.

Images whose phase ends leave the batch, so that time is really saved, and wait for the others at the start of the next
phase. The same function runs a surrogate and its teacher: for a teacher the remaining blocks of a phase are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from raptor.vit.exits import ReadOut, Rule, parse_rule
from raptor.vit.groups import TokenGroups


class Blocks(Protocol):
    """What is needed of a view to run its blocks one by one. The view itself imports this file."""

    name: str
    groups: TokenGroups
    phases: Sequence[int] | None
    num_classes: int

    @property
    def num_layers(self) -> int: ...

    def embed(self, images: Tensor) -> tuple[Tensor, Any]: ...

    def step(self, layer: int, x_btd: Tensor, context: Any) -> Tensor: ...

    def finish(self, x_btd: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class OnDemand:
    """What a batch gives, and how many blocks each of its images passed.

    Attributes:
        output: of the model, or of the `read_out` that was given.
        last_btd: the states that left the last phase.
        num_blocks_bk: blocks that each image passed in each phase.
        num_read_outs: how many states the rule has read class scores of.
    """

    output: Tensor
    last_btd: Tensor
    num_blocks_bk: Tensor
    num_read_outs: int

    @property
    def num_blocks_b(self) -> Tensor:
        return self.num_blocks_bk.sum(-1)


@torch.no_grad()
def run_on_demand(
    vit: Blocks,
    images: Tensor,
    exit: Rule | str | None = None,
    phases: Sequence[int] | None = None,
    read_out: ReadOut | None = None,
) -> OnDemand:
    """Run `images` (B, 3, H, W) through the phases, each image for as many steps as the rule asks for.

    Args:
        exit: a rule, or its name with a threshold, such as `turn<.02`; None runs all blocks.
        phases: lengths of the phases, needed for a teacher; by default those of the surrogate.
        read_out: class scores of a state; by default the model's own head.
    """
    lengths = _lengths(vit, phases)
    rule = exit or Rule()
    if isinstance(rule, str):
        own = vit.finish if vit.num_classes else None
        rule = parse_rule(rule, vit.groups, read_out or own)
    x_btd, context = vit.embed(images)
    context_of = PerImageContext(vit, images, context)
    num_blocks_bk = torch.empty(len(images), len(lengths), dtype=torch.long, device=x_btd.device)
    num_read_before = rule.num_read_outs
    last = 0
    for phase, length in enumerate(lengths):
        first = last + 1
        last += length
        rule.begin(phase)
        rows = torch.arange(len(images), device=x_btd.device)
        # Every row is filled: at the last layer of a phase all images leave.
        left_btd: Tensor | None = None
        for layer in range(first, last + 1):
            after_btd = vit.step(layer, x_btd, context_of.rows(rows))
            is_done_b = torch.ones_like(rows, dtype=torch.bool)
            # After the last layer nothing is left to decide, and reading classes takes time.
            if layer < last:
                is_done_b = rule.fires(x_btd, after_btd, layer - first + 1)
            x_btd = after_btd
            # The host has to know which images leave: the number of the others is the size of the next batch.
            leaving = is_done_b.nonzero().flatten()
            if len(leaving) == 0:
                continue
            if left_btd is None:
                # Like the state after a block: under autocast the one before it may have half its digits.
                left_btd = x_btd.new_empty(len(images), *x_btd.shape[1:])
            left_btd[rows[leaving]] = x_btd[leaving].to(left_btd.dtype)
            num_blocks_bk[rows[leaving], phase] = layer - first + 1
            if len(leaving) == len(rows):
                break
            staying = (~is_done_b).nonzero().flatten()
            rule.keep(staying)
            rows = rows[staying]
            x_btd = x_btd[staying]
        assert left_btd is not None, "every image leaves a phase"
        x_btd = left_btd
    output = (read_out or vit.finish)(x_btd)
    return OnDemand(output, x_btd, num_blocks_bk, rule.num_read_outs - num_read_before)


def _lengths(vit: Blocks, phases: Sequence[int] | None) -> list[int]:
    """The lengths of the phases; ValueError unless they are those of a cut of this model's depth."""
    lengths = vit.phases if phases is None else phases
    if lengths is None:
        raise ValueError(f"{vit.name} is not a surrogate: say where its phases are with phases=")
    if min(lengths, default=0) < 1 or sum(lengths) != vit.num_layers:
        raise ValueError(f"phases {list(lengths)} do not add up to the {vit.num_layers} layers of {vit.name}")
    return list(lengths)


class PerImageContext:
    """What the model passes to its blocks, for some of the images of a batch.

    Masks or positions may differ between images. A tensor has a row for each image if its first dimension is the size
    of the batch and is 1 for a batch of one image.
    """

    def __init__(self, vit: Blocks, images: Tensor, context: Any):
        self._leaves, self._structure = tree_flatten(context.calls)
        self._num_images = len(images)
        self._whole = context
        self._per_image = [False] * len(self._leaves)
        # Most models pass no tensor at all, and embedding an image again would cost a third of a block.
        if len(images) > 1 and any(isinstance(leaf, Tensor) for leaf in self._leaves):
            _, of_one = vit.embed(images[:1])
            for place, (leaf, single) in enumerate(zip(self._leaves, tree_flatten(of_one.calls)[0])):
                self._per_image[place] = _is_per_image(leaf, single, len(images))

    def rows(self, rows: Tensor) -> Any:
        """The context of the images `rows`."""
        if len(rows) == self._num_images or not any(self._per_image):
            return self._whole
        leaves: list[Any] = []
        for leaf, is_per_image in zip(self._leaves, self._per_image):
            leaves.append(leaf[rows.to(leaf.device)] if is_per_image else leaf)
        return replace(self._whole, calls=tree_unflatten(leaves, self._structure))


def _is_per_image(leaf: Any, single: Any, num_images: int) -> bool:
    if not isinstance(leaf, Tensor) or not isinstance(single, Tensor) or leaf.ndim == 0:
        return False
    return leaf.shape[0] == num_images and single.shape[0] == 1 and leaf.shape[1:] == single.shape[1:]
