"""Attraction within phases: a system whose phases contract by known factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raptor.dynamics.attraction import contraction, measure_attraction
from raptor.dynamics.stability import Stability
from raptor.vit.view import TokenGroups

GROUPS = TokenGroups(cls=1, registers=0, patches=2)
FACTORS = (0.5, 0.5, 0.5, 1.25, 1.25)
"""Of the coordinates off the first axis, by block: the tangent of the angle to that axis shrinks by it."""


def run_from(layer: int, state_btd: torch.Tensor) -> list[torch.Tensor]:
    states = [state_btd]
    for factor in FACTORS[layer:]:
        states.append(torch.cat([states[-1][..., :1], factor * states[-1][..., 1:]], -1))
    return states


def test_each_phase_has_its_own_rate() -> None:
    clean = torch.zeros(3, 3, 8, dtype=torch.float64)
    clean[..., 0] = 1
    measure = Stability(GROUPS, eps=(1e-4,), kind="paper")
    measure.update(run_from(0, clean), run_from)
    first, second = measure_attraction(measure.result(), (3, 2))
    assert (first.first, first.last, second.first, second.last) == (0, 3, 3, 5)
    for group in ("all", "cls", "patches"):
        assert first.rate[group] == pytest.approx(0.5, rel=1e-4)
        assert second.rate[group] == pytest.approx(1.25, rel=1e-4)
        steps = np.array(first.angle[group])
        np.testing.assert_allclose(steps[1:] / steps[:-1], 0.5, rtol=1e-4)
    # A start that was not perturbed is left out.
    partly = Stability(GROUPS, eps=(1e-4,), layers=(0,), kind="paper")
    partly.update(run_from(0, clean), run_from)
    assert [phase.first for phase in measure_attraction(partly.result(), (3, 2))] == [0]


def test_contraction_is_the_geometric_mean_of_the_factors() -> None:
    path = np.array([[1.0, 0.5, 0.4], [2.0, 1.0, 8.0]])
    expected = [np.exp(np.mean(np.log(row[1:] / row[:-1]))) for row in path]
    np.testing.assert_allclose(contraction(path), expected)
