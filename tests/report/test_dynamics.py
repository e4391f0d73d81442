"""Dynamics: curves, eigenvalues and findings on the page are those of dynamics.json."""

from __future__ import annotations

from dataclasses import replace
from html import unescape

import numpy as np

from raptor.report.dynamics import basins, dynamics
from raptor.report.results import Results


def test_curves_are_the_saved_means_with_their_quartiles(committed: Results) -> None:
    assert committed.dynamics is not None
    sides = committed.dynamics.sides()
    charts = {chart.id: chart for chart in dynamics(committed).charts}
    for name in ("norm", "gamma", "speed"):
        chart = charts[f"dynamics-{name}"]
        assert len(chart.series) == sum(len(getattr(m.direction, name)) for m in sides.values())
        first = 1 if name == "speed" else 0  # a block belongs to the state after it
        for series in chart.series:
            spread = getattr(sides[series.side].direction, name)[series.when["tokens"][0]]
            np.testing.assert_array_equal(series.y, spread.mean)
            np.testing.assert_array_equal(series.lower, spread.quantile(0.25))
            assert series.x == list(range(first, first + len(spread.mean)))
        # A phase ends on a state, and between two blocks.
        assert chart.offset == (0.5 if name == "speed" else 0)


def test_findings_are_on_the_page(committed: Results) -> None:
    assert committed.dynamics is not None
    html = dynamics(committed).html
    assert html.count("<li>") == sum(len(m.findings) + len(m.notes) for m in committed.dynamics.sides().values())


def test_models_and_images_are_named_and_very_few_told_of(committed: Results) -> None:
    measured = committed.dynamics
    assert measured is not None and measured.surrogate is not None
    names = f"{measured.teacher.model.name} and {measured.surrogate.model.name}"
    html = dynamics(committed).html
    assert f"{names}, {measured.teacher.num_images:,} held-out images of {measured.data}" in unescape(html)
    assert "very few" not in html
    teacher = replace(measured.teacher, num_images=3)
    few = replace(measured, teacher=teacher, num_images=3, split="train", data="d", image_size=24)
    html = dynamics(replace(committed, dynamics=few)).html
    assert "3 training images of d at 24 px. Measured on very few images (3), so other images may give" in html


def test_a_model_by_itself_is_not_called_a_teacher(committed: Results) -> None:
    assert committed.dynamics is not None
    both = dynamics(committed)
    assert "solid lines the teacher" in both.lead and "In words: the teacher" in both.html
    alone = dynamics(replace(committed, dynamics=replace(committed.dynamics, surrogate=None)))
    assert "teacher" not in alone.lead and f"In words: {committed.dynamics.teacher.model.name}" in alone.html


def test_eigenvalues_are_finite_and_those_of_both_fits(committed: Results) -> None:
    assert committed.dynamics is not None
    modes = committed.dynamics.teacher.modes.groups["cls"]
    chart = next(chart for chart in dynamics(committed).charts if chart.id == "eigenvalues")
    assert all(np.isfinite(series.x).all() and len(series.x) > 0 for series in chart.series)
    own = [s for s in chart.series if s.colour == "cls" and s.side == "teacher"]
    for series, values in zip(own, (modes.eigenvalues, modes.pooled.eigenvalues), strict=True):
        np.testing.assert_array_equal(series.x + 1j * series.y, values[np.isfinite(values)])
    furthest = max(np.hypot(series.x, series.y).max() for series in chart.series)
    assert chart.x.range is not None and chart.x.range[1] > furthest


def test_charts_of_the_figures_folder_are_not_on_the_page(committed: Results) -> None:
    ids = {chart.id for chart in dynamics(committed).charts}
    assert "sensitivity" in ids and ids.isdisjoint({"attraction", "gathering-tokens", "rank-sweep-error"})


def test_a_surrogate_is_missed_only_where_there_is_one(committed: Results) -> None:
    assert committed.dynamics is not None
    without = replace(committed, dynamics=replace(committed.dynamics, surrogate=None))
    assert "the surrogate" in dynamics(without).hint_reason
    assert dynamics(replace(without, summary=None)).hint == ""


def test_paths_and_curves_of_basins_are_the_saved_ones(committed: Results) -> None:
    assert committed.dynamics is not None
    found = {side: m.basins for side, m in committed.dynamics.sides().items() if m.basins is not None}
    charts = {chart.id: chart for chart in basins(committed).charts}
    first = next(iter(found.values()))
    drawn = [s for s in charts["basin-paths"].series if s.when == {"tokens": ["cls"], "model": ["teacher"]}]
    assert len(drawn) == len(first.classes)
    for series, path in zip(drawn, first.groups["cls"].class_paths):
        np.testing.assert_array_equal(np.stack([series.x, series.y, series.z], 1), path)
    for series in charts["basins-accuracy"].series:
        group = series.when["tokens"][0]
        np.testing.assert_allclose(series.y, 100 * found[series.side].groups[group].accuracy)
    assert charts["basins-accuracy"].level == 100 * first.chance
    without = basins(Results(committed.folder))
    assert without.charts == [] and without.hint.startswith("raptor dynamics")
