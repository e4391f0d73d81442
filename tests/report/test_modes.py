"""Modes: eigenvalues and the sweep over ranks, on the page and on paper, are those of dynamics.json."""

from __future__ import annotations

import numpy as np

from raptor.report.dynamics import dynamics
from raptor.report.modes import figure_eigenvalues, figure_rank_sweep
from raptor.report.paper import draw
from raptor.report.results import Results


def test_eigenvalues_are_finite_and_those_of_both_fits(committed: Results) -> None:
    assert committed.dynamics is not None
    modes = committed.dynamics.teacher.modes.groups["cls"]
    chart = next(chart for chart in dynamics(committed).charts if chart.id == "eigenvalues")
    assert all(np.isfinite(series.x).all() and len(series.x) > 0 for series in chart.series)
    own = [s for s in chart.series if s.colour == "cls" and s.side == "teacher"]
    for series, values in zip(own, (modes.eigenvalues, modes.pooled.eigenvalues), strict=True):
        np.testing.assert_array_equal(series.x + 1j * series.y, values[np.isfinite(values)])
    panels = draw(figure_eigenvalues(committed.dynamics)).axes
    assert len(panels) == 6 and f"mean spectral radius {modes.spectral_radius.mean:.3f}" in panels[0].get_title()


def test_the_rank_sweep_has_one_point_per_rank(committed: Results) -> None:
    measured = committed.dynamics
    assert measured is not None
    sweep = measured.teacher.modes.groups["cls"].sweep
    left, right = draw(figure_rank_sweep(measured)).axes
    for ax in (left, right):
        line = next(line for line in ax.get_lines() if line.get_label() == "cls, teacher")
        assert list(line.get_xdata()) == list(sweep)
    assert list(line.get_ydata()) == [fit.median_modulus.mean for fit in sweep.values()]
