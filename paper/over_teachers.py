"""Statistics over teachers: intervals, one-sided tests against a claim's bounds, and Holm's correction.

A teacher is one draw of everything that training decides, so images of one teacher say nothing of the next one.
Teachers of one make (architecture, data and recipe) resemble each other: their values are averaged first, and the makes
are the sample. A trend with stochastic depth is measured within each make and pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import atanh, inf, sqrt, tanh
from statistics import fmean, stdev

from scipy import stats

LEVEL = 0.95
NUM_MAKES = 3
"""Fewer makes of teachers give no verdict."""
_LARGEST_CORRELATION = 0.999  # Fisher's z of a perfect rank correlation is infinite
_FIELLER = 1.06  # variance of Fisher's z of Spearman's correlation times n - 3 (Fieller, Hartley and Pearson 1957)


@dataclass(frozen=True)
class Evidence:
    """An estimate over teachers and what it says of a claim.

    Attributes:
        value, lower, upper: the estimate and its 95 % interval, not corrected for the number of cards.
        p_for: one-sided p-value for the claim. With two bounds it is the larger of the two, as in the equivalence test
            by two one-sided tests (TOST).
        p_against: one-sided p-value for the opposite, so that the rule is the same for both verdicts.
    """

    value: float
    lower: float
    upper: float
    p_for: float
    p_against: float

    @property
    def p(self) -> float:
        """Two-sided: either verdict was possible."""
        return min(1.0, 2 * min(self.p_for, self.p_against))


def evidence(value: float, error: float, df: float, above: float | None, below: float | None) -> Evidence:
    """Student's t of an estimate with a standard error (normal for df = inf) against the claim's bounds."""
    assert above is not None or below is not None
    error = max(error, 1e-12)
    t = stats.t(df)
    half = float(t.ppf((1 + LEVEL) / 2)) * error
    p_inside = []
    if above is not None:
        p_inside.append(float(t.sf((value - above) / error)))
    if below is not None:
        p_inside.append(float(t.sf((below - value) / error)))
    # Two ways to lie outside an interval are two tests: the smaller p-value counts twice (Bonferroni).
    p_outside = min(1.0, len(p_inside) * min(1 - p for p in p_inside))
    return Evidence(value, value - half, value + half, max(p_inside), p_outside)


def mean_over_makes(makes: Sequence[Sequence[float]], above: float | None, below: float | None) -> Evidence | None:
    """Student's t over the means of makes; None with fewer than three makes."""
    means = list(map(fmean, makes))
    if len(means) < NUM_MAKES:
        return None
    return evidence(fmean(means), stdev(means) / sqrt(len(means)), len(means) - 1, above, below)


def trend_within_makes(
    makes: Sequence[Sequence[tuple[float, float]]], above: float | None, below: float | None
) -> Evidence | None:
    """Spearman's correlation of pairs, one make at a time, pooled by Fisher's z with weights n - 3.

    This holds for teachers of these makes: three makes are too few to say how makes differ.
    """
    if len(makes) < NUM_MAKES:
        return None
    total = 0.0
    weights = 0
    for teachers in makes:
        x, y = zip(*teachers)
        found = float(stats.spearmanr(x, y).statistic)
        clipped = max(-_LARGEST_CORRELATION, min(_LARGEST_CORRELATION, found))
        weight = len(teachers) - 3
        total += weight * atanh(clipped)
        weights += weight
    z_above = atanh(above) if above is not None else None
    z_below = atanh(below) if below is not None else None
    found_z = evidence(total / weights, sqrt(_FIELLER / weights), inf, z_above, z_below)
    return replace(found_z, value=tanh(found_z.value), lower=tanh(found_z.lower), upper=tanh(found_z.upper))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values by Holm's step-down method, in the order given."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        # A smaller p-value must not end up with a larger adjusted one.
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted
