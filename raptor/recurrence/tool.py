"""What the results of the four tools begin with, and how they read classes from a state."""

from __future__ import annotations

from dataclasses import dataclass

from raptor.certificate.heads import Head
from raptor.certificate.verdict import named_images
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


def read_out_of(head: Head, vit: ViT) -> ReadOut:
    """Class scores of a state: by the model's own head, or by a linear head on its features."""
    if head.linear is None:
        return vit.finish
    linear = head.linear.to(vit.device)
    return lambda x_btd: linear(vit.features(x_btd))
