"""Null models for every error curve: a surrogate is only meaningful if it beats them.

identity   a_0 at every depth
mean       the mean of each layer, token group and coordinate
tied       the phase's middle teacher block, repeated without training
linear     one least-squares linear map (with offset) per phase, applied to its own output
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raptor.data.stream import Batch, sharing
from raptor.devices import Ranks, full_precision
from raptor.phases.cut import Phases, check_phases
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.trajectory import NonFiniteStates, Trajectories, autocast
from raptor.vit.view import ViT

NULL_NAMES = ("identity", "mean", "tied", "linear")
_JITTER = 1e-7  # of the mean squared feature: keeps directions that hold only rounding noise out of the linear maps


@dataclass
class NullModels:
    """The four null models of one teacher and its phases.

    Attributes:
        mean_ltd: mean of each layer 0..L; every token has the mean of its group, (L + 1, T, D).
        maps: one (D + 1, D) matrix per phase; the last row is the offset.
        tied: the teacher with the phase's middle block repeated.
        num_images: how many images the mean and the maps were fitted on.
    """

    phases: Phases
    mean_ltd: Tensor
    maps: list[Tensor]
    tied: ViT
    num_images: int

    @torch.no_grad()
    def states(self, images: Tensor, teacher_states: Sequence[Tensor], precision: str) -> dict[str, list[Tensor]]:
        """States `a_0..a_L` of each null model for a batch whose teacher states are known."""
        start = teacher_states[0]
        with autocast(precision, start.device):
            tied, _ = self.tied.record(images)
        linear = [start.float()]  # then on its own outputs, as a surrogate runs
        with full_precision(start.device):
            for num_repeats, matrix in zip(self.phases, self.maps):
                for _ in range(num_repeats):
                    linear.append(linear[-1] @ matrix[:-1] + matrix[-1])
        # Identity and mean are views: only the other two take memory for each image.
        mean = [mean_td.expand_as(start) for mean_td in self.mean_ltd]
        return {"identity": [start] * len(teacher_states), "mean": mean, "tied": tied, "linear": linear}


def fit_null_models(teacher: ViT, phases: Sequence[int], batches: Iterable[Batch], precision: str) -> NullModels:
    """Fit the null models on the teacher's states, in one streaming pass; of all ranks that share the batches."""
    phases = check_phases(teacher, phases)
    ranks = sharing(batches)
    fits: list[LinearFit] = []
    if ranks.size > 1:
        # All ranks standardise alike, by the first batch, which rank 0 has.
        standards = ranks.first(lambda: _first_standards(teacher, phases, batches, precision))
        fits = [LinearFit(*(values.to(teacher.device) for values in one)) for one in standards]
    sums_ltd: Tensor | None = None
    num_images = 0
    for states, _, batch in Trajectories(teacher, batches, precision, "null models", quiet=True):
        # Token by token in float64: the mean of a group is then exact whatever its size.
        added_ltd = torch.stack([x.float().sum(0) for x in states]).double()
        sums_ltd = added_ltd if sums_ltd is None else sums_ltd + added_ltd
        num_images += len(batch.images)
        fits = fits or [LinearFit(*standards_of(states[first - 1], states[first])) for first, _ in phases.spans]
        for (first, last), fit in zip(phases.spans, fits):
            for layer in range(first, last + 1):
                fit.update(states[layer - 1], states[layer])
    num_images = sum(ranks.gather(num_images))
    if num_images == 0:
        raise ValueError("no images to fit the null models on: the data is empty")
    sums_ltd = ranks.sum(sums_ltd)
    bad = (~sums_ltd.flatten(1).isfinite().all(dim=1)).nonzero()
    if len(bad):
        raise NonFiniteStates.of(teacher.name, f"at layer {int(bad[0])} on the images that null models are fitted on")
    for fit in fits:
        fit.reduce(ranks)
    mean_ltd = sums_ltd / num_images
    group_means_ltd = torch.empty_like(mean_ltd)
    # By the place of each group, because some models have their registers after the patches.
    for _, where in teacher.groups.present():
        group_means_ltd[:, where] = mean_ltd[:, where].mean(1, keepdim=True)
    # The start of a distillation without its training: a surrogate has to show what training added.
    tied = make_surrogate(teacher, phases, block="teacher", conditioning="none", copy="middle")
    return NullModels(phases, group_means_ltd.float(), [fit.solve() for fit in fits], tied, num_images)


def _first_standards(
    teacher: ViT, phases: Phases, batches: Iterable[Batch], precision: str
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What each phase standardises by, on the CPU; empty without images."""
    for states, _, _ in Trajectories(teacher, batches, precision):
        found = []
        for first, _ in phases.spans:
            x_mean, x_scale, y_mean = standards_of(states[first - 1], states[first])
            found.append((x_mean.cpu(), x_scale.cpu(), y_mean.cpu()))
        return found
    return []


def standards_of(x_btd: Tensor, y_btd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and deviation of x and mean of y, per coordinate: what a `LinearFit` of y on x standardises by."""
    x = x_btd.float().flatten(0, -2)
    y = y_btd.float().flatten(0, -2)
    # A coordinate that is constant in the first batch would be divided by 0.
    return x.mean(0), x.std(0, correction=0).clamp_min(1e-6), y.mean(0)


class LinearFit:
    """Least squares of y on x with an offset, streaming: D x D normal equations, never the rows.

    Rows are standardised by the first batch's mean and deviation, so that float32 products lose no digits to a large
    offset or a huge coordinate; sums are float64.
    """

    def __init__(self, x_mean: Tensor, x_scale: Tensor, y_mean: Tensor) -> None:
        self._x_mean = x_mean
        self._x_scale = x_scale
        self._y_mean = y_mean
        num_features = len(x_mean) + 1  # and the offset
        self._gram = x_mean.new_zeros(num_features, num_features, dtype=torch.float64)
        self._cross = x_mean.new_zeros(num_features, len(y_mean), dtype=torch.float64)

    @torch.no_grad()
    def update(self, x_btd: Tensor, y_btd: Tensor) -> None:
        """Add pairs of rows."""
        x = x_btd.float().flatten(0, -2)
        y = y_btd.float().flatten(0, -2)
        z = torch.cat([(x - self._x_mean) / self._x_scale, x.new_ones(len(x), 1)], dim=1)
        # Normal equations square the condition number, which the ten bits of TF32 do not bear.
        with full_precision(x.device):
            self._gram += z.T @ z
            self._cross += z.T @ (y - self._y_mean)

    def reduce(self, ranks: Ranks) -> None:
        """Merge the rows of all ranks."""
        self._gram = ranks.sum(self._gram)
        self._cross = ranks.sum(self._cross)

    def solve(self) -> Tensor:
        """The map as (D + 1, D) in float32; the last row is the offset."""
        jitter = _JITTER * self._gram.diagonal().mean()
        eye = torch.eye(len(self._gram), device=self._gram.device, dtype=torch.float64)
        solution = torch.linalg.solve(self._gram + jitter * eye, self._cross)
        # Back from standardised rows to the states themselves.
        weight = solution[:-1] / self._x_scale.double()[:, None]
        offset = solution[-1] + self._y_mean.double() - self._x_mean.double() @ weight
        return torch.cat([weight, offset[None]]).float()
