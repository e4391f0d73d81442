from __future__ import annotations

import numpy as np
import pytest
import torch
from pydmd import DMD as PyDMD
from tiny_trajectories import match, trajectories

from raptor.dynamics.dmd import BatchedDMD, PooledDMD, eigenvalue_numbers, fit_dmd


def fit_one(x_ld: torch.Tensor, rank: int) -> BatchedDMD:
    """One trajectory, through QR."""
    return fit_dmd(x_ld[None], rank, gram_limit=np.inf)


def assert_equals_pydmd(x_ld: np.ndarray, eigenvalues: np.ndarray, modes: np.ndarray, amplitudes: np.ndarray) -> None:
    reference = PyDMD(svd_rank=len(eigenvalues), exact=True).fit(x_ld.T)
    order = match(eigenvalues, reference.eigs)
    np.testing.assert_allclose(eigenvalues[order], reference.eigs, atol=1e-8, rtol=0)
    # An eigenvector is defined up to a phase; mode times amplitude is not.
    ours, theirs = (modes * amplitudes)[:, order], reference.modes * reference.amplitudes
    np.testing.assert_allclose(ours, theirs, atol=1e-8 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize("name", ["cls", "registers", "patches"])
def test_equals_pydmd_on_a_real_trajectory(states: list[torch.Tensor], name: str) -> None:
    x_nld = trajectories(states, name)
    for rank in (3, 10):
        for x_ld in x_nld[:3]:
            dmd = fit_one(x_ld, rank)
            assert dmd.ranks[0] == rank and dmd.note is None
            assert_equals_pydmd(x_ld.numpy(), dmd.eigenvalues[0], dmd.modes(x_ld[None])[0], dmd.amplitudes[0])
            reference = PyDMD(svd_rank=rank, exact=True).fit(x_ld.numpy().T)
            error = np.linalg.norm(reference.reconstructed_data.real.T - x_ld.numpy(), axis=1)
            np.testing.assert_allclose(dmd.reconstruction_error[0], error, atol=1e-8)


@pytest.mark.parametrize("gram_limit", [0.0, 3e-3])
@pytest.mark.parametrize("name", ["cls", "patches"])
def test_batched_equals_pydmd(states: list[torch.Tensor], name: str, gram_limit: float) -> None:
    x_nld = trajectories(states, name)
    fit = fit_dmd(x_nld, rank=10, gram_limit=gram_limit)
    modes = fit.modes(x_nld)
    for n, x_ld in enumerate(x_nld.numpy()):
        assert_equals_pydmd(x_ld, fit.eigenvalues[n], modes[n], fit.amplitudes[n])


def rotation(angles: list[float], dim: int, num_steps: int) -> torch.Tensor:
    """A trajectory of a rotation by each angle in its own plane: (L+1, dim)."""
    basis = torch.linalg.qr(torch.randn(dim, 2 * len(angles), dtype=torch.float64)).Q
    t = torch.arange(num_steps + 1, dtype=torch.float64)[:, None]
    angle = torch.tensor(angles, dtype=torch.float64)
    return torch.cat([torch.cos(t * angle), torch.sin(t * angle)], 1) @ basis.mT


def test_rotation_has_eigenvalues_on_the_unit_circle() -> None:
    angles = [0.3, 0.9, 1.7]
    dmd = fit_one(rotation(angles, dim=32, num_steps=12), rank=6)
    np.testing.assert_allclose(np.abs(dmd.eigenvalues[0]), np.ones(6), atol=1e-10)
    np.testing.assert_allclose(np.sort(np.angle(dmd.eigenvalues[0]))[3:], angles, atol=1e-9)
    np.testing.assert_allclose(dmd.reconstruction_error[0], np.zeros(13), atol=1e-9)


def test_contraction_has_its_moduli() -> None:
    rates = np.array([0.95, 0.7, 0.4])
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(20, 3)))[0]
    x_ld = torch.from_numpy((rates[None] ** np.arange(9)[:, None]) @ basis.T)
    dmd = fit_one(x_ld, rank=3)
    np.testing.assert_allclose(dmd.eigenvalues[0], rates, atol=1e-10)
    assert dmd.spectral_radius[0] == pytest.approx(0.95, abs=1e-10)
    assert dmd.median_modulus[0] == pytest.approx(0.7, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rank_deficient_trajectory_truncates_with_a_note(dtype: torch.dtype) -> None:
    x_ld = rotation([0.3, 0.9], dim=32, num_steps=12).to(dtype)
    dmd = fit_one(x_ld, rank=10)
    assert dmd.ranks[0] == 4
    assert dmd.note == "1 of 1 trajectories truncated below rank 10, down to 4"
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    np.testing.assert_allclose(np.abs(dmd.eigenvalues[0, :4]), np.ones(4), atol=tolerance)
    full = rotation([0.3, 0.9, 1.2, 1.7, 2.3], dim=32, num_steps=12).to(dtype)
    fit = fit_dmd(torch.stack([x_ld, full]), rank=10)
    assert fit.ranks.tolist() == [4, 10]
    assert np.isnan(fit.eigenvalues[0, 4:]).all() and np.isfinite(fit.eigenvalues[1]).all()
    assert fit.note == "1 of 2 trajectories truncated below rank 10, down to 4"
    assert np.isfinite(fit.spectral_radius).all()


def test_the_gap_is_between_the_last_kept_singular_value_and_the_next(states: list[torch.Tensor]) -> None:
    x_nld = trajectories(states, "cls")
    for rank in (3, 10):
        singular = np.linalg.svd(x_nld[:, :-1].numpy(), compute_uv=False)
        np.testing.assert_allclose(fit_dmd(x_nld, rank).gap, singular[:, rank - 1] / singular[:, rank], rtol=1e-6)
    whole = fit_dmd(x_nld, x_nld.shape[1] - 1)
    assert np.isinf(whole.gap).all()  # nothing is left out


def test_ill_conditioned_trajectory_goes_through_qr() -> None:
    """Singular values down to 1e-5: the squared form by itself would lose the eigenvalues."""
    rng = np.random.default_rng(1)
    rates = np.array([0.99, 0.9, 0.8, 0.6])
    basis = np.linalg.qr(rng.normal(size=(64, 4)))[0] * np.array([1, 1e-1, 1e-3, 1e-4])
    x_ld = torch.from_numpy((rates[None] ** np.arange(13)[:, None]) @ basis.T)
    fit = fit_dmd(x_ld[None], rank=4)
    assert fit.singular_values[0, 3] < 1e-4 * fit.singular_values[0, 0]
    np.testing.assert_allclose(fit.eigenvalues[0], rates, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_a_fit_does_not_depend_on_the_scale(states: list[torch.Tensor], scale: float) -> None:
    """A linear map has the same eigenvalues in any unit: ranks, gaps and the choice of QR are relative."""
    turning = scale * rotation([0.3, 0.9], dim=32, num_steps=12)
    assert fit_one(turning, rank=10).ranks[0] == 4
    rates = np.array([0.99, 0.9, 0.8, 0.6])
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(64, 4)))[0] * np.array([1, 1e-1, 1e-3, 1e-4])
    steep = torch.from_numpy(scale * (rates[None] ** np.arange(13)[:, None]) @ basis.T)
    np.testing.assert_allclose(fit_dmd(steep[None], rank=4).eigenvalues[0], rates, atol=1e-8)
    x_nld = trajectories(states, "patches")
    gaps = []
    for factor in (1.0, scale):
        pooled = PooledDMD()
        pooled.update(factor * x_nld)
        gaps.append(pooled.fit(rank=5).gap)
    assert gaps[1] == pytest.approx(gaps[0], rel=1e-6)


def test_truncation_below_the_dimension() -> None:
    x_nld = torch.randn(3, 13, 4, dtype=torch.float64)
    fit = fit_dmd(x_nld, rank=10)
    assert fit.ranks.tolist() == [4, 4, 4]
    assert fit.note is not None and "3 of 3" in fit.note
    for n in range(3):
        assert_equals_pydmd(x_nld[n].numpy(), fit.eigenvalues[n], fit.modes(x_nld)[n], fit.amplitudes[n])


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        fit_dmd(torch.full((1, 4, 3), float("nan")))
    with pytest.raises(ValueError, match="at least two states"):
        fit_dmd(torch.ones(1, 1, 3))


def test_pooled_equals_pydmd_on_concatenated_pairs(states: list[torch.Tensor]) -> None:
    x_nld = trajectories(states, "patches")
    pooled = PooledDMD()
    pooled.update(x_nld[:2])
    pooled.update(x_nld[2:])
    pooled.fit(rank=5)
    x1, x2 = x_nld[:, :-1].flatten(0, 1).numpy().T, x_nld[:, 1:].flatten(0, 1).numpy().T
    reference = PyDMD(svd_rank=5, exact=True).fit(x1, x2)
    order = match(pooled.eigenvalues, reference.eigs)
    np.testing.assert_allclose(pooled.eigenvalues[order], reference.eigs, atol=1e-8)
    singular = np.linalg.svd(x1, compute_uv=False)
    np.testing.assert_allclose(pooled.singular_values[:5], singular[:5], rtol=1e-8)
    assert pooled.gap == pytest.approx(singular[4] / singular[5], rel=1e-6)


def test_pooled_recovers_one_operator_from_many_short_paths() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(16, 3)))[0]
    rates = np.array([0.9, 0.5, 0.2])
    start = rng.normal(size=(10, 1, 3))
    x_nld = torch.from_numpy(start * rates ** np.arange(3)[None, :, None] @ basis.T)
    pooled = PooledDMD()
    pooled.update(x_nld)
    pooled.fit()
    np.testing.assert_allclose(pooled.eigenvalues, rates, atol=1e-7)
    assert pooled.note is not None and pooled.rank_used == 3
    assert pooled.reconstruction_error(x_nld).max() < 1e-6


def test_no_images_is_an_error() -> None:
    with pytest.raises(ValueError, match="no images were measured"):
        PooledDMD().fit()


def test_eigenvalue_numbers_by_hand() -> None:
    values = np.array([0.9 + 0j, 0.5j, -0.01 + 0j, complex(np.nan, np.nan)])
    radius, median, distance, angle, weighted = eigenvalue_numbers(values)
    assert radius == pytest.approx(0.9) and median == pytest.approx(0.5)
    assert distance == pytest.approx((0.1 + abs(0.5j - 1) + 1.01) / 3)
    assert angle == pytest.approx(np.pi)
    assert weighted == pytest.approx((0.5 * np.pi / 2 + 0.01 * np.pi) / 1.41)
