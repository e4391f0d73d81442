"""Statistics of the experiments: means over seeds, z-scores, correlations with bootstrap intervals, trends with p."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np
from numpy.typing import ArrayLike, NDArray
from records import Correlation, Interval, MeanOverSeeds, Trend, ZScore
from scipy import stats

from raptor.fidelity.bootstrap import interval
from raptor.phases import within_and_across

Array = NDArray[np.float64]
_NUM_RESAMPLES = 10_000


def off_diagonal_mean(matrix: ArrayLike) -> float:
    """Mean entry of a layer-layer matrix (L, L) off its diagonal."""
    m = np.asarray(matrix, dtype=np.float64)
    return float(m[~np.eye(len(m), dtype=bool)].mean())


def within_phases_mean(matrix: ArrayLike, lengths: Sequence[int]) -> float | None:
    """Mean entry off the diagonal of pairs of layers in one phase; None when every phase is one layer."""
    return within_and_across(matrix, lengths)[0]


def spread(values: Sequence[float | None]) -> MeanOverSeeds:
    """Mean and sample deviation; None where a value is missing, or for the deviation of one."""
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        return MeanOverSeeds()
    return MeanOverSeeds(mean=fmean(known), deviation=stdev(known) if len(known) > 1 else None)


def z_score(value: float, sample: Sequence[float]) -> ZScore:
    """Distance of `value` from the mean of `sample` in sample deviations, and the share of the sample below it.

    z is None where the sample has fewer than two values or does not vary.
    """
    x = np.asarray(sample, dtype=np.float64)
    mean = float(x.mean()) if len(x) else None
    deviation = float(x.std(ddof=1)) if len(x) > 1 else None
    z = (value - mean) / deviation if mean is not None and deviation else None
    below = float((x < value).mean()) if len(x) else None
    return ZScore(value=float(value), mean=mean, deviation=deviation, z=z, below=below, num=len(x))


def correlation(x: Sequence[float], y: Sequence[float], seed: int = 0) -> Correlation:
    """Pearson's and Spearman's correlation of pairs, each with a 95 % percentile interval over resampled pairs.

    A resample in which one side does not vary has no correlation and is left out. None where there are fewer than three
    pairs or one side does not vary.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    assert a.shape == b.shape and a.ndim == 1
    if len(a) < 3 or min(np.ptp(a), np.ptp(b)) == 0:
        return Correlation(num=len(a), pearson=None, spearman=None)
    found: dict[str, Interval] = {}
    for name, statistic in (("pearson", _pearson), ("spearman", _spearman)):
        with warnings.catch_warnings():
            # scipy warns that its interval contains resamples without a correlation; our interval leaves them out.
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            resampled = stats.bootstrap(
                (a, b),
                statistic,
                n_resamples=_NUM_RESAMPLES,
                paired=True,
                vectorized=True,
                method="percentile",
                rng=np.random.default_rng(seed),
            ).bootstrap_distribution
        lower, upper = interval(resampled[np.isfinite(resampled)])
        found[name] = Interval(value=float(statistic(a, b)), lower=float(lower), upper=float(upper))
    return Correlation(num=len(a), **found)


def partial_correlation(x: Sequence[float], y: Sequence[float], given: Sequence[float]) -> float | None:
    """Pearson correlation of the residuals of x and y after a linear fit in `given`; None if a residual is zero."""
    if len(x) < 4 or len(set(given)) < 2:
        return None
    line = np.stack([np.ones(len(given)), np.asarray(given, dtype=float)], axis=1)
    left = [v - line @ np.linalg.lstsq(line, v, rcond=None)[0] for v in (np.asarray(x, float), np.asarray(y, float))]
    if min(np.abs(v).max() for v in left) < 1e-12:
        return None
    return float(_pearson(*left))


def permutation_p(x: Sequence[float], y: Sequence[float], seed: int = 0) -> float | None:
    """Share of pairings with a Spearman correlation at least as large (one-sided).

    Over all pairings where there are few, else over 10,000 random ones and the real one. None where there are fewer
    than three pairs or one side does not vary.
    """
    if len(x) < 3 or min(np.ptp(x), np.ptp(y)) == 0:
        return None
    rank_x = stats.rankdata(x)
    found = stats.permutation_test(
        (stats.rankdata(y),),
        lambda rank_y, axis: _pearson(rank_x, rank_y),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=_NUM_RESAMPLES,
        alternative="greater",
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def trend(x: Sequence[float], y: Sequence[float]) -> Trend:
    """Trend of y with x: correlations, the one-sided chance of a rise (and a fall) as strong, and the mean of y at the
    smallest and at the largest x."""
    found = correlation(x, y)
    return Trend(
        num=found.num,
        pearson=found.pearson,
        spearman=found.spearman,
        p_rise=permutation_p(x, y),
        p_fall=permutation_p(x, [-v for v in y]),
        first=fmean(b for a, b in zip(x, y) if a == min(x)) if y else None,
        last=fmean(b for a, b in zip(x, y) if a == max(x)) if y else None,
    )


def _pearson(x: Array, y: Array, axis: int = -1) -> Array:
    """Correlation along the last axis; NaN where one side does not vary."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        x, y = np.broadcast_arrays(x, y)
        return stats.pearsonr(x, y, axis=axis).statistic


def _spearman(x: Array, y: Array, axis: int = -1) -> Array:
    return _pearson(stats.rankdata(x, axis=axis), stats.rankdata(y, axis=axis), axis)
