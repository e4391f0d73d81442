"""Statistics of the experiments: means over seeds, z-scores, correlations with bootstrap intervals, trends with p."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from raptor import within_and_across

Array = NDArray[np.float64]
_NUM_RESAMPLES = 10_000
LEVEL = 0.95
_ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


def off_diagonal_mean(matrix: ArrayLike) -> float:
    """Mean entry of a layer-layer matrix (L, L) off its diagonal."""
    m = np.asarray(matrix, dtype=np.float64)
    return float(m[~np.eye(len(m), dtype=bool)].mean())


def within_phases_mean(matrix: ArrayLike, lengths: Sequence[int]) -> float | None:
    """Mean entry off the diagonal of pairs of layers in one phase; None when every phase is one layer."""
    return within_and_across(matrix, lengths)[0]


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample deviation; None where a value is missing, or for the deviation of one."""
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        return {"mean": None, "deviation": None}
    return {"mean": fmean(known), "deviation": stdev(known) if len(known) > 1 else None}


def z_score(value: float, sample: Sequence[float]) -> dict[str, float | None]:
    """Distance of `value` from the mean of `sample` in sample deviations, and the share of the sample below it.

    z is None where the sample has fewer than two values or does not vary.
    """
    x = np.asarray(sample, dtype=np.float64)
    mean = float(x.mean()) if len(x) else None
    deviation = float(x.std(ddof=1)) if len(x) > 1 else None
    z = (value - mean) / deviation if mean is not None and deviation else None
    below = float((x < value).mean()) if len(x) else None
    return {"value": float(value), "mean": mean, "deviation": deviation, "z": z, "below": below, "num": len(x)}


def correlation(x: Sequence[float], y: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Pearson's and Spearman's correlation of pairs, each with a 95 % percentile interval over resampled pairs.

    A resample in which one side does not vary has no correlation and is left out. None where there are fewer than three
    pairs or one side does not vary.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    assert a.shape == b.shape and a.ndim == 1
    if len(a) < 3 or min(np.ptp(a), np.ptp(b)) == 0:
        return {"num": len(a), "pearson": None, "spearman": None}
    found: dict[str, Any] = {"num": len(a)}
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
        lower, upper = np.quantile(resampled[np.isfinite(resampled)], _ENDS)
        found[name] = {"value": float(statistic(a, b)), "lower": float(lower), "upper": float(upper)}
    return found


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


def trend(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Trend of y with x.

    The correlations, the one-sided chance of a rise and of a fall as strong as this one (`p_rise`, `p_fall`), and the
    mean of y at the smallest and at the largest x (`first`, `last`).
    """
    return {
        **correlation(x, y),
        "p_rise": permutation_p(x, y),
        "p_fall": permutation_p(x, [-v for v in y]),
        "first": fmean(b for a, b in zip(x, y) if a == min(x)) if y else None,
        "last": fmean(b for a, b in zip(x, y) if a == max(x)) if y else None,
    }


def over_seeds(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean over seeds with its 95 % interval by Student's t; one seed has no interval."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return mean, mean - half, mean + half


def _pearson(x: Array, y: Array, axis: int = -1) -> Array:
    """Correlation along the last axis; NaN where one side does not vary."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        x, y = np.broadcast_arrays(x, y)
        return stats.pearsonr(x, y, axis=axis).statistic


def _spearman(x: Array, y: Array, axis: int = -1) -> Array:
    return _pearson(stats.rankdata(x, axis=axis), stats.rankdata(y, axis=axis), axis)
