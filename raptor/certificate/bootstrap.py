"""Bootstrap intervals over images: resample the images, measure again, take percentiles.

A single image has no interval: all its resamples are the same, which says nothing about other images.

Not `scipy.stats.bootstrap`: that draws anew for each column and holds all resampled rows. Here one set of draws serves
thousands of columns (layers x groups x metrics) as a product with counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from raptor.streaming import Array

LEVEL = 0.95
_ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
CHUNK = 100  # resamples made at once


def resampled_means(values_nm: Array, num_resamples: int, seed: int = 0) -> Array:
    """Means of M values over N images drawn with replacement, (R, M); NaN of a single image.

    Every column sees the same resamples.
    """
    rng = np.random.default_rng(seed)
    num_images = len(values_nm)
    # In chunks: all counts at once would take num_resamples x num_images numbers.
    means = np.full((num_resamples, values_nm.shape[1]), np.nan)
    if num_images == 1:
        return means
    for start in range(0, num_resamples, CHUNK):
        rows = min(CHUNK, num_resamples - start)
        drawn = rng.integers(num_images, size=(rows, num_images)) + num_images * np.arange(rows)[:, None]
        # Row r of the draws is shifted by r x num_images, so that one bincount counts every resample by itself.
        counts = np.bincount(drawn.ravel(), minlength=rows * num_images).reshape(rows, num_images)
        means[start : start + rows] = counts @ values_nm / num_images
    return means


def interval(estimates: Array) -> Array:
    """Percentile interval of estimates (R, ...): (2, ...), lower and upper end. NaN where there are no resamples."""
    if len(estimates) == 0:
        return np.full((2, *estimates.shape[1:]), np.nan)
    return np.quantile(estimates, _ENDS, axis=0)


def statistic_interval(
    columns: Sequence[Array], statistic: Callable[..., Array], num_resamples: int, seed: int = 0
) -> Array:
    """Interval (2, ...) of `statistic(mean of each column)`; columns are (N, ...) of one shape."""
    shape = columns[0].shape[1:]
    flat = np.concatenate([c.reshape(len(c), -1) for c in columns], axis=1)
    means = resampled_means(flat, num_resamples, seed).reshape(num_resamples, len(columns), *shape)
    # A resample may hold nothing to divide by. NaN is then the right answer, and no reason for a warning.
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval(statistic(*np.moveaxis(means, 1, 0)))
