"""Perturbations on paper: every panel holds the angles of its token group."""

from __future__ import annotations

import numpy as np

from raptor.report.results import Results
from raptor.report.stability import figure_perturbed_path, figure_sensitivity


def test_every_panel_of_perturbations_holds_its_group(committed: Results) -> None:
    measured = committed.dynamics
    assert measured is not None and measured.teacher.stability is not None
    found = measured.teacher.stability
    figure = figure_perturbed_path(measured)
    assert figure is not None
    (panels,) = figure.panels
    target, middle = found.targets.index("all"), len(found.eps) // 2
    for chart in panels:
        assert chart is not None
        group = found.groups.index(chart.title)
        own = [series for series in chart.series if series.side == "teacher"]
        assert [series.base for series in own] == [f"from layer {layer}" for layer in (0, 3, 6, 8)]
        for series, i in zip(own, (0, 3, 6, 8)):
            np.testing.assert_array_equal(series.y, found.path[target, group, middle, i])
    figure = figure_sensitivity(measured)
    assert figure is not None
    every, alone = figure.panels[0]
    assert every is not None and alone is not None
    for chart, targets in ((every, ["all", "all", "all"]), (alone, ["cls", "registers", "patches"])):
        own = [series for series in chart.series if series.side == "teacher"]
        for series, group, name in zip(own, ("cls", "registers", "patches"), targets, strict=True):
            place = found.targets.index(name), found.groups.index(group), 0
            np.testing.assert_array_equal(series.y, found.angle_per_eps.mean[place])
