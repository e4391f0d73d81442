"""Correcting a damaged state by running further steps of a phase.

If a tied block pulls states towards those of usual images, a few more of its steps should undo some of a disturbance.
The measure is the share of the lost agreement that comes back. A teacher, which repeats the last blocks of the phase,
and an untrained twin are measured in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

import torch
from torch import Tensor

from raptor.data.stream import Batch
from raptor.dynamics.effects import run_blocks
from raptor.dynamics.repetition import repetition_plan
from raptor.recurrence.tool import ToolFile, phases_with
from raptor.streaming import Record
from raptor.vit.on_demand import ReadOut
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

MAX_EXTRA = 8
NOISE = "noise"
DROP = "dropped patches"


@dataclass(frozen=True)
class Correction(Record):
    """How much of the agreement lost to a disturbance comes back after further steps.

    Attributes:
        agreement: with the classes of the clean image at the usual depth, by the number of extra steps (0..E).
        agreement_clean: the same without the disturbance: what the extra steps themselves cost.
    """

    disturbance: str
    size: float
    phase: int
    agreement: list[float]
    agreement_clean: list[float]
    num_images: int

    @property
    def recovered(self) -> list[float] | None:
        """Share of the lost agreement that came back, by the number of extra steps; None if nothing was lost."""
        lost = 1 - self.agreement[0]
        if lost <= 0:
            return None
        return [(kept - self.agreement[0]) / lost for kept in self.agreement]


@dataclass
class CorrectFile(ToolFile):
    """correct.json: what further steps of each phase bring back, by model: surrogate, teacher, untrained twin.

    Attributes:
        beside: the folder or name of the other surrogate, where one was given.
    """

    FILE: ClassVar[str] = "correct.json"

    sides: dict[str, list[Correction]]
    notes: list[str]
    beside: str | None = None


def correct_findings(sides: dict[str, list[Correction]]) -> list[str]:
    """For each model and disturbance, the most that further steps of any phase bring back."""
    found = []
    for side, corrections in sides.items():
        by_kind: dict[tuple[str, float], list[Correction]] = defaultdict(list)
        for one in corrections:
            by_kind[one.disturbance, one.size].append(one)
        for (disturbance, size), own in by_kind.items():
            name = f"{side}, {disturbance} {size:g}"
            hurt = [(one.recovered, one) for one in own if one.recovered is not None]
            if not hurt:
                found.append(f"{name}: no agreement is lost")
                continue
            shares, best = max(hurt, key=lambda pair: max(pair[0][1:]))
            most = max(shares[1:])
            # In images: all of the agreement that one image has lost may come back by chance.
            num_lost = round((1 - best.agreement[0]) * best.num_images)
            found.append(
                f"{name}: at best {most:+.0%} of the lost agreement comes back ({num_lost} of {best.num_images} images "
                f"were lost, phase {best.phase}, further steps: {shares.index(most, 1)})"
            )
    return found


@dataclass(frozen=True)
class Disturbance:
    """What is done to the state that enters a phase.

    Attributes:
        name, size: `noise` adds a random direction of `size` times each token's norm; `dropped patches` sets a share
            `size` of the patches to the mean patch of the image. With `batches` they only say what was done.
        batches: the same images in the same batches, disturbed themselves, such as blurred.
    """

    name: str
    size: float
    batches: Iterable[Batch] | None = None


@torch.no_grad()
def measure_corrections(
    vit: ViT,
    batches: Iterable[Batch],
    phase: int,
    disturbances: Sequence[Disturbance],
    max_extra: int = MAX_EXTRA,
    phases: Sequence[int] | None = None,
    logits: ReadOut | None = None,
    precision: str = "fp32",
    seed: int = 0,
) -> list[Correction]:
    """Disturb the state that enters a phase (1..k), run 0 to `max_extra` further steps of the phase, then the rest.

    phases: lengths of the phases, needed for a teacher; by default those of the surrogate.
    """
    found = phases_with(vit, phases, phase)
    if max_extra < 0:
        raise ValueError(f"the number of further steps must be at least 0, got {max_extra}")
    logits = logits or vit.finish
    first, last = found.spans[phase - 1]
    length = last - first + 1
    # What follows the phase's own steps: these are run once for all numbers of further steps.
    plans = [repetition_plan(vit, (first, last), length + extra)[length:] for extra in range(max_extra + 1)]
    # A generator for each, so that no disturbance depends on which others are measured.
    generators = [torch.Generator().manual_seed(seed) for _ in disturbances]
    others = [repeat(None) if one.batches is None else one.batches for one in disturbances]
    num_kept = torch.zeros(1 + len(disturbances), max_extra + 1, dtype=torch.long)
    num_images = 0
    for batch, *changed in zip(batches, *others):
        with autocast(precision, vit.device):
            a_0_btd, context = vit.embed(batch.images.to(vit.device))
            entry_btd = vit.unroll(a_0_btd, context, stop=first - 1)[-1]
            entries = [entry_btd]
            for one, other, generator in zip(disturbances, changed, generators):
                if other is None:
                    entries.append(disturb(vit, entry_btd, one.name, one.size, generator))
                else:
                    # The context stays that of the clean image: it holds positions, not pixels.
                    b_0_btd, _ = vit.embed(other.images.to(vit.device))
                    entries.append(vit.unroll(b_0_btd, context, stop=first - 1)[-1])
            for row, start_btd in enumerate(entries):
                ended_btd = vit.unroll(start_btd, context, start=first - 1, stop=last)[-1]
                for extra, plan in enumerate(plans):
                    left_btd = run_blocks(vit, ended_btd, context, plan)
                    class_b = logits(vit.unroll(left_btd, context, start=last)[-1]).argmax(-1)
                    # The undisturbed state without further steps is the model as it is.
                    if row == 0 and extra == 0:
                        clean_b = class_b
                    num_kept[row, extra] += (class_b == clean_b).sum().cpu()
        num_images += len(clean_b)
    if num_images == 0:
        raise ValueError("there are no images to correct: check --data")
    clean, *agreements = (num_kept.double() / num_images).tolist()
    corrections = []
    for one, agreement in zip(disturbances, agreements):
        corrections.append(Correction(one.name, one.size, phase, agreement, clean, num_images))
    return corrections


def disturb(vit: ViT, x_btd: Tensor, disturbance: str, size: float, generator: torch.Generator) -> Tensor:
    """A disturbed copy of a state."""
    if disturbance not in (NOISE, DROP):
        raise ValueError(f"unknown disturbance {disturbance!r}: choose from {NOISE}, {DROP}")
    largest = 1.0 if disturbance == DROP else float("inf")
    if not 0 <= size <= largest:
        raise ValueError(f"a disturbance of size {size:g} is not possible: give a share of at least 0")
    if disturbance == NOISE:
        direction_btd = torch.randn(x_btd.shape, generator=generator).to(x_btd)
        # Uniform on the sphere, so that its length is exactly what was asked for.
        direction_btd = direction_btd / direction_btd.norm(dim=-1, keepdim=True)
        return x_btd + size * x_btd.norm(dim=-1, keepdim=True) * direction_btd
    where = vit.groups.slice("patches")
    patches_bpd = x_btd[:, where]
    num_dropped = round(size * patches_bpd.shape[1])
    # The same number in each image; a coin for each patch would vary it.
    order_bp = torch.rand(patches_bpd.shape[:2], generator=generator).argsort(dim=1).to(x_btd.device)
    is_dropped_bp = order_bp < num_dropped
    # The mean patch and not zeros, which no layer has ever seen.
    mean_b1d = patches_bpd.mean(1, keepdim=True)
    disturbed_btd = x_btd.clone()
    disturbed_btd[:, where] = torch.where(is_dropped_bp[..., None], mean_b1d, patches_bpd)
    return disturbed_btd
