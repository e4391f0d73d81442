"""Depth on patch and cls tokens: 256 bins, upsampled four times, the softmax's expectation; RMSE in metres."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from raptor.data.augment import change_colours
from raptor.data.dense import DenseData
from raptor.devices import ONE_PROCESS, Ranks
from raptor.probes.dense_task import DenseTask
from raptor.probes.frames import bilinear, crop_targets, on_device, resize
from raptor.vit.view import ViT

_NUM_BINS = 256
_MIN_DEPTH = 1e-3
_UPSAMPLE = 4
_LOG_EPS = 1e-3
_EIGEN_ROWS = (45, 471)
_EIGEN_COLUMNS = (41, 601)
_EIGEN_FRAME = (480, 640)
_JITTER = 0.2


class Depth(DenseTask):
    """The depth task.

    Both losses are taken on the grid four times as fine as the patches, the score on the target's frame: predictions
    lose their padding before they are resized to it.
    """

    metric = "rmse"
    higher_is_better = False
    no_target = 0.0

    def __init__(self, vit: ViT, layer: int, train_data: DenseData, val_data: DenseData, **options: Any) -> None:
        if train_data.max_depth is None or val_data.max_depth is None:
            raise ValueError("depth needs data with depths; open it with the task depth")
        super().__init__(vit, layer, train_data, val_data, **options)
        self.num_outputs = _NUM_BINS
        # Every patch also sees cls, which knows the scene.
        self.num_features = vit.dim * (1 + vit.groups.cls)
        self.max_depth = train_data.max_depth
        self.bins = bin_depths(self.max_depth).to(self.device)
        sides = self.geometry.sides
        self.to_fine = on_device([bilinear(num, num * _UPSAMPLE) for num in self.geometry.grid], self.device)
        # The padding goes before the resize. The authors resize it too, which squeezes the picture.
        self.to_target = on_device([side.to_target(_UPSAMPLE) for side in sides], self.device)
        self.places = on_device([side.cell_centres(_UPSAMPLE) for side in sides], self.device)
        self.eigen = eigen_crop(train_data.frame) if val_data.eigen_crop else None

    def features(self, tokens_btd: Tensor) -> Tensor:
        own = tokens_btd[:, self.vit.groups.slice("patches")]
        if not self.vit.groups.cls:
            return own
        return torch.cat([own, tokens_btd[:, self.vit.groups.slice("cls")].expand_as(own)], dim=-1)

    def has_target(self, targets: Tensor) -> Tensor:
        return _is_valid(targets, self.max_depth)

    def train_targets(self, targets: Tensor, boxes: Tensor) -> Tensor:
        return crop_targets(targets, boxes, *self.places, 0.0)

    def augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Brightness, contrast and saturation of each image changed by up to 20 %."""
        factors_b3 = 1 + _JITTER * (2 * torch.rand(3, self.batch_size, generator=generator) - 1).T[self.rows]
        return change_colours(images, factors_b3.to(images, non_blocking=True))

    def gradient(self, logits_bhwc: Tensor, targets_bhw: Tensor) -> Tensor:
        rows, columns = self.to_fine
        fine = resize(logits_bhwc, rows, columns)
        return resize(depth_loss_gradient(fine, targets_bhw, self.bins, self.ranks), rows.T, columns.T)

    def scores(self, weight_gcf: Tensor, bias_gc: Tensor, part: str) -> list[dict[str, float]]:
        areas = {"rmse": (slice(None), slice(None))}
        if self.eigen is not None:
            areas["rmse_eigen"] = self.eigen
        errors = [{name: self._no_errors() for name in areas} for _ in range(len(weight_gcf))]
        for logits_bhwgc, targets in self.scored_batches(weight_gcf, bias_gc, part):
            for g, of_head in enumerate(errors):
                depth_bhw = expected_depth(resize(logits_bhwgc[..., g, :], *self.to_fine), self.bins)
                guess_bhw = resize(depth_bhw[..., None], *self.to_target)[..., 0]
                for name, (rows, columns) in areas.items():
                    of_head[name] += self._errors(guess_bhw[:, rows, columns], targets[:, rows, columns])
        return [{name: self._rmse(sums) for name, sums in of_head.items()} for of_head in errors]

    def floors(self) -> dict[str, float]:
        height, width = self.fit.data.frame
        sum_hw = torch.zeros(height, width, dtype=torch.float64, device=self.device)
        num_hw = torch.zeros_like(sum_hw)
        for targets in self.targets_of(self.fit):
            is_valid = _is_valid(targets, self.max_depth)
            sum_hw += torch.where(is_valid, targets, 0.0).sum(0, dtype=torch.float64)
            num_hw += is_valid.sum(0)
        self.ranks.add_(sum_hw)
        self.ranks.add_(num_hw)
        # The mean has the smallest root mean square error of all constants.
        constant = sum_hw.sum() / num_hw.sum()
        mean_hw = torch.where(num_hw > 0, sum_hw / num_hw.clamp(min=1), constant)
        guesses = {"constant depth": constant.expand_as(mean_hw), "mean map": mean_hw}
        errors = {name: self._no_errors() for name in guesses}
        for targets in self.targets_of(self.parts["reported"]):
            for name, guess_hw in guesses.items():
                errors[name] += self._errors(guess_hw.expand_as(targets), targets)
        return {name: self._rmse(sums) for name, sums in errors.items()}

    def _no_errors(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self.device)

    def _errors(self, guess: Tensor, true: Tensor) -> Tensor:
        """The sum of squared errors over the valid pixels, and their number."""
        # In float64, because squares of a hundred million pixels are added.
        true = true.double()
        valid = _is_valid(true, self.max_depth)
        squares = torch.where(valid, guess.double() - true, 0.0).square().sum()
        return torch.stack([squares, valid.sum().double()])

    def _rmse(self, sums: Tensor) -> float:
        squares, num_valid = self.ranks.add_(sums).tolist()
        if num_valid == 0:
            return math.nan
        return math.sqrt(squares / num_valid)


def bin_depths(max_depth: float = 10.0) -> Tensor:
    """The 256 depths (256,), evenly spaced from 1 mm to `max_depth` metres."""
    return torch.linspace(_MIN_DEPTH, max_depth, _NUM_BINS)


def expected_depth(logits: Tensor, bins: Tensor) -> Tensor:
    """Depth (...) as the softmax's expectation over the bins of logits (..., 256)."""
    return logits.softmax(dim=-1) @ bins


def _is_valid(depths: Tensor, max_depth: float | Tensor) -> Tensor:
    """Where there is a reading within range."""
    # The limit itself is a reading, also after rounding to float32.
    return (depths >= _MIN_DEPTH) & (depths <= max_depth * (1 + 1e-6))


def nearest_bin(depths: Tensor, bins: Tensor) -> Tensor:
    """Index of the nearest bin; 0 where there is no valid reading."""
    step = (bins[-1] - bins[0]) / (len(bins) - 1)
    index = ((depths - bins[0]) / step).round().clamp(0, len(bins) - 1).long()
    # No bin stands for them: the authors mark them with 255, a real bin, while their loss ignores 256.
    return torch.where(_is_valid(depths, bins[-1]), index, 0)


def depth_loss_gradient(logits_bhwc: Tensor, true_bhw: Tensor, bins: Tensor, ranks: Ranks = ONE_PROCESS) -> Tensor:
    """Gradient of the loss in the logits, from one softmax: autograd's takes several times as long.

    The loss is 10 (mean g^2 - .85 (mean g)^2) + cross-entropy over valid pixels, those of the whole batch where ranks
    share it; g is the difference of logarithms.
    """
    valid = _is_valid(true_bhw, bins[-1])
    num = ranks.add_(valid.sum()).clamp(min=1)
    probability = logits_bhwc.softmax(dim=-1)
    predicted = probability @ bins
    # The epsilon on both sides, as in the loss itself: near readings would rule it otherwise.
    g = (predicted + _LOG_EPS).log() - (torch.where(valid, true_bhw, 1.0) + _LOG_EPS).log()
    # A pixel without a reading must not move the mean, either.
    g = torch.where(valid, g, 0.0)
    mean_g = ranks.add_(g.sum()) / num
    slope = torch.where(valid, 20 * (g - 0.85 * mean_g) / ((predicted + _LOG_EPS) * num), 0.0)
    share = valid.to(predicted.dtype) / num
    # d predicted / d logit_i = p_i (bin_i - predicted), d entropy / d logit_i = p_i - one-hot_i
    gradient = probability.mul_(torch.addcmul((share - slope * predicted)[..., None], slope[..., None], bins))
    # Pixels without a reading point at bin 0 with a share of 0, so that they change nothing.
    labels = nearest_bin(true_bhw, bins)[..., None]
    return gradient.scatter_add_(-1, labels, -share[..., None])


def eigen_crop(frame: tuple[int, int]) -> tuple[slice, slice]:
    """Rows 45-470 and columns 41-600 of 480 x 640, scaled to another frame."""
    height, width = _EIGEN_FRAME
    top, bottom = _EIGEN_ROWS
    left, right = _EIGEN_COLUMNS
    # The crop is given for the sensor's own frame.
    rows = slice(round(top * frame[0] / height), round(bottom * frame[0] / height))
    columns = slice(round(left * frame[1] / width), round(right * frame[1] / width))
    return rows, columns
