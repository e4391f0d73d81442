"""Watching a model: a surrogate that follows its teacher on usual images follows it worse on unusual ones.

The score of an image is the largest standardised discrepancy `|a_l - ã_l|` over layers and token groups. The images
that the watcher is calibrated on are used in two halves: one says what is usual at each layer, the other sets the
threshold, so that the promised share of false alarms holds for any number of images (split conformal prediction).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from raptor.data.stream import Batch
from raptor.recurrence.detection import Baselines, Detection, detection
from raptor.recurrence.tool import ToolFile
from raptor.streaming import Record
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

WATCHER = "surrogate"
"""The watcher's name among the scores."""
_MAD_OF_NORMAL = 1.4826  # a standard deviation of a normal distribution in median absolute deviations


@dataclass(frozen=True)
class Watched:
    """What the watcher says about images; N of them, L layers, P patches.

    Attributes:
        score_n: largest standardised discrepancy; above the threshold is an alarm.
        alarm_n: whether the score is above the threshold.
        layer_n: the layer (1..L) where it is largest.
        group_n: the index of the group there, in the order of `Watcher.group_names`.
        map_np: for each patch, its discrepancy at that layer in units of the median patch there.
        profile_nl: the largest standardised discrepancy over the groups of each layer.
    """

    score_n: Tensor
    alarm_n: Tensor
    layer_n: Tensor
    group_n: Tensor
    map_np: Tensor
    profile_nl: Tensor


class Watcher:
    """Compares a teacher with its surrogate on every image, after it was calibrated on usual ones."""

    def __init__(self, surrogate: ViT, teacher: ViT, precision: str = "fp32"):
        if surrogate.num_layers != teacher.num_layers:
            raise ValueError(
                f"{surrogate.name} has {surrogate.num_layers} layers, {teacher.name} {teacher.num_layers}: "
                "watch a teacher with a surrogate of its own"
            )
        self.surrogate = surrogate
        self.teacher = teacher
        self.precision = precision
        self.group_names = [name for name, _ in teacher.groups.present()]
        self.threshold = math.inf
        self._centre_lg: Tensor | None = None
        self._scale_lg: Tensor | None = None

    def calibrate(self, batches: Iterable[Batch], false_alarms: float = 0.05) -> Watcher:
        """Learn from usual images what is usual, and set the threshold for a share of false alarms."""
        if not 0 < false_alarms < 1:
            raise ValueError(f"false alarms are a share between 0 and 1, not {false_alarms:g}")
        errors = [error_blg for error_blg, _ in self._errors(batches)]
        if not errors:
            raise ValueError("there are no images to calibrate with: check --calibrate")
        error_nlg = torch.cat(errors)
        # A threshold from the images that the medians are of would be too low: they fit themselves.
        usual_nlg = error_nlg[0::2]
        held_out_nlg = error_nlg[1::2]
        least = least_images(false_alarms)
        if len(error_nlg) < least:
            raise ValueError(
                f"{len(error_nlg)} calibration images are too few for {false_alarms:.1%} false alarms: give at least "
                f"{least}"
            )
        # Medians, because one strange image among the usual ones would move a mean and a deviation.
        self._centre_lg = usual_nlg.median(dim=0).values
        deviation_lg = (usual_nlg - self._centre_lg).abs().median(dim=0).values
        # A layer whose error is the same for all images would make every other image an alarm.
        floor = 1e-6 * float(self._centre_lg.abs().max())
        self._scale_lg = (_MAD_OF_NORMAL * deviation_lg).clamp_min(max(floor, torch.finfo(torch.float64).tiny))
        scores_n = self._standardise(held_out_nlg).flatten(1).amax(dim=1)
        self.threshold = conformal_threshold(scores_n, false_alarms)
        return self

    def watch(self, batches: Iterable[Batch]) -> Watched:
        """Scores, alarms and where they come from."""
        parts = []
        for error_blg, map_blp in self._errors(batches):
            standardised_blg = self._standardise(error_blg)
            score_b, place_b = standardised_blg.flatten(1).max(dim=1)
            num_groups = standardised_blg.shape[2]
            layer_b = place_b // num_groups
            patches_bp = map_blp[torch.arange(len(layer_b)), layer_b]
            # Relative to the image itself: the map says where, the score says how much.
            patches_bp = patches_bp / patches_bp.median(dim=1, keepdim=True).values.clamp_min(1e-12)
            alarm_b = score_b > self.threshold
            profile_bl = standardised_blg.amax(dim=2)
            parts.append((score_b, alarm_b, layer_b + 1, place_b % num_groups, patches_bp, profile_bl))
        if not parts:
            raise ValueError("there are no images to watch: check --data")
        return Watched(*(torch.cat(column) for column in zip(*parts)))

    def score(self, images: Tensor) -> Tensor:
        """The score of each image of a batch, (B,), with gradients: for an attack that knows the watcher."""
        return self._standardise(self._discrepancy(images)[0]).flatten(1).amax(dim=1)

    def _standardise(self, error_nlg: Tensor) -> Tensor:
        if self._centre_lg is None or self._scale_lg is None:
            raise ValueError("the watcher has not seen usual images yet: calibrate it first")
        centre_lg = self._centre_lg.to(error_nlg.device)
        return (error_nlg - centre_lg) / self._scale_lg.to(error_nlg.device)

    @torch.no_grad()
    def _errors(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each batch, errors by layer and group (B, L, G) and by layer and patch (B, L, P), on the CPU."""
        for batch in batches:
            with autocast(self.precision, self.teacher.device):
                error_blg, map_blp = self._discrepancy(batch.images.to(self.teacher.device))
            yield error_blg.cpu(), map_blp.float().cpu()

    def _discrepancy(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The distance of both models' states by layer and group (B, L, G), and by layer and patch (B, L, P)."""
        wanted = self.teacher.record(images)[0][1:]
        found = self.surrogate.record(images)[0][1:]
        by_layer = []
        maps = []
        for target_btd, x_btd in zip(wanted, found):
            # In float64: the states of a good surrogate differ in few of their digits.
            squares_bt = (target_btd.double() - x_btd.double()).square().sum(-1)
            groups = [squares_bt[:, where].sum(-1).sqrt() for _, where in self.teacher.groups.present()]
            by_layer.append(torch.stack(groups, dim=-1))
            maps.append(squares_bt[:, self.teacher.groups.slice("patches")].detach().sqrt())
        return torch.stack(by_layer, dim=1), torch.stack(maps, dim=1)


def watch(surrogate: ViT, teacher: ViT, precision: str = "fp32") -> Watcher:
    """A watcher of the teacher: `watch(surrogate, teacher).calibrate(usual).watch(others)`, each of batches."""
    return Watcher(surrogate, teacher, precision)


def least_images(false_alarms: float) -> int:
    """The fewest images that a watcher can be calibrated with for a share of false alarms."""
    # Half of them are scored. With fewer scores the conformal rank lies beyond the largest one, and nothing would ever
    # be an alarm.
    return max(4, 2 * (math.ceil(1 / false_alarms) - 1))


def conformal_threshold(scores_n: Tensor, false_alarms: float) -> float:
    """The smallest threshold that a new usual image exceeds with at most this probability, for any distribution.

    It is the score of rank ceil((n + 1) (1 - false_alarms)) of n calibration scores.
    """
    num = len(scores_n)
    # One more than there are, because the new image is one of those that are ranked.
    rank = math.ceil((num + 1) * (1 - false_alarms) - 1e-9)
    if rank > num:
        return math.inf
    return float(scores_n.sort().values[rank - 1])


@dataclass
class WatchedSet(Record):
    """One set of images.

    Attributes:
        name: the data, corruption or attack.
        alarms: share of the images that are alarms.
        profile, lower, upper: of the largest standardised discrepancy at each layer, median and quartiles over images.
        fooled: of an attack, the share of images whose class changed; only those are judged.
        scores: how well each score tells these images from usual ones; empty for the usual images themselves.
    """

    name: str
    num_images: int
    alarms: float
    profile: list[float]
    lower: list[float]
    upper: list[float]
    fooled: float | None = None
    scores: dict[str, Detection] | None = None


@dataclass
class ShownImage(Record):
    """An image with a high score: the image as a PNG in base64, and where both models disagree.

    Attributes:
        layer, group: where the standardised discrepancy is largest.
        map: of each patch at that layer, relative to the median patch, row by row.
        profile: largest standardised discrepancy by layer.
    """

    name: str
    of: str
    score: float
    layer: int
    group: str
    picture: str
    map: list[list[float]]
    profile: list[float]


class Judge:
    """Judges sets of images, one batch at a time.

    Args:
        baselines: the scores beside the watcher's; None for none.
        num_shown: how many images of each set are kept as pictures.
        picture: makes a PNG in base64 of a normalised image.
    """

    def __init__(self, watcher: Watcher, baselines: Baselines | None, num_shown: int, picture: Callable[[Tensor], str]):
        self.picture = picture
        self.watcher = watcher
        self.baselines = baselines
        self.num_shown = num_shown

    def __call__(
        self, name: str, batches: Iterable[Batch], names: Sequence[str], fooled: float | None = None
    ) -> Judgement:
        """Judge the set `name`, whose images have `names`. fooled: of an attack, the share of images it fools."""
        found = Judgement(name, names, self.watcher, fooled)
        for batch in batches:
            watched = self.watcher.watch([batch])
            found.watched.append(watched)
            found.indices += batch.indices.tolist()
            found.scores.setdefault(WATCHER, []).append(watched.score_n)
            # The other scores read the same batch, so that an attack or a corruption is made once.
            if self.baselines is not None:
                for score, value_n in self.baselines.scores([batch]).items():
                    found.scores.setdefault(score, []).append(value_n)
            self._keep_pictures(found, batch, watched)
        return found

    def _keep_pictures(self, found: Judgement, batch: Batch, watched: Watched) -> None:
        """Of all images so far, those with the highest scores."""
        teacher = self.watcher.teacher
        for place, index in enumerate(batch.indices.tolist()):
            score = float(watched.score_n[place])
            if len(found.shown) == self.num_shown and (not found.shown or score <= found.shown[-1].score):
                continue
            image = ShownImage(
                name=str(found.names[index]),
                of=found.name,
                score=score,
                layer=int(watched.layer_n[place]),
                group=self.watcher.group_names[int(watched.group_n[place])],
                picture=self.picture(batch.images[place]),
                map=watched.map_np[place].view(teacher.grid).tolist(),
                profile=watched.profile_nl[place].tolist(),
            )
            # Pictures are made only of candidates, so that a large set costs no more than a small one.
            found.shown = sorted([*found.shown, image], key=lambda one: -one.score)[: self.num_shown]


@dataclass
class Judgement:
    """What a set of images got. scores: of each batch, by the name of the score."""

    name: str
    names: Sequence[str]
    watcher: Watcher
    fooled: float | None = None
    watched: list[Watched] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    scores: dict[str, list[Tensor]] = field(default_factory=dict)
    shown: list[ShownImage] = field(default_factory=list)

    def compared(self, usual: Judgement) -> WatchedSet:
        """The set in numbers, with every score of it against that of the usual images."""
        if not self.watched:
            return WatchedSet(self.name, 0, 0.0, [], [], [], self.fooled)
        # Quartiles, because a few huge discrepancies would be all that a mean shows.
        profile_nl = torch.cat([one.profile_nl for one in self.watched])
        lower, middle, upper = profile_nl.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=0)
        alarm_n = torch.cat([one.alarm_n for one in self.watched])
        scores = None
        if self is not usual:
            scores = {}
            for name, values in self.scores.items():
                scores[name] = detection(torch.cat(usual.scores[name]), torch.cat(values))
        return WatchedSet(
            name=self.name,
            num_images=len(alarm_n),
            alarms=float(alarm_n.double().mean()),
            profile=middle.tolist(),
            lower=lower.tolist(),
            upper=upper.tolist(),
            fooled=self.fooled,
            scores=scores,
        )

    def rows(self) -> Iterator[tuple[str, str, float, bool, int, str]]:
        """For each image: set, name, score, whether it is an alarm, and where the score comes from."""
        place = 0
        for one in self.watched:
            for i in range(len(one.score_n)):
                name = str(self.names[self.indices[place]])
                group = self.watcher.group_names[int(one.group_n[i])]
                yield self.name, name, float(one.score_n[i]), bool(one.alarm_n[i]), int(one.layer_n[i]), group
                place += 1


@dataclass
class WatchFile(ToolFile):
    """watch.json: the sets of images that were judged, the usual ones (or those of --data) first."""

    FILE: ClassVar[str] = "watch.json"

    calibration: str
    num_calibration: int
    false_alarms: float
    threshold: float
    sets: list[WatchedSet]
    shown: list[ShownImage]


def watch_findings(sets: list[WatchedSet], false_alarms: float) -> list[str]:
    """The share of alarms, and for each unusual set the watcher's AUROC beside that of the best other score."""
    first = sets[0]
    found = [f"{first.alarms:.1%} of {first.num_images} images of {first.name} are alarms ({false_alarms:.1%} wished)"]
    for one in sets[1:]:
        if not one.scores:
            found.append(f"{one.name}: the attack changed too few classes to judge scores by")
            continue
        own = one.scores[WATCHER].auroc
        others = {name: score.auroc for name, score in one.scores.items() if name != WATCHER}
        best = max(others, key=lambda name: others[name])
        fooled = "" if one.fooled is None else f" ({one.fooled:.0%} of the images are fooled)"
        # The best is known only after the images were judged: this flatters the others, not the watcher.
        beside = f"{best}, the best of {len(others)} other scores on these images, {others[best]:.3f}"
        found.append(f"{one.name}{fooled}: AUROC {own:.3f}; {beside}; {one.alarms:.0%} are alarms")
    return found
