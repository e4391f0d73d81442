"""Claims about depth: each follows its bounds, is judged on the paper's perturbation, and stands beside the witness."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from depth_claims import (
    claims_certificate,
    claims_dynamics,
    claims_phases,
    claims_witness,
)
from evidence import Claim, Verdict
from test_phases import DISTANCE
from witness import witness

from raptor.dynamics.estimates import ImageEstimate
from raptor.dynamics.measure import DynamicsFile
from raptor.fidelity.certificate import Certificate
from raptor.fidelity.complexity import Complexity
from raptor.phases import PhasesFile

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DYNAMICS = RESULTS / "dynamics"


@pytest.fixture(scope="module")
def measured() -> DynamicsFile:
    return DynamicsFile.read_file(DYNAMICS / "dinov2s.json")


def with_estimate(measured: DynamicsFile, key: str, lower: float, upper: float) -> DynamicsFile:
    estimates = {**measured.teacher.estimates, key: ImageEstimate((lower + upper) / 2, lower, upper, 256)}
    return replace(measured, teacher=replace(measured.teacher, estimates=estimates))


def of_key(claims: list[Claim], key: str) -> list[Claim]:
    return [claim for claim in claims if claim.number == f"teacher/estimates/{key}"]


@pytest.mark.parametrize(
    ("key", "holds", "fails"),
    [
        ("norm.smallest_step.cls", 1.1, 0.9),
        ("gamma.before_last.patches", 0.95, 0.5),
        ("gamma.patches_minus_cls", 0.1, -0.1),
        ("speed.registers_minus_slowest_other", -0.1, 0.1),
        ("speed.late_turn_after_first.cls", 0.3, -0.3),
        ("sensitivity.slope.patches", -0.3, 0.1),
        ("rank.stable_late.patches", 6.0, 1.5),
        ("rank.effective_late.patches", 6.0, 100.0),
        ("dmd.ratio.spectral_radius.cls", 0.95, 1.05),
        ("dmd.ratio.median_modulus.cls", 0.95, 0.8),
        ("attraction.last_minus_least_before.all", -0.1, 0.1),
        ("dmd.pooled.cls_distance_minus_least_other", -0.1, 0.1),
    ],
)
def test_a_claim_follows_its_bounds(measured: DynamicsFile, key: str, holds: float, fails: float) -> None:
    for value, verdict in ((holds, Verdict.AGREES), (fails, Verdict.DISAGREES)):
        found = claims_dynamics(with_estimate(measured, key, value - 0.01, value + 0.01))
        (claim,) = of_key(found, key)
        assert claim.verdict is verdict
    wide = claims_dynamics(with_estimate(measured, key, min(holds, fails), max(holds, fails)))
    assert of_key(wide, key)[0].verdict is Verdict.UNDETERMINED


def test_sensitivity_is_judged_on_the_papers_perturbation(measured: DynamicsFile) -> None:
    relative = DynamicsFile.read_file(DYNAMICS / "dinov2s-relative.json")
    claims = claims_dynamics(measured, None, relative)
    (falls,) = of_key(claims, "sensitivity.slope.patches")
    assert "growing norms" in falls.measured and "relative to the state" in falls.measured
    stability = replace(measured.teacher.stability, kind="relative")
    other = claims_dynamics(replace(measured, teacher=replace(measured.teacher, stability=stability)))
    assert not [c for c in other if "sensitivity" in c.number or "attraction" in c.number or "path." in c.number]
    assert of_key(other, "gamma.patches_minus_cls")


def test_the_witness_stands_beside_gamma_and_the_last_turn(measured: DynamicsFile) -> None:
    claims = claims_dynamics(measured, witness(DISTANCE))
    assert all("gamma_11 = 0.25" in c.measured for c in claims if "gamma.before_last" in c.number)
    rises = np.diff(1 - np.array(DISTANCE)[:, -1])
    inner = f"ViT-B matrix (pooled) {rises[:-1].max() - rises[-1]:.2f}"
    assert all(inner in c.measured for c in claims if "gamma.inner_rise" in c.number)
    for key in ("speed.late_turn.cls", "speed.late_turn_after_first.cls"):
        assert "ViT-B matrix (pooled) 1.32 rad" in of_key(claims, key)[0].measured
    (table3,) = claims_witness(witness(DISTANCE))
    assert table3.verdict is Verdict.AGREES and "7+5, 7+3+2, 4+3+3+2" in table3.measured
    assert {c.verdict for c in [*claims_witness(None), *claims_dynamics(None)]} == {Verdict.NOT_TESTED}


def test_a_difference_between_groups_stands_beside_their_numbers(measured: DynamicsFile) -> None:
    claims = claims_dynamics(measured)
    known = {g: measured.teacher.estimates[f"dmd.pooled.median_modulus.{g}"].value for g in ("cls", "patches")}
    (modulus,) = of_key(claims, "dmd.pooled.patches_modulus_minus_least_other")
    assert all(f"{g} {value:.2f}" in modulus.measured for g, value in known.items())
    speed = np.abs(np.diff(measured.teacher.direction.speed["registers"].mean))  # phases 7 | 3 | 2
    jump = speed[[6, 9]].mean() - np.delete(speed, [6, 9]).mean()
    assert f"registers {jump:.2f}" in of_key(claims, "speed.jump_at_boundaries")[0].measured
    gamma = measured.teacher.direction.gamma["registers"].mean[1:-1].mean()
    assert f"registers {gamma:.2f}" in of_key(claims, "gamma.registers_minus_earliest_other")[0].measured


def test_what_is_left_of_a_perturbation_stands_by_layer(measured: DynamicsFile) -> None:
    stability = measured.teacher.stability
    path = stability.path[0, stability.groups.index("cls"), 0]
    (claim,) = of_key(claims_dynamics(measured), "path.kept_angle.cls")
    assert f"{path[0, -1] / path[0, 0]:.2f} from layer 0, {path[6, -1] / path[6, 6]:.2f} from layer 6" in claim.measured


def test_the_untrained_twin_of_basins(measured: DynamicsFile) -> None:
    found = [c for c in claims_dynamics(measured, twins=[measured]) if "basins" in c.number]
    assert len(found) == 3
    for claim in found:
        ends = f"{claim.evidence.value:.3g} [{claim.evidence.lower:.3g}, {claim.evidence.upper:.3g}]"
        assert f"untrained {ends} ({claim.evidence.num} images)" in claim.measured


def test_the_untrained_twin_stands_beside_its_numbers(measured: DynamicsFile) -> None:
    twin = with_estimate(measured, "gamma.patches_minus_cls", 0.1, 0.3)
    smaller = with_estimate(measured, "gamma.patches_minus_cls", 0.4, 0.6)
    (claim,) = of_key(claims_dynamics(measured, twins=[twin, smaller]), "gamma.patches_minus_cls")
    assert claim.measured.endswith("untrained 0.2 [0.1, 0.3] (256 images)")
    assert claim.evidence == of_key(claims_dynamics(measured), "gamma.patches_minus_cls")[0].evidence


def test_a_claim_says_whether_an_untrained_model_meets_it_too(measured: DynamicsFile) -> None:
    same = claims_dynamics(measured, twins=[measured])
    assert any(claim.untrained_too is not None for claim in same)
    for claim in same:
        if claim.untrained_too is not None:
            assert claim.untrained_too is (claim.verdict is Verdict.AGREES)
    assert all(claim.untrained_too is None for claim in claims_dynamics(measured))


def test_where_the_cut_counts_every_twin_stands_with_its_own(measured: DynamicsFile) -> None:
    key = "similarity.within_minus_across"
    own = replace(with_estimate(measured, key, 0.1, 0.2), phases=[5, 3, 4])
    claims = claims_dynamics(measured, twins=[own, with_estimate(measured, key, 0.0, 0.1)])
    (claim,) = of_key(claims, key)
    assert "0.15 [0.1, 0.2] (256 images, its own cut, 5+3+4)" in claim.measured
    assert claim.measured.endswith("0.05 [0, 0.1] (256 images, cut alike, 7+3+2)")
    (made,) = [c for c in claims if c.place == "Section 1"]
    trained = measured.teacher.estimates[key].value
    assert made.evidence.value == pytest.approx(trained - 0.15) and "its own cut, 5+3+4" in made.measured
    assert made.verdict is Verdict.UNDETERMINED  # one untrained seed


def test_three_untrained_seeds_tell_what_training_made_of_one_model(measured: DynamicsFile) -> None:
    key = "similarity.within_minus_across"
    trained = measured.teacher.estimates[key]

    def claims(values: list[float], seeds: list[int] | None = None) -> list[Claim]:
        twins = [
            replace(with_estimate(measured, key, value, value), seed=seed if seeds is None else seeds[seed])
            for seed, value in enumerate(values)
        ]
        return claims_dynamics(measured, twins=twins)

    found = claims([0.1, 0.12, 0.08])
    (made,) = [c for c in found if c.place == "Section 1"]
    assert made.verdict is Verdict.AGREES and made.evidence.num == 3
    half = np.hypot(4.302653 * 0.02 / np.sqrt(3), 0.5 * (trained.upper - trained.lower))
    assert made.evidence.lower == pytest.approx(trained.value - 0.1 - half)
    # Rows about phases show one twin for each cut.
    assert of_key(found, key)[0].measured.count("untrained") == 1
    # A second run of the same weights is no further seed.
    (twice,) = [c for c in claims([0.1, 0.12, 0.08], seeds=[0, 0, 1]) if c.place == "Section 1"]
    assert twice.evidence.num == 2 and twice.evidence.value == pytest.approx(trained.value - 0.09)
    (apart,) = [c for c in claims([0.1, 0.5, 0.3]) if c.place == "Section 1"]
    assert apart.verdict is Verdict.UNDETERMINED


def test_depth_has_boundaries_where_a_smooth_matrix_has_less_contrast() -> None:
    (model,) = PhasesFile.read_file(RESULTS / "phases-vitb16.json").models
    (claim,) = claims_phases(model, witness(DISTANCE))
    cut = model.evidence[3]
    assert claim.verdict is Verdict.AGREES and claim.evidence.value == pytest.approx(cut.contrast - cut.smooth)
    assert claim.evidence.lower == pytest.approx(cut.interval[0] - cut.smooth)
    assert "ViT-B matrix (pooled) 0.134" in claim.measured
    gradual = replace(model, evidence={3: replace(cut, smooth=cut.contrast + 0.1)})
    assert claims_phases(gradual)[0].verdict is Verdict.DISAGREES
    assert claims_phases(replace(model, evidence={})) == []


def test_certificate_and_complexity_of_a_surrogate() -> None:
    certificate = Certificate.read_file(RESULTS / "dinov2s-732-certificate.json")
    complexity = Complexity.read_file(RESULTS / "dinov2s-732-complexity.json")
    follows, compute, shorter = claims_certificate(certificate, complexity)
    assert follows.evidence.value == pytest.approx(min(certificate.curves.r2["all"]))
    assert follows.evidence.lower < follows.evidence.value < follows.evidence.upper
    assert compute.evidence.value == certificate.costs["surrogate"].flops / certificate.costs["teacher"].flops
    assert shorter.evidence.value == complexity.fp32.ratio and shorter.verdict is Verdict.AGREES
    assert {c.verdict for c in claims_certificate(None, None)} == {Verdict.NOT_TESTED}
