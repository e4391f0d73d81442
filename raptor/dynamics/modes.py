"""DMD along depth by token group: one fit per image, and one pooled over all images.

A state is the raw mean over a group's tokens, then normalised. Per-image fits use a stated number of images spread
evenly over the set; the pooled fit uses every image, through two running `D x D` matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raptor.devices import Ranks
from raptor.dynamics.dmd import NUMBERS, TOLERANCE, BatchedDMD, PooledDMD, eigenvalue_numbers, fit_dmd
from raptor.dynamics.states import EvenSubset, group_means, measured_groups, parallel_map, places_of, take_rows
from raptor.streaming import (
    Array,
    ComplexArray,
    ImageMoments,
    NotSaved,
    Record,
    Rows,
    Spread,
    decode,
    jsonable,
    reduce_all,
)
from raptor.vit.groups import TokenGroups
from raptor.vit.trajectory import check_states

_TRAJECTORIES = 256
_SHOWN = 64  # trajectories that are swept over ranks and whose eigenvalues go into the JSON
_LAYERS_PER_MODE = 4  # the paper's ratio: 10 modes of 40 layers
_NUM_FOLDS = 8  # parts of the images whose left-out fits give the interval of a pooled fit


@dataclass
class PooledModes(Record):
    """The DMD of all images at once: the attributes of `PooledDMD` (50 singular values at most), and its error.

    gap: None when it is infinite. reconstruction_error: over images, `(L+1,)`.
    """

    rank_used: int
    eigenvalues: ComplexArray
    spectral_radius: float | None
    median_modulus: float | None
    gap: float | None
    note: str | None
    num_pairs: int
    singular_values: Array
    reconstruction_error: Spread


@dataclass
class RatioModes(Record):
    """DMD at the paper's ratio of rank to depth, 10 of 40: one fit per image, and one pooled over all images.

    eigenvalues: of the pooled fit. pooled: its `NUMBERS`.
    values: `(N, 5)`, the numbers of each image. folds: `(8, 5)`, of pooled fits of the kept trajectories, each without
    one part of the images. Both are for intervals and not saved.
    """

    rank: int
    spectral_radius: Spread
    median_modulus: Spread
    distance: Spread
    angle: Spread
    weighted_angle: Spread
    eigenvalues: ComplexArray
    pooled: dict[str, float]
    values: NotSaved[np.ndarray | None] = None
    folds: NotSaved[np.ndarray | None] = None


@dataclass
class GroupModes(Record):
    """DMD of one token group: spreads over images, the fits behind them, the pooled fit and the rank sweep.

    rank: the rank that was asked for. ranks_used: how many images were fitted at rank 0, 1, ...
    eigenvalues, amplitudes: `(N, rank)` of at most 64 images, NaN where the rank is lower.
    sweep: rank -> `spectral_radius`, `median_modulus` and `reconstruction_error`, on at most 64 trajectories.
    ratio: at the paper's ratio of rank to depth.
    fits: the fits of all images; not saved.
    """

    spectral_radius: Spread
    median_modulus: Spread
    gap: Spread
    singular_values: Spread
    reconstruction_error: Spread
    rank: int
    ranks_used: list[int]
    note: str | None
    eigenvalues: ComplexArray
    amplitudes: Array
    pooled: PooledModes
    sweep: dict[int, dict[str, Spread]] = field(default_factory=dict)
    ratio: RatioModes | None = None
    fits: NotSaved[BatchedDMD | None] = None


@dataclass
class ModesResult(Record):
    """DMD by token group. In JSON the groups stand beside `tolerance`."""

    groups: dict[str, GroupModes]
    tolerance: float

    def to_dict(self) -> dict[str, Any]:
        return {"tolerance": self.tolerance} | jsonable(self.groups)

    @classmethod
    def from_dict(cls, saved: Any) -> ModesResult:
        groups = dict(decode(dict[str, Any], saved))
        tolerance = decode(dict[str, float], {"tolerance": groups.pop("tolerance", TOLERANCE)})["tolerance"]
        return cls(decode(dict[str, GroupModes], groups), tolerance)


class Modes:
    """Streaming DMD of the group means of every image.

    `num_trajectories` images are fitted one by one, spread evenly over `num_images` if that is given, else the first.
    """

    def __init__(
        self,
        groups: TokenGroups,
        rank: int = 10,
        num_trajectories: int = _TRAJECTORIES,
        num_images: int | None = None,
        tolerance: float = TOLERANCE,
        sweep: Sequence[int] | None = None,
    ) -> None:
        self.groups = groups
        self.rank = rank
        self.tolerance = tolerance
        self.sweep = sweep
        self._subset = EvenSubset(num_trajectories, num_images)
        self._kept: dict[str, Rows] = {}
        self._pooled: dict[str, PooledDMD] = {}
        for name in measured_groups(groups):
            self._kept[name] = Rows()
            self._pooled[name] = PooledDMD(rank, tolerance)

    @torch.no_grad()
    def update(
        self,
        states: Sequence[Tensor],
        means: dict[str, Tensor] | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`.

        means: its `group_means`, if known. places: positions of its images in the stream, by default the next ones.
        """
        check_states(states, num_tokens=self.groups.num_tokens)
        rows = self._subset.pick(len(states[0]), places)
        if means is None:
            means = group_means(states, self.groups)
        for name, x_bld in means.items():
            # The pooled fit takes every image, because two D x D matrices hold all that it needs.
            self._pooled[name].update(x_bld)
            if rows:
                self._kept[name].add(take_rows(x_bld, rows), places_of(rows, places))

    def reduce(self, ranks: Ranks) -> None:
        reduce_all(ranks, *self._kept.values(), *self._pooled.values())

    def result(self) -> ModesResult:
        if not len(self._kept["all"]):
            raise ValueError("no images were measured: call update with at least one batch first")
        return ModesResult(dict(zip(self._kept, parallel_map(self._fit, self._kept))), self.tolerance)

    def _fit(self, name: str) -> GroupModes:
        x_nld = self._kept[name].values().cpu()
        fits = fit_dmd(x_nld, self.rank, self.tolerance)
        few = slice(None, None, -(-len(x_nld) // _SHOWN))  # evenly spaced
        sweep: dict[int, dict[str, Spread]] = {}
        ranks = self.sweep
        if ranks is None:
            ranks = range(1, self.rank + 1)
        for rank in ranks:
            # L steps have at most L singular directions.
            if rank < x_nld.shape[1]:
                fit = fit_dmd(x_nld[few], rank, self.tolerance, with_modes=False)
                sweep[rank] = {
                    "spectral_radius": _spread(fit.spectral_radius),
                    "median_modulus": _spread(fit.median_modulus),
                    "reconstruction_error": _spread(fit.reconstruction_error),
                }
        pooled = self._pooled[name].fit()
        return GroupModes(
            spectral_radius=_spread(fits.spectral_radius),
            median_modulus=_spread(fits.median_modulus),
            gap=_spread(fits.gap),
            singular_values=_spread(fits.singular_values),
            reconstruction_error=_spread(fits.reconstruction_error),
            rank=fits.asked_rank,
            ranks_used=np.bincount(fits.ranks, minlength=fits.rank + 1).tolist(),
            note=fits.note,
            eigenvalues=fits.eigenvalues[few],
            amplitudes=np.abs(fits.amplitudes[few]),
            pooled=PooledModes(
                rank_used=pooled.rank_used,
                eigenvalues=pooled.eigenvalues,
                spectral_radius=pooled.spectral_radius,
                median_modulus=pooled.median_modulus,
                gap=pooled.gap,
                note=pooled.note,
                num_pairs=pooled.num_pairs,
                singular_values=pooled.singular_values[:50],
                reconstruction_error=_spread(pooled.reconstruction_error(x_nld)),
            ),
            sweep=sweep,
            ratio=self._fit_ratio(name, x_nld),
            fits=fits,
        )

    def _fit_ratio(self, name: str, x_nld: Tensor) -> RatioModes:
        # Ten modes of twelve steps nearly interpolate; three of twelve are the paper's ten of forty.
        rank = max(1, round((x_nld.shape[1] - 1) / _LAYERS_PER_MODE))
        fits = fit_dmd(x_nld, rank, self.tolerance, with_modes=False)
        values = eigenvalue_numbers(fits.eigenvalues)
        # Claims are judged by the fits per image and by the pooled one: one image has few steps.
        eigenvalues = self._pooled[name].fit(rank).eigenvalues
        spreads = {}
        for i, number in enumerate(NUMBERS):
            spreads[number] = _spread(values[:, i])
        return RatioModes(
            rank=rank,
            **spreads,
            eigenvalues=eigenvalues,
            pooled=dict(zip(NUMBERS, eigenvalue_numbers(eigenvalues).tolist())),
            values=values,
            folds=_jackknife(x_nld, rank, self.tolerance),
        )


def _jackknife(x_nld: Tensor, rank: int, tolerance: float) -> np.ndarray | None:
    """Numbers of pooled fits without each part of the trajectories, `(parts, 5)`; None for fewer than two of them."""
    if len(x_nld) < 2:
        return None
    # Every eighth trajectory is a part: images that follow each other may be alike, and a block of them would bias it.
    parts = torch.arange(len(x_nld)) % min(_NUM_FOLDS, len(x_nld))
    numbers = []
    for left_out in parts.unique():
        pooled = PooledDMD(rank, tolerance)
        pooled.update(x_nld[parts != left_out])
        numbers.append(eigenvalue_numbers(pooled.fit().eigenvalues))
    return np.stack(numbers)


def _spread(values: np.ndarray) -> Spread:
    """The spread of `(N, ...)` values over their first axis."""
    # All rows are kept, so the quantiles are exact.
    moments = ImageMoments(reservoir=len(values))
    moments.update(torch.from_numpy(np.ascontiguousarray(values)))
    return moments.result()
