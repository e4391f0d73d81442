"""The verdict on a surrogate, in words and numbers: how long it was trained, and which null models it beats.

Written once, and shown by `raptor evaluate`, `raptor distill`, certificate.json, summary.json and the page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raptor.certificate.bootstrap import interval, resampled_means
from raptor.certificate.error_curves import Array, Curves
from raptor.files import RunError
from raptor.run import read_metrics, read_summary
from raptor.streaming import Record, jsonable

MIN_STEPS = 100  # per stage
STEEP = 0.1  # how much the loss may still fall from the third eighth before the end to the last one
NULL_WORDS = {
    "identity": "the input repeated",
    "mean": "the mean of the images",
    "tied": "an untrained tied block",
    "linear": "a linear map per phase",
}


@dataclass(frozen=True)
class Estimate(Record):
    """A mean over images and the ends of its 95 % bootstrap interval."""

    value: float | None
    lower: float | None = None
    upper: float | None = None

    @classmethod
    def of(cls, value: Any, ends: Any = (None, None)) -> Estimate:
        """From numbers of numpy; None where one is not finite."""
        return cls(jsonable(value), *map(jsonable, ends))

    def __str__(self) -> str:
        if self.value is None:
            return "undefined"
        if self.lower is None or self.upper is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.lower:.3f}, {self.upper:.3f}]"


@dataclass
class Training(Record):
    """How a surrogate was trained.

    Attributes:
        num_steps: per stage.
        batch_size: images per step.
        num_images: different training images; None where it is not known.
        start: the trained surrogate it started from; None for a start from the teacher's blocks.
        loss_fall: by how much the loss fell within the last quarter of the last stage, as a share of it.
    """

    num_steps: dict[str, int]
    batch_size: int | None = None
    num_images: int | None = None
    start: str | None = None
    loss_fall: float | None = None

    def undertrained(self) -> list[str]:
        """Why the surrogate counts as undertrained: fewer than 100 steps in a stage, or a loss that still falls."""
        found = []
        if self.start is None:  # otherwise the steps of the run it started from are missing here
            few = [f"{num} in {stage}" for stage, num in self.num_steps.items() if num < MIN_STEPS]
            if few:
                found.append(f"fewer than {MIN_STEPS} steps: {', '.join(few)}")
        if self.loss_fall is not None and self.loss_fall > STEEP:
            found.append(f"the loss still fell by {self.loss_fall:.0%} within the last quarter")
        return found

    def __str__(self) -> str:
        text = f"trained {sum(self.num_steps.values())} steps"
        if len(self.num_steps) > 1:
            text += f" ({' + '.join(map(str, self.num_steps.values()))})"
        if self.batch_size is not None:
            text += f" of {self.batch_size} images"
        if self.num_images is not None:
            text += f" from {self.num_images:,}"
        if self.start is not None:
            text += f", starting from {self.start}"
        return text


@dataclass
class GroupVerdict(Record):
    """A token group: R2 at the last layer and at the lowest one, and the null models it is compared with.

    `better`, `worse` and `alike` hold the names of null models by their error at the last layer, on the same images;
    a difference counts where its 95 % interval leaves out 0, and all three are empty for a single image.
    `layers_ahead` counts the layers with a smaller error than all of them; None for a single image.
    """

    r2_last: Estimate
    r2_lowest: Estimate
    lowest_layer: int
    better: list[str] = field(default_factory=list)
    worse: list[str] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    layers_ahead: int | None = None
    no_better_than_mean: bool = False

    def compared(self) -> str:
        """The surrogate beside the null models at the last layer, in words; empty where there is nothing to compare."""
        num = len(self.better) + len(self.worse) + len(self.alike)
        if num and len(self.better) == num:
            return f"better than all {num} null models"
        parts = []
        if self.no_better_than_mean:
            parts.append(f"no better than {NULL_WORDS['mean']}")
        for words, names in (
            ("better than", self.better),
            ("worse than", self.worse),
            ("no different from", self.alike),
        ):
            named = [NULL_WORDS.get(name, name) for name in names if name != "mean" or not self.no_better_than_mean]
            if named:
                parts.append(f"{words} {', '.join(named)}")
        return "; ".join(parts)


def images_of(split: str) -> str:
    """What the images of a split are called: only those of `val` were held out. Of an empty split only `images`."""
    words = {"": "images", "val": "held-out images", "train": "training images", "all": "training and held-out images"}
    return words.get(split, f"{split} images")


def named_images(num: int | None, split: str, data: str | None, size: int | str | None = None) -> str:
    """The images of a measurement, as far as they are known: `24 held-out images of scenes at 64 px`."""
    text = images_of(split)
    if num is not None:
        text = f"{num:,} {text}"
    if data:
        text += f" of {data}"
    if size is not None:
        text += f" at {size} px"
    return text


@dataclass
class Verdict(Record):
    """What a reader must know first; `lines` says it in words.

    Attributes:
        training: None where the run that trained the surrogate is not known.
        data: name of the images, where it is known.
        against: name of the teacher, where it is not the surrogate's own.
    """

    num_images: int
    groups: dict[str, GroupVerdict]
    num_layers: int
    training: Training | None = None
    undertrained: list[str] = field(default_factory=list)
    split: str = "val"
    data: str | None = None
    against: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields and the words."""
        return {"lines": self.lines(), **super().to_dict()}

    def lines(self) -> list[str]:
        """One line on training, then one for each token group."""
        trained = "how it was trained is not known"
        if self.training is not None:
            trained = str(self.training)
        if self.undertrained:
            trained = f"undertrained ({'; '.join(self.undertrained)}): {trained}"
        first = f"{trained}; measured on {named_images(self.num_images, self.split, self.data)}"
        if self.against:
            first += f", against {self.against}"
        lines = [first]
        for name, group in self.groups.items():
            parts = [
                f"{name}: R2 {group.r2_last} at the last layer",
                f"lowest {group.r2_lowest} at layer {group.lowest_layer}",
            ]
            if group.compared():
                parts.append(group.compared())
            if group.layers_ahead is not None:
                ahead = f"{group.layers_ahead} of {self.num_layers}"
                parts.append(f"smaller mean error than every null model at {ahead} layers")
            lines.append("; ".join(parts))
        return lines


def judge(
    curves: Curves,
    nulls: Mapping[str, Curves],
    intervals: Mapping[str, Array] | None = None,
    training: Training | None = None,
    bootstrap: int = 0,
    seed: int = 0,
    split: str = "val",
) -> Verdict:
    """The verdict from error curves; errors of single images, where they are kept, give intervals of differences."""
    advantage = _advantages(curves, nulls, bootstrap, seed)
    # Without intervals an estimate is only its value.
    ends_2lg = np.full((2, curves.num_layers, len(curves.groups)), np.nan)
    if intervals is not None:
        ends_2lg = intervals.get("r2", ends_2lg)
    groups = {}
    for g, group in enumerate(curves.groups):
        r2 = curves.r2[group]
        # Without a finite value in its place `argmin` would choose a NaN: a layer without variance has no R2.
        lowest = int(np.argmin(np.where(np.isfinite(r2), r2, np.inf)))
        last = Estimate.of(r2[-1], ends_2lg[:, -1, g])
        found = GroupVerdict(last, Estimate.of(r2[lowest], ends_2lg[:, lowest, g]), lowest + 1)
        for name in nulls:
            low, high = advantage[name][:, g]
            # By differences on the same images: two intervals that overlap may still differ image by image.
            if low > 0:
                found.better.append(name)
            elif high < 0:
                found.worse.append(name)
            elif not np.isnan(low):  # NaN: there is no interval
                found.alike.append(name)
        if "mean" in (*found.better, *found.worse, *found.alike):
            found.no_better_than_mean = "mean" not in found.better
        else:
            # The mean of the images has an R2 of 0. If all images share one state, R2 is undefined and shows nothing.
            lower = last.value if last.lower is None else last.lower
            found.no_better_than_mean = lower is None or lower <= 0
        if nulls and curves.num_images > 1:
            # The best at each layer, which no single null model may be.
            best_null = np.max([null.r2[group] for null in nulls.values()], axis=0)
            found.layers_ahead = int(np.sum(r2 > best_null))
        groups[group] = found
    undertrained = [] if training is None else training.undertrained()
    return Verdict(curves.num_images, groups, curves.num_layers, training, undertrained, split)


def _advantages(curves: Curves, nulls: Mapping[str, Curves], bootstrap: int, seed: int) -> dict[str, Array]:
    """Null -> interval (2, G) of its squared error less the surrogate's at the last layer, on the same images.

    Where the values of the images are not there, both ends are the difference of the R2. NaN of a single image.
    """
    found: dict[str, Array] = {}
    gains_ng: dict[str, Array] = {}
    ours_nlg = curves.image_error
    for name, null in nulls.items():
        with np.errstate(invalid="ignore"):  # both are -inf where all images have the same state
            difference = [curves.r2[group][-1] - null.r2[group][-1] for group in curves.groups]
        found[name] = np.array([difference, difference])
        if bootstrap and len(ours_nlg) and null.image_error.shape == ours_nlg.shape:
            # Squared, because R2 compares sums of squares: the sign is then that of the difference in R2.
            gains_ng[name] = null.image_error[:, -1] ** 2 - ours_nlg[:, -1] ** 2
    if gains_ng:
        # One set of resamples for all null models.
        ends_2m = interval(resampled_means(np.concatenate(list(gains_ng.values()), axis=1), bootstrap, seed))
        found.update(zip(gains_ng, np.split(ends_2m, len(gains_ng), axis=1)))
    return found


def loss_fall(losses: Sequence[float]) -> float | None:
    """By how much the loss fell within the last quarter of a stage: its second half against its first, as a share.

    None of fewer than eight losses.
    """
    if len(losses) < 8:
        return None
    # Half against half of a quarter: single steps are too noisy, and the schedule itself ends there.
    quarter = list(losses)[-(len(losses) // 4) :]
    half = len(quarter) // 2
    before = np.mean(quarter[:half])
    after = np.mean(quarter[-half:])
    return float(1 - after / before) if before > 0 else None


def read_training(folder: Path) -> Training | None:
    """How the run in `folder` was trained, by its own summary; None where it is not a finished distillation."""
    verdict = (read_summary(folder) or {}).get("verdict")
    if not isinstance(verdict, dict) or verdict.get("training") is None:
        return None
    try:
        return Training.from_dict(verdict["training"])
    except ValueError as error:
        raise RunError(f"{folder} has a damaged summary.json ({error}): distil it again") from None


def last_losses(folder: Path, stages: Collection[str]) -> list[float]:
    """The logged losses of the last of `stages`."""
    losses: dict[str, list[float]] = {}
    for row in read_metrics(folder):
        # Validations are lines of the same file, without a loss.
        if row.get("stage") in stages and isinstance(row.get("loss"), int | float):
            losses.setdefault(row["stage"], []).append(float(row["loss"]))
    return list(losses.values())[-1] if losses else []
