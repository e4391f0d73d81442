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

from raptor.dynamics.groups import EvenSubset, check_states, group_means, measured_groups, take_rows
from raptor.dynamics.modes import TOLERANCE, BatchedDMD, fit_dmd, rank_sweep
from raptor.dynamics.parallel import on_host_if_small, parallel_map
from raptor.streaming import ImageMoments, Spread, jsonable
from raptor.vit.view import TokenGroups

TRAJECTORIES = 256
SHOWN = 64  # trajectories that are swept over ranks and whose eigenvalues go into the JSON


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

    def fit(self) -> PooledDMD:
        if self._before is None or self._across is None:
            raise ValueError("no images were measured: call update with at least one batch first")
        squares, vectors = (t.cpu() for t in torch.linalg.eigh(on_host_if_small(self._before)))
        sigma = squares.flip(0).clamp_min(0).sqrt()
        numerical_rank = int((sigma > max(self.tolerance, 1e-7) * sigma[0]).sum())
        r = self.rank_used = min(self.rank, numerical_rank)
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
        self.note = None if r == self.rank else f"truncated to rank {r} of {self.rank}: the numerical rank of X1"
        return self

    def reconstruction_error(self, x_nld: Tensor) -> np.ndarray:
        """`|x_t - x̃_t| / |x_t|` of trajectories, each rebuilt from its own `x_0`: `(N, L+1)`."""
        x = x_nld.detach().cpu().double().numpy()
        b = np.linalg.pinv(self.modes) @ x[:, 0].T  # (r', N)
        rebuilt = [(self.modes @ (self.eigenvalues[:, None] ** t * b)).real.T for t in range(x.shape[1])]
        return np.linalg.norm(x - np.stack(rebuilt, 1), axis=2) / np.linalg.norm(x, axis=2)

    def to_dict(self) -> dict[str, Any]:
        names = ("rank_used", "eigenvalues", "spectral_radius", "median_modulus", "gap", "note", "num_pairs")
        head = {"singular_values": jsonable(self.singular_values[:50])}
        return {name: jsonable(getattr(self, name)) for name in names} | head


@dataclass
class GroupModes:
    """DMD of one token group: spreads over images, the fits behind them, the pooled fit and the rank sweep.

    sweep: by rank, on at most 64 trajectories, spreads of the spectral radius, median modulus and reconstruction
    error.
    """

    spectral_radius: Spread
    median_modulus: Spread
    gap: Spread
    singular_values: Spread
    reconstruction_error: Spread
    fits: BatchedDMD
    pooled: PooledDMD
    pooled_error: Spread
    sweep: dict[int, dict[str, Spread]]

    def to_dict(self) -> dict[str, Any]:
        spreads = ("spectral_radius", "median_modulus", "gap", "singular_values", "reconstruction_error")
        return {name: getattr(self, name).to_dict() for name in spreads} | {
            "rank": self.fits.asked_rank,
            "ranks_used": jsonable(np.bincount(self.fits.ranks, minlength=self.fits.rank + 1)),
            "note": self.fits.note,
            "eigenvalues": jsonable(self.fits.eigenvalues[shown(len(self.fits.ranks))]),
            "amplitudes": jsonable(np.abs(self.fits.amplitudes[shown(len(self.fits.ranks))])),
            "pooled": self.pooled.to_dict() | {"reconstruction_error": self.pooled_error.to_dict()},
            "sweep": jsonable(self.sweep),
        }


@dataclass
class ModesResult:
    """DMD by token group."""

    groups: dict[str, GroupModes]
    tolerance: float

    def to_dict(self) -> dict[str, Any]:
        return {"tolerance": self.tolerance} | {name: group.to_dict() for name, group in self.groups.items()}


class Modes:
    """Streaming DMD of the group means of every image.

    `num_trajectories` images are fitted one by one, spread evenly over `num_images` if that is given, else the first.
    """

    def __init__(
        self,
        groups: TokenGroups,
        rank: int = 10,
        num_trajectories: int = TRAJECTORIES,
        num_images: int | None = None,
        tolerance: float = TOLERANCE,
        sweep: Sequence[int] | None = None,
    ) -> None:
        self.groups = groups
        self.rank = rank
        self.tolerance = tolerance
        self.sweep = tuple(sweep) if sweep is not None else tuple(range(1, rank + 1))
        self._subset = EvenSubset(num_trajectories, num_images)
        self._kept: dict[str, list[Tensor]] = {name: [] for name in measured_groups(groups)}
        self._pooled = {name: PooledDMD(rank, tolerance) for name in self._kept}

    @torch.no_grad()
    def update(self, states: Sequence[Tensor], means: dict[str, Tensor] | None = None) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`; `means` are its `group_means`, if at hand."""
        check_states(states, self.groups)
        rows = self._subset.pick(len(states[0]))
        for name, x_bld in (means or group_means(states, self.groups)).items():
            self._pooled[name].update(x_bld)
            if rows:
                self._kept[name].append(take_rows(x_bld, rows))

    def result(self) -> ModesResult:
        if not self._subset.num_kept:
            raise ValueError("no images were measured: call update with at least one batch first")
        return ModesResult(dict(zip(self._kept, parallel_map(self._fit, self._kept))), self.tolerance)

    def _fit(self, name: str) -> GroupModes:
        x_nld = torch.cat(self._kept[name]).cpu()
        fits = fit_dmd(x_nld, self.rank, self.tolerance)
        pooled = self._pooled[name].fit()
        swept = rank_sweep(x_nld[shown(len(x_nld))], [r for r in self.sweep if r < x_nld.shape[1]], self.tolerance)
        return GroupModes(
            spectral_radius=spread_of(fits.spectral_radius),
            median_modulus=spread_of(fits.median_modulus),
            gap=spread_of(fits.gap),
            singular_values=spread_of(fits.singular_values),
            reconstruction_error=spread_of(fits.reconstruction_error),
            fits=fits,
            pooled=pooled,
            pooled_error=spread_of(pooled.reconstruction_error(x_nld)),
            sweep={rank: _summary(fit) for rank, fit in swept.items()},
        )


def shown(num: int) -> slice:
    """At most 64 of `num` trajectories, evenly spaced."""
    return slice(None, None, -(-num // SHOWN))


def _summary(fit: BatchedDMD) -> dict[str, Spread]:
    return {
        "spectral_radius": spread_of(fit.spectral_radius),
        "median_modulus": spread_of(fit.median_modulus),
        "reconstruction_error": spread_of(fit.reconstruction_error),
    }


def spread_of(values: np.ndarray) -> Spread:
    """The spread of `(N, ...)` values over their first axis."""
    moments = ImageMoments(reservoir=len(values))
    moments.update(torch.from_numpy(np.ascontiguousarray(values)))
    return moments.result()
