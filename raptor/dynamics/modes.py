"""DMD along depth by token group: one fit per image, and one pooled over all images.

A state is the raw mean over a group's tokens, then normalised. Per-image fits use a stated number of images spread
evenly over the set; the pooled fit uses every image, through two running `D x D` matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raptor.devices import Ranks
from raptor.dynamics.dmd import NUMBERS, TOLERANCE, PooledDMD, eigenvalue_numbers, fit_dmd
from raptor.dynamics.states import EvenSubset, group_means, measured_groups, parallel_map, take_rows
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

RANK = 10
_TRAJECTORIES = 256
_SHOWN = 64  # trajectories that are swept over ranks and whose eigenvalues go into the JSON
_LAYERS_PER_MODE = 4  # the paper's ratio: 10 modes of 40 layers


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
    """

    rank: int
    spectral_radius: Spread
    median_modulus: Spread
    distance: Spread
    angle: Spread
    weighted_angle: Spread
    eigenvalues: ComplexArray
    pooled: dict[str, float]


@dataclass
class GroupModes(Record):
    """DMD of one token group: spreads over images, the pooled fit and the rank sweep.

    rank: the rank that was asked for. ranks_used: how many images were fitted at rank 0, 1, ...
    eigenvalues, amplitudes: `(N, rank)` of at most 64 images, NaN where the rank is lower.
    sweep: rank -> `spectral_radius`, `median_modulus` and `reconstruction_error`, on at most 64 trajectories.
    ratio: at the paper's ratio of rank to depth.
    trajectories: `(N, L+1, D)` that were fitted one by one; not saved.
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
    sweep: dict[int, dict[str, Spread]]
    ratio: RatioModes | None = None
    trajectories: NotSaved[Tensor | None] = None


@dataclass
class ModesResult(Record):
    """DMD by token group. In JSON the groups stand beside `tolerance`."""

    groups: dict[str, GroupModes]

    def to_dict(self) -> dict[str, Any]:
        return {"tolerance": TOLERANCE} | jsonable(self.groups)

    @classmethod
    def from_dict(cls, saved: Any) -> ModesResult:
        groups = dict(decode(dict[str, Any], saved))
        groups.pop("tolerance", None)
        return cls(decode(dict[str, GroupModes], groups))


class Modes:
    """Streaming DMD of the group means of every image.

    `num_trajectories` images are fitted one by one, spread evenly over `num_images` if that is given, else the first.
    """

    def __init__(
        self, groups: TokenGroups, num_trajectories: int = _TRAJECTORIES, num_images: int | None = None
    ) -> None:
        self.groups = groups
        self._subset = EvenSubset(num_trajectories, num_images)
        self._kept: dict[str, Rows] = {}
        self._pooled: dict[str, PooledDMD] = {}
        for name in measured_groups(groups):
            self._kept[name] = Rows()
            self._pooled[name] = PooledDMD()

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
        rows, kept_places = self._subset.pick(len(states[0]), places)
        if means is None:
            means = group_means(states, self.groups)
        for name, x_bld in means.items():
            # The pooled fit takes every image, because two D x D matrices hold all that it needs.
            self._pooled[name].update(x_bld)
            if rows:
                self._kept[name].add(take_rows(x_bld, rows), kept_places)

    def reduce(self, ranks: Ranks) -> None:
        reduce_all(ranks, *self._kept.values(), *self._pooled.values())

    def result(self) -> ModesResult:
        if not len(self._kept["all"]):
            raise ValueError("no images were measured: call update with at least one batch first")
        return ModesResult(dict(zip(self._kept, parallel_map(self._fit, self._kept))))

    def _fit(self, name: str) -> GroupModes:
        x_nld = self._kept[name].values().cpu()
        fits = fit_dmd(x_nld, RANK)
        few = slice(None, None, -(-len(x_nld) // _SHOWN))  # evenly spaced
        sweep: dict[int, dict[str, Spread]] = {}
        # L steps have at most L singular directions.
        for rank in range(1, min(RANK, x_nld.shape[1] - 1) + 1):
            fit = fit_dmd(x_nld[few], rank)
            sweep[rank] = {
                "spectral_radius": _spread(fit.spectral_radius),
                "median_modulus": _spread(fit.median_modulus),
                "reconstruction_error": _spread(fit.reconstruction_error),
            }
        # Ten modes of twelve steps nearly interpolate; three of twelve are the paper's ten of forty. Claims are judged
        # by the fits per image and by the pooled one, because one image has few steps.
        ratio_rank = max(1, round((x_nld.shape[1] - 1) / _LAYERS_PER_MODE))
        numbers = eigenvalue_numbers(fit_dmd(x_nld, ratio_rank).eigenvalues)
        at_ratio = self._pooled[name].fit(ratio_rank).eigenvalues
        spreads = {name: _spread(numbers[:, i]) for i, name in enumerate(NUMBERS)}
        pooled_numbers = dict(zip(NUMBERS, eigenvalue_numbers(at_ratio).tolist()))
        ratio = RatioModes(ratio_rank, **spreads, eigenvalues=at_ratio, pooled=pooled_numbers)
        pooled = self._pooled[name].fit(RANK)
        return GroupModes(
            spectral_radius=_spread(fits.spectral_radius),
            median_modulus=_spread(fits.median_modulus),
            gap=_spread(fits.gap),
            singular_values=_spread(fits.singular_values),
            reconstruction_error=_spread(fits.reconstruction_error),
            rank=RANK,
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
            ratio=ratio,
            trajectories=x_nld,
        )


def _spread(values: np.ndarray) -> Spread:
    """The spread of `(N, ...)` values over their first axis."""
    # All rows are kept, so the quantiles are exact.
    moments = ImageMoments(reservoir=len(values))
    moments.update(torch.from_numpy(np.ascontiguousarray(values)))
    return moments.result()
