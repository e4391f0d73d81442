"""Class basins: PCA of the trajectories of a few classes, and how well classes separate over depth.

A state is the raw mean over a group's tokens, then normalised. At most `per_class` images per class are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raptor.devices import Ranks
from raptor.dynamics.states import group_means, on_host_if_small, parallel_map, take_rows
from raptor.streaming import Array, NotSaved, Record, Rows, reduce_all
from raptor.vit.groups import TokenGroups
from raptor.vit.trajectory import check_states

_PER_CLASS = 200


@dataclass
class GroupBasins(Record):
    """Basins of one token group, of N images in C classes.

    paths: `(N, L+1, 3)`, trajectories on the principal components of all kept points; not saved, because it is large.
    class_paths: `(C, L+1, 3)`, their class means. explained: `(3,)`, share of the variance.
    scatter_ratio: `(L+1,)`, between-class over within-class sum of squares (traces).
    accuracy: `(L+1,)`, nearest class mean, where the image is left out of its class's mean.
    """

    class_paths: Array
    explained: Array
    scatter_ratio: Array
    accuracy: Array
    paths: NotSaved[np.ndarray | None] = None


@dataclass
class BasinsResult(Record):
    """By group.

    classes: the classes that had two images or more. images_per_class: how many images of each.
    chance: the accuracy of a guess. labels: `(N,)`, the class of each image as its position in `classes`; not saved.
    """

    classes: list[int]
    images_per_class: list[int]
    note: str | None
    chance: float
    groups: dict[str, GroupBasins]
    labels: NotSaved[np.ndarray | None] = None


class Basins:
    """Streaming collection of the trajectories of chosen classes."""

    def __init__(self, groups: TokenGroups, classes: Sequence[int], per_class: int = _PER_CLASS) -> None:
        if len(set(classes)) < 2:
            raise ValueError(f"basins need at least two different classes, got {list(classes)}")
        self.groups = groups
        self.classes = list(dict.fromkeys(int(c) for c in classes))
        self.per_class = per_class
        self._counts = dict.fromkeys(self.classes, 0)
        self._labels = Rows()
        self._kept = {name: Rows() for name, _ in groups.present()}

    @torch.no_grad()
    def update(
        self,
        states: Sequence[Tensor],
        labels: Tensor | Sequence[int],
        means: dict[str, Tensor] | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`, and its labels `(B,)`, preferably on the CPU.

        means: its `group_means`, if known. places: positions of its images in the stream, by default the next ones.
        """
        check_states(states, num_tokens=self.groups.num_tokens)
        labels = torch.as_tensor(labels).cpu()
        rows = self._choose(labels.tolist())
        if not rows:
            return
        if means is None:
            means = group_means(states, self.groups)
        kept_places = None if places is None else [places[row] for row in rows]
        self._labels.add(take_rows(labels, rows), kept_places)
        for name, kept in self._kept.items():
            kept.add(take_rows(means[name], rows), kept_places)

    def _choose(self, labels: Sequence[int]) -> list[int]:
        """The rows to keep: the first `per_class` of each class."""
        rows = []
        for row, label in enumerate(labels):
            if label in self._counts and self._counts[label] < self.per_class:
                self._counts[label] += 1
                rows.append(row)  # the first ones: any choice that needs the whole stream would need its labels first
        return rows

    def reduce(self, ranks: Ranks) -> None:
        """Collect the images of all ranks on rank 0, which keeps the first ones of each class."""
        reduce_all(ranks, self._labels, *self._kept.values())
        if ranks.size == 1 or not ranks.is_first or not len(self._labels):
            return
        self._counts = dict.fromkeys(self.classes, 0)
        # Each rank kept as many as one process may, so together there are too many.
        chosen = self._choose(self._labels.values().tolist())
        for rows in (self._labels, *self._kept.values()):
            rows.keep(chosen)

    def result(self) -> BasinsResult:
        # Accuracy leaves each image out of the mean of its class, so a class of one image has no mean.
        classes = [c for c in self.classes if self._counts[c] >= 2]
        if len(classes) < 2:
            raise ValueError(f"fewer than two of the classes {self.classes} had two images: choose others or add data")
        note = None
        if len(classes) < len(self.classes):
            missing = [c for c in self.classes if c not in classes]
            note = f"left out, with fewer than two images: classes {missing}"
        rows = []
        positions = []
        for row, label in enumerate(self._labels.values().tolist()):
            if label in classes:
                rows.append(row)
                positions.append(classes.index(label))
        labels = torch.tensor(positions)

        def fit(kept: Rows) -> GroupBasins:
            return group_basins(take_rows(kept.values(), rows), labels)

        groups = dict(zip(self._kept, parallel_map(fit, self._kept.values())))
        counts = torch.bincount(labels, minlength=len(classes)).tolist()
        return BasinsResult(classes, counts, note, 1 / len(classes), groups, labels.numpy())


def group_basins(x_nld: Tensor, labels: Tensor) -> GroupBasins:
    """PCA, scatter and accuracy of trajectories `(N, L+1, D)` with labels 0..C-1."""
    x_nld = x_nld.double()
    labels = labels.to(x_nld.device)
    points = x_nld.flatten(0, 1)
    points = points - points.mean(0)
    variances, vectors = torch.linalg.eigh(on_host_if_small(points.mT @ points))
    axes = vectors.to(points.device).flip(1)[:, :3]
    # An eigenvector has no sign: with its largest coordinate positive, two runs agree.
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    paths = (points @ (axes * largest.sign())).unflatten(0, x_nld.shape[:2])
    means_cld = class_means(x_nld, labels)
    return GroupBasins(
        paths=paths.cpu().numpy(),
        class_paths=class_means(paths, labels).cpu().numpy(),
        explained=(variances.flip(0)[:3] / variances.sum()).cpu().numpy(),
        scatter_ratio=scatter_ratio(x_nld, means_cld, labels).cpu().numpy(),
        accuracy=centroid_accuracy(x_nld, means_cld, labels).cpu().numpy(),
    )


def class_means(x_nld: Tensor, labels: Tensor) -> Tensor:
    """Mean of each class: `(C, L+1, D)`."""
    # A product of matrices gives all classes in one call, without a loop.
    member_cn = torch.nn.functional.one_hot(labels).to(x_nld.dtype).mT
    return torch.einsum("cn,nld->cld", member_cn, x_nld) / member_cn.sum(1)[:, None, None]


def scatter_ratio(x_nld: Tensor, means_cld: Tensor, labels: Tensor) -> Tensor:
    """Between-class over within-class sum of squared distances, by layer: `(L+1,)`."""
    own = means_cld[labels]
    # At layer 0 cls is the same for all images: 0 / 0, which is saved as null.
    between = (own - x_nld.mean(0)).square().sum((0, 2))
    return between / (x_nld - own).square().sum((0, 2))


def centroid_accuracy(x_nld: Tensor, means_cld: Tensor, labels: Tensor) -> Tensor:
    """Leave-one-out accuracy of the nearest class mean, by layer: `(L+1,)`."""
    x_lnd = x_nld.transpose(0, 1)
    means_lcd = means_cld.transpose(0, 1)
    # Unit states lie close together, where the form by matrix products loses the small distances.
    distance_lnc = torch.cdist(x_lnd, means_lcd, compute_mode="donot_use_mm_for_euclid_dist")
    counts = torch.bincount(labels).to(x_nld.dtype)
    own = torch.nn.functional.one_hot(labels).to(x_nld.dtype)
    # Without its image, a class mean of n images stands n / (n - 1) times as far from that image.
    distance_lnc = distance_lnc * (1 + own / (counts - 1))
    return (distance_lnc.argmin(2) == labels).double().mean(1)
