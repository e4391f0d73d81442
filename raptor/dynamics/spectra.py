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
from numpy.typing import NDArray
from torch import Tensor

from raptor.devices import Ranks
from raptor.dynamics.modes import NUMBERS, TOLERANCE, BatchedDMD, eigenvalue_numbers, fit_dmd, rank_sweep
from raptor.dynamics.parallel import on_host_if_small, parallel_map
from raptor.dynamics.states import EvenSubset, group_means, measured_groups, places_of, take_rows
from raptor.streaming import NOT_SAVED, ImageMoments, Record, Rows, Spread, jsonable, reduce_all
from raptor.vit.trajectory import check_states
from raptor.vit.view import TokenGroups

_Complex = NDArray[np.complex128]
_TRAJECTORIES = 256
_SHOWN = 64  # trajectories that are swept over ranks and whose eigenvalues go into the JSON
_LAYERS_PER_MODE = 4  # the paper's ratio: 10 modes of 40 layers
_NUM_FOLDS = 8  # parts of the images whose left-out fits give the interval of a pooled fit


class PooledDMD:
    """Exact DMD of all snapshot pairs of many trajectories at once; results are attributes after `fit`.

    eigenvalues: `(r',)` complex, by falling modulus. modes: `(D, r')`. singular_values: `(D,)` of the pooled X1.
    rank_used, spectral_radius, median_modulus, gap, note: as in `DMD`.
    Squared sums in float64 resolve singular values down to about 1e-7 of the largest.
    """

    def __init__(self, rank: int = 10, tolerance: float = TOLERANCE) -> None:
        self.rank = rank
        self.tolerance = tolerance
        self.num_pairs = 0
        self._before: Tensor | None = None
        self._across: Tensor | None = None

    @torch.no_grad()
    def update(self, x_nld: Tensor) -> None:
        """Add the snapshot pairs of trajectories `(N, L+1, D)`."""
        x1, x2 = x_nld[:, :-1].flatten(0, 1).double(), x_nld[:, 1:].flatten(0, 1).double()
        if self._before is None or self._across is None:
            self._before, self._across = x1.mT @ x1, x2.mT @ x1
        else:
            self._before.addmm_(x1.mT, x1)
            self._across.addmm_(x2.mT, x1)
        self.num_pairs += len(x1)

    def reduce(self, ranks: Ranks) -> None:
        self._before, self._across = ranks.sum(self._before), ranks.sum(self._across)
        self.num_pairs = sum(ranks.gather(self.num_pairs))

    def fit(self, rank: int | None = None) -> PooledDMD:
        """Fit at `rank`, by default the one given at the start."""
        if self._before is None or self._across is None:
            raise ValueError("no images were measured: call update with at least one batch first")
        squares, vectors = (t.cpu() for t in torch.linalg.eigh(on_host_if_small(self._before)))
        sigma = squares.flip(0).clamp_min(0).sqrt()
        numerical_rank = int((sigma > max(self.tolerance, 1e-7) * sigma[0]).sum())
        asked = rank or self.rank
        r = self.rank_used = min(asked, numerical_rank)
        u = vectors.flip(1)[:, :r]
        after = self._across.cpu() @ u / sigma[:r] ** 2  # X2 V S^-1 = (X2 X1^T) U S^-2
        # In the basis U the operator is U^T X2 V S^-1; it acts on U^T x.
        self.operator = (u.mT @ after).numpy()
        eigenvalues, w = torch.linalg.eig(u.mT @ after)
        order = torch.argsort(eigenvalues.abs(), descending=True)
        self.eigenvalues = eigenvalues[order].numpy()
        self.modes = (after.to(w.dtype) @ w[:, order]).numpy()
        self.singular_values = sigma.numpy()
        self.spectral_radius = float(np.abs(self.eigenvalues).max())
        self.median_modulus = float(np.median(np.abs(self.eigenvalues)))
        self.gap = float(sigma[r - 1] / sigma[r]) if r < len(sigma) and sigma[r] > 0 else float("inf")
        self.note = None if r == asked else f"truncated to rank {r} of {asked}: the numerical rank of X1"
        return self

    def reconstruction_error(self, x_nld: Tensor) -> np.ndarray:
        """`|x_t - x̃_t| / |x_t|` of trajectories, each rebuilt from its own `x_0`: `(N, L+1)`."""
        x = x_nld.detach().cpu().double().numpy()
        b = np.linalg.pinv(self.modes) @ x[:, 0].T  # (r', N)
        rebuilt = [(self.modes @ (self.eigenvalues[:, None] ** t * b)).real.T for t in range(x.shape[1])]
        return np.linalg.norm(x - np.stack(rebuilt, 1), axis=2) / np.linalg.norm(x, axis=2)

    def result(self, x_nld: Tensor) -> PooledModes:
        """The saved part of the fit; `x_nld` are the trajectories that it is tested on."""
        return PooledModes(
            rank_used=self.rank_used,
            eigenvalues=self.eigenvalues,
            spectral_radius=self.spectral_radius,
            median_modulus=self.median_modulus,
            gap=self.gap,
            note=self.note,
            num_pairs=self.num_pairs,
            singular_values=self.singular_values[:50],
            reconstruction_error=_spread_of(self.reconstruction_error(x_nld)),
        )


@dataclass
class PooledModes(Record):
    """The DMD of all images at once: the attributes of `PooledDMD` (50 singular values at most), and its error.

    gap: None when it is infinite. reconstruction_error: over images, `(L+1,)`.
    """

    rank_used: int
    eigenvalues: _Complex
    spectral_radius: float | None
    median_modulus: float | None
    gap: float | None
    note: str | None
    num_pairs: int
    singular_values: np.ndarray
    reconstruction_error: Spread


@dataclass
class RankFit(Record):
    """Spreads over images of the DMD at one rank."""

    spectral_radius: Spread
    median_modulus: Spread
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
    eigenvalues: _Complex
    pooled: dict[str, float]
    values: np.ndarray | None = field(default=None, metadata=NOT_SAVED)
    folds: np.ndarray | None = field(default=None, metadata=NOT_SAVED)


@dataclass
class GroupModes(Record):
    """DMD of one token group: spreads over images, the fits behind them, the pooled fit and the rank sweep.

    rank: the rank that was asked for. ranks_used: how many images were fitted at rank 0, 1, ...
    eigenvalues, amplitudes: `(N, rank)` of at most 64 images, NaN where the rank is lower.
    sweep: by rank, on at most 64 trajectories. ratio: at the paper's ratio of rank to depth.
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
    eigenvalues: _Complex
    amplitudes: np.ndarray
    pooled: PooledModes
    sweep: dict[int, RankFit] = field(default_factory=dict)
    ratio: RatioModes | None = None
    fits: BatchedDMD | None = field(default=None, metadata=NOT_SAVED)


@dataclass
class ModesResult(Record):
    """DMD by token group. In JSON the groups stand beside `tolerance`."""

    groups: dict[str, GroupModes]
    tolerance: float

    def to_dict(self) -> dict[str, Any]:
        return {"tolerance": self.tolerance} | jsonable(self.groups)

    @classmethod
    def from_dict(cls, saved: Any, where: str = "") -> ModesResult:
        rest = dict(saved) if isinstance(saved, dict) else saved
        tolerance = rest.pop("tolerance", TOLERANCE) if isinstance(rest, dict) else None
        return super().from_dict({"tolerance": tolerance, "groups": rest}, where)


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
        self.sweep = tuple(sweep) if sweep is not None else tuple(range(1, rank + 1))
        self._subset = EvenSubset(num_trajectories, num_images)
        self._kept = {name: Rows() for name in measured_groups(groups)}
        self._pooled = {name: PooledDMD(rank, tolerance) for name in self._kept}

    @torch.no_grad()
    def update(
        self,
        states: Sequence[Tensor],
        means: dict[str, Tensor] | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`.

        means: its `group_means`, if known. places: of its images in the stream, by default those that follow.
        """
        check_states(states, num_tokens=self.groups.num_tokens)
        rows = self._subset.pick(len(states[0]), places)
        for name, x_bld in (means or group_means(states, self.groups)).items():
            self._pooled[name].update(x_bld)
            if rows:
                self._kept[name].add(take_rows(x_bld, rows), places_of(rows, places))

    def reduce(self, ranks: Ranks) -> None:
        reduce_all(ranks, *self._kept.values(), *self._pooled.values())

    def result(self) -> ModesResult:
        if not all(map(len, self._kept.values())):
            raise ValueError("no images were measured: call update with at least one batch first")
        return ModesResult(dict(zip(self._kept, parallel_map(self._fit, self._kept))), self.tolerance)

    def _fit(self, name: str) -> GroupModes:
        x_nld = self._kept[name].values().cpu()
        fits = fit_dmd(x_nld, self.rank, self.tolerance)
        swept = rank_sweep(x_nld[shown(len(x_nld))], [r for r in self.sweep if r < x_nld.shape[1]], self.tolerance)
        return GroupModes(
            spectral_radius=_spread_of(fits.spectral_radius),
            median_modulus=_spread_of(fits.median_modulus),
            gap=_spread_of(fits.gap),
            singular_values=_spread_of(fits.singular_values),
            reconstruction_error=_spread_of(fits.reconstruction_error),
            rank=fits.asked_rank,
            ranks_used=[int(n) for n in np.bincount(fits.ranks, minlength=fits.rank + 1)],
            note=fits.note,
            eigenvalues=fits.eigenvalues[shown(len(fits.ranks))],
            amplitudes=np.abs(fits.amplitudes[shown(len(fits.ranks))]),
            pooled=self._pooled[name].fit().result(x_nld),
            sweep={rank: _summary(fit) for rank, fit in swept.items()},
            ratio=self._fit_ratio(name, x_nld),
            fits=fits,
        )

    def _fit_ratio(self, name: str, x_nld: Tensor) -> RatioModes:
        rank = max(1, round((x_nld.shape[1] - 1) / _LAYERS_PER_MODE))
        values = eigenvalue_numbers(fit_dmd(x_nld, rank, self.tolerance, with_modes=False).eigenvalues)
        pooled = self._pooled[name].fit(rank)
        return RatioModes(
            rank=rank,
            **{number: _spread_of(values[:, i]) for i, number in enumerate(NUMBERS)},
            eigenvalues=pooled.eigenvalues,
            pooled=dict(zip(NUMBERS, eigenvalue_numbers(pooled.eigenvalues).tolist())),
            values=values,
            folds=_left_out_fits(x_nld, rank, self.tolerance),
        )


def _left_out_fits(x_nld: Tensor, rank: int, tolerance: float) -> np.ndarray | None:
    """Numbers of pooled fits without each part of the trajectories, `(parts, 5)`; None for fewer than two of them."""
    if len(x_nld) < 2:
        return None
    parts = torch.arange(len(x_nld)) % min(_NUM_FOLDS, len(x_nld))
    found = []
    for left_out in parts.unique():
        pooled = PooledDMD(rank, tolerance)
        pooled.update(x_nld[parts != left_out])
        found.append(eigenvalue_numbers(pooled.fit().eigenvalues))
    return np.stack(found)


def shown(num: int) -> slice:
    """At most 64 of `num` trajectories, evenly spaced."""
    return slice(None, None, -(-num // _SHOWN))


def _summary(fit: BatchedDMD) -> RankFit:
    return RankFit(
        spectral_radius=_spread_of(fit.spectral_radius),
        median_modulus=_spread_of(fit.median_modulus),
        reconstruction_error=_spread_of(fit.reconstruction_error),
    )


def _spread_of(values: np.ndarray) -> Spread:
    """The spread of `(N, ...)` values over their first axis."""
    moments = ImageMoments(reservoir=len(values))
    moments.update(torch.from_numpy(np.ascontiguousarray(values)))
    return moments.result()
