"""Dynamics: curves, eigenvalues and findings, on the page and on paper, are those of dynamics.json."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raptor.dynamics.measure import DynamicsFile
from raptor.report import dynamics as report_of_dynamics
from raptor.report.dynamics import (
    FIGURES,
    dynamics,
    figure_panel,
    save_figures,
)
from raptor.report.paper import draw
from raptor.report.results import Results

WITHOUT_REGISTERS = Path(__file__).parents[2] / "docs" / "results" / "dynamics" / "vitb16.json"


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


def test_the_same_curves_are_drawn_on_paper(committed: Results) -> None:
    measured = committed.dynamics
    assert measured is not None and measured.phases == [3, 4, 5]
    for quantity, first, ends in (("gamma", 0, [3, 7]), ("speed", 1, [3.5, 7.5])):
        (ax,) = draw(figure_panel(quantity, measured)).axes
        lines = {line.get_label(): line for line in ax.get_lines()}
        for side, result in measured.sides().items():
            expected = getattr(result.direction, quantity)["cls"].mean
            line = lines[f"cls, {side}"]
            np.testing.assert_array_equal(line.get_ydata(), expected)
            np.testing.assert_array_equal(line.get_xdata(), np.arange(first, first + len(expected)))
        assert [line.get_xdata()[0] for line in ax.get_lines() if len(line.get_xdata()) == 2] == ends


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
    few = replace(measured, teacher=replace(measured.teacher, num_images=3), split="train", data="d", image_size=24)
    html = dynamics(replace(committed, dynamics=few)).html
    assert "3 training images of d at 24 px. Measured on very few images (3), so other images may give" in html


def test_without_dynamics_there_is_a_hint(committed: Results) -> None:
    section = dynamics(Results(committed.folder))
    assert section.charts == [] and section.hint is not None and section.hint.startswith("raptor dynamics")


def test_a_legend_stays_inside_its_figure_and_the_title_counts_the_perturbed_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = DynamicsFile.read_file(WITHOUT_REGISTERS)
    saved: dict[str, Any] = {}
    shown = ("dynamics-perturbed-path", "dynamics-speed")
    monkeypatch.setattr(report_of_dynamics, "FIGURES", {name: FIGURES[name] for name in shown})
    monkeypatch.setattr(report_of_dynamics, "save_figure", lambda figure, path: saved.update({path.name: figure}))
    save_figures(measured, None, tmp_path)
    path, speed = (saved[name] for name in shown)
    assert path.legends[0].get_window_extent().width <= path.bbox.width
    assert f"; {measured.teacher.num_stability_images} images of" in path.get_suptitle()
    assert f"; {measured.num_images} images of" in speed.get_suptitle()
