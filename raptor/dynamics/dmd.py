"""Exact dynamic mode decomposition of trajectories, without an affine term, in float64.

A trajectory is `x_0..x_L`. With `X1 = [x_0..x_(L-1)]` and `X2 = [x_1..x_L]` the operator `A = X2 X1^+`, truncated to
the first r' singular directions of X1, has the eigenvalues `lambda_i`, the exact modes `phi_i = X2 V S^-1 w_i` and the
amplitudes `b = Phi^+ x_0`; step t is rebuilt as `Phi diag(lambda)^t b`. r' is the asked rank or the numerical rank of
X1 (singular values above `TOLERANCE` times the largest), whichever is less.

Many trajectories are fitted at once from their `(L+1) x (L+1)` Gram matrices (the method of snapshots). Squaring costs
half the digits, so a trajectory whose r-th singular value is below `_GRAM_LIMIT` of the largest goes through a QR
factorisation instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raptor.devices import Ranks
from raptor.dynamics.states import on_host_if_small, parallel_map

TOLERANCE = 1e-6
_GRAM_LIMIT = 3e-3
CHUNK = 200  # trajectories fitted together: few enough to stay in the cache


@dataclass
class BatchedDMD:
    """Fits of N trajectories. Eigenvalues are sorted by falling modulus; entries past r' are NaN.

    eigenvalues, amplitudes: `(N, r)` complex, r the asked rank or the most that L and D allow.
    ranks: `(N,)`, the r' used. singular_values: `(N, L)` of X1.
    gap: `(N,)`, the singular value r' over the next one (infinite when there is none).
    reconstruction_error: `(N, L+1)`, `|x_t - x̃_t| / |x_t|`; values below about 1e-7 are rounding.
    coefficients: `(N, L, r)` complex, the modes in terms of the columns of X2.
    """

    eigenvalues: np.ndarray
    amplitudes: np.ndarray
    ranks: np.ndarray
    singular_values: np.ndarray
    reconstruction_error: np.ndarray
    coefficients: np.ndarray
    rank: int
    asked_rank: int

    @property
    def spectral_radius(self) -> np.ndarray:
        return np.nanmax(np.abs(self.eigenvalues), axis=1)

    @property
    def median_modulus(self) -> np.ndarray:
        return np.nanmedian(np.abs(self.eigenvalues), axis=1)

    @property
    def gap(self) -> np.ndarray:
        # A zero after the last one gives a fit at full rank an infinite gap.
        s = np.concatenate([self.singular_values, np.zeros((len(self.ranks), 1))], axis=1)
        rows = np.arange(len(self.ranks))
        with np.errstate(divide="ignore"):
            return s[rows, self.ranks - 1] / s[rows, self.ranks]

    @property
    def note(self) -> str | None:
        """Says how many trajectories were truncated below the asked rank, if any."""
        short = self.ranks[self.ranks < self.asked_rank]
        if len(short) == 0:
            return None
        total = len(self.ranks)
        return f"{len(short)} of {total} trajectories truncated below rank {self.asked_rank}, down to {short.min()}"

    def modes(self, x_nld: Tensor) -> np.ndarray:
        """Exact modes `(N, D, r)` of the trajectories that were fitted."""
        after_ndl = x_nld[:, 1:].detach().cpu().double().mT
        return _times(after_ndl, torch.from_numpy(self.coefficients)).numpy()


NUMBERS = ("spectral_radius", "median_modulus", "distance", "angle", "weighted_angle")


def eigenvalue_numbers(eigenvalues: np.ndarray) -> np.ndarray:
    """The five `NUMBERS` that claims rest on, of eigenvalues `(..., r)`: `(..., 5)`; NaN entries are left out.

    distance: mean distance from +1. angle: the largest one, in radians; an eigenvalue near 0 may have any angle, so the
    weighted angle is the mean one weighted by the modulus.
    """
    modulus = np.abs(eigenvalues)
    angle = np.abs(np.angle(eigenvalues))
    return np.stack(
        [
            np.nanmax(modulus, -1),
            np.nanmedian(modulus, -1),
            np.nanmean(np.abs(eigenvalues - 1), -1),
            np.nanmax(angle, -1),
            np.nansum(modulus * angle, -1) / np.nansum(modulus, -1),
        ],
        -1,
    )


def fit_dmd(x_nld: Tensor, rank: int = 10, gram_limit: float = _GRAM_LIMIT) -> BatchedDMD:
    """Fit every trajectory of `(N, L+1, D)` on the CPU in float64.

    gram_limit: trajectories with a smaller relative r-th singular value use QR; infinity sends all there.
    """
    if x_nld.ndim != 3 or x_nld.shape[1] < 2:
        raise ValueError(f"trajectories must be (N, L+1, D) with at least two states, got {tuple(x_nld.shape)}")
    if rank < 1:
        raise ValueError(f"the rank must be at least 1, got {rank}")
    x_nld = x_nld.detach().cpu()
    num = len(x_nld)
    num_steps = x_nld.shape[1] - 1
    used_rank = min(rank, num_steps, x_nld.shape[2])
    nan = complex(np.nan, np.nan)
    fit = BatchedDMD(
        eigenvalues=np.full((num, used_rank), nan),
        amplitudes=np.full((num, used_rank), nan),
        ranks=np.full(num, used_rank),
        singular_values=np.zeros((num, num_steps)),
        reconstruction_error=np.zeros((num, num_steps + 1)),
        coefficients=np.full((num, num_steps, used_rank), nan),
        rank=used_rank,
        asked_rank=rank,
    )
    limit = max(gram_limit, TOLERANCE)

    def fit_chunk(rows: Tensor, chunk_nld: Tensor) -> None:
        chunk_nld = chunk_nld.double()
        gram = chunk_nld @ chunk_nld.mT
        norms = gram.diagonal(dim1=1, dim2=2)
        if not bool((torch.isfinite(norms) & (norms > 0)).all()):
            raise ValueError("a trajectory holds a state that is zero or not finite: check the model's states")
        good = torch.zeros(len(rows), dtype=torch.bool)
        if np.isfinite(limit):
            good = _fit_grams(fit, rows, gram, limit)
        if not bool(good.all()):
            _fit_qr(fit, rows[~good], chunk_nld[~good])

    # Chunks write to rows of their own, so threads need no lock.
    parallel_map(fit_chunk, torch.arange(num).split(CHUNK), x_nld.split(CHUNK))
    modulus = np.nan_to_num(np.abs(fit.eigenvalues), nan=-1.0)
    # Conjugate pairs have equal moduli up to rounding: the positive imaginary part comes first.
    order = np.lexsort((-np.nan_to_num(fit.eigenvalues.imag), -np.round(modulus, 10)), axis=1)
    fit.eigenvalues = np.take_along_axis(fit.eigenvalues, order, 1)
    fit.amplitudes = np.take_along_axis(fit.amplitudes, order, 1)
    fit.coefficients = np.take_along_axis(fit.coefficients, order[:, None], 2)
    return fit


def _fit_grams(fit: BatchedDMD, rows: Tensor, gram: Tensor, limit: float) -> Tensor:
    """Fit the trajectories whose Gram matrices `(n, L+1, L+1)` are well enough conditioned; returns their mask."""
    # Many small eigenproblems of size L cost far less than as many SVDs of size D.
    rank = fit.rank
    squares, vectors = torch.linalg.eigh(gram[:, :-1, :-1])
    sigma = squares.clamp_min(0).sqrt().flip(1)
    fit.singular_values[rows.numpy()] = sigma.numpy()
    good = sigma[:, rank - 1] > limit * sigma[:, 0]
    if not bool(good.any()):
        return good
    rows = rows[good]
    gram = gram[good]
    sigma = sigma[good]
    vectors = vectors[good]
    scaled = vectors.flip(2)[:, :, :rank] / sigma[:, None, :rank]  # V S^-1
    after = gram[:, 1:, 1:] @ scaled
    operator = scaled.mT @ (gram[:, :-1, 1:] @ scaled)
    first = torch.linalg.solve_ex(scaled.mT @ after, scaled.mT @ gram[:, 1:, :1]).result  # B^+ x_0, B = X2 V S^-1
    weights = (scaled @ _path(operator, first, gram.shape[1])).mT  # of the columns of X2, by step
    inner = torch.linalg.vecdot(weights, gram[:, :, 1:])
    own = torch.linalg.vecdot(weights @ gram[:, 1:, 1:], weights)
    norms = gram.diagonal(dim1=1, dim2=2)
    index = rows.numpy()
    # |x_t - x̃_t|^2 from inner products alone; rounding may leave it just below 0.
    fit.reconstruction_error[index] = ((norms - 2 * inner + own).clamp_min(0) / norms).sqrt().numpy()
    fit.ranks[index] = rank
    eigenvalues, w = torch.linalg.eig(operator)
    fit.eigenvalues[index] = eigenvalues.numpy()
    fit.amplitudes[index] = torch.linalg.solve_ex(w, first.to(w.dtype)).result[:, :, 0].numpy()
    fit.coefficients[index] = _times(scaled, w).numpy()
    return good


def _fit_qr(fit: BatchedDMD, rows: Tensor, x_nld: Tensor) -> None:
    """Fit through QR and SVD, to full precision, in groups of equal r'."""
    r_factor = torch.linalg.qr(x_nld.mT, mode="r").R
    u, sigma, vh = torch.linalg.svd(r_factor[:, :, :-1], full_matrices=False)
    num_steps = x_nld.shape[1] - 1
    fit.singular_values[rows.numpy()] = torch.nn.functional.pad(sigma, (0, num_steps - sigma.shape[1])).numpy()
    ranks = (sigma > TOLERANCE * sigma[:, :1]).sum(1).clamp(1, fit.rank)
    for r in ranks.unique().tolist():
        same = ranks == r
        points = r_factor[same]
        scaled = vh[same, :r].mT / sigma[same, None, :r]
        after = points[:, :, 1:] @ scaled
        operator = u[same, :, :r].mT @ after
        eigenvalues, w = torch.linalg.eig(operator)
        first = torch.linalg.lstsq(after, points[:, :, :1], driver="gelsd").solution
        phi = _times(after, w)
        amplitudes = torch.linalg.lstsq(phi, points[:, :, :1].to(w.dtype), driver="gelsd").solution[:, :, 0]
        rebuilt = after @ _path(operator, first, num_steps + 1)
        error = torch.linalg.vector_norm(points - rebuilt, dim=1) / torch.linalg.vector_norm(points, dim=1)
        index = rows[same].numpy()
        fit.eigenvalues[index, :r] = eigenvalues.numpy()
        fit.reconstruction_error[index] = error.numpy()
        fit.ranks[index] = r
        fit.amplitudes[index, :r] = amplitudes.numpy()
        fit.coefficients[index, :, :r] = _times(scaled, w).numpy()


def _path(operator: Tensor, first: Tensor, num: int) -> Tensor:
    """`A^t z` for t = 0..num-1, of operators `(n, r, r)` and vectors `(n, r, 1)`: `(n, r, num)`."""
    steps = [first]
    for _ in range(num - 1):
        steps.append(operator @ steps[-1])
    return torch.cat(steps, 2)


def _times(real: Tensor, w: Tensor) -> Tensor:
    """A real matrix times a complex one."""
    return torch.complex(real @ w.real, real @ w.imag)


class PooledDMD:
    """Exact DMD of all snapshot pairs of many trajectories at once; results are attributes after `fit`.

    eigenvalues: `(r',)` complex, by falling modulus. modes: `(D, r')`. singular_values: `(D,)` of the pooled X1.
    rank_used: r'. spectral_radius, median_modulus: of the eigenvalues. gap: the singular value r' over the next one.
    note: why r' is less than the asked rank, or None.
    """

    def __init__(self) -> None:
        self.num_pairs = 0
        self._before: Tensor | None = None
        self._across: Tensor | None = None

    @torch.no_grad()
    def update(self, x_nld: Tensor) -> None:
        """Add the snapshot pairs of trajectories `(N, L+1, D)`."""
        x1 = x_nld[:, :-1].flatten(0, 1).double()
        x2 = x_nld[:, 1:].flatten(0, 1).double()
        if self._before is None or self._across is None:
            self._before = x1.mT @ x1
            self._across = x2.mT @ x1
        else:
            # In place: these two D x D matrices are all that is kept of any number of images.
            self._before.addmm_(x1.mT, x1)
            self._across.addmm_(x2.mT, x1)
        self.num_pairs += len(x1)

    def reduce(self, ranks: Ranks) -> None:
        self._before = ranks.sum(self._before)
        self._across = ranks.sum(self._across)
        self.num_pairs = sum(ranks.gather(self.num_pairs))

    def fit(self, rank: int = 10) -> PooledDMD:
        if self._before is None or self._across is None:
            raise ValueError("no images were measured: call update with at least one batch first")
        squares, vectors = torch.linalg.eigh(on_host_if_small(self._before))
        sigma = squares.cpu().flip(0).clamp_min(0).sqrt()
        # Squared sums in float64 resolve singular values down to about 1e-7 of the largest.
        r = min(rank, int((sigma > TOLERANCE * sigma[0]).sum()))
        u = vectors.cpu().flip(1)[:, :r]
        after = self._across.cpu() @ u / sigma[:r] ** 2  # X2 V S^-1 = (X2 X1^T) U S^-2
        # In the basis U the operator is U^T X2 V S^-1; it acts on U^T x.
        eigenvalues, w = torch.linalg.eig(u.mT @ after)
        order = torch.argsort(eigenvalues.abs(), descending=True)
        self.rank_used = r
        self.eigenvalues = eigenvalues[order].numpy()
        self.modes = (after.to(w.dtype) @ w[:, order]).numpy()
        self.singular_values = sigma.numpy()
        self.spectral_radius = float(np.abs(self.eigenvalues).max())
        self.median_modulus = float(np.median(np.abs(self.eigenvalues)))
        self.gap = float("inf")
        if r < len(sigma) and sigma[r] > 0:
            self.gap = float(sigma[r - 1] / sigma[r])
        self.note = None
        if r < rank:
            self.note = f"truncated to rank {r} of {rank}: the numerical rank of X1"
        return self

    def reconstruction_error(self, x_nld: Tensor) -> np.ndarray:
        """`|x_t - x̃_t| / |x_t|` of trajectories, each rebuilt from its own `x_0`: `(N, L+1)`."""
        x = x_nld.detach().cpu().double().numpy()
        amplitudes = np.linalg.pinv(self.modes) @ x[:, 0].T  # (r', N)
        rebuilt = np.empty_like(x)
        for t in range(x.shape[1]):
            # Eigenvalues of a real operator come in conjugate pairs, so the imaginary part of their sum is rounding.
            rebuilt[:, t] = (self.modes @ (self.eigenvalues[:, None] ** t * amplitudes)).real.T
        return np.linalg.norm(x - rebuilt, axis=2) / np.linalg.norm(x, axis=2)
