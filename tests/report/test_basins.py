"""Basins on the page: paths and curves are those of dynamics.json."""

from __future__ import annotations

import numpy as np

from raptor.report.basins import basins
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
        group = series.when["tokens"][0]
        np.testing.assert_allclose(series.y, 100 * found[series.side].groups[group].accuracy)
    assert charts["basins-accuracy"].level == 100 * first.chance


def test_without_basins_there_is_a_hint(committed: Results) -> None:
    section = basins(Results(committed.folder))
    assert section.charts == [] and section.hint is not None and section.hint.startswith("raptor dynamics")
