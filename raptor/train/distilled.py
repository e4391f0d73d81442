"""What a distillation gives: its summary and the surrogate. And what a later run finds of it: blocks, the teacher."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from torch import Tensor

from raptor.certificate.error_curves import Curves
from raptor.certificate.verdict import Training, Verdict, judge, last_losses, loss_fall
from raptor.files import RunError
from raptor.phases.cut import PhaseLengths
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Result
from raptor.subject import Subject
from raptor.surrogate.surrogate import shared_blocks, surrogate_spec
from raptor.train.validation import Scores, shown_r2
from raptor.vit.open import open_vit
from raptor.vit.origin import Opened
from raptor.vit.pair import check_teacher
from raptor.vit.saved import needs_teacher, save_vit, saved_folder
from raptor.vit.view import ModelFacts, ViT
from raptor.vit.weights import load_weights

File = TypeVar("File", bound=ResultFile)


@dataclass
class DistillSummary(ResultFile):
    """`summary.json` of a distillation.

    Attributes:
        phases: on disk their lengths.
        num_steps: per stage.
        seconds: of training, without validation and checkpoints.
        data, num_images: what was trained on, and how many images; val, split: what was judged on.
        bad_images: names of the unreadable images that were skipped.
        num_processes: how many processes trained it.
        cuda_graph: whether each step was a CUDA graph; false where one could not be captured.
    """

    FILE: ClassVar[str] = "summary.json"

    phases: PhaseLengths
    teacher: ModelFacts
    surrogate: ModelFacts
    num_steps: dict[str, int]
    seconds: float
    validation: Scores
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None
    device: str = ""
    image_size: int | None = None
    data: str = "the data"
    val: str = "the data"
    split: str = "val"
    num_images: int | None = None
    bad_images: list[str] = field(default_factory=list)
    train_images: int | None = None
    verdict: Verdict | None = None
    num_processes: int = 1
    cuda_graph: bool = False

    def judged(self, folder: Path, batch_size: int, start: str | None) -> Self:
        """With the verdict on the validation curves."""
        fall = loss_fall(last_losses(folder, self.num_steps))
        training = Training(self.num_steps, batch_size, self.train_images, start, fall)
        curves = replace(Curves.from_dict(self.validation.curves), num_images=self.validation.num_images)
        # Without null models, which take passes of their own: they are the certificate's.
        verdict = judge(curves, {}, training=training, split=self.split)
        return dataclasses.replace(self, verdict=replace(verdict, data=self.val))

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "phases": list(self.phases)}


@dataclass
class Distilled(Result):
    """What a distillation gives: the surrogate, its teacher, its run folder and the summary written there."""

    surrogate: ViT
    teacher: ViT
    folder: Path
    summary: DistillSummary

    def to_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder), **self.summary.to_dict()}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per layer: its phase, R2 and cosine on held-out images."""
        scores = self.summary.validation
        rows = []
        for layer, (r2, cosine) in enumerate(zip(scores.r2, scores.cosine), start=1):
            phase = self.summary.phases.phase_of(layer) + 1
            rows.append({"layer": layer, "phase": phase, "r2": r2, "cosine": cosine})
        return rows

    def plot(self) -> Any:
        """R2 and cosine over layers, with the phases."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(4.6, 3.0), layout="constrained")
        scores = self.summary.validation
        layers = range(1, len(scores.r2) + 1)
        axes.plot(layers, np.array(scores.r2, dtype=float), marker="o", label="r2")  # None becomes NaN
        axes.plot(layers, np.array(scores.cosine, dtype=float), marker="o", label="cosine")
        for boundary in self.summary.phases.boundaries:
            axes.axvline(boundary + 0.5, color="grey", linewidth=0.8, linestyle=":")
        axes.set_xlabel("layer")
        axes.set_title(self.surrogate.name)
        axes.legend()
        return figure

    def text(self) -> str:
        """Phases, scores on held-out images and the folder, in a few lines."""
        scores = self.summary.validation
        lines = []
        if self.summary.verdict is not None:
            lines += self.summary.verdict.lines()
        lines += [
            f"{self.surrogate.name}: phases {' '.join(map(str, self.summary.phases))}, trained on {self.summary.data}",
            f"R2 of the last layer {shown_r2(scores.r2_last)}, lowest {shown_r2(scores.r2_lowest)}",
        ]
        for label, score, of_teacher in (
            ("agreement with the teacher", scores.agreement, None),
            ("accuracy", scores.accuracy, scores.teacher_accuracy),
            ("accuracy of a ridge probe", scores.probe, scores.teacher_probe),
            ("recovery of the ridge probe", scores.recovery, None),
        ):
            if score is None:
                continue
            line = f"{label} {score:.1%}"
            if of_teacher is not None:
                line += f" (teacher {of_teacher:.1%})"
            lines.append(line)
        num_bad = len(self.summary.bad_images)
        if num_bad:
            lines.append(f"{num_bad} unreadable images were skipped: see bad_images in summary.json")
        lines.append(f"run folder {self.folder}")
        return "\n".join(lines)


# What of it a later run finds.


def read_finished(kind: type[File], folder: Path) -> File | None:
    """The summary of a finished run; None when the run is not finished."""
    if not (folder / kind.FILE).exists():
        return None
    return kind.read(folder)


def check_run_folder(teacher: ViT, out: Path) -> None:
    """Refuse the teacher's own folder: a surrogate saved there would be opened in the teacher's place."""
    folder = saved_folder(teacher.opened.model or "")
    if folder is not None and out.resolve() in (folder.resolve(), folder.resolve().parent):
        raise RunError(f"{out} holds the teacher itself: choose another --out")


def keep_teacher(teacher: ViT, student: ViT, folder: Path) -> None:
    """Save a teacher that cannot be opened again by its name: built from a name, then changed or never trained."""
    made_from = student.origin.teacher
    assert made_from is not None
    untrained = not teacher.opened.pretrained and not teacher.opened.weights
    changed = teacher.opened.fingerprint != made_from.fingerprint
    if teacher.origin.base is not None and (untrained or changed):
        save_vit(teacher, folder / "teacher")
        kept = Opened(model=str(folder / "teacher"), fingerprint=made_from.fingerprint)
        student.origin = replace(student.origin, teacher=kept)


def load_blocks(student: ViT, tensors: Mapping[str, Tensor]) -> None:
    """Put the blocks of a checkpoint into a surrogate."""
    blocks = {name.removeprefix("block."): value for name, value in tensors.items() if name.startswith("block.")}
    load_weights(shared_blocks(student), blocks, "the run's checkpoint")


def start_from(student: ViT, start: str, teacher: ViT) -> None:
    """Take the blocks of the surrogate that `start` names."""
    module = None
    if needs_teacher(start):
        module = copy.deepcopy(teacher.model)  # so that the teacher stays as it is whatever the folder holds
    other = open_vit(start, teacher=module)
    if other.phases is None:
        raise ValueError(f"{start} is not a surrogate: --start takes the folder of one")
    # The blocks were trained on the states of one teacher.
    check_teacher(other, teacher, str(start))
    theirs = surrogate_spec(other)
    ours = surrogate_spec(student)
    for name in ("phases", "block", "conditioning", "adapters", "adapted"):
        here = getattr(ours, name)
        there = getattr(theirs, name)
        if here != there:
            if name == "phases":
                here = student.phases  # as they are written
                there = other.phases
            raise ValueError(f"{start} has {name} {there}, this run {here}: give the same --{name}")
    # The weights only: moments of another run's optimizer would be of its last, small learning rate.
    shared_blocks(student).load_state_dict(shared_blocks(other).state_dict())
