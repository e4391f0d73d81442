"""The rule behind every verdict, with numbers made for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from evidence import Basis, Evidence, Verdict, counted, judge, of_counts, over_seeds
from scipy import stats

CLEAR = Evidence(value=0.5, lower=0.4, upper=0.6, basis=Basis.SEEDS, num=3, above=0.0)


def test_the_interval_decides_between_three_verdicts() -> None:
    assert judge(CLEAR) is Verdict.AGREES
    assert judge(replace(CLEAR, above=0.7)) is Verdict.DISAGREES
    assert judge(replace(CLEAR, above=0.45)) is Verdict.UNDETERMINED
    assert judge(replace(CLEAR, above=None, below=0.3)) is Verdict.DISAGREES
    assert judge(replace(CLEAR, below=0.7)) is Verdict.AGREES
    assert judge(replace(CLEAR, below=0.55)) is Verdict.UNDETERMINED
    assert replace(CLEAR, below=0.7).bounds() == "> 0 and < 0.7"


def test_fewer_than_three_seeds_or_no_interval_can_only_be_undetermined() -> None:
    for num in (1, 2):
        assert judge(replace(CLEAR, num=num)) is Verdict.UNDETERMINED
        assert judge(replace(CLEAR, num=num, above=0.7)) is Verdict.UNDETERMINED
        assert judge(replace(CLEAR, num=num, basis=Basis.RUNS)) is Verdict.UNDETERMINED
    assert judge(replace(CLEAR, lower=None, upper=None)) is Verdict.UNDETERMINED
    assert judge(replace(CLEAR, basis=Basis.IMAGES, num=3)) is Verdict.UNDETERMINED
    assert judge(replace(CLEAR, basis=Basis.IMAGES, num=64)) is Verdict.AGREES


def test_a_smaller_budget_confirms_but_does_not_refute() -> None:
    small = replace(CLEAR, smaller_budget=True)
    assert judge(small) is Verdict.AGREES
    assert judge(replace(small, above=0.9)) is Verdict.NOT_TESTED
    assert judge(replace(small, above=0.9, num=1)) is Verdict.NOT_TESTED
    assert judge(None) is judge(replace(CLEAR, value=None)) is Verdict.NOT_TESTED


def test_intervals_over_seeds_and_of_counts() -> None:
    values = [0.2, 0.5, 0.3]
    found = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert over_seeds(values) == pytest.approx((1 / 3, found.low, found.high))
    assert over_seeds([0.2]) == (0.2, None, None)
    # Wilson's interval in closed form
    p, n, z = 0.3, 50, stats.norm.ppf(0.975)
    centre, half = (p + z**2 / (2 * n)), z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
    expected = [(centre + s * half) / (1 + z**2 / n) for s in (-1, 1)]
    assert of_counts(15, 50) == pytest.approx((0.3, *expected))


def test_a_counted_number_on_its_bound_does_not_meet_it() -> None:
    at = counted(5, above=5)
    assert judge(at) is Verdict.DISAGREES
    assert judge(replace(at, above=None, below=5)) is Verdict.DISAGREES
    assert judge(replace(at, above=4.5)) is Verdict.AGREES
