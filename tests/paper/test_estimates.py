from __future__ import annotations

import numpy as np
import pytest
from estimates import (
    correlation,
    off_diagonal_mean,
    over_seeds,
    partial_correlation,
    spread,
    z_score,
)
from scipy import stats

RNG = np.random.default_rng(3)


def test_spreads_leave_out_nothing_silently() -> None:
    assert spread([1.0, 3.0]) == {"mean": 2.0, "deviation": pytest.approx(2**0.5)}
    assert spread([1.0]) == {"mean": 1.0, "deviation": None}
    assert spread([1.0, None]) == {"mean": None, "deviation": None}


def test_z_score_is_that_of_scipy() -> None:
    sample = RNG.normal(size=10)
    found = z_score(1.3, sample.tolist())
    assert found["z"] == pytest.approx(stats.zmap([1.3], sample, ddof=1)[0])
    assert found["mean"] == pytest.approx(np.mean(sample)) and found["deviation"] == pytest.approx(stats.tstd(sample))
    assert found["below"] == stats.percentileofscore(sample, 1.3, kind="strict") / 100
    assert z_score(1.0, [0.5, 0.5])["z"] is None and z_score(1.0, [0.5])["deviation"] is None
    assert z_score(1.0, [])["mean"] is None


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 by counting; ties share their mean rank."""
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


@pytest.mark.parametrize("ties", [False, True])
def test_correlations_are_those_of_numpy(ties: bool) -> None:
    x = RNG.normal(size=14)
    y = x + RNG.normal(size=14)
    if ties:
        x, y = x.round(0), y.round(0)
    found = correlation(x.tolist(), y.tolist())
    assert found["pearson"]["value"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert found["spearman"]["value"] == pytest.approx(np.corrcoef(mean_ranks(x), mean_ranks(y))[0, 1])


def test_the_bootstrap_interval_is_the_percentiles_over_resampled_pairs() -> None:
    x = RNG.normal(size=14)
    y = 0.8 * x + 0.6 * RNG.normal(size=14)
    found = correlation(x.tolist(), y.tolist())["pearson"]
    drawn = np.random.default_rng(1).integers(14, size=(10_000, 14))
    low, high = np.quantile([np.corrcoef(x[rows], y[rows])[0, 1] for rows in drawn], [0.025, 0.975])
    # Two independent sets of 10,000 resamples: the ends agree to their Monte-Carlo error.
    assert found["lower"] == pytest.approx(low, abs=0.03)
    assert found["upper"] == pytest.approx(high, abs=0.01)
    assert found["lower"] < found["value"] < found["upper"]


def test_a_side_that_does_not_vary_has_no_correlation() -> None:
    found = correlation([0.0, 0.0, 1.0], [1.0, 2.0, 4.0])["pearson"]  # some of the resamples do not vary
    assert np.isfinite([found["lower"], found["upper"]]).all()
    found = correlation([1.0, 2.0, 3.0], [5.0, 5.0, 5.0])
    assert found["pearson"] is None and found["spearman"] is None
    assert correlation([1.0, 2.0], [1.0, 2.0])["pearson"] is None


def test_the_mean_off_the_diagonal_by_hand() -> None:
    matrix = [[1.0, 0.8, 0.1], [0.8, 1.0, 0.3], [0.1, 0.3, 1.0]]
    assert off_diagonal_mean(matrix) == pytest.approx((0.8 + 0.1 + 0.3) / 3)


def test_partial_correlation_is_the_closed_form_of_three_correlations() -> None:
    z = RNG.normal(size=40)
    x, y = z + 0.5 * RNG.normal(size=40), -z + 0.5 * RNG.normal(size=40)
    xy, xz, yz = (stats.pearsonr(a, b).statistic for a, b in ((x, y), (x, z), (y, z)))
    expected = (xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2))
    assert partial_correlation(x.tolist(), y.tolist(), z.tolist()) == pytest.approx(expected)
    line = (2 * z + 1).tolist()  # nothing is left of it
    assert partial_correlation(line, y.tolist(), z.tolist()) is None
    assert partial_correlation([1.0, 2.0, 4.0], [1.0, 3.0, 2.0], [0.0, 1.0, 2.0]) is None


def test_the_interval_over_seeds_is_students() -> None:
    values = [0.2, 0.5, 0.3]
    found = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert over_seeds(values) == pytest.approx((1 / 3, found.low, found.high))
    assert over_seeds([0.2]) == (0.2, None, None)
