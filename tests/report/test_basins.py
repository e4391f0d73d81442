"""Basins on the page: paths and curves are those of dynamics.json."""

from __future__ import annotations

import numpy as np

from raptor.report.basins import basins, figure_basins, figure_paths
from raptor.report.paper import draw
from raptor.report.results import Results


def test_paths_and_curves_are_the_saved_ones(committed: Results) -> None:
    assert committed.dynamics is not None
    found = {side: m.basins for side, m in committed.dynamics.sides().items() if m.basins is not None}
    charts = {chart.id: chart for chart in basins(committed).charts}
    first = next(iter(found.values()))
    drawn = [s for s in charts["basin-paths"].series if s.when == {"tokens": ["cls"], "model": ["teacher"]}]
    assert len(drawn) == len(first.classes)
    for series, path in zip(drawn, first.groups["cls"].class_paths):
        np.testing.assert_array_equal(np.stack([series.x, series.y, series.z], 1), path)
    for series in charts["basins-accuracy"].series:
        (group,) = series.when["tokens"]
        np.testing.assert_allclose(series.y, 100 * found[series.side].groups[group].accuracy)
    assert charts["basins-accuracy"].level == 100 * first.chance


def test_without_basins_there_is_a_hint(committed: Results) -> None:
    section = basins(Results(committed.folder))
    assert section.charts == [] and section.hint is not None and section.hint.startswith("raptor dynamics")


def test_paper_has_the_curves_in_percent_and_a_panel_of_paths_per_group_and_model(committed: Results) -> None:
    measured = committed.dynamics
    assert measured is not None and measured.teacher.basins is not None
    figure = figure_basins(measured)
    assert figure is not None
    lines = {line.get_label(): line.get_ydata() for line in draw(figure).axes[0].get_lines()}
    groups = measured.teacher.basins.groups
    np.testing.assert_allclose(lines["patches, teacher"], 100 * groups["patches"].accuracy)
    assert [100 * measured.teacher.basins.chance] * 2 in [list(line) for line in lines.values()]
    figure = figure_paths(measured)
    assert figure is not None
    axes = draw(figure).axes
    assert [ax.get_title() for ax in axes[:3]] == ["cls, teacher", "registers, teacher", "patches, teacher"]
    np.testing.assert_array_equal(axes[0].get_lines()[0].get_xydata(), groups["cls"].class_paths[0][:, :2])
