"""What the results of the four tools begin with, and how they read classes from a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from raptor.certificate.heads import Head
from raptor.certificate.verdict import named_images
from raptor.phases.cut import Phases, check_phases
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.subject import Subject
from raptor.vit.on_demand import ReadOut
from raptor.vit.view import ViT


@dataclass
class ToolFile(ResultFile):
    """What depth.json, watch.json, edit.json and correct.json begin with.

    Attributes:
        head: which head gives the classes.
        findings: what came out, a sentence each.
    """

    subject: Subject
    phases: list[int]
    head: str
    data: str
    split: str
    image_size: int
    num_images: int
    findings: list[str]
    provenance: Provenance

    @property
    def images(self) -> str:
        """The images of the measurement, in words."""
        return named_images(self.num_images, self.split, self.data, self.image_size)


def phases_with(vit: ViT, phases: Sequence[int] | None, phase: int) -> Phases:
    """The phases of a model, by default those of a surrogate; ValueError where `phase` (1..k) is none of them."""
    lengths = vit.phases if phases is None else phases
    if lengths is None:
        raise ValueError(f"{vit.name} is not a surrogate: say where its phases are with phases=")
    found = check_phases(vit, lengths)
    if not 1 <= phase <= found.k:
        raise ValueError(f"there is no phase {phase}: phases are numbered 1 to {found.k}")
    return found


def read_out_of(head: Head, vit: ViT) -> ReadOut:
    """Class scores of a state: by the model's own head, or by a linear head on its features."""
    return partial(head.logits, vit)
