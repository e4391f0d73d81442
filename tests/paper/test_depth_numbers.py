"""The numbers behind the claims: values by hand from the curves, intervals against a plain bootstrap."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from depth_numbers import DepthNumbers, between_share, boundary_jump, estimate_all, jackknife_interval, main
from scipy import stats
from tiny_models import noise_images, tiny_timm

from raptor.data.stream import Batch
from raptor.dynamics.measure import DynamicsResult, measure_dynamics
from raptor.phases.cut import Phases, within_and_across
from raptor.vit.view import ViT

CUT = Phases((1, 3))


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
    found, direction = estimate_all(measured, CUT), measured.direction
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
        assert found[name]["value"] == pytest.approx(float(value), rel=1e-4, abs=1e-7), name
        assert found[name]["lower"] <= found[name]["upper"], name
    json.dumps(found, allow_nan=False)


def test_an_interval_is_that_of_a_plain_bootstrap(measured: DynamicsResult) -> None:
    values = measured.direction.values
    assert values is not None
    speeds = values[:, 2, list(measured.direction.norm).index("cls"), 1:].mean(1)
    rng = np.random.default_rng(1)
    drawn = [speeds[rng.integers(12, size=12)].mean() for _ in range(4000)]
    found = estimate_all(measured, CUT)["speed.mean.cls"]
    width = np.ptp(np.quantile(drawn, [0.025, 0.975]))
    np.testing.assert_allclose([found["lower"], found["upper"]], np.quantile(drawn, [0.025, 0.975]), atol=0.15 * width)


def test_stationary_phases_by_hand() -> None:
    speed = np.array([[1.0, 1.0, 3.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    np.testing.assert_allclose(between_share(speed, (2, 3)), [1.0, ((1.5 - 3) ** 2 * 2 + (4 - 3) ** 2 * 3) / 10])
    np.testing.assert_allclose(boundary_jump(speed, (2, 3)), [2.0, 0.0])
    best = max(
        combinations(range(1, 5), 1),
        key=lambda cut: between_share(speed[:1], (cut[0], 5 - cut[0]))[0],
    )
    assert best == (2,)


def test_the_contrast_is_within_minus_across_of_the_pooled_similarity(measured: DynamicsResult) -> None:
    cosines = []
    for group in ("cls", "patches"):
        x_nld = measured.modes.groups[group].trajectories[:, 1:].double()
        cosines.append(x_nld @ x_nld.mT)
    cosine = (sum(cosines) / 2).mean(0)
    within, across = within_and_across(cosine.numpy(), (1, 3))
    found = estimate_all(measured, CUT)
    assert found["similarity.within_minus_across"]["value"] == pytest.approx(within - across, abs=1e-9)
    assert found["similarity.within_phases"]["value"] == pytest.approx(within, abs=1e-9)
    pairs = cosine[~torch.eye(4, dtype=torch.bool)].mean()
    assert found["similarity.all_pairs"]["value"] == pytest.approx(float(pairs), abs=1e-9)
    assert not any(name.startswith("similarity") for name in estimate_all(measured, None))


def test_a_jackknife_is_students_interval_of_the_mean() -> None:
    """Without one value the mean is that of the others: the jackknife's error of a mean is the standard error."""
    values = np.random.default_rng(0).normal(size=8)
    left_out = np.array([np.delete(values, i).mean() for i in range(8)])
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose(jackknife_interval(values.mean(), left_out), expected, rtol=1e-9)


def test_the_numbers_stand_in_the_file_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raptor.report.figures.save_figures", lambda *_: [])
    options = dict(data=["scenes"], num_images=4, sample_images=2, num_classes=0, size=32, k=2, pretrained=False)
    saved = main(DepthNumbers(model="timm/test_vit", out=str(tmp_path), device="cpu", **options))
    assert saved == json.loads((tmp_path / "dynamics.json").read_text())
    found = saved["teacher"]["estimates"]
    assert {"value", "lower", "upper", "num_images"} == set(found["norm.ratio.patches"])
    assert saved["teacher"]["stability"]["kind"] == "paper"
