"""DMD by token group and pooled over images, against PyDMD and operators that are known."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from pydmd import DMD as PyDMD
from tiny_trajectories import GROUPS, match, trajectories

from raptor.dynamics.modes import BatchedDMD, fit_dmd
from raptor.dynamics.spectra import Modes, ModesResult, PooledDMD
from raptor.dynamics.states import group_means


def test_pooled_equals_pydmd_on_concatenated_pairs(states: list[torch.Tensor]) -> None:
    x_nld = trajectories(states, "patches")
    pooled = PooledDMD(rank=5)
    pooled.update(x_nld[:2])
    pooled.update(x_nld[2:])
    pooled.fit()
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
    pooled = PooledDMD(rank=10)
    pooled.update(x_nld)
    pooled.fit()
    np.testing.assert_allclose(pooled.eigenvalues, rates, atol=1e-7)
    assert pooled.note is not None and pooled.rank_used == 3
    assert pooled.reconstruction_error(x_nld).max() < 1e-6


def test_modes_accumulator(states: list[torch.Tensor]) -> None:
    measure = Modes(GROUPS, rank=10, num_trajectories=4, sweep=(2, 10))
    measure.update([a[:3] for a in states])
    measure.update([a[3:] for a in states])
    result = measure.result()
    assert set(result.groups) == {"all", "cls", "registers", "patches"}
    cls = result.groups["cls"]
    direct = fit_dmd(trajectories(states, "cls")[:4].float(), rank=10)
    assert isinstance(cls.fits, BatchedDMD) and len(cls.fits.ranks) == 4
    np.testing.assert_allclose(cls.spectral_radius.mean, direct.spectral_radius.mean(), rtol=1e-4)
    assert cls.pooled.num_pairs == 6 * 12
    assert cls.sweep[2].reconstruction_error.mean.mean() > cls.sweep[10].reconstruction_error.mean.mean()
    shared = Modes(GROUPS, rank=10, num_trajectories=4, sweep=())
    shared.update(states, group_means(states, GROUPS))
    np.testing.assert_allclose(shared.result().groups["cls"].gap.mean, cls.gap.mean, rtol=1e-5)
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert len(text) < 200_000
    assert ModesResult.from_dict(json.loads(text)).to_dict() == json.loads(text)


def test_no_images_is_an_error() -> None:
    with pytest.raises(ValueError, match="no images were measured"):
        PooledDMD(rank=2).fit()
