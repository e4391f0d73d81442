"""Claims about block swaps: the turn of the last state, the predictions that stay, the accuracy kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evidence import Verdict, of_counts
from records import Compared, SwapRow, Swaps
from swap_claims import claims_interventions, claims_swaps, prediction_claims
from tiny_claims import verdicts

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.swaps import compare_pairs

DYNAMICS = Path(__file__).parents[2] / "docs" / "results" / "dynamics"

AGREES, DISAGREES, UNDETERMINED, NOT_TESTED = Verdict


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
    assert within.verdict is Verdict.AGREES and within.evidence.lower == pytest.approx(of_counts(384, 400)[1], abs=1e-4)
    assert across.verdict is Verdict.AGREES and matched.verdict is Verdict.NOT_TESTED
    within, across, _ = prediction_claims({**shares, "within": 0.5, "across": 0.8}, 400, ())
    assert {within.verdict, across.verdict} == {Verdict.DISAGREES}


def test_few_images_decide_nothing_where_all_or_none_stay() -> None:
    shares = {"within": 1.0, "across": 0.0, "within_matched": 1.0, "across_matched": 0.0}
    within, across, matched = prediction_claims(shares, 16, (), paired=0.0)
    assert within.evidence.lower == pytest.approx(of_counts(16, 16)[1], abs=1e-3)
    assert within.verdict is Verdict.UNDETERMINED
    assert across.evidence.upper == pytest.approx(of_counts(0, 16)[2], abs=1e-3)
    assert matched.evidence.lower < 1


def test_swaps_count_only_teachers_that_learned() -> None:
    def row(accuracy: float, within: float, across: float) -> SwapRow:
        # blocks 1..3 in phases 2 | 1: the pair (1, 2) is within; block 1 loses everything
        swapped = [within * accuracy, 0.0, across * accuracy]
        kept = Compared(within=0.0, across=0.0, within_matched=None, across_matched=None)
        return SwapRow(
            p=0.1,
            phases=[2, 1],
            pairs=[(1, 2), (1, 3), (2, 3)],
            compared={},
            angle=[],
            accuracy=accuracy,
            chance=0.01,
            swapped_accuracy=swapped,
            compared_accuracy=kept,
        )

    good = [row(0.5, 0.96 + i / 1000, 0.4) for i in range(3)]
    chance = row(0.012, 0.0, 1.0)
    claims = claims_swaps(Swaps(rows=[*good, chance]))
    within, across, matched, *rest = claims
    assert within.verdict is AGREES and within.evidence.num == 3 and within.evidence.value == pytest.approx(0.961)
    assert across.evidence.value == pytest.approx(0.2) and across.verdict is AGREES
    assert matched.evidence.value == pytest.approx(0.961 - 0.4) and matched.verdict is AGREES
    assert rest[1].evidence.value == pytest.approx(0.4)  # without block 1 only the pair (2, 3) is left
    assert rest[0].verdict is NOT_TESTED  # and none within a phase
    assert verdicts(claims_swaps(Swaps(rows=good[:1])))[0] is UNDETERMINED
    assert set(verdicts(claims_swaps(Swaps(rows=[chance])))) == {NOT_TESTED}


def test_one_model_is_judged_over_images_by_the_turn_and_only_with_deviations() -> None:
    # blocks 1..4 in phases 2 | 2: at distance 1 the pairs (1, 2) and (3, 4) are within, (2, 3) across
    pairs, angle = [(1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)], [1.4, 1.4, 1.4, 0.8, 1.0, 0.4]
    stays = Compared(within=0.6, across=0.3, within_matched=0.6, across_matched=0.4)
    row = SwapRow(cell="model", phases=[2, 2], pairs=pairs, compared={"agreement": stays}, angle=angle, num_images=400)
    command = "raptor reproduce swaps --config raptor/recipes/swaps-vitb16.yaml --data d"
    plain, rest, within, across, predictions = claims_swaps(Swaps(rows=[row], command=command))
    assert plain.evidence.value == pytest.approx(0.8 - 0.9) and rest.evidence.value == pytest.approx(0.8 - 0.4)
    assert verdicts([plain, rest]) == [UNDETERMINED] * 2 and "no interval" in plain.measured
    lower = of_counts(240, 400)[1] - of_counts(160, 400)[2]
    assert predictions.verdict is AGREES and predictions.evidence.lower == pytest.approx(lower, abs=1e-4)
    assert within.verdict is DISAGREES and across.verdict is AGREES  # 60 and 30 % of the predictions stay
    assert {claim.recipe for claim in (plain, rest, within, across, predictions)} == {"swaps-vitb16"}
    known = claims_swaps(Swaps(rows=[replace(row, angle_std=[0.2] * 6, compared={})]))
    assert verdicts(known) == [DISAGREES, AGREES]
    assert known[0].evidence.upper == pytest.approx(-0.1 + 1.96 * 0.4 / 20)
    # The deviation of the difference itself is what counts where a run has kept it.
    paired = replace(row, angle_std=[9.0] * 6, matched_std={"turn": [0.1, 0.2], "agreement": [0.3, None]})
    claims = claims_swaps(Swaps(rows=[paired]))
    intervals = [claim.evidence.upper - claim.evidence.value for claim in claims if "equal distance" in claim.says]
    assert intervals == pytest.approx([1.96 * std / 20 for std in (0.1, 0.2, 0.3)])
    # Accuracy by the model's head makes it no teacher of the sweep; block 1 may be left out of the predictions, too.
    less = replace(row, accuracy=0.8, without_first_agreement=replace(stays, within_matched=0.3))
    last = claims_swaps(Swaps(rows=[less]))[-1]
    assert last.says.endswith("without block 1") and last.evidence.value == pytest.approx(0.3 - 0.4)
