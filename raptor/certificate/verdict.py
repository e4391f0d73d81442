"""The verdict on a surrogate, in words and numbers: how long it was trained, and which null models it beats.

Written once, and shown by `raptor evaluate`, `raptor distill`, certificate.json, summary.json and the page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from raptor.certificate.bootstrap import interval, resampled_means
from raptor.certificate.error_curves import Array, Curves
from raptor.files import RunError, parse_json, read_json
from raptor.run import read_config
from raptor.streaming import Record, jsonable

MIN_STEPS = 100  # per stage
STEEP = 0.1  # how much the loss may still fall from the third eighth before the end to the last one
NULL_WORDS = {
    "identity": "the input repeated",
    "mean": "the mean of the training images",
    "tied": "an untrained tied block",
    "linear": "a linear map per phase",
}


@dataclass(frozen=True)
class Estimate(Record):
    """A mean over images and the ends of its 95 % bootstrap interval."""

    value: float | None
    lower: float | None = None
    upper: float | None = None

    def __str__(self) -> str:
        if self.value is None:
            return "undefined"
        ends = "" if self.lower is None or self.upper is None else f" [{self.lower:.3f}, {self.upper:.3f}]"
        return f"{self.value:.3f}{ends}"


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
        """The rules that say so: fewer than 100 steps in a stage, or a loss that still falls steeply."""
        found = []
        if self.start is None:
            few = [f"{num} in {stage}" for stage, num in self.num_steps.items() if num < MIN_STEPS]
            if few:
                found.append(f"fewer than {MIN_STEPS} steps: {', '.join(few)}")
        if self.loss_fall is not None and self.loss_fall > STEEP:
            found.append(f"the loss still fell by {self.loss_fall:.0%} within the last quarter")
        return found

    def __str__(self) -> str:
        steps = f"{sum(self.num_steps.values())} steps"
        if len(self.num_steps) > 1:
            steps += f" ({' + '.join(map(str, self.num_steps.values()))})"
        images = "" if self.batch_size is None else f" of {self.batch_size} images"
        drawn = "" if self.num_images is None else f" from {self.num_images:,}"
        began = "" if self.start is None else f", starting from {self.start}"
        return f"trained {steps}{images}{drawn}{began}"


@dataclass
class GroupVerdict(Record):
    """A token group: R2 at the last layer and at the lowest one, and the null models it is compared with.

    `better`, `worse` and `alike` hold the names of null models by their error at the last layer, on the same images;
    a difference counts where its 95 % interval leaves out 0, and all three are empty for a single image.
    `layers_better` counts the layers with a smaller error than each, `layers_ahead` those with a smaller error than
    all of them, None for a single image.
    """

    r2_last: Estimate
    r2_lowest: Estimate
    lowest_layer: int
    better: list[str] = field(default_factory=list)
    worse: list[str] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    layers_better: dict[str, int] = field(default_factory=dict)
    layers_ahead: int | None = None
    no_better_than_mean: bool = False


def images_of(split: str) -> str:
    """What the images of a split are called: only those of `val` were held out."""
    words = {"val": "held-out", "train": "training", "all": "training and held-out"}
    return f"{words.get(split, split)} images"


def named_images(num: int | None, split: str, data: str, size: int | str | None) -> str:
    """What was measured on, as far as it is known: `24 held-out images of scenes at 64 px`."""
    count = "" if num is None else f"{num:,} "
    return f"{count}{images_of(split)} of {data}" + ("" if size is None else f" at {size} px")


@dataclass
class Verdict(Record):
    """What a reader must know first. `lines` are the words; None for `training` of a surrogate whose run is unknown.

    data: what the images are of; None where it is not known. against: a teacher that is not the surrogate's own.
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
        trained = "how it was trained is not known" if self.training is None else str(self.training)
        words = f"undertrained ({'; '.join(self.undertrained)}): " if self.undertrained else ""
        images = f"{self.num_images:,} {images_of(self.split)}" + (f" of {self.data}" if self.data else "")
        against = f", against {self.against}" if self.against else ""
        return [
            f"{words}{trained}; measured on {images}{against}",
            *(self._line(name, group) for name, group in self.groups.items()),
        ]

    def _line(self, name: str, group: GroupVerdict) -> str:
        lowest = f"lowest {group.r2_lowest} at layer {group.lowest_layer}"
        parts = [f"{name}: R2 {group.r2_last} at the last layer, {lowest}"]
        if group.no_better_than_mean:
            is_null = "mean" in (*group.worse, *group.alike)
            parts.append(f"no better than {NULL_WORDS['mean'] if is_null else 'the mean of these images'}")
        compared = (("better than", group.better), ("worse than", group.worse), ("no different from", group.alike))
        for word, nulls in compared:
            named = [NULL_WORDS.get(null, null) for null in nulls if null != "mean" or not group.no_better_than_mean]
            if named:
                parts.append(f"{word} {', '.join(named)}")
        if group.layers_ahead is not None:
            every = group.layers_ahead == self.num_layers
            where = "every layer" if every else f"{group.layers_ahead} of {self.num_layers} layers"
            unsure = group.no_better_than_mean or group.alike  # of the last layer, where intervals count
            words = "smaller mean error than" if unsure else "ahead of"
            parts.append(f"{words} every null model at {where}")
        return "; ".join(parts)


def judge(
    curves: Curves,
    nulls: Mapping[str, Curves],
    intervals: Mapping[str, Array] | None = None,
    training: Training | None = None,
    bootstrap: int = 0,
    seed: int = 0,
    split: str = "val",
) -> Verdict:
    """The verdict from error curves; their per-image errors, where they are there, give intervals of differences."""
    r2_ends = None if intervals is None else intervals.get("r2")
    advantage = _advantages(curves, nulls, bootstrap, seed)
    groups = {}
    for g, group in enumerate(curves.groups):
        r2 = curves.r2[group]
        worst = int(np.argmin(np.where(np.isfinite(r2), r2, np.inf)))
        last, lowest = (_estimate(r2, r2_ends, layer, g) for layer in (len(r2) - 1, worst))
        found = GroupVerdict(last, lowest, worst + 1)
        for name, null in nulls.items():
            low, high = advantage[name][:, g]
            if not np.isnan(low):
                side = found.better if low > 0 else (found.worse if high < 0 else found.alike)
                side.append(name)
            found.layers_better[name] = int(np.sum(r2 > null.r2[group]))
        below = last.value is None or (last.value if last.lower is None else last.lower) <= 0
        compared = {*found.better, *found.worse, *found.alike}
        found.no_better_than_mean = ("mean" not in found.better) if "mean" in compared else below
        if nulls and curves.num_images > 1:
            found.layers_ahead = int(np.sum(r2 > np.max([null.r2[group] for null in nulls.values()], axis=0)))
        groups[group] = found
    undertrained = [] if training is None else training.undertrained()
    return Verdict(curves.num_images, groups, curves.num_layers, training, undertrained, split)


def _estimate(r2: Array, ends: Array | None, layer: int, g: int) -> Estimate:
    lower, upper = (None, None) if ends is None else ends[:, layer, g]
    return Estimate(jsonable(r2[layer]), jsonable(lower), jsonable(upper))


def _advantages(curves: Curves, nulls: Mapping[str, Curves], bootstrap: int, seed: int) -> dict[str, Array]:
    """Null -> interval (2, G) of its squared error less the surrogate's at the last layer, on the same images.

    Where the values of the images are not there, both ends are the difference of the R2. NaN of a single image.
    """
    with np.errstate(invalid="ignore"):  # both are -inf where all images have the same state
        plain = {name: [curves.r2[g][-1] - null.r2[g][-1] for g in curves.groups] for name, null in nulls.items()}
    found = {name: np.array([difference, difference]) for name, difference in plain.items()}
    ours_nlg = curves.image_error
    paired = [name for name, null in nulls.items() if null.image_error.shape == ours_nlg.shape]
    if not bootstrap or len(ours_nlg) == 0 or not paired:
        return found
    gain_nm = np.concatenate([nulls[name].image_error[:, -1] ** 2 - ours_nlg[:, -1] ** 2 for name in paired], axis=1)
    ends_2m = interval(resampled_means(gain_nm, bootstrap, seed))
    return found | dict(zip(paired, np.split(ends_2m, len(paired), axis=1)))


def loss_fall(losses: Sequence[float]) -> float | None:
    """By how much the loss fell within the last quarter of a stage: its second half against its first, as a share."""
    quarter = list(losses)[-(len(losses) // 4) :] if len(losses) >= 8 else []
    half = len(quarter) // 2
    before, after = np.mean(quarter[:half]) if half else 0.0, np.mean(quarter[-half:]) if half else 0.0
    return float(1 - after / before) if before > 0 else None


def read_training(folder: Path) -> Training | None:
    """How the run in `folder` was trained, from its own files; None where it is no finished distillation."""
    summary, config = folder / "summary.json", folder / "config.yaml"
    if not summary.is_file():
        return None
    saved = read_json(summary)
    if not isinstance(saved.get("num_steps"), dict):
        return None
    settings = read_config(folder) if config.is_file() else {}
    recipe = settings.get("recipe")
    batch_size = recipe.get("batch_size") if isinstance(recipe, dict) else None
    fall = loss_fall(last_losses(folder / "metrics.jsonl", saved["num_steps"]))
    found = [saved["num_steps"], batch_size, saved.get("train_images"), settings.get("start"), fall]
    try:
        return Training.from_dict(dict(zip([f.name for f in fields(Training)], found)))
    except ValueError as error:
        raise RunError(f"{folder} has a damaged summary.json or config.yaml ({error}): distil it again") from None


def last_losses(path: Path, stages: Collection[str]) -> list[float]:
    """The logged losses of the last of `stages`."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row.get("loss"), int | float) and row.get("stage") in stages:
            rows.append((row.get("stage"), float(row["loss"])))
    return [loss for stage, loss in rows if stage == rows[-1][0]]
