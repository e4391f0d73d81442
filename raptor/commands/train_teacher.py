"""raptor train-teacher: see raptor.train.teacher."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raptor.train import teacher as teachers
from raptor.train.teacher import TeacherSummary
from raptor.vit.view import ViT


@dataclass
class TrainedTeacher:
    """A trained teacher, its run folder and the summary written there."""

    teacher: ViT
    folder: Path
    summary: TeacherSummary

    def to_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder), **self.summary.to_dict()}

    def text(self) -> str:
        accuracy, seconds = self.summary.accuracy, self.summary.seconds
        lines = [f"{self.teacher.name}: accuracy {accuracy:.1%} on held-out images after {seconds:g} s"]
        bad = self.summary.bad_images
        lines += [f"{len(bad)} unreadable images were passed over: see bad_images in summary.json"] if bad else []
        return "\n".join([*lines, f"run folder {self.folder}"])


@functools.wraps(teachers.train_teacher)
def train_teacher(*args: Any, **options: Any) -> TrainedTeacher:
    teacher = teachers.train_teacher(*args, **options)
    given = inspect.signature(teachers.train_teacher).bind(*args, **options)
    given.apply_defaults()
    folder = Path(given.arguments["out"])
    summary = TeacherSummary.read(folder)
    assert summary is not None
    return TrainedTeacher(teacher, folder, summary)
