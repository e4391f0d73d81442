from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from raptor.experiments.statistics import (
    correlation,
    off_diagonal_mean,
    partial_correlation,
    pearson,
    permutation_p,
    ranks,
    trend,
    within_phases_mean,
    z_score,
)

RNG = np.random.default_rng(3)


def test_z_score_is_that_of_scipy() -> None:
    sample = RNG.normal(size=10)
    found = z_score(1.3, sample.tolist())
    assert found["z"] == pytest.approx(stats.zmap([1.3], sample, ddof=1)[0])
    assert found["mean"] == pytest.approx(np.mean(sample)) and found["deviation"] == pytest.approx(stats.tstd(sample))
    assert found["below"] == stats.percentileofscore(sample, 1.3, kind="strict") / 100
    assert z_score(1.0, [0.5, 0.5])["z"] is None and z_score(1.0, [0.5])["deviation"] is None
    assert z_score(1.0, [])["mean"] is None


@pytest.mark.parametrize("ties", [False, True])
def test_correlations_are_those_of_scipy(ties: bool) -> None:
    x = RNG.normal(size=14)
    y = x + RNG.normal(size=14)
    if ties:
        x, y = x.round(0), y.round(0)
    found = correlation(x.tolist(), y.tolist())
    assert found["pearson"]["value"] == pytest.approx(stats.pearsonr(x, y).statistic)
    assert found["spearman"]["value"] == pytest.approx(stats.spearmanr(x, y).statistic)
    np.testing.assert_allclose(ranks(x), stats.rankdata(x))


def test_the_bootstrap_interval_is_that_of_scipy() -> None:
    x = RNG.normal(size=14)
    y = 0.8 * x + 0.6 * RNG.normal(size=14)
    found = correlation(x.tolist(), y.tolist())["pearson"]
    theirs = stats.bootstrap(
        (x, y), lambda a, b, axis: pearson(a, b), paired=True, vectorized=True, n_resamples=10_000, method="percentile",
        rng=np.random.default_rng(1),
    )  # fmt: skip
    # Two independent sets of 10,000 resamples: the ends agree to their Monte-Carlo error.
    assert found["lower"] == pytest.approx(theirs.confidence_interval.low, abs=0.03)
    assert found["upper"] == pytest.approx(theirs.confidence_interval.high, abs=0.01)
    assert found["lower"] < found["value"] < found["upper"]


def test_a_side_that_does_not_vary_has_no_correlation() -> None:
    found = correlation([1.0, 2.0, 3.0], [5.0, 5.0, 5.0])
    assert found["pearson"] is None and found["spearman"] is None
    assert permutation_p([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]) is None
    assert correlation([1.0, 2.0], [1.0, 2.0])["pearson"] is None


def test_permutation_p_matches_the_exact_count() -> None:
    x, y = [0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 2.0, 4.0, 3.0]
    exact = stats.permutation_test(
        (np.array(y),), lambda v: stats.spearmanr(x, v).statistic, permutation_type="pairings", alternative="greater",
        n_resamples=np.inf,
    ).pvalue  # fmt: skip
    assert permutation_p(x, y) == pytest.approx(exact, abs=0.015)
    rising = trend(x, [0.1, 0.2, 0.3, 0.4, 0.5])
    assert rising["p_rise"] == pytest.approx(1 / 120, abs=0.004) and rising["p_fall"] == 1.0
    assert (rising["first"], rising["last"]) == (0.1, 0.5)


def test_means_of_a_similarity_matrix_by_hand() -> None:
    matrix = [[1.0, 0.8, 0.1], [0.8, 1.0, 0.3], [0.1, 0.3, 1.0]]
    assert off_diagonal_mean(matrix) == pytest.approx((0.8 + 0.1 + 0.3) / 3)
    assert within_phases_mean(matrix, [2, 1]) == pytest.approx(0.8)
    assert within_phases_mean(matrix, [3]) == pytest.approx(0.4)
    assert within_phases_mean(matrix, [1, 1, 1]) is None


def test_partial_correlation_is_the_closed_form_of_three_correlations() -> None:
    z = RNG.normal(size=40)
    x, y = z + 0.5 * RNG.normal(size=40), -z + 0.5 * RNG.normal(size=40)
    xy, xz, yz = (stats.pearsonr(a, b).statistic for a, b in ((x, y), (x, z), (y, z)))
    expected = (xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2))
    assert partial_correlation(x.tolist(), y.tolist(), z.tolist()) == pytest.approx(expected)
    line = (2 * z + 1).tolist()  # nothing is left of it
    assert partial_correlation(line, y.tolist(), z.tolist()) is None
    assert partial_correlation([1.0, 2.0, 4.0], [1.0, 3.0, 2.0], [0.0, 1.0, 2.0]) is None
