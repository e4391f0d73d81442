"""The numbers behind the claims: values by hand from the curves, intervals against a plain bootstrap."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from tiny_models import noise_images, tiny_timm

from raptor.data.stream import Batch
from raptor.dynamics.direction import DirectionResult
from raptor.dynamics.dmd import eigenvalue_numbers
from raptor.dynamics.estimates import BlockContrast, between_share, boundary_jump
from raptor.dynamics.measure import DynamicsResult, measure_dynamics
from raptor.phases.cut import Phases, within_and_across
from raptor.vit.view import ViT


@pytest.fixture(scope="module")
def module_teacher() -> ViT:
    """Four blocks, a cls token, two registers, four patches."""
    return tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=5)


@pytest.fixture(scope="module")
def measured(module_teacher: ViT) -> DynamicsResult:
    images = noise_images(module_teacher, 12)
    return measure_dynamics(
        module_teacher,
        [Batch(images[:7], None, torch.arange(7)), Batch(images[7:], None, torch.arange(7, 12))],
        num_images=12,
        phases=(1, 3),
        stability_images=4,
        eps=(1e-2,),
        perturbation="paper",
    )


def test_values_follow_from_the_curves(measured: DynamicsResult) -> None:
    found, direction = measured.estimates, measured.direction
    norm, gamma, speed = (getattr(direction, name)["patches"].mean for name in ("norm", "gamma", "speed"))
    expected = {
        "norm.ratio.patches": norm[-1] / norm[0],
        "norm.smallest_step.patches": (norm[1:] / norm[:-1]).min(),
        "gamma.before_last.patches": gamma[-2],
        "gamma.inner_rise.patches": np.diff(gamma)[:-1].max() - np.diff(gamma)[-1],
        "speed.mean.patches": speed.mean(),
        "gamma.late_acceleration.patches": np.diff(gamma)[-1] - np.diff(gamma)[:-1].mean(),
        "gamma.patches_minus_cls": gamma[1:-1].mean() - direction.gamma["cls"].mean[1:-1].mean(),
        "gamma.registers_minus_earliest_other": direction.gamma["registers"].mean[1:-1].mean()
        - max(direction.gamma[g].mean[1:-1].mean() for g in ("cls", "patches")),
        "speed.late_turn.patches": speed[-1] - speed[:-1].max(),
        "speed.late_turn_after_first.patches": speed[-1] - speed[1:-1].max(),
        "speed_variance.late.patches": sum(direction.speed_variance["patches"].values())[1:].mean(),
        "speed.registers_minus_slowest_other": direction.speed["registers"].mean.mean()
        - min(direction.speed[g].mean.mean() for g in ("cls", "patches")),
        "rank.stable_late.patches": measured.rank.stable_rank["patches"].mean[-1],
        "rank.coherence_late_peak.patches": measured.rank.coherence["patches"].mean[-1]
        - measured.rank.coherence["patches"].mean[:-1].max(),
    }
    stability = measured.stability
    assert stability is not None
    angle = stability.angle_per_eps.mean[0, stability.groups.index("cls"), 0]
    fit = np.polynomial.Polynomial.fit(stability.layers, np.log(angle), 1).convert().coef
    expected["sensitivity.slope.cls"] = fit[1]
    expected["sensitivity.r2.cls"] = np.corrcoef(stability.layers, np.log(angle))[0, 1] ** 2
    for phase in measured.attraction:
        expected[f"attraction.layers_{phase.first}_{phase.last}.cls"] = phase.rate["cls"]
    first, last = (phase.rate["cls"] for phase in measured.attraction)
    expected["attraction.last_minus_least_before.cls"] = last - first
    ratio = measured.modes.groups["cls"].ratio
    assert ratio is not None and ratio.rank == 1
    expected["dmd.ratio.distance.cls"] = ratio.distance.mean
    expected["dmd.pooled.spectral_radius.cls"] = ratio.pooled["spectral_radius"]
    for name, value in expected.items():
        assert found[name].value == pytest.approx(float(value), rel=1e-4, abs=1e-7), name
        assert found[name].lower <= found[name].upper, name
    saved = json.loads(json.dumps(measured.to_dict(), allow_nan=False))
    assert DynamicsResult.from_dict(saved).estimates == found


def test_an_interval_is_that_of_a_plain_bootstrap(measured: DynamicsResult) -> None:
    values = measured.direction.values
    assert values is not None
    speeds = values[:, 2, list(measured.direction.norm).index("cls"), 1:].mean(1)
    rng = np.random.default_rng(1)
    drawn = [speeds[rng.integers(12, size=12)].mean() for _ in range(4000)]
    found = measured.estimates["speed.mean.cls"]
    width = np.ptp(np.quantile(drawn, [0.025, 0.975]))
    np.testing.assert_allclose([found.lower, found.upper], np.quantile(drawn, [0.025, 0.975]), atol=0.15 * width)


def test_the_variance_of_the_speed_is_that_over_all_tokens(measured: DynamicsResult, module_teacher: ViT) -> None:
    with torch.no_grad():
        states, _ = module_teacher.record(noise_images(module_teacher, 12))
    x = torch.stack(states).double()
    x = x / x.norm(dim=-1, keepdim=True)
    speed = torch.arccos((x[1:] * x[:-1]).sum(-1).clamp(-1, 1))[..., module_teacher.groups.slice("patches")]
    variance = measured.direction.speed_variance["patches"]
    np.testing.assert_allclose(
        variance["tokens"] + variance["images"], speed.flatten(1).var(1, correction=0), rtol=1e-3, atol=1e-9
    )
    np.testing.assert_allclose(variance["tokens"], speed.var(2, correction=0).mean(1), rtol=1e-3, atol=1e-9)
    assert isinstance(measured.direction, DirectionResult)


def test_stationary_phases_by_hand() -> None:
    speed = np.array([[1.0, 1.0, 3.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    np.testing.assert_allclose(between_share(speed, (2, 3)), [1.0, ((1.5 - 3) ** 2 * 2 + (4 - 3) ** 2 * 3) / 10])
    np.testing.assert_allclose(boundary_jump(speed, (2, 3)), [2.0, 0.0])
    best = max(
        combinations(range(1, 5), 1),
        key=lambda cut: between_share(speed[:1], (cut[0], 5 - cut[0]))[0],
    )
    assert best == (2,)


def test_block_contrast_is_within_minus_across_of_the_pooled_similarity() -> None:
    generator = torch.Generator().manual_seed(0)
    means = {
        name: torch.nn.functional.normalize(torch.randn(3, 5, 6, generator=generator), dim=-1)
        for name in ("cls", "patches")
    }
    contrast = BlockContrast(Phases.from_lengths((1, 3)))
    contrast.update(means)
    cosine = sum(x[:, 1:] @ x[:, 1:].mT for x in means.values()) / 2
    within, across = within_and_across(cosine.mean(0).numpy(), (1, 3))
    found = contrast.result()
    assert found["similarity.within_minus_across"].value == pytest.approx(within - across, abs=1e-6)
    assert found["similarity.within_phases"].value == pytest.approx(within, abs=1e-6)
    pairs = cosine.mean(0)[~torch.eye(4, dtype=torch.bool)].mean()
    assert found["similarity.all_pairs"].value == pytest.approx(float(pairs), abs=1e-6)


def test_eigenvalue_numbers_by_hand() -> None:
    values = np.array([0.9 + 0j, 0.5j, -0.01 + 0j, complex(np.nan, np.nan)])
    radius, median, distance, angle, weighted = eigenvalue_numbers(values)
    assert radius == pytest.approx(0.9) and median == pytest.approx(0.5)
    assert distance == pytest.approx((0.1 + abs(0.5j - 1) + 1.01) / 3)
    assert angle == pytest.approx(np.pi)
    assert weighted == pytest.approx((0.5 * np.pi / 2 + 0.01 * np.pi) / 1.41)
