"""Figures in files hold the numbers of the result files, one panel per value of the chooser that became panels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.dynamics.tangents import TangentsFile
from raptor.report import figures
from raptor.report.charts import Chart, descriptions
from raptor.report.dynamics import dynamics_charts
from raptor.report.figures import FIGURES, on_paper, save_figures
from raptor.report.interventions import intervention_charts
from raptor.report.paper import draw
from raptor.report.results import Results
from raptor.report.stability import tangent_charts

DYNAMICS = Path(__file__).parents[2] / "docs" / "results" / "dynamics"
WITHOUT_REGISTERS = DYNAMICS / "vitb16.json"
TANGENTS = DYNAMICS / "scenes-k3-tangents.json"


@pytest.fixture(scope="module")
def charts(committed: Results) -> list[Chart]:
    assert committed.dynamics is not None and committed.interventions is not None
    tangents = tangent_charts(TangentsFile.read_file(TANGENTS))
    return dynamics_charts(committed.dynamics) + intervention_charts(committed.interventions) + tangents


def panels(name: str, charts: list[Chart]) -> list[list[Chart | None]]:
    figure = on_paper(name, charts)
    assert figure is not None
    return [list(row) for row in figure.panels]


def drawn(name: str, charts: list[Chart]) -> Any:
    figure = on_paper(name, charts)
    assert figure is not None
    return draw(figure)


@pytest.fixture
def teacher(committed: Results) -> DynamicsResult:
    assert committed.dynamics is not None
    return committed.dynamics.teacher


def test_every_figure_is_of_charts_that_are_there(charts: list[Chart]) -> None:
    not_measured = {"dynamics-speed-variance", "gathering-tokens", "gathering-updates", "attraction"}
    for name, about in FIGURES.items():
        assert set(about.charts) <= descriptions().keys()
        if not_measured.isdisjoint(about.charts) and name.split("-")[0] in ("dynamics", "interventions", "tangents"):
            assert all(any(chart is not None for chart in row) for row in panels(name, charts)), name


def test_curves_are_drawn_with_the_ends_of_phases(committed: Results, charts: list[Chart]) -> None:
    measured = committed.dynamics
    assert measured is not None and measured.phases == [3, 4, 5]
    for quantity, first, ends in (("gamma", 0, [3, 7]), ("speed", 1, [3.5, 7.5])):
        (ax,) = drawn(f"dynamics-{quantity}", charts).axes
        lines = {line.get_label(): line for line in ax.get_lines()}
        for side, result in measured.sides().items():
            expected = getattr(result.direction, quantity)["cls"].mean
            line = lines[f"cls, {side}"]
            np.testing.assert_array_equal(line.get_ydata(), expected)
            np.testing.assert_array_equal(line.get_xdata(), np.arange(first, first + len(expected)))
        assert [line.get_xdata()[0] for line in ax.get_lines() if len(line.get_xdata()) == 2] == ends


def test_perturbations_have_a_panel_per_group_at_one_size(teacher: DynamicsResult, charts: list[Chart]) -> None:
    found = teacher.stability
    assert found is not None
    target, middle = found.targets.index("all"), len(found.eps) // 2
    (row,) = panels("dynamics-perturbed-path", charts)
    assert [chart.title for chart in row if chart] == ["cls", "registers", "patches"]
    for chart in row:
        assert chart is not None
        own = [series for series in chart.series if series.side == "teacher"]
        assert [series.base for series in own] == [f"from layer {layer}" for layer in (0, 3, 6, 9)]
        for series, layer in zip(own, (0, 3, 6, 9)):
            np.testing.assert_array_equal(series.y, found.path[target, found.groups.index(chart.title), middle, layer])
    (row,) = panels("dynamics-sensitivity", charts)
    assert [chart.title for chart in row if chart] == ["all tokens", "cls", "registers", "patches"]
    for chart, name in zip(row, found.targets):
        assert chart is not None
        own = [series for series in chart.series if series.side == "teacher"]
        for series, group in zip(own, ("cls", "registers", "patches"), strict=True):
            place = found.targets.index(name), found.groups.index(group), 0
            np.testing.assert_array_equal(series.y, found.angle_per_eps.mean[place])
    figure = on_paper("dynamics-sensitivity", charts)
    assert figure is not None and figure.title == f"Sensitivity, size ε {found.eps[0]:g}"


def test_modes_have_a_point_per_rank_and_a_plane_per_group_and_model(
    teacher: DynamicsResult, charts: list[Chart]
) -> None:
    sweep = teacher.modes.groups["cls"].sweep
    left, right = drawn("dynamics-rank-sweep", charts).axes
    for ax in (left, right):
        line = next(line for line in ax.get_lines() if line.get_label() == "cls, teacher")
        assert list(line.get_xdata()) == list(sweep)
    line = next(line for line in right.get_lines() if line.get_label() == "cls, teacher")
    assert list(line.get_ydata()) == [fit["median_modulus"].mean for fit in sweep.values()]
    titles = [[chart.title for chart in row if chart] for row in panels("dynamics-eigenvalues", charts)]
    assert titles == [[f"{g}, {side}" for g in ("cls", "registers", "patches")] for side in ("teacher", "surrogate")]


def test_panels_of_a_model_by_itself_are_not_called_the_teachers() -> None:
    rows = panels("dynamics-eigenvalues", dynamics_charts(DynamicsFile.read_file(WITHOUT_REGISTERS)))
    assert [[chart.title for chart in row if chart] for row in rows] == [["cls", "patches"]]


def test_swaps_have_an_outline_per_phase(committed: Results, charts: list[Chart]) -> None:
    assert committed.interventions is not None and committed.interventions.teacher is not None
    swaps = committed.interventions.teacher.swaps
    ax = drawn("interventions-swaps", charts).axes[0]
    image = np.ma.filled(ax.get_images()[0].get_array(), np.nan)
    np.testing.assert_array_equal(image, swaps.matrix(swaps.angle["all"].mean))
    assert [p.get_width() for p in ax.patches] == list(swaps.phases)


def test_a_side_without_agreement_leaves_its_place_empty(
    committed: Results, one_sided: tuple[str, InterventionsFile]
) -> None:
    without, changed = one_sided
    found = intervention_charts(changed)
    rows = panels("interventions-swaps", found)
    empty = [["teacher", "surrogate"][i] for i, row in enumerate(rows) if row[1] is None]
    assert empty == [without] and all(row[0] is not None for row in rows)
    (row,) = panels("interventions-repetition", found)
    assert row[1] is not None and {series.side for series in row[1].series} == {"teacher", "surrogate"} - {without}


def test_a_legend_stays_inside_its_figure_and_the_title_counts_the_perturbed_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = DynamicsFile.read_file(WITHOUT_REGISTERS)
    saved: dict[str, Any] = {}
    shown = ("dynamics-perturbed-path", "dynamics-speed")
    monkeypatch.setattr(figures, "FIGURES", {name: FIGURES[name] for name in shown})
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: saved.update({path.name: figure}))
    written = save_figures(dynamics_charts(measured), tmp_path, f"the model; {measured.images}")
    assert sorted(written) == sorted(shown)
    path, speed = (saved[name] for name in shown)
    assert path.legends[0].get_window_extent().width <= path.bbox.width
    assert f"{measured.teacher.num_stability_images} of {measured.images}" in path.get_suptitle().replace("\n", " ")
    assert f"the model; {measured.images}" in speed.get_suptitle().replace("\n", " ")


def test_what_was_not_measured_has_no_figure(charts: list[Chart]) -> None:
    tangents = TangentsFile.read_file(TANGENTS)
    alone = replace(tangents, teacher=replace(tangents.teacher, transplants=None), surrogate=None, twin=None)
    measured = DynamicsFile.read_file(WITHOUT_REGISTERS)
    without = replace(measured, teacher=replace(measured.teacher, stability=None, basins=None))
    found = dynamics_charts(without) + tangent_charts(alone)
    missing = {name for name in FIGURES if on_paper(name, found) is None}
    assert {"dynamics-sensitivity", "dynamics-basins", "tangents-transplants", "interventions-swaps"} <= missing
    assert {"dynamics-norm", "tangents-jacobian"}.isdisjoint(missing)
