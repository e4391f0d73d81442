"""Depth on demand: each image takes as many steps of each phase as its rule asks for.

Images whose phase ends leave the batch, so that time is really saved, and wait for the others at the start of the next
phase. The same function runs a surrogate and its teacher: for a teacher the remaining blocks of a phase are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from raptor.data.stream import Batch
from raptor.phases.cut import check_phases
from raptor.recurrence.rules import Logits, Rule
from raptor.vit.trajectory import autocast
from raptor.vit.view import Context, ViT


@dataclass(frozen=True)
class DepthRun:
    """The last states of a batch, and how many blocks each image passed.

    Attributes:
        state_btd: the state that left the last phase.
        num_blocks_bk: blocks that each image passed in each phase.
    """

    state_btd: Tensor
    num_blocks_bk: Tensor

    @property
    def num_blocks_b(self) -> Tensor:
        return self.num_blocks_bk.sum(-1)


@torch.no_grad()
def run_on_demand(vit: ViT, images: Tensor, rule: Rule, phases: Sequence[int] | None = None) -> DepthRun:
    """Run `images` (B, 3, H, W) through the phases, each image for as many steps as the rule asks for.

    phases: lengths of the phases, needed for a teacher; by default those of the surrogate.
    """
    lengths = vit.phases if phases is None else phases
    if lengths is None:
        raise ValueError(f"{vit.name} is not a surrogate: say where its phases are with phases=")
    found = check_phases(vit, lengths)
    x_btd, context = vit.embed(images)
    context_of = PerImageContext(vit, images, context)
    num_blocks_bk = torch.zeros(len(images), found.k, dtype=torch.long, device=x_btd.device)
    for phase, (first, last) in enumerate(found.spans):
        x_btd = _run_phase(vit, x_btd, context_of, rule, phase, first, last, num_blocks_bk)
    return DepthRun(x_btd, num_blocks_bk)


def _run_phase(
    vit: ViT,
    x_btd: Tensor,
    context_of: PerImageContext,
    rule: Rule,
    phase: int,
    first: int,
    last: int,
    num_blocks_bk: Tensor,
) -> Tensor:
    """The states that leave a phase; counts the blocks of each image in `num_blocks_bk`."""
    rows = torch.arange(len(x_btd), device=x_btd.device)
    before_btd = x_btd
    left_btd = x_btd.clone()
    rule.begin(phase, len(rows))
    for layer in range(first, last + 1):
        after_btd = vit.step(layer, before_btd, context_of.rows(rows))
        left_btd[rows] = after_btd.to(left_btd.dtype)
        num_blocks_bk[rows, phase] += 1
        if layer == last:
            break
        # The host has to know which images go on: their number is the size of the next batch.
        staying = (~rule.fires(before_btd, after_btd, layer - first + 1)).nonzero().flatten()
        if len(staying) == 0:
            break
        rule.keep(staying)
        rows = rows[staying]
        before_btd = after_btd[staying]
    return left_btd


class PerImageContext:
    """What the model passes to its blocks, for some of the images of a batch.

    Masks or positions may differ between images. A tensor has a row for each image if its first dimension is the size
    of the batch and is 1 for a batch of one image.
    """

    def __init__(self, vit: ViT, images: Tensor, context: Context):
        self._leaves, self._structure = tree_flatten(context.calls)
        self._num_images = len(images)
        self._whole = context
        self._per_image = [False] * len(self._leaves)
        if len(images) > 1:
            _, of_one = vit.embed(images[:1])
            for place, (leaf, single) in enumerate(zip(self._leaves, tree_flatten(of_one.calls)[0])):
                self._per_image[place] = _is_per_image(leaf, single, len(images))

    def rows(self, rows: Tensor) -> Context:
        """The context of the images `rows`."""
        if len(rows) == self._num_images or not any(self._per_image):
            return self._whole
        leaves: list[Any] = []
        for leaf, is_per_image in zip(self._leaves, self._per_image):
            leaves.append(leaf[rows.to(leaf.device)] if is_per_image else leaf)
        return Context(tree_unflatten(leaves, self._structure))


def _is_per_image(leaf: Any, single: Any, num_images: int) -> bool:
    if not isinstance(leaf, Tensor) or not isinstance(single, Tensor) or leaf.ndim == 0:
        return False
    return leaf.shape[0] == num_images and single.shape[0] == 1 and leaf.shape[1:] == single.shape[1:]


@dataclass(frozen=True)
class DepthPoint:
    """One rule on one model: what it saves and what it costs.

    Attributes:
        blocks: mean share of the blocks that an image passed; also the share of the FLOPs of the blocks.
        milliseconds: per image, with the rule and the regrouping of images.
        agreement: share of images with the class that the reference gives.
        accuracy: share of labelled images that are right, None without labels.
    """

    rule: str
    blocks: float
    milliseconds: float
    agreement: float
    accuracy: float | None
    num_images: int


def measure_depth(
    vit: ViT,
    reference: ViT,
    batches: Iterable[Batch],
    rules: dict[str, Rule],
    logits: Logits | None = None,
    reference_logits: Logits | None = None,
    phases: Sequence[int] | None = None,
    precision: str = "fp32",
) -> list[DepthPoint]:
    """Run every rule over a stream of images and compare the classes with those of `reference` at full depth.

    Args:
        rules: by the name that the result gives them; `Rule()` is full depth.
        logits, reference_logits: class scores of a last state; by default the models' own heads.
    """
    logits = logits or vit.finish
    reference_logits = reference_logits or reference.finish
    totals = {name: _Total() for name in rules}
    for batch in batches:
        images = batch.images.to(vit.device)
        with torch.no_grad(), autocast(precision, vit.device):
            wanted_b = reference_logits(reference.record(images)[0][-1]).argmax(-1)
        for name, rule in rules.items():
            started = _now(vit.device)
            with torch.no_grad(), autocast(precision, vit.device):
                run = run_on_demand(vit, images, rule, phases)
                class_b = logits(run.state_btd).argmax(-1)
            totals[name].add(run, class_b, wanted_b, batch.labels, _now(vit.device) - started)
    return [total.point(name, vit.num_layers) for name, total in totals.items()]


@dataclass
class _Total:
    """Sums over images of one rule."""

    num_images: int = 0
    num_blocks: int = 0
    seconds: float = 0.0
    num_agreeing: int = 0
    num_labelled: int = 0
    num_right: int = 0

    def add(self, run: DepthRun, class_b: Tensor, wanted_b: Tensor, labels_b: Tensor | None, seconds: float) -> None:
        self.num_images += len(class_b)
        self.num_blocks += int(run.num_blocks_bk.sum())
        self.seconds += seconds
        self.num_agreeing += int((class_b == wanted_b).sum())
        if labels_b is not None:
            self.num_labelled += len(class_b)
            self.num_right += int((class_b == labels_b.to(class_b.device)).sum())

    def point(self, name: str, num_layers: int) -> DepthPoint:
        accuracy = self.num_right / self.num_labelled if self.num_labelled else None
        return DepthPoint(
            rule=name,
            blocks=self.num_blocks / (self.num_images * num_layers),
            milliseconds=1000 * self.seconds / self.num_images,
            agreement=self.num_agreeing / self.num_images,
            accuracy=accuracy,
            num_images=self.num_images,
        )


def _now(device: torch.device) -> float:
    """Seconds, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
