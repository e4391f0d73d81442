"""All interventions on depth, of a teacher and of its surrogate: swaps, repetition, extrapolation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from torch import Tensor

from raptor.certificate.heads import Head
from raptor.devices import ONE_PROCESS, Ranks
from raptor.dynamics.effects import BATCH
from raptor.dynamics.measure import SidesFile
from raptor.dynamics.repetition import Extrapolation, Repetition, measure_extrapolation, measure_repetition
from raptor.dynamics.swaps import Swaps, measure_swaps
from raptor.progress import Progress
from raptor.streaming import Record
from raptor.vit.view import ViT


@dataclass
class Interventions(Record):
    """All interventions on one model; `extrapolation` only on a surrogate."""

    swaps: Swaps
    repetition: Repetition
    extrapolation: Extrapolation | None = None

    def findings(self) -> list[str]:
        """One sentence for each intervention."""
        lines = [self.swaps.finding(), self.repetition.finding()]
        if self.extrapolation is not None:
            lines.append(self.extrapolation.finding())
        return lines


@dataclass
class InterventionsFile(SidesFile):
    """interventions.json: what `raptor dynamics` found when it changed the depth of a model.

    head: why there are no predictions, or which head gives them.
    """

    FILE: ClassVar[str] = "interventions.json"

    teacher: Interventions | None
    surrogate: Interventions | None
    findings: list[str] = field(default_factory=list)
    head: str | None = None


def intervene(
    teacher: ViT,
    surrogate: ViT | None,
    images: Tensor,
    phases: Sequence[int],
    head: Head | None,
    ranks: Ranks = ONE_PROCESS,
) -> dict[str, Interventions]:
    """Swaps and repetition of both sides, and extrapolation of the surrogate, on `images` (N, 3, H, W).

    Args:
        phases: their lengths, of both sides.
        head: gives the predictions whose agreement is measured; None leaves agreement out.
        ranks: they share the swaps; each gives the same images and gets the same result.
    """
    found: dict[str, Interventions] = {}
    for side, vit in (("teacher", teacher), ("surrogate", surrogate)):
        if vit is None:
            continue
        predict = None
        if head is not None:
            predict = partial(head.logits, vit)
        num_pairs = vit.num_layers * (vit.num_layers - 1) // 2
        bar = Progress(f"swaps of {vit.name}", num_pairs * -(-len(images) // BATCH), "pairs")
        swaps = measure_swaps(vit, images, phases, predict, bar.advance, ranks)
        bar.finish()
        # Swaps are quadratic in depth and shared by the ranks; the rest takes a few passes, which one rank makes.
        repetition = ranks.first(partial(measure_repetition, vit, images, phases, predict))
        found[side] = Interventions(swaps, repetition)
        # Only a tied block can run on: a teacher has no block for a layer past its last.
        if vit.phases is not None:
            found[side].extrapolation = ranks.first(partial(measure_extrapolation, vit, images, predict=predict))
    return found
