"""How well a score tells unusual images from usual ones, and the scores that need no surrogate.

`Baselines` are the scores of the literature: maximum softmax (Hendrycks and Gimpel, 2017), energy (Liu et al., 2020),
Mahalanobis distance (Lee et al., 2018), nearest neighbours (Sun et al., 2022) and the norm of the features. No claim
about a watcher stands without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.data.stream import Batch
from raptor.streaming import Record
from raptor.vit.on_demand import ReadOut
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

NUM_NEIGHBOURS = 10
_NUM_RESAMPLES = 500


class Baselines:
    """Scores of unusualness that need only the teacher; larger is more unusual. What is usual is learned by `fit`."""

    def __init__(self, teacher: ViT, read_out: ReadOut, precision: str = "fp32"):
        self.teacher = teacher
        self.read_out = read_out
        self.precision = precision

    def fit(self, usual: Iterable[Batch]) -> Baselines:
        """Remember the features of usual images, their mean (of each class where labels are known) and covariance."""
        kept = list(usual)
        self._usual_nf, _ = self._features(kept)
        class_n = torch.zeros(len(self._usual_nf), dtype=torch.long)
        if all(batch.labels is not None for batch in kept):
            class_n = torch.cat([batch.labels.cpu() for batch in kept if batch.labels is not None])
        # As Lee et al.: a mean for each class, and one covariance around them for all.
        _, class_n = class_n.unique(return_inverse=True)
        one_hot_nc = F.one_hot(class_n).double()
        self._means_cf = one_hot_nc.T @ self._usual_nf / one_hot_nc.sum(0)[:, None]
        centred_nf = self._usual_nf - self._means_cf[class_n]
        covariance_ff = centred_nf.T @ centred_nf / len(centred_nf)
        # With fewer images than features the covariance has no inverse: a tenth of it is replaced by its mean variance.
        identity_ff = torch.eye(len(covariance_ff), dtype=torch.float64)
        self._covariance_ff = 0.9 * covariance_ff + 0.1 * covariance_ff.diagonal().mean() * identity_ff
        return self

    def scores(self, judged: Iterable[Batch]) -> dict[str, Tensor]:
        """Each score of each image, (N,)."""
        features_nf, logits_nc = self._features(judged)
        mahalanobis_n = torch.full((len(features_nf),), torch.inf, dtype=torch.float64)
        for mean_f in self._means_cf:
            difference_nf = features_nf - mean_f
            solved_nf = torch.linalg.solve(self._covariance_ff, difference_nf.T).T
            # Rounding may leave a tiny negative number, whose root is not a number.
            distance_n = (difference_nf * solved_nf).sum(-1).clamp_min(0).sqrt()
            mahalanobis_n = torch.minimum(mahalanobis_n, distance_n)
        # Unit features, as Sun et al. found: their norm would decide the distance otherwise.
        distance_nn = torch.cdist(F.normalize(features_nf, dim=-1), F.normalize(self._usual_nf, dim=-1))
        nearest = min(NUM_NEIGHBOURS, distance_nn.shape[1])
        return {
            "maximum softmax": -logits_nc.softmax(-1).amax(-1),
            "energy": -torch.logsumexp(logits_nc, dim=-1),
            "mahalanobis": mahalanobis_n,
            "nearest neighbours": distance_nn.sort(dim=1).values[:, nearest - 1],
            # Features of strange images are usually shorter, so a short one is unusual.
            "norm": -features_nf.norm(dim=1),
        }

    @torch.no_grad()
    def _features(self, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
        features = []
        logits = []
        for batch in batches:
            with autocast(self.precision, self.teacher.device):
                last_btd = self.teacher.record(batch.images.to(self.teacher.device))[0][-1]
                # In float64, because a covariance of nearly equal features is badly conditioned.
                features.append(self.teacher.features(last_btd).double().cpu())
                logits.append(self.read_out(last_btd).double().cpu())
        return torch.cat(features), torch.cat(logits)


@dataclass(frozen=True)
class Detection(Record):
    """How well scores tell unusual images from usual ones, with 95 % bootstrap intervals over images.

    Attributes:
        auroc: probability that an unusual image scores higher than a usual one; ties count half.
        fpr95: share of usual images above the threshold that 95 % of the unusual ones exceed.
    """

    auroc: float
    auroc_interval: tuple[float, float]
    fpr95: float
    fpr95_interval: tuple[float, float]


def detection(usual_n: Tensor, unusual_n: Tensor, num_resamples: int = _NUM_RESAMPLES, seed: int = 0) -> Detection:
    """AUROC, and the rate of false alarms at 95 % detections."""
    generator = torch.Generator().manual_seed(seed)
    areas = []
    rates = []
    for _ in range(num_resamples):
        # Both sets are drawn anew, because both are samples.
        some_usual = usual_n[torch.randint(len(usual_n), (len(usual_n),), generator=generator)]
        some_unusual = unusual_n[torch.randint(len(unusual_n), (len(unusual_n),), generator=generator)]
        areas.append(auroc(some_usual, some_unusual))
        rates.append(false_alarm_rate(some_usual, some_unusual))
    return Detection(
        auroc=auroc(usual_n, unusual_n),
        auroc_interval=_interval(areas),
        fpr95=false_alarm_rate(usual_n, unusual_n),
        fpr95_interval=_interval(rates),
    )


def auroc(usual_n: Tensor, unusual_n: Tensor) -> float:
    """Area under the ROC curve, by counting pairs."""
    ordered = usual_n.double().sort().values
    unusual_n = unusual_n.double().contiguous()
    # By sorting, n log n: a matrix of all pairs of two large sets would not fit in memory.
    below = torch.searchsorted(ordered, unusual_n, right=False)
    up_to = torch.searchsorted(ordered, unusual_n, right=True)
    return float((below + up_to).double().mean() / (2 * len(usual_n)))


def false_alarm_rate(usual_n: Tensor, unusual_n: Tensor, detected: float = 0.95) -> float:
    """Share of usual images that score at least as high as the threshold that keeps `detected` of the unusual ones."""
    # The small addition keeps .05 * 20 from being rounded down to 0.
    num_missed = math.floor((1 - detected) * len(unusual_n) + 1e-9)
    threshold = unusual_n.sort().values[num_missed]
    return float((usual_n >= threshold).double().mean())


def _interval(values: list[float]) -> tuple[float, float]:
    low, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)


def attack(
    images: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    step_size_c: Tensor,
    num_steps: int,
    score_of: Callable[[Tensor], Tensor] | None = None,
    valid: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Projected gradient descent (Madry et al., 2018) away from the class that the model gives each image.

    The result is the images after the attack, and for which of them the class has changed.

    Args:
        images: (B, 3, H, W), normalised.
        logits_of: class scores of images, with gradients.
        step_size_c: largest change of each channel; each step takes a quarter of it.
        score_of: the score of a watcher. With it, an image whose class has changed already is moved towards a lower
            score instead, so that the attack evades the watcher as well.
        valid: the smallest and the largest value of each channel, which are black and white; None for no bounds.
    """
    limit_b = step_size_c.to(images).view(1, -1, 1, 1)
    low = images - limit_b
    high = images + limit_b
    if valid is not None:
        # No picture has a pixel darker than black or lighter than white.
        low = torch.maximum(low, valid[0].to(images).view(1, -1, 1, 1))
        high = torch.minimum(high, valid[1].to(images).view(1, -1, 1, 1))
    with torch.no_grad():
        class_b = logits_of(images).argmax(-1)
    # From the image itself and not from a random place near it: the attack is then the same each time.
    changed = images.clone()
    best = images.clone()
    best_score_b = images.new_full((len(images),), torch.inf)
    is_fooled_b = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    for step in range(num_steps + 1):
        changed = changed.detach().requires_grad_()
        logits_bc = logits_of(changed)
        fools_b = logits_bc.argmax(-1) != class_b
        gain_b = F.cross_entropy(logits_bc, class_b, reduction="none")
        score_b = torch.zeros_like(gain_b)
        if score_of is not None:
            score_b = score_of(changed)
            # A weighted sum of both aims would need a weight for each model; taking turns needs none.
            gain_b = torch.where(fools_b, -score_b, gain_b)
        # Of all steps that fool the model, the one with the lowest score is kept; without a watcher the last one.
        is_better_b = fools_b & (score_b.detach() <= best_score_b)
        best_score_b = torch.where(is_better_b, score_b.detach(), best_score_b)
        best = torch.where(is_better_b[:, None, None, None], changed.detach(), best)
        is_fooled_b = is_fooled_b | fools_b
        if step < num_steps:
            # No image enters the gain of another one, so one backward pass serves the batch.
            (gradient,) = torch.autograd.grad(gain_b.sum(), changed)
            changed = (changed.detach() + limit_b / 4 * gradient.sign()).clamp(low, high)
    return best, is_fooled_b
