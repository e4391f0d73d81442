"""How close a surrogate is to its teacher on held-out images, while it is trained and at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from raptor.certificate.error_curves import ErrorCurves
from raptor.certificate.heads import Head, head_batches, prediction_hits, resolve_head, share_kept
from raptor.certificate.ridge import fit_ridge_head, head_accuracy
from raptor.data import ImageData, iterate
from raptor.data.stream import Batch
from raptor.devices import ONE_PROCESS, Ranks, is_out_of_memory
from raptor.progress import say, track
from raptor.streaming import Number, Record, jsonable
from raptor.vit.trajectory import NonFiniteStates, autocast
from raptor.vit.view import ViT

_VALIDATION_BATCH = 128
T = TypeVar("T")


@dataclass
class Scores(Record):
    """Scores of a surrogate on held-out images; None where there is no head or there are no labels.

    Attributes:
        r2, cosine: per layer, over all tokens.
        r2_last, r2_lowest: R2 of the last layer and of the worst one.
        curves: token group -> metric -> value per layer.
        agreement: share of images on which both predict the same class.
        teacher_accuracy, accuracy, recovery_head: of the head described in `head`, and surrogate / teacher.
        teacher_probe, probe, recovery: the same with a ridge probe that is fitted to each side's features.
    """

    r2: list[float | None]
    r2_last: Number
    r2_lowest: Number
    cosine: list[float | None]
    curves: dict[str, dict[str, list[float | None]]]
    num_images: int
    agreement: float | None = None
    teacher_accuracy: float | None = None
    accuracy: float | None = None
    recovery_head: float | None = None
    head: str | None = None
    teacher_probe: float | None = None
    probe: float | None = None
    recovery: float | None = None


class Validator:
    """Measures surrogates of one teacher on held-out images.

    Args:
        head_data: images that ridge heads are fitted on, where they have labels.
        head_file: a linear head, for a teacher that has none.
        folder: where a ridge head fitted for the run is kept.
        ranks: the processes that share the images. All of them call `validate` and `final`.
    """

    def __init__(
        self,
        teacher: ViT,
        head_data: ImageData,
        val_data: ImageData,
        precision: str = "fp32",
        num_workers: int | None = None,
        head_file: str | None = None,
        folder: Path | None = None,
        ranks: Ranks = ONE_PROCESS,
    ):
        self.teacher = teacher
        self.precision = precision
        self.ranks = ranks
        size = min(_VALIDATION_BATCH, len(val_data))
        self.val = iterate(
            val_data, teacher.preprocess, size, device=teacher.device, num_workers=num_workers, ranks=ranks
        )
        self.train = head_batches(teacher, head_data, _VALIDATION_BATCH, num_workers=num_workers, ranks=ranks)
        self.has_truth = val_data.labels is not None
        self.labelled = self.has_truth and len(head_data.present()) > 1  # of one class every probe is right
        self.classes = val_data.classes or []
        self.head_file = head_file
        self.folder = folder
        self._head: tuple[Head | None, str] | None = None

    @property
    def head(self) -> Head | None:
        """The head for accuracy and agreement, resolved once."""
        if self._head is None:
            cache = None
            if self.folder is not None:
                cache = self.folder / "head.safetensors"
            self._head = resolve_head(
                self.teacher,
                self.train,
                file=self.head_file,
                cache=cache,
                precision=self.precision,
            )
        return self._head[0]

    @torch.no_grad()
    def validate(self, student: ViT) -> Scores:
        """R2 per layer, cosine, agreement with the teacher's prediction and, with labels, accuracy of both."""
        if self._head is None:  # a head is fitted on batches that are known to fit
            self._in_memory(lambda: self._measure(student, islice(self.val, 1), None, False))
        head = self.head
        with_labels = self.has_truth and head is not None and bool(self.classes) and head.fits(self.classes)
        curves, hits = self._in_memory(
            lambda: self._measure(student, track(self.val, "validation", quiet=True), head, with_labels)
        )
        curves.reduce(self.ranks)
        counts = self.ranks.sum(hits) if head is not None else None
        # On rank 0, so that all ranks have the same numbers to the last bit.
        scores, finite = self.ranks.first(lambda: self._curve_scores(curves))
        if counts is not None and finite:  # of NaN every head predicts class 0
            shares = [count / scores.num_images for count in counts.tolist()]
            scores.agreement = shares[0]
            if with_labels:
                scores.teacher_accuracy = shares[1]
                scores.accuracy = shares[2]
                scores.recovery_head = share_kept(scores.accuracy, scores.teacher_accuracy)
        return scores

    def _curve_scores(self, curves: ErrorCurves) -> tuple[Scores, bool]:
        """The scores of the curves, and whether the surrogate's states are finite; the teacher's states must be."""
        bad = curves.first_not_finite()
        if bad is not None and bad[1]:  # the teacher's own states, so no surrogate can be judged
            raise NonFiniteStates.of(self.teacher.name, f"from layer {bad[0]} on, for one held-out image or more")
        result = curves.result()
        r2 = result.r2["all"]
        scores = Scores(
            r2=jsonable(r2),
            r2_last=float(r2[-1]),
            r2_lowest=float(r2.min()),
            cosine=jsonable(result.cosine["all"]),
            curves=result.to_dict(),
            num_images=result.num_images,
        )
        return scores, bad is None

    def _measure(
        self, student: ViT, batches: Iterable[Batch], head: Head | None, with_labels: bool
    ) -> tuple[ErrorCurves, Tensor]:
        """Curves, and the counts of agreement and, with labels, accuracy of both, over this rank's batches."""
        curves = ErrorCurves(self.teacher.num_layers, self.teacher.groups)
        hits = torch.zeros((), dtype=torch.int64)
        for batch in batches:
            with autocast(self.precision, self.teacher.device):
                states, output = self.teacher.record(batch.images)
                own_states, own_output = student.record(batch.images)
                if head is not None:
                    chosen = head.logits(self.teacher, states[-1], output).argmax(-1)
                    own = head.logits(student, own_states[-1], own_output).argmax(-1)
                    labels = batch.labels if with_labels else None
                    hits = hits + prediction_hits(chosen, own, labels).sum(0)
            curves.update(states, own_states, batch.places)  # outside autocast: sums are fp64
        return curves, hits

    def _in_memory(self, measure: Callable[[], T]) -> T:
        """What `measure` gives; while any rank has no memory for it, all halve their batches and try again."""
        while True:
            found: list[T] = []
            try:
                found.append(measure())
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # Asked of all: a rank that took smaller batches by itself would have more of them than the others.
            if all(self.ranks.gather(bool(found))):
                return found[0]
            found.clear()  # all ranks measure again with the same batches
            size = self.val.batch_size
            if self.teacher.device.type == "cuda":
                # Memory that is kept for the old batches is in pieces of another size.
                torch.cuda.empty_cache()
            if size == 1:
                raise torch.OutOfMemoryError("no memory for a batch of 1")
            self.val.batch_size = self.train.batch_size = size // 2
            say(f"validation: no memory for batches of {size}; {size // 2} from here on")

    @torch.no_grad()
    def final(self, student: ViT) -> Scores:
        """`validate`, and with labels the recovery under a ridge probe refitted on each side's own features."""
        scores = self.validate(student)
        assert self._head is not None
        scores.head = self._head[1]
        if not self.labelled:
            return scores
        if self.head is not None and self.head.source == "ridge":
            scores.teacher_probe = scores.teacher_accuracy  # of the same probe, already fitted
        if scores.teacher_probe is None:
            scores.teacher_probe = self._ridge_accuracy(self.teacher)
        scores.probe = self._ridge_accuracy(student)
        scores.recovery = share_kept(scores.probe, scores.teacher_probe)
        return scores

    def _ridge_accuracy(self, vit: ViT) -> float:
        """Held-out accuracy of a ridge probe on the features of `vit`."""
        fitted = fit_ridge_head(vit, self.train, len(self.classes), self.precision)
        assert fitted is not None
        return head_accuracy(vit, fitted[0], self.val, self.precision)


def shown_r2(r2: float) -> str:
    """An R2 as text; states that do not vary over the held-out images have none."""
    if math.isfinite(r2):
        return f"{r2:.3f}"
    return "undefined (the states do not vary)"
