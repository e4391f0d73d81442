"""Statistics of the experiments: means over seeds, z-scores, correlations with bootstrap intervals."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Array = NDArray[np.float64]
LEVEL = 0.95
_NUM_RESAMPLES = 10_000


def off_diagonal_mean(matrix: ArrayLike) -> float:
    """Mean entry of a layer-layer matrix (L, L) off its diagonal."""
    m = np.asarray(matrix, dtype=np.float64)
    return float(m[~np.eye(len(m), dtype=bool)].mean())


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample deviation; None where a value is missing, or for the deviation of one."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {"mean": None, "deviation": None}
    deviation = stdev(known) if len(known) > 1 else None
    return {"mean": fmean(known), "deviation": deviation}


def z_score(value: float, sample: Sequence[float]) -> dict[str, float | None]:
    """Distance of `value` from the mean of `sample` in sample deviations, and the share of the sample below it.

    z is None where the sample has fewer than two values or does not vary.
    """
    x = np.asarray(sample, dtype=np.float64)
    found: dict[str, float | None] = {"value": float(value), "mean": None, "deviation": None, "z": None, "below": None}
    found["num"] = len(x)
    if len(x):
        found["mean"] = mean = float(x.mean())
        found["below"] = float((x < value).mean())
    if len(x) > 1:
        found["deviation"] = deviation = float(x.std(ddof=1))
        if deviation:
            found["z"] = (value - mean) / deviation
    return found


def correlation(x: Sequence[float | None], y: Sequence[float | None], seed: int = 0) -> dict[str, Any]:
    """Pearson's and Spearman's correlation of pairs, each with a 95 % percentile interval over resampled pairs.

    Pairs with a missing value are left out. A resample in which one side does not vary has no correlation and is left
    out, too. None where there are fewer than three pairs or one side does not vary.
    """
    a, b = _known(x, y)
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
        known = resampled[np.isfinite(resampled)]
        lower, upper = np.quantile(known, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
        found[name] = {"value": float(statistic(a, b)), "lower": float(lower), "upper": float(upper)}
    return found


def partial_correlation(
    x: Sequence[float | None], y: Sequence[float | None], given: Sequence[float | None]
) -> float | None:
    """Pearson correlation of the residuals of x and y after a linear fit in `given`; None if a residual is zero."""
    *sides, fixed = _known(x, y, given)
    if len(fixed) < 4 or np.ptp(fixed) == 0:
        return None
    line = np.stack([np.ones(len(fixed)), fixed], axis=1)
    residuals = []
    for values in sides:
        residual = values - line @ np.linalg.lstsq(line, values, rcond=None)[0]
        if np.abs(residual).max() < 1e-12:
            return None
        residuals.append(residual)
    return float(_pearson(*residuals))


def _known(*sides: Sequence[float | None]) -> list[Array]:
    """The values of each side at the places where every side has one."""
    rows = [values for values in zip(*sides, strict=True) if None not in values]
    return list(np.array(rows, dtype=np.float64).reshape(-1, len(sides)).T.copy())


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
