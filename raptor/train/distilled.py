"""What a distillation gives back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raptor.vit.view import ViT

# Score, what it is called, and the teacher's own where there is one.
SCORES = (
    ("agreement", "agreement with the teacher", ""), ("accuracy", "accuracy", "teacher_accuracy"),
    ("probe", "accuracy of a ridge probe", "teacher_probe"), ("recovery", "recovery", ""),
)  # fmt: skip


@dataclass
class Distilled:
    """What a distillation gives: the surrogate, its teacher, its run folder and the summary written there."""

    surrogate: ViT
    teacher: ViT
    folder: Path
    summary: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder), **self.summary}

    def text(self) -> str:
        """Phases, scores on held-out images and the folder, in a few lines."""
        scores = self.summary["validation"]
        lines = [
            f"{self.surrogate.name}: phases {' '.join(map(str, self.summary['phases']))}",
            f"R2 of the last layer {scores['r2_last']:.3f}, lowest {scores['r2_lowest']:.3f}",
        ]
        for key, label, of_teacher in SCORES:
            if scores.get(key) is not None:
                beside = scores.get(of_teacher)
                lines.append(f"{label} {scores[key]:.1%}" + (f" (teacher {beside:.1%})" if beside is not None else ""))
        bad = self.summary.get("bad_images") or []
        lines += [f"{len(bad)} unreadable images were passed over: see bad_images in summary.json"] if bad else []
        return "\n".join([*lines, f"run folder {self.folder}"])
