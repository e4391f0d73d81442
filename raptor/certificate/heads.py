"""The head that gives accuracy and agreement: one given by file, the model's own, or a ridge probe on its features."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from raptor.certificate.linear_head import LinearHead, head_logits, read_metadata
from raptor.certificate.ridge import fit_ridge_head
from raptor.data.images import ImageData
from raptor.data.split import choice_split
from raptor.data.stream import Batch, ImageStream, iterate, sharing
from raptor.devices import ONE_PROCESS, Ranks
from raptor.provenance import hash_config
from raptor.streaming import Record
from raptor.subject import Subject, differences
from raptor.vit.groups import POOLED
from raptor.vit.view import ViT

_NUM_IMAGES, _NUM_IMAGES_PER_CLASS = 5000, 20  # a ridge head is fitted on 20 images per class, at least 5,000
HEAD_OF_FILE = "the head in "
"""How a summary says that a head was given by file; its name follows."""


@dataclass(frozen=True)
class Head:
    """A classifier for a model and its surrogates: their own output, or a linear head on their features."""

    source: str  # own, file or ridge
    num_classes: int
    linear: LinearHead | None = None
    classes: Sequence[str] | None = None  # their names, where the model keeps them

    def fits(self, classes: Sequence[str]) -> bool:
        """Whether it can be right about labels of these classes: as many and, where it names its own, the same.

        Data that names no classes (`classes` is empty) is taken to have those of the head.
        """
        if not classes:
            return True
        return len(classes) == self.num_classes and (self.classes is None or list(classes) == list(self.classes))

    def logits(self, vit: ViT, state_btd: Tensor, output: Tensor | None = None) -> Tensor:
        """Logits (B, C) of `vit`, given a last state `a_L` and, where it is known, the model's own output."""
        return head_logits(vit, self.linear, state_btd, output)


def share_kept(score: float | None, of_teacher: float, higher_is_better: bool = True) -> float | None:
    """Surrogate / teacher for scores, teacher / surrogate for errors; None without a score or if it divides by 0."""
    if score is None:
        return None
    if higher_is_better:
        return score / of_teacher if of_teacher else None
    return of_teacher / score if score else None


def prediction_hits(teacher_b: Tensor, student_b: Tensor, labels_b: Tensor | None) -> Tensor:
    """0 or 1 for each image (B, 1 or 3): whether both chose the same class and, with labels, whether each is right."""
    hits = [teacher_b == student_b]
    if labels_b is not None:
        labels_b = labels_b.to(teacher_b.device)
        hits += [teacher_b == labels_b, student_b == labels_b]
    return torch.stack(hits, dim=1).to(torch.uint8)


def head_batches(
    teacher: ViT,
    data: ImageData,
    batch_size: int,
    *,
    head_images: int | None = None,
    num_workers: int | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> ImageStream:
    """The training images a ridge head is fitted on: `head_images` of them, by default 20 per class, at least 5,000.

    None of them is in the part of train that probes choose on, so that a probe may start from such a head.
    """
    if len(data) > 1:  # a single image cannot be split
        data = data.select(choice_split(data.keys)[0])
    wanted = head_images or max(_NUM_IMAGES, _NUM_IMAGES_PER_CLASS * len(data.classes or ()))
    return iterate(
        data,
        teacher.preprocess,
        batch_size,
        device=teacher.device,
        num_workers=num_workers,
        limit=min(wanted, len(data)),
        ranks=ranks,
    )


def given_head(file: str | Path, vit: ViT) -> LinearHead:
    """The head in a file; ValueError where it takes other features than the model gives."""
    linear = LinearHead.load(file)
    probe = read_metadata(file)
    # A file from elsewhere states neither task nor layer, and is not refused for that.
    if probe.get("task", "classify") != "classify":
        raise ValueError(f"the head in {file} is of the task {probe['task']}: give one that classifies")
    if probe.get("layer", str(vit.num_layers)) != str(vit.num_layers):
        raise ValueError(
            f"the head in {file} reads layer {probe['layer']}, not the last one of {vit.name}: give another --head_file"
        )
    # The width comes last: a head of another layer or task may have the right one.
    takes = linear.weight.shape[1]
    num = num_features(vit)
    if takes != num:
        raise ValueError(f"the head in {file} takes {takes} features, {vit.name} gives {num}: give another --head_file")
    return linear


def num_features(vit: ViT) -> int:
    """The width of `vit.features`."""
    return vit.dim * sum(name in POOLED for name, _ in vit.groups.present())


def head_outputs(vit: ViT, file: str | Path | None) -> tuple[int, Sequence[str] | None]:
    """Number and names of the classes of the head that judges: the one in `file`, else the model's own.

    The names are None where the head keeps none.
    """
    if file is None:
        return vit.num_classes, vit.classes
    linear = given_head(file, vit)
    return linear.num_classes, linear.classes


@dataclass(frozen=True)
class RidgeFit(Record):
    """What a ridge head was fitted on; its file keeps it, so that another head is never taken for it.

    Attributes:
        num_images: how many images were asked for; None where the batches do not say.
        num_classes, classes: of the data, with its names where it has as many.
        labels: a short name of the labels of all images, which the fingerprint of images does not know.
        num_fitted, alpha: how many images the head was fitted on, and its penalty; 0 before the fit.
    """

    subject: Subject
    num_images: int | None = None
    num_classes: int | None = None
    classes: list[str] | None = None
    labels: str | None = None
    num_fitted: int = 0
    alpha: float = 0.0

    def __str__(self) -> str:
        return f"a ridge probe on the teacher's features of {self.num_fitted} training images (alpha {self.alpha:g})"


def resolve_head(
    teacher: ViT,
    train_batches: Iterable[Batch] | None = None,
    *,
    file: str | Path | None = None,
    cache: str | Path | None = None,
    head_images: int | None = None,
    num_classes: int | None = None,
    precision: str = "fp32",
) -> tuple[Head | None, str]:
    """The head for accuracy and agreement, or None; and a sentence that says which one, or why there is none.

    This is the head in `file`; else the model's own; else a ridge probe on the teacher's features of `train_batches`
    (see `head_batches`), if these have labels.

    cache: where the ridge probe is kept (in the run folder), so that all commands on a run use one head. A kept probe
        is not used if it was fitted on other images, labels or classes, on another teacher, or on another number of
        images than `head_images`. Rank 0 reads and keeps it.
    """
    if file is not None:
        linear = given_head(file, teacher)
        return Head("file", linear.num_classes, linear, linear.classes), f"{HEAD_OF_FILE}{file}"
    if teacher.num_classes:
        return Head("own", teacher.num_classes, classes=teacher.classes), f"the head of {teacher.name} itself"
    data = getattr(train_batches, "data", None)
    ranks = sharing(train_batches)
    # Described before the fit, so that a kept head is recognised without reading an image.
    names = list(getattr(data, "classes", None) or ())
    num_classes = num_classes or len(names) or None
    fit = RidgeFit(Subject.of(teacher, data), getattr(train_batches, "num_images", None), num_classes)
    if len(names) == num_classes:
        fit = replace(fit, classes=names)
    if data is not None:
        # Sorted by key, so that the order of a listing does not change the name of the labels.
        fit = replace(fit, labels=hash_config({"labels": sorted(zip(data.keys, data.labels or ()))}))
    if cache is not None:
        kept = ranks.first(lambda: _read_kept(Path(cache), fit, of_any_number=head_images is None))
        if kept is not None:
            linear, kept_fit = kept
            return Head("ridge", linear.num_classes, linear, linear.classes), str(kept_fit)
    none = f"no accuracy or agreement: {teacher.name} has no head, none was given and"
    if train_batches is None:
        return None, f"{none} there is no training data"
    # Of one class every head is right.
    if data is not None and len(data.present()) < 2:
        if data.labels is None:
            return None, f"{none} {data.name} has no labels"
        return None, f"{none} {data.name} has one class only"
    fitted = fit_ridge_head(teacher, train_batches, num_classes, precision)
    if fitted is None:
        return None, f"{none} the data has no labels"
    linear, num_fitted = fitted
    # A head with names refuses other data with as many classes.
    linear.classes = fit.classes
    fit = replace(fit, num_fitted=num_fitted, alpha=float(linear.alpha or 0))
    if cache is not None and ranks.is_first:
        linear.save(cache, {"ridge": json.dumps(fit.to_dict())})
    return Head("ridge", linear.num_classes, linear, linear.classes), str(fit)


def _read_kept(cache: Path, wanted: RidgeFit, of_any_number: bool) -> tuple[LinearHead, RidgeFit] | None:
    """The head in `cache` and its fit, unless something else decided it, as far as both say what did.

    of_any_number: whether it may have been fitted on any number of images.
    """
    if not cache.is_file():
        return None
    try:
        kept = RidgeFit.from_json(read_metadata(cache).get("ridge", ""))
    except ValueError:  # a damaged file, or a head from elsewhere
        return None
    has_classes = wanted.num_classes is None or (wanted.num_classes, wanted.classes) == (kept.num_classes, kept.classes)
    has_number = of_any_number or wanted.num_images in (None, kept.num_images)
    # A run with --train_images has fewer images, whose labels have another name, and its head holds for all its data.
    has_labels = (cache.parent / "config.yaml").is_file()
    if wanted.subject.num_images in (None, kept.subject.num_images):
        has_labels = wanted.labels in (None, kept.labels)
    if differences(wanted.subject, kept.subject) or not (has_classes and has_number and has_labels):
        return None
    return LinearHead.load(cache), kept
