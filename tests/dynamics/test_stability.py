from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from raptor.dynamics.stability import Stability, contraction, measure_attraction, perturbation, seeded_generator
from raptor.vit.groups import TokenGroups

GROUPS = TokenGroups(cls=1, registers=1, patches=4)
NUM_BLOCKS = 6
DIM = 32


class Contraction:
    """Every block keeps the first coordinate and shrinks the others by `rate`; the clean state is the first axis.

    The tangent of the angle to that axis shrinks by `rate` a block.
    """

    def __init__(self, rate: float, dtype: torch.dtype = torch.float32) -> None:
        self.scale = torch.full((DIM,), rate, dtype=dtype)
        self.scale[0] = 1
        clean = torch.zeros(3, GROUPS.num_tokens, DIM, dtype=dtype)
        clean[..., 0] = torch.rand(3, GROUPS.num_tokens, generator=torch.Generator().manual_seed(0)) + 1
        self.states = [clean] * (NUM_BLOCKS + 1)
        self.num_block_calls = 0

    def run_from(self, layer: int, state_btd: torch.Tensor) -> list[torch.Tensor]:
        states = [state_btd]
        for _ in range(layer, NUM_BLOCKS):
            states.append(states[-1] * self.scale)
            self.num_block_calls += 1
        return states


def test_contraction_shrinks_angle_by_rate_and_d_by_its_square() -> None:
    rate = 0.6
    system = Contraction(rate)
    measure = Stability(GROUPS, eps=(1e-3, 1e-2))
    measure.update(system.states, system.run_from)
    result = measure.result()
    path = result.path[0, 0]  # all tokens perturbed, all measured: (eps, layers, L+1)
    assert np.isnan(path[0, 3, :3]).all()
    for e in range(2):
        for l in range(NUM_BLOCKS):
            np.testing.assert_allclose(path[e, l, l + 1 :] / path[e, l, l:-1], rate, rtol=1e-3)
    d = result.d_per_eps.mean[0, 0]
    for l in range(NUM_BLOCKS - 1):
        # Directions differ between injection layers: their out-of-axis share varies by about 1 / DIM.
        np.testing.assert_allclose(d[:, l] / d[:, l + 1], rate**2, rtol=0.1)
    # d / eps grows tenfold with eps, angle / eps does not move.
    np.testing.assert_allclose(d[1] / d[0], 10, rtol=0.05)
    angle = result.angle_per_eps.mean[0, 0]
    np.testing.assert_allclose(angle[1] / angle[0], 1, rtol=0.05)
    assert 0 < result.noise_floor.max() < 1e-6  # far below what the smallest perturbation does


def test_sensitivity_slope_is_minus_log_rate() -> None:
    for rate in (0.5, 0.9, 1.2):
        system = Contraction(rate)
        measure = Stability(GROUPS, eps=(1e-3,))
        measure.update(system.states, system.run_from)
        slope = measure.result().log_slope[0, 0, 0]
        assert slope == pytest.approx(-np.log(rate), abs=0.02)


def test_d_of_one_path_in_closed_form() -> None:
    """A perturbation p of the axis e: tan of the final angle is rate^n |p_perp| / |e + p_par|."""
    rate = 0.7
    system = Contraction(rate, dtype=torch.float64)
    measure = Stability(GROUPS, eps=(0.1,), seed=5)
    measure.update(system.states, system.run_from)
    generator = seeded_generator(torch.device("cpu"), 5, 2, 0, 0)
    moved = system.states[2] + perturbation(system.states[2], 0.1, slice(None), generator)
    tangent = rate**4 * moved[..., 1:].norm(dim=-1) / moved[..., 0]
    expected = torch.arctan(tangent)
    result = measure.result()
    assert result.angle_per_eps.mean[0, 0, 0, 2] == pytest.approx(expected.mean().item() / 0.1, rel=1e-9)
    assert result.d_per_eps.mean[0, 0, 0, 2] == pytest.approx((1 - expected.cos()).mean().item() / 0.1, rel=1e-9)


def test_the_noise_floor_is_the_turn_of_the_last_state() -> None:
    """One unit of rounding p at the first axis e: the angle at the end is about rate^n |p_perp|."""
    rate = 0.5
    system = Contraction(rate)
    clean = system.states[0]
    states = [(l + 1) * clean for l in range(NUM_BLOCKS + 1)]
    started: list[tuple[int, torch.Tensor]] = []

    def run_from(layer: int, state_btd: torch.Tensor) -> list[torch.Tensor]:
        started.append((layer, state_btd))
        return system.run_from(layer, state_btd)

    measure = Stability(GROUPS, eps=(0.1,), seed=5)
    measure.update(states, run_from)
    layer, first = started[0]
    torch.testing.assert_close(first, clean)
    assert layer == 0
    generator = seeded_generator(torch.device("cpu"), 5)
    moved = clean + perturbation(clean, torch.finfo(torch.float32).eps, slice(None), generator)
    angle_bt = rate**NUM_BLOCKS * moved[..., 1:].norm(dim=-1) / clean[..., 0]
    expected = [float(angle_bt[:, span].mean()) for span in (slice(None), slice(0, 1), slice(1, 2), slice(2, 6))]
    np.testing.assert_allclose(measure.result().noise_floor, expected, rtol=1e-3)


def test_tokens_without_coupling_answer_only_their_own_group() -> None:
    system = Contraction(0.8)
    measure = Stability(GROUPS, eps=(1e-2,))
    measure.update(system.states, system.run_from)
    result = measure.result()
    angle = result.angle_per_eps.mean[..., 0, 0]  # (targets, groups)
    assert result.targets == result.groups == ["all", "cls", "registers", "patches"]
    off = angle[1:, 1:] * (1 - np.eye(3))
    assert np.abs(off).max() == 0 and (np.diag(angle[1:, 1:]) > 0.1).all()
    # The same directions for every target: a group responds the same by itself and among all.
    np.testing.assert_allclose(np.diag(angle)[1:], angle[0, 1:], rtol=1e-6)
    assert result.num_block_calls == 4 * sum(range(1, NUM_BLOCKS + 1))
    assert system.num_block_calls == result.num_block_calls + NUM_BLOCKS  # the noise floor costs one pass
    json.dumps(result.to_dict(), allow_nan=False)


def test_perturbation_sizes() -> None:
    state = torch.randn(5, GROUPS.num_tokens, DIM) * 7
    generator = seeded_generator(torch.device("cpu"), 0, 1, 2, 3)
    added = perturbation(state, 1e-2, GROUPS.slice("patches"), generator)
    ratio = added.norm(dim=-1) / state.norm(dim=-1)
    torch.testing.assert_close(ratio[:, 2:], torch.full((5, 4), 1e-2))
    assert ratio[:, :2].abs().max() == 0
    paper = perturbation(torch.randn(40, 6, 400), 1e-2, slice(None), generator, kind="paper")
    assert paper.norm(dim=-1).mean().item() == pytest.approx(1e-2 * 20, rel=0.01)


def test_directions_are_uniform() -> None:
    """Mean 0 and covariance I / D on the sphere."""
    state = torch.ones(500, 40, 4)
    p = perturbation(state, 0.5, slice(None), seeded_generator(torch.device("cpu"), 1, 1, 1, 1)).flatten(0, 1)
    torch.testing.assert_close(p.mean(0), torch.zeros(4), atol=0.015, rtol=0)
    torch.testing.assert_close(p.mT @ p / len(p), torch.eye(4) / 4, atol=0.01, rtol=0)


def test_randomness_is_a_function_of_the_key() -> None:
    draws = {}
    for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]:
        draws[key] = torch.randn(4, generator=seeded_generator(torch.device("cpu"), *key))
        again = torch.randn(4, generator=seeded_generator(torch.device("cpu"), *key))
        torch.testing.assert_close(draws[key], again, rtol=0, atol=0)
    assert len({tuple(draw.tolist()) for draw in draws.values()}) == 5
    # Results in files were measured with the directions of these seeds.
    high, low = np.random.SeedSequence((0, 1, 2)).generate_state(2).tolist()
    assert seeded_generator(torch.device("cpu"), 0, 1, 2).initial_seed() == (high << 31) ^ low


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        Stability(GROUPS, eps=(0.0,))
    with pytest.raises(ValueError, match="unknown kind of perturbation 'absolute'"):
        Stability(GROUPS, kind="absolute")


def test_sizes_are_in_ascending_order() -> None:
    """The smallest one, which attraction and the slopes rest on, comes first."""
    assert Stability(TokenGroups(cls=1, registers=0, patches=4), eps=(3.0, 1e-2, 3.0)).eps == [1e-2, 3.0]


THREE_TOKENS = TokenGroups(cls=1, registers=0, patches=2)
FACTORS = (0.5, 0.5, 0.5, 1.25, 1.25)
"""Of the coordinates off the first axis, by block: the tangent of the angle to that axis shrinks by it."""


def run_phases(layer: int, state_btd: torch.Tensor) -> list[torch.Tensor]:
    states = [state_btd]
    for factor in FACTORS[layer:]:
        states.append(torch.cat([states[-1][..., :1], factor * states[-1][..., 1:]], -1))
    return states


def test_each_phase_has_its_own_rate() -> None:
    clean = torch.zeros(3, 3, 8, dtype=torch.float64)
    clean[..., 0] = 1
    measure = Stability(THREE_TOKENS, eps=(1e-4,), kind="paper")
    measure.update(run_phases(0, clean), run_phases)
    first, second = measure_attraction(measure.result(), (3, 2))
    assert (first.first, first.last, second.first, second.last) == (0, 3, 3, 5)
    for group in ("all", "cls", "patches"):
        assert first.rate[group] == pytest.approx(0.5, rel=1e-4)
        assert second.rate[group] == pytest.approx(1.25, rel=1e-4)
        steps = np.array(first.angle[group])
        np.testing.assert_allclose(steps[1:] / steps[:-1], 0.5, rtol=1e-4)
    # A start that was not perturbed is left out.
    partly = replace(measure.result(), layers=[0])
    assert [phase.first for phase in measure_attraction(partly, (3, 2))] == [0]


def test_contraction_is_the_geometric_mean_of_the_factors() -> None:
    path = np.array([[1.0, 0.5, 0.4], [2.0, 1.0, 8.0]])
    expected = [np.exp(np.mean(np.log(row[1:] / row[:-1]))) for row in path]
    np.testing.assert_allclose(contraction(path), expected)
