"""Statistics over teachers against closed forms, tables and simulation."""

from __future__ import annotations

from math import atanh, inf, sqrt, tanh
from statistics import NormalDist

import numpy as np
import pytest
from over_teachers import evidence, holm, mean_over_makes, trend_within_makes


def cauchy_tail(t: float) -> float:
    """Student's t with one degree of freedom is Cauchy's distribution."""
    return float(0.5 - np.arctan(t) / np.pi)


def two_df_tail(t: float) -> float:
    """The closed form of Student's t with two degrees of freedom."""
    return 0.5 - t / (2 * sqrt(2 + t * t))


def test_tails_are_the_closed_forms_of_students_t() -> None:
    assert evidence(3.0, 2.0, 1, 0, None).p_for == pytest.approx(cauchy_tail(1.5))
    assert evidence(3.0, 2.0, 2, 0, None).p_for == pytest.approx(two_df_tail(1.5))
    assert evidence(3.0, 2.0, inf, 0, None).p_for == pytest.approx(1 - NormalDist().cdf(1.5))
    found = evidence(3.0, 2.0, 2, None, 0)
    assert found.p_against == pytest.approx(two_df_tail(1.5)) and found.p_for == pytest.approx(1 - two_df_tail(1.5))


def test_the_interval_over_three_makes_is_that_of_the_tables() -> None:
    found = mean_over_makes([[1.0], [2.0, 2.0], [1.0, 5.0]], 0, None)
    assert found is not None and found.value == 2.0
    half = 4.302653 * 1 / sqrt(3)  # t(.975) with two degrees of freedom; the means are 1, 2, 3
    assert (found.lower, found.upper) == pytest.approx((2 - half, 2 + half))
    assert found.p == pytest.approx(2 * two_df_tail(2 * sqrt(3)))


def test_many_teachers_of_one_make_are_one_observation() -> None:
    few = mean_over_makes([[1.0], [2.0], [3.0]], 0, None)
    many = mean_over_makes([[1.0] * 50, [2.0], [3.0]], 0, None)
    assert few == many
    assert mean_over_makes([[1.0] * 50, [2.0] * 50], 0, None) is None


def test_an_equivalence_needs_both_one_sided_tests() -> None:
    close, wide, far = ([0.99, 1.0, 1.01], [0.8, 1.0, 1.2], [1.49, 1.5, 1.51])
    inside, undecided, outside = (
        mean_over_makes([[value] for value in values], 0.9, 1.1) for values in (close, wide, far)
    )
    assert inside is not None and undecided is not None and outside is not None
    assert inside.p_for == pytest.approx(two_df_tail(0.1 / (0.01 / sqrt(3))))
    assert inside.p < 0.05 < undecided.p
    assert outside.p_against < 0.01 < outside.p_for
    # The rule is symmetric: p-values change places when the claim is the opposite.
    above, below = (mean_over_makes([[v] for v in close], *bounds) for bounds in ((0.5, None), (None, 0.5)))
    assert above is not None and below is not None
    assert (above.p_for, above.p_against) == pytest.approx((below.p_against, below.p_for))


def test_the_equivalence_test_errs_rarely_at_its_bound() -> None:
    """Simulation: a true mean on the bound passes in at most 2.5 % of samples, as each side is tested at that level."""
    rng = np.random.default_rng(0)
    passed = 0
    for values in rng.normal(1.1, 0.01, size=(2000, 5)):
        found = mean_over_makes([[float(value)] for value in values], 0.9, 1.1)
        assert found is not None
        passed += found.p < 0.05 and found.p_for < found.p_against
    assert 0.015 < passed / 2000 < 0.036


def test_trends_are_pooled_by_fishers_z() -> None:
    up = [(float(i), float(i)) for i in range(10)]
    swapped = [(0.0, 1.0), (1.0, 0.0), *up[2:]]  # Spearman's correlation 1 - 6 * 2 / 990
    rho = 1 - 12 / 990
    found = trend_within_makes([swapped, swapped, swapped], 0, None)
    assert found is not None and found.value == pytest.approx(rho)
    half = 1.959964 * sqrt(1.06 / 21)
    assert found.lower == pytest.approx(tanh(atanh(rho) - half), abs=1e-6)
    assert found.p_for < 1e-9
    reversed_ = [(x, -y) for x, y in swapped]
    against = trend_within_makes([reversed_] * 3, 0, None)
    assert against is not None and against.p_against == pytest.approx(found.p_for)
    assert trend_within_makes([up, up], 0, None) is None


def test_holm_is_the_textbook_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_holm_keeps_the_chance_of_any_false_verdict() -> None:
    p_values = np.random.default_rng(2).random((4000, 20))
    any_false = np.mean([min(holm(row.tolist())) < 0.05 for row in p_values])
    assert 0.038 < any_false < 0.06
