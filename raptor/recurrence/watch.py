"""Watching a model: a surrogate that follows its teacher on usual images follows it worse on unusual ones.

The score of an image is the largest standardised discrepancy `|a_l - ã_l|` over layers and token groups. The images
that the watcher is calibrated on are used in two halves: one says what is usual at each layer, the other sets the
threshold, so that the promised share of false alarms holds for any number of images (split conformal prediction).

`baseline_scores` are the scores that need no surrogate. No claim about the watcher stands without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.data.stream import Batch
from raptor.recurrence.rules import Logits
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

MAD_OF_NORMAL = 1.4826
"""The standard deviation of a normal distribution in units of its median absolute deviation."""
NUM_NEIGHBOURS = 10
ENERGY_TEMPERATURE = 1.0


@dataclass(frozen=True)
class Watched:
    """What the watcher says about images; N of them, L layers, G token groups.

    Attributes:
        score_n: largest standardised discrepancy; above the threshold is an alarm.
        alarm_n: whether the score is above the threshold.
        layer_n: the layer (1..L) where it is largest.
        group_n: the index of the group there, in the order of `Watcher.group_names`.
        map_np: for each patch, its discrepancy at that layer in units of the median patch there.
    """

    score_n: Tensor
    alarm_n: Tensor
    layer_n: Tensor
    group_n: Tensor
    map_np: Tensor


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
        error_nlg = torch.cat([error for error, _ in self._errors(batches)])
        usual_nlg, held_out_nlg = error_nlg[0::2], error_nlg[1::2]
        least = math.ceil(1 / false_alarms) - 1
        if len(held_out_nlg) < least or len(usual_nlg) < 2:
            raise ValueError(
                f"{len(error_nlg)} calibration images are too few for {false_alarms:.1%} false alarms: give at least "
                f"{max(4, 2 * least)}"
            )
        self._centre_lg = usual_nlg.median(dim=0).values
        deviation_lg = (usual_nlg - self._centre_lg).abs().median(dim=0).values
        # A layer whose error is the same for all images would make every other image an alarm.
        floor = 1e-6 * float(self._centre_lg.abs().max())
        self._scale_lg = (MAD_OF_NORMAL * deviation_lg).clamp_min(max(floor, torch.finfo(torch.float64).tiny))
        scores_n = self._standardise(held_out_nlg).flatten(1).amax(dim=1)
        self.threshold = conformal_threshold(scores_n, false_alarms)
        return self

    def watch(self, batches: Iterable[Batch]) -> Watched:
        """Scores, alarms and where they come from."""
        if self._centre_lg is None:
            raise ValueError("the watcher has not seen usual images yet: calibrate it first")
        parts = [self._judge(error_nlg, map_nlp) for error_nlg, map_nlp in self._errors(batches)]
        if not parts:
            raise ValueError("there are no images to watch: check --data")
        return Watched(*(torch.cat(column) for column in zip(*parts)))

    def _judge(self, error_nlg: Tensor, map_nlp: Tensor) -> tuple[Tensor, ...]:
        standardised_nlg = self._standardise(error_nlg)
        score_n, place_n = standardised_nlg.flatten(1).max(dim=1)
        num_groups = standardised_nlg.shape[2]
        layer_n = place_n // num_groups
        patches_np = map_nlp[torch.arange(len(layer_n)), layer_n]
        patches_np = patches_np / patches_np.median(dim=1, keepdim=True).values.clamp_min(1e-12)
        return score_n, score_n > self.threshold, layer_n + 1, place_n % num_groups, patches_np

    def _standardise(self, error_nlg: Tensor) -> Tensor:
        assert self._centre_lg is not None and self._scale_lg is not None
        return (error_nlg - self._centre_lg) / self._scale_lg

    @torch.no_grad()
    def _errors(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each batch, errors by layer and group (N, L, G) and by layer and patch (N, L, P), on the CPU."""
        device = self.teacher.device
        patches = self.teacher.groups.slice("patches")
        for batch in batches:
            images = batch.images.to(device)
            with autocast(self.precision, device):
                wanted = self.teacher.record(images)[0][1:]
                found = self.surrogate.record(images)[0][1:]
            by_layer = []
            maps = []
            for target_btd, x_btd in zip(wanted, found):
                squares_bt = (target_btd.double() - x_btd.double()).square().sum(-1)
                groups = [squares_bt[:, where].sum(-1).sqrt() for _, where in self.teacher.groups.present()]
                by_layer.append(torch.stack(groups, dim=-1))
                maps.append(squares_bt[:, patches].sqrt())
            yield torch.stack(by_layer, dim=1).cpu(), torch.stack(maps, dim=1).float().cpu()


def conformal_threshold(scores_n: Tensor, false_alarms: float) -> float:
    """The smallest threshold that a new usual image exceeds with at most this probability, for any distribution.

    It is the score of rank ceil((n + 1) (1 - false_alarms)) of n calibration scores.
    """
    num = len(scores_n)
    rank = math.ceil((num + 1) * (1 - false_alarms) - 1e-9)
    if rank > num:
        return math.inf
    return float(scores_n.sort().values[rank - 1])


@torch.no_grad()
def baseline_scores(
    teacher: ViT, usual: Iterable[Batch], judged: Iterable[Batch], logits: Logits | None, precision: str = "fp32"
) -> dict[str, Tensor]:
    """Scores of unusualness that need only the teacher; larger is more unusual.

    Maximum softmax and energy read the head; Mahalanobis distance, the distance to the nearest neighbours and the norm
    read the features of `a_L`. What is usual is learned from the same images as the watcher's.
    """
    usual_nf, _ = _features(teacher, usual, None, precision)
    judged_nf, judged_nc = _features(teacher, judged, logits, precision)
    scores = {
        "mahalanobis": _mahalanobis(usual_nf, judged_nf),
        "nearest neighbours": _neighbour_distance(usual_nf, judged_nf),
        "norm": -judged_nf.norm(dim=1),
    }
    if judged_nc is not None:
        scores["maximum softmax"] = -judged_nc.softmax(-1).amax(-1)
        scores["energy"] = -ENERGY_TEMPERATURE * torch.logsumexp(judged_nc / ENERGY_TEMPERATURE, dim=-1)
    return scores


def _features(
    teacher: ViT, batches: Iterable[Batch], logits: Logits | None, precision: str
) -> tuple[Tensor, Tensor | None]:
    features = []
    scores = []
    for batch in batches:
        with autocast(precision, teacher.device):
            last_btd = teacher.record(batch.images.to(teacher.device))[0][-1]
            features.append(teacher.features(last_btd).double().cpu())
            if logits is not None:
                scores.append(logits(last_btd).double().cpu())
    return torch.cat(features), torch.cat(scores) if scores else None


def _mahalanobis(usual_nf: Tensor, judged_nf: Tensor) -> Tensor:
    """Distance from the mean of the usual features in units of their covariance, shrunk towards its diagonal."""
    mean_f = usual_nf.mean(0)
    centred_nf = usual_nf - mean_f
    covariance_ff = centred_nf.T @ centred_nf / len(usual_nf)
    # With fewer images than features the covariance has no inverse: a tenth of it is replaced by its mean variance.
    identity_ff = torch.eye(len(mean_f), dtype=torch.float64)
    covariance_ff = 0.9 * covariance_ff + 0.1 * covariance_ff.diagonal().mean() * identity_ff
    difference_nf = judged_nf - mean_f
    return (difference_nf * torch.linalg.solve(covariance_ff, difference_nf.T).T).sum(-1).clamp_min(0).sqrt()


def _neighbour_distance(usual_nf: Tensor, judged_nf: Tensor) -> Tensor:
    """Distance of the unit features to the tenth nearest usual image."""
    usual_nf = F.normalize(usual_nf, dim=-1)
    judged_nf = F.normalize(judged_nf, dim=-1)
    distance_nn = torch.cdist(judged_nf, usual_nf)
    nearest = min(NUM_NEIGHBOURS, len(usual_nf))
    return distance_nn.sort(dim=1).values[:, nearest - 1]


@dataclass(frozen=True)
class Detection:
    """How well scores tell unusual images from usual ones, with 95 % bootstrap intervals over images.

    Attributes:
        auroc: probability that an unusual image scores higher than a usual one; ties count half.
        false_alarms: share of usual images above the threshold that 95 % of the unusual ones exceed.
    """

    auroc: float
    auroc_interval: tuple[float, float]
    false_alarms: float
    false_alarms_interval: tuple[float, float]


def detection(usual_n: Tensor, unusual_n: Tensor, num_resamples: int = 1000, seed: int = 0) -> Detection:
    """AUROC and the rate of false alarms at 95 % detections."""
    generator = torch.Generator().manual_seed(seed)
    areas = []
    rates = []
    for _ in range(num_resamples):
        some_usual = usual_n[torch.randint(len(usual_n), (len(usual_n),), generator=generator)]
        some_unusual = unusual_n[torch.randint(len(unusual_n), (len(unusual_n),), generator=generator)]
        areas.append(auroc(some_usual, some_unusual))
        rates.append(false_alarm_rate(some_usual, some_unusual))
    return Detection(
        auroc=auroc(usual_n, unusual_n),
        auroc_interval=_interval(areas),
        false_alarms=false_alarm_rate(usual_n, unusual_n),
        false_alarms_interval=_interval(rates),
    )


def auroc(usual_n: Tensor, unusual_n: Tensor) -> float:
    """Area under the ROC curve, by counting pairs."""
    ordered = usual_n.double().sort().values
    unusual_n = unusual_n.double().contiguous()
    below = torch.searchsorted(ordered, unusual_n, right=False)
    up_to = torch.searchsorted(ordered, unusual_n, right=True)
    return float((below + up_to).double().mean() / (2 * len(usual_n)))


def false_alarm_rate(usual_n: Tensor, unusual_n: Tensor, detected: float = 0.95) -> float:
    """Share of usual images that score at least as high as the threshold that keeps `detected` of the unusual ones."""
    num_missed = math.floor((1 - detected) * len(unusual_n) + 1e-9)
    threshold = unusual_n.sort().values[num_missed]
    return float((usual_n >= threshold).double().mean())


def _interval(values: list[float]) -> tuple[float, float]:
    low, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)
