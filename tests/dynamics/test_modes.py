"""DMD by token group over batches, against direct fits."""

from __future__ import annotations

import json

import numpy as np
import torch
from tiny_trajectories import GROUPS, trajectories

from raptor.dynamics.dmd import NUMBERS, eigenvalue_numbers, fit_dmd
from raptor.dynamics.modes import Modes, ModesResult
from raptor.dynamics.states import group_means


def test_modes_accumulator(states: list[torch.Tensor]) -> None:
    measure = Modes(GROUPS, num_trajectories=4)
    measure.update([a[:3] for a in states])
    measure.update([a[3:] for a in states])
    result = measure.result()
    assert set(result.groups) == {"all", "cls", "registers", "patches"}
    cls = result.groups["cls"]
    direct = fit_dmd(trajectories(states, "cls")[:4].float(), rank=10)
    assert cls.trajectories is not None and len(cls.trajectories) == 4
    np.testing.assert_allclose(cls.spectral_radius.mean, direct.spectral_radius.mean(), rtol=1e-4)
    assert cls.pooled.num_pairs == 6 * 12 and list(cls.sweep) == list(range(1, 11))
    assert cls.sweep[2]["reconstruction_error"].mean.mean() > cls.sweep[10]["reconstruction_error"].mean.mean()
    assert cls.ratio is not None and cls.ratio.rank == 3
    at_ratio = eigenvalue_numbers(fit_dmd(trajectories(states, "cls")[:4].float(), rank=3).eigenvalues)
    np.testing.assert_allclose(cls.ratio.distance.mean, at_ratio[:, NUMBERS.index("distance")].mean(), rtol=1e-4)
    shared = Modes(GROUPS, num_trajectories=4)
    shared.update(states, group_means(states, GROUPS))
    np.testing.assert_allclose(shared.result().groups["cls"].gap.mean, cls.gap.mean, rtol=1e-5)
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert len(text) < 300_000
    assert ModesResult.from_dict(json.loads(text)).to_dict() == json.loads(text)
