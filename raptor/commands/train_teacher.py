"""raptor train-teacher: train a small ViT, and say how accurate it is and where it was saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raptor.config import TeacherConfig
from raptor.provenance import command
from raptor.run import read_metrics
from raptor.streaming import Result
from raptor.train import teacher as teachers
from raptor.train.plan import Plan
from raptor.train.teacher import TeacherSummary
from raptor.vit.view import ViT


@dataclass
class TrainedTeacher(Result):
    """A trained teacher, its run folder and the summary written there."""

    teacher: ViT
    folder: Path
    summary: TeacherSummary

    def to_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder), **self.summary.to_dict()}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per line of metrics.jsonl that has a loss."""
        return [line for line in read_metrics(self.folder) if "loss" in line]

    def text(self) -> str:
        accuracy, seconds = self.summary.accuracy, self.summary.seconds
        lines = [f"{self.teacher.name}: accuracy {accuracy:.1%} on held-out images after {seconds:g} s"]
        bad = self.summary.bad_images
        if bad:
            lines.append(f"{len(bad)} unreadable images were skipped: see bad_images in summary.json")
        return "\n".join([*lines, f"run folder {self.folder}"])


@command(TeacherConfig)
def train_teacher(config: TeacherConfig) -> TrainedTeacher | Plan:
    """Train a ViT classifier from scratch and save it to OUT/teacher, where the other commands find it."""
    teacher = teachers.train_teacher(config)
    # --dry_run gives a plan, and nothing is trained.
    if isinstance(teacher, Plan):
        return teacher
    summary = TeacherSummary.read(Path(config.out))
    assert summary is not None
    return TrainedTeacher(teacher, Path(config.out), summary)
