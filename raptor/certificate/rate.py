"""Rate and distortion: how much error a model has for how many bits, the surrogate's against the rounded teacher's.

A surrogate has fewer weights than its teacher by construction, and rounding the teacher's weights saves bits as well.
So a surrogate shows compression only where its error lies below the teacher's curve at as many bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raptor.certificate.complexity import BITS, LevinPair, block_list, count_flops, levin_bound
from raptor.certificate.follow import check_pair
from raptor.certificate.heads import Head
from raptor.certificate.refit import replaced_weights
from raptor.data.stream import Batch, sharing
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Record
from raptor.subject import Subject
from raptor.vit.trajectory import Trajectories, autocast
from raptor.vit.view import ViT

NO_EVIDENCE = "the ratio of the Levin bounds follows from k / L by counting and is no evidence of compression"
# Fewer bits for the teacher than for the surrogate: its curve has to reach the bits of fewer weights.
PRECISIONS = {"surrogate": ("fp16", "int8", "int4"), "teacher": ("int8", "int6", "int4", "int3")}


@dataclass(frozen=True)
class RatePoint(Record):
    """One side at one precision of its weights.

    Attributes:
        side: `teacher` or `surrogate`.
        bits: the Levin bound at this precision.
        largest: the largest relative error over the layers, E |a_l - x_l|_F / E |a_l|_F.
        layer: where that is.
        last: the relative error of the last layer.
        agreement: the share of images with the class of the unrounded teacher; None without a head.
    """

    side: str
    precision: str
    bits: float
    largest: float
    layer: int
    last: float
    agreement: float | None = None


@dataclass
class RateDistortion(Record):
    """Both curves, on the same images."""

    num_images: int
    points: list[RatePoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A head judges every point or none: in a file a number was lost.
        if len({point.agreement is None for point in self.points}) > 1:
            raise ValueError("the agreement of a point is missing")

    def of(self, side: str) -> list[RatePoint]:
        """The points of a side, by their bits."""
        found = [point for point in self.points if point.side == side]
        return sorted(found, key=lambda point: point.bits)

    def line(self) -> str:
        """Where the surrogate lies below the teacher's curve, in one line."""
        words = {
            True: "below the teacher's curve, which is compression",
            False: "above the teacher's curve, which is no compression",
            None: "left of the teacher's curve with a larger error, which decides nothing",
        }
        parts = []
        for verdict, meaning in words.items():
            named = []
            for point in self.of("surrogate"):
                if self.is_below(point) == verdict:
                    named.append(f"{point.precision} ({point.bits / 1e6:.1f} Mbit, error {point.largest:.3f})")
            if named:
                parts.append(f"in {' and '.join(named)} {meaning}")
        return f"by bits and largest relative error over layers the surrogate is {'; '.join(parts)}"

    def is_below(self, point: RatePoint) -> bool | None:
        """Whether `point` has a smaller error, the largest over layers, than the teacher at as many bits.

        Between two points of the teacher's curve the error is interpolated. Left of all of them only a smaller error
        than theirs decides; then None.
        """
        curve = self.of("teacher")
        # `largest` and not `last`: the hypothesis is about every layer.
        if point.bits < curve[0].bits:
            return True if point.largest < curve[0].largest else None
        at_bits = np.interp(point.bits, [each.bits for each in curve], [each.largest for each in curve])
        return bool(point.largest < at_bits)


@dataclass
class Complexity(ResultFile):
    """complexity.json: rate and distortion of both sides on images of `data`, and the terms of their Levin bounds."""

    FILE: ClassVar[str] = "complexity.json"

    fp32: LevinPair
    fp16: LevinPair
    int8: LevinPair
    rates: RateDistortion | None = None
    data: str = "the data"
    split: str = "val"
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None

    def lines(self) -> list[str]:
        """What the file shows and what it does not, in words."""
        found = []
        if self.rates is not None:
            found.append(self.rates.line())
        found.append(f"{NO_EVIDENCE} ({self.fp32.ratio:.3f} in fp32)")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The words, then the fields."""
        return {"lines": self.lines(), **super().to_dict()}


@torch.no_grad()
def measure_rates(
    surrogate: ViT, teacher: ViT, batches: Iterable[Batch], *, head: Head | None = None, precision: str = "fp32"
) -> RateDistortion:
    """Round the weights of both sides and compare each with the teacher as it is, in one pass over the images.

    Costs eight forward passes per image. Of all ranks that share the batches.
    """
    check_pair(surrogate, teacher)
    models = {"surrogate": surrogate, "teacher": teacher}
    cases = []
    for side, kinds in PRECISIONS.items():
        if not has_matrices(models[side]):
            raise ValueError(
                f"the blocks of {models[side].name} have no linear layers to round: there is no rate to vary"
            )
        cases += [(side, kind) for kind in kinds]
    errors_cl = torch.zeros(len(cases), teacher.num_layers, dtype=torch.float64, device=teacher.device)
    norms_l = torch.zeros(teacher.num_layers, dtype=torch.float64, device=teacher.device)
    agrees_c = torch.zeros(len(cases), dtype=torch.float64, device=teacher.device)
    num_images = 0
    for states, output, batch in Trajectories(teacher, batches, precision, "rounded weights", quiet=True):
        images = batch.images.to(teacher.device, non_blocking=True)
        norms_l += _summed_norms(states)
        for place, (side, kind) in enumerate(cases):
            vit = models[side]
            # Rounded anew for every batch: seven copies of both models would not fit beside a large teacher.
            with quantised(vit, kind), autocast(precision, vit.device):
                # The whole model, as in the certificate: embedding, norm and head stay as they are.
                own_states, own_output = vit.record(images)
                if head is not None:
                    own_b = head.logits(vit, own_states[-1], own_output).argmax(-1)
                    agrees_c[place] += (own_b == head.logits(teacher, states[-1], output).argmax(-1)).sum()
            # In float32, because the difference of two close bf16 states would be mostly rounding.
            errors_cl[place] += _summed_norms([x.float() - y.float() for x, y in zip(states, own_states)])
        num_images += len(images)
    ranks = sharing(batches)
    # A ratio of means over images, as in Definition 1, not a mean of ratios.
    relative_cl = (ranks.sum(errors_cl) / ranks.sum(norms_l)).cpu().numpy()
    num_images = sum(ranks.gather(num_images))
    if not num_images:
        raise ValueError("no images to measure errors on: the held-out data is empty")
    agreement_c = (ranks.sum(agrees_c) / num_images).tolist()
    flops = {side: count_flops(vit) for side, vit in models.items()}
    found = RateDistortion(num_images)
    for (side, kind), relative_l, agreement in zip(cases, relative_cl, agreement_c):
        found.points.append(
            RatePoint(
                side=side,
                precision=kind,
                bits=levin_bound(models[side], kind, flops[side]).total_bits,
                largest=float(relative_l.max()),
                layer=int(relative_l.argmax()) + 1,
                last=float(relative_l[-1]),
                agreement=None if head is None else agreement,
            )
        )
    return found


def _summed_norms(states: list[Tensor]) -> Tensor:
    """The sum over images of |x_l|_F for the layers 1..L, (L,) in float64."""
    sums = []
    for x_btd in states[1:]:
        sums.append(x_btd.float().flatten(1).norm(dim=1).double().sum())
    return torch.stack(sums)


# Rounding -------------------------------------------------------------------------------------------------------------


def has_matrices(vit: ViT) -> bool:
    """Whether its blocks have anything that rounding to whole numbers changes."""
    return any(parameter.ndim > 1 for parameter in block_list(vit).parameters())


@contextmanager
def quantised(vit: ViT, precision: str) -> Iterator[ViT]:
    """Inside the context the weights of the blocks are rounded to `precision`, in place; then they are put back.

    `fp16` rounds every weight. `int8`, `int6`, `int4` and `int3` round matrices to even steps per row, symmetric about
    zero (255 of them in 8 bits), and vectors to fp16. The arithmetic stays that of the model: what is measured is the
    error of the weights.
    """
    parameters = list(block_list(vit).parameters())
    with replaced_weights(parameters, [rounded(p.detach(), precision) for p in parameters]):
        yield vit


def rounded(weight: Tensor, precision: str) -> Tensor:
    """The values `weight` takes when stored at `precision`, in its own dtype."""
    if precision == "fp16" or weight.ndim < 2:
        # A weight beyond fp16's range would become infinite, and every state after it.
        limit = torch.finfo(torch.float16).max
        return weight.clamp(-limit, limit).half().to(weight.dtype)
    steps, scale = whole_numbers(weight, precision)
    return (steps * scale).view_as(weight)


def whole_numbers(weight: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """The rows of a matrix as whole numbers, still in its own dtype, and their scales (rows, 1).

    The numbers are symmetric about zero: -7..7 in `int4`, -127..127 in `int8`.
    """
    rows = weight.flatten(1)
    # Symmetric: one code of 256 is left unused, so that zero stays zero.
    largest = 2 ** (BITS[precision] - 1) - 1
    # A row of zeros has no largest entry, and no scale of its own.
    scale = (rows.abs().amax(1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    # The largest entry becomes the largest number, so that nothing has to be clipped.
    return (rows / scale).round(), scale
