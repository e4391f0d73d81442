"""Claims about block swaps of one model: by the turn of its last state and by the predictions that stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raptor.dynamics.interventions import InterventionsFile, compare_pairs
from raptor.experiments.evidence import Verdict
from raptor.experiments.swap_claims import claims_interventions, prediction_claims

DYNAMICS = Path(__file__).parents[2] / "docs" / "results" / "dynamics"


def test_swaps_of_a_model_at_equal_distance() -> None:
    found = InterventionsFile.read_file(DYNAMICS / "dinov2s-interventions.json")
    plain, rest = (c for c in claims_interventions(found) if "turns the last state" in c.says)
    swaps = found.teacher.swaps
    means = compare_pairs(swaps.pairs, swaps.angle["all"].mean, swaps.phases, (1,))
    assert rest.evidence.value == pytest.approx(means["across_matched"] - means["within_matched"])
    kept = [i for i, pair in enumerate(swaps.pairs) if 1 not in pair]
    pairs = [swaps.pairs[i] for i in kept]
    by_hand = compare_pairs(pairs, np.array(swaps.angle["all"].mean)[kept], swaps.phases)
    assert by_hand == pytest.approx(means)
    assert plain.evidence.lower < plain.evidence.value < plain.evidence.upper


def test_predictions_that_stay_are_judged_with_and_without_block_1() -> None:
    found = InterventionsFile.read_file(DYNAMICS / "vitb16-interventions.json")
    claims = [c for c in claims_interventions(found) if "predictions" in c.says]
    assert len(claims) == 6 and [c.says.endswith("without block 1") for c in claims] == [False] * 3 + [True] * 3
    swaps = found.teacher.swaps
    means = compare_pairs(swaps.pairs, swaps.agreement.mean, swaps.phases, (1,))
    within, across, matched = claims[3:]
    assert within.evidence.value == pytest.approx(means["within"]) and "the head of vitb16" in within.measured
    assert across.evidence.value == pytest.approx(means["across"])
    half = 1.96 * swaps.matched_std["agreement"][1] / np.sqrt(swaps.num_images)
    assert matched.evidence.upper - matched.evidence.value == pytest.approx(half)
    without_head = replace(found, teacher=replace(found.teacher, swaps=replace(swaps, agreement=None)))
    assert len(claims_interventions(without_head)) == 2


def test_bounds_and_intervals_of_predictions() -> None:
    shares = {"within": 0.96, "across": 0.4, "within_matched": 0.95, "across_matched": float("nan")}
    within, across, matched = prediction_claims(shares, 400, ())
    assert within.verdict is Verdict.AGREES and within.evidence.lower == pytest.approx(0.96 - 1.96 * 0.0384**0.5 / 20)
    assert across.verdict is Verdict.AGREES and matched.verdict is Verdict.NOT_TESTED
    within, across, _ = prediction_claims({**shares, "within": 0.5, "across": 0.8}, 400, ())
    assert {within.verdict, across.verdict} == {Verdict.DISAGREES}
