"""DMD along depth: eigenvalues, spectra, reconstruction, and what the rank of the fit decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.dynamics.modes import GroupModes
from raptor.report.charts import GROUPS, SHOWN_ON_PAPER, Axis, Chart, Figure, Series, number, of_group

_POOLED = "one fit for all images"


def _modes(sides: dict[str, DynamicsResult]) -> Iterator[tuple[str, str, GroupModes]]:
    for side, found in sides.items():
        for group in GROUPS:
            if group in found.modes.groups:
                yield side, group, found.modes.groups[group]


def _first(sides: dict[str, DynamicsResult]) -> tuple[str, GroupModes]:
    _, group, modes = next(_modes(sides))
    return group, modes


def eigenvalues(sides: dict[str, DynamicsResult]) -> Chart:
    """Eigenvalues on the complex plane: of one fit per image, and of the fit pooled over all images."""
    series: list[Series] = []
    for side, group, modes in _modes(sides):
        fitted, pooled = _finite(modes.eigenvalues), _finite(modes.pooled.eigenvalues)
        series.append(of_group(group, side, fitted.real, fitted.imag))
        large = of_group(group, side, pooled.real, pooled.imag)
        series.append(replace(large, name=f"{large.name}, {_POOLED}", base=_POOLED, large=True))
        series[-1].when["tokens"] = [group]
    group, first = _first(sides)
    radius, modulus = float(first.spectral_radius.mean), float(first.median_modulus.mean)
    furthest = max((np.abs(np.hypot(one.x, one.y)).max(initial=0) for one in series), default=0.0)
    limit = 1.06 * max(1.0, float(furthest))
    return Chart(
        id="eigenvalues",
        kind="points",
        title="DMD eigenvalues",
        caption="Inside the circle contracts, the angle rotates. Look for a cluster near +1.",
        alt=f"{series[0].name}: mean spectral radius {number(radius)}, median modulus {number(modulus)}",
        series=series,
        x=Axis("real part of λ", range=(-limit, limit)),
        y=Axis("imaginary part of λ", range=(-limit, limit)),
        circle=True,
    )


def figure_eigenvalues(measured: DynamicsFile) -> Figure:
    """On paper: a row per model, a column per token group."""
    sides = measured.sides()
    chart = eigenvalues(sides)
    rows: list[list[Chart | None]] = []
    for side, found in sides.items():
        row: list[Chart | None] = []
        for group in SHOWN_ON_PAPER:
            if group in found.modes.groups:
                row.append(_plane_of_group(chart, group, side, found, len(sides)))
        rows.append(row)
    return Figure(rows, size=(3.1, 3.2))


def _plane_of_group(chart: Chart, group: str, side: str, found: DynamicsResult, num_sides: int) -> Chart:
    name = f"{group}, {side}" if num_sides > 1 else group
    title = f"{name}\nmean spectral radius {found.modes.groups[group].spectral_radius.mean:.3f}"
    own = []
    for series in chart.only(tokens=group).series:
        if series.side == side:
            label = _POOLED if series.large else "one fit per image"
            own.append(replace(series, name=label, base=label, side=""))
    return replace(chart, series=own, title=title)


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def spectrum(sides: dict[str, DynamicsResult]) -> Chart:
    """Singular values of the trajectories of group means, over the largest."""
    series: list[Series] = []
    for side, group, modes in _modes(sides):
        values = modes.singular_values.mean
        series.append(of_group(group, side, list(range(1, len(values) + 1)), values / (values[0] or 1.0)))
    return Chart(
        id="singular-values",
        kind="lines",
        title="Singular spectrum",
        caption="Look for a fast fall: few directions carry the whole path through depth.",
        series=series,
        x=Axis("index i", integer=True),
        y=Axis("σᵢ / σ₁", log=True),
    )


def figure_singular_values(measured: DynamicsFile) -> Figure:
    title = "Singular spectrum of the trajectory"
    return Figure([[spectrum(measured.sides()).only(tokens=SHOWN_ON_PAPER, title=title)]])


def reconstruction(sides: dict[str, DynamicsResult], phases: list[int] | None) -> Chart:
    """Error of the states rebuilt by t steps of the fitted operator."""
    series: list[Series] = []
    for side, group, modes in _modes(sides):
        values = modes.reconstruction_error.mean
        layers = list(range(len(values)))
        series.append(of_group(group, side, layers, values))
        if side == "teacher":
            pooled = modes.pooled.reconstruction_error.mean
            name, when = "one pooled fit", {"tokens": [group]}
            series.append(Series(name, layers, pooled, colour=group, side="null", base=name, when=when))
    _, first = _first(sides)
    return Chart(
        id="reconstruction",
        kind="lines",
        title="Rebuilt by a linear operator",
        caption=f"Error of t steps of a rank-{first.rank} linear map. Small is nearly linear, but a high rank fits "
        "anything.",
        series=series,
        x=Axis("layer l", integer=True),
        y=Axis("relative error", from_zero=True),
        phases=phases,
    )


def rank_sweep(sides: dict[str, DynamicsResult]) -> Chart:
    """The median modulus against the rank of the fit."""
    series: list[Series] = []
    for side, group, modes in _modes(sides):
        ranks = sorted(modes.sweep)
        if ranks:
            moduli = [modes.sweep[rank].median_modulus.mean for rank in ranks]
            series.append(of_group(group, side, ranks, moduli))
    return Chart(
        id="rank-sweep",
        kind="lines",
        title="Does the rank decide it?",
        caption="Trust a modulus that stays as the rank grows; one that drifts is an artefact of the fit.",
        series=series,
        x=Axis("rank r of the fit", integer=True),
        y=Axis("median |λ|", from_zero=True),
    )


def _sweep_of_errors(sides: dict[str, DynamicsResult]) -> Chart:
    """The reconstruction error, mean over layers, against the rank of the fit."""
    series: list[Series] = []
    for side, group, modes in _modes(sides):
        ranks = sorted(modes.sweep)
        errors = [float(np.mean(modes.sweep[rank].reconstruction_error.mean[1:])) for rank in ranks]
        series.append(of_group(group, side, ranks, errors))
    return Chart(
        id="rank-sweep-error",
        kind="lines",
        title="Reconstruction error",
        caption="Look for the rank from which more modes no longer help.",
        series=series,
        x=Axis("rank r of the fit", integer=True),
        y=Axis("relative error, mean over layers", from_zero=True),
    )


def figure_rank_sweep(measured: DynamicsFile) -> Figure:
    """On paper: reconstruction error and median modulus side by side."""
    sides = measured.sides()
    left = _sweep_of_errors(sides).only(tokens=SHOWN_ON_PAPER)
    right = rank_sweep(sides).only(tokens=SHOWN_ON_PAPER, title="Median modulus")
    return Figure([[left, replace(right, y=replace(right.y, from_zero=False))]], size=(4.3, 3.4))
