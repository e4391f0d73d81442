"""Bootstrap means and quantiles."""

from __future__ import annotations

import numpy as np

from raptor.certificate.bootstrap import interval, resampled_means, statistic_interval


def test_resampled_means_have_the_standard_error() -> None:
    values = np.random.default_rng(0).normal(3, 2, size=(400, 3))
    means = resampled_means(values, 2000, seed=1)
    np.testing.assert_allclose(means.mean(0), values.mean(0), atol=0.02)
    np.testing.assert_allclose(means.std(0), values.std(0) / 20, rtol=0.06)
    ends = statistic_interval([values], lambda v: v, 2000, seed=1)
    np.testing.assert_allclose(ends[1] - ends[0], 2 * 1.96 * values.std(0) / 20, rtol=0.08)


def test_an_interval_holds_the_middle_95_per_cent() -> None:
    np.testing.assert_allclose(interval(np.arange(1001.0)), [25, 975])


def test_without_resamples_an_interval_is_undefined() -> None:
    assert np.isnan(interval(np.empty((0, 3)))).all() and interval(np.empty((0, 3))).shape == (2, 3)
    # One resample is its own interval.
    np.testing.assert_array_equal(interval(np.array([[2.0]])), [[2.0], [2.0]])


def test_resamples_are_drawn_in_chunks_of_one_stream() -> None:
    """250 resamples are two chunks of 100 and one of 50, and each row is the mean of the images drawn for it."""
    values = np.random.default_rng(3).normal(size=(7, 2))
    rng = np.random.default_rng(5)
    drawn = np.concatenate([rng.integers(7, size=(num, 7)) for num in (100, 100, 50)])
    np.testing.assert_allclose(resampled_means(values, 250, seed=5), values[drawn].mean(1), rtol=1e-12)


def test_every_run_draws_the_same_resamples() -> None:
    values = np.random.default_rng(0).normal(size=(5, 1))
    drawn = np.random.default_rng(0).integers(5, size=(3, 5))
    np.testing.assert_allclose(resampled_means(values, 3), values[drawn].mean(1))
    np.testing.assert_allclose(statistic_interval([values], lambda v: v, 3), interval(values[drawn].mean(1)))


def test_a_single_image_has_no_interval() -> None:
    """Its resamples are all the same: an interval of width 0 would say that other images are like it."""
    one = np.array([[3.0, 4.0]])
    assert np.isnan(statistic_interval([one], lambda v: v, 50)).all()
