"""The validation curve of a run: how near the surrogate is to its teacher on held-out images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from raptor.data import ImageData, iterate
from raptor.fidelity.error_curves import ErrorCurves
from raptor.fidelity.heads import (
    Head,
    accuracy,
    agreement,
    collect_features,
    fit_ridge,
    head_batches,
    resolve_head,
    share_kept,
)
from raptor.streaming import jsonable
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

BATCH = 128


class Validator:
    """Measures surrogates of one teacher on held-out images.

    Args:
        head_file: a linear head, for a teacher that has none of its own.
        folder: where a ridge head fitted for the run is kept.
        head_images: training images a ridge head is fitted on; see `head_batches`.
    """

    def __init__(
        self, teacher: ViT, train_data: ImageData, val_data: ImageData, precision: str = "fp32", num_workers: int = 0,
        head_file: str | None = None, folder: Path | None = None, head_images: int | None = None,
    ):  # fmt: skip
        self.teacher, self.precision = teacher, precision
        device = teacher.device
        size = min(BATCH, len(val_data))
        self.val = iterate(val_data, teacher.preprocess, size, device=device, num_workers=num_workers)
        self.head_images = head_images
        self.train = head_batches(teacher, train_data, BATCH, head_images=head_images, num_workers=num_workers)
        self.labelled = train_data.labels is not None and val_data.labels is not None
        self.num_classes = len(train_data.classes or ())
        self.head_file, self.folder = head_file, folder
        self._head: tuple[Head | None, str] | None = None
        self._teacher_ridge: float | None = None

    @property
    def head(self) -> Head | None:
        """The head for accuracy and agreement, resolved once."""
        if self._head is None:
            cache = None if self.folder is None else self.folder / "head.safetensors"
            self._head = resolve_head(
                self.teacher, self.train, file=self.head_file, cache=cache, head_images=self.head_images,
                precision=self.precision,
            )  # fmt: skip
        return self._head[0]

    @torch.no_grad()
    def validate(self, student: ViT) -> dict[str, Any]:
        """R2 per layer, cosine, agreement with the teacher's prediction and, with labels, accuracy of both."""
        curves = ErrorCurves(self.teacher.num_layers, self.teacher.groups)
        logits: dict[str, list[torch.Tensor]] = {"teacher": [], "student": []}
        labels = []
        for batch in self.val:
            with autocast(self.precision, self.teacher.device):
                states, output = self.teacher.record(batch.images)
                own_states, own_output = student.record(batch.images)
                if self.head is not None:
                    logits["teacher"].append(self.head.logits(self.teacher, states[-1], output).float())
                    logits["student"].append(self.head.logits(student, own_states[-1], own_output).float())
            curves.update(states, own_states)
            if batch.labels is not None:
                labels.append(batch.labels)
        result = curves.result()
        r2 = result.r2["all"]
        scores: dict[str, Any] = {
            "r2": jsonable(r2), "r2_last": float(r2[-1]), "r2_lowest": float(r2.min()),
            "cosine": jsonable(result.cosine["all"]), "curves": result.to_dict(), "num_images": result.num_images,
        }  # fmt: skip
        if self.head is not None:
            of_teacher, of_student = torch.cat(logits["teacher"]), torch.cat(logits["student"])
            scores["agreement"] = agreement(of_student, of_teacher)
            if self.labelled and self.head.num_classes == self.num_classes:
                label = torch.cat(labels)
                scores["teacher_accuracy"] = accuracy(of_teacher, label)
                scores["accuracy"] = accuracy(of_student, label)
                scores["recovery_head"] = share_kept(scores["accuracy"], scores["teacher_accuracy"])
        return scores

    @torch.no_grad()
    def final(self, student: ViT) -> dict[str, Any]:
        """`validate`, and with labels the recovery under a ridge probe refitted on each side's own features."""
        scores = self.validate(student)
        scores["head"] = self._head[1] if self._head else None
        if self.labelled:
            if self._teacher_ridge is None:
                self._teacher_ridge = self._ridge_accuracy(self.teacher)
            scores["teacher_probe"] = self._teacher_ridge
            scores["probe"] = self._ridge_accuracy(student)
            scores["recovery"] = share_kept(scores["probe"], self._teacher_ridge)
        return scores

    def _ridge_accuracy(self, vit: ViT) -> float:
        features, labels, _ = collect_features(vit, self.train, self.precision)
        held_out, held_labels, _ = collect_features(vit, self.val, self.precision)
        assert labels is not None and held_labels is not None
        return accuracy(fit_ridge(features, labels, self.num_classes)(held_out), held_labels)
