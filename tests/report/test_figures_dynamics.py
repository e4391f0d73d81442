"""Figures of the dynamics: the curves drawn are the numbers of dynamics.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest

from raptor.dynamics.measure import DynamicsFile
from raptor.report import figures_dynamics
from raptor.report.figures_dynamics import (
    FIGURES,
    figure_basins,
    figure_gamma,
    figure_rank_sweep,
    figure_speed,
    save_figures,
)
from raptor.report.results import Results

WITHOUT_REGISTERS = Path(__file__).parents[2] / "docs" / "results" / "dynamics" / "vitb16.json"


def test_curves_start_at_layer_zero_and_steps_at_block_one(committed: Results) -> None:
    measured = committed.dynamics
    assert measured is not None
    for draw, quantity, first in ((figure_gamma, "gamma", 0), (figure_speed, "speed", 1)):
        figure = draw(measured)
        lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
        for side, result in measured.sides().items():
            expected = getattr(result.direction, quantity)["cls"].mean
            line = lines[f"cls, {side}"]
            np.testing.assert_array_equal(line.get_ydata(), expected)
            np.testing.assert_array_equal(line.get_xdata(), np.arange(first, first + len(expected)))
        plt.close(figure)


def test_basins_are_in_percent_with_chance(committed: Results) -> None:
    measured = committed.dynamics
    assert measured is not None and measured.teacher.basins is not None
    figure = figure_basins(measured)
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    np.testing.assert_allclose(lines["patches, teacher"], 100 * measured.teacher.basins.groups["patches"].accuracy)
    plt.close(figure)


def test_the_rank_sweep_has_one_point_per_rank(committed: Results) -> None:
    measured = committed.dynamics
    assert measured is not None
    figure = figure_rank_sweep(measured)
    sweep = measured.teacher.modes.groups["cls"].sweep
    line = next(line for line in figure.axes[1].get_lines() if line.get_label() == "cls, teacher")
    assert list(line.get_xdata()) == list(sweep)
    assert list(line.get_ydata()) == [fit.median_modulus.mean for fit in sweep.values()]
    plt.close(figure)


def test_every_figure_names_a_measure_of_the_result(committed: Results) -> None:
    assert committed.dynamics is not None
    assert all(hasattr(committed.dynamics.teacher, measure) for measure, _ in FIGURES.values())


def test_a_legend_stays_inside_its_figure_and_the_title_counts_the_perturbed_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = DynamicsFile.read_file(WITHOUT_REGISTERS)
    saved: dict[str, Any] = {}
    shown = ("dynamics-perturbed-path", "dynamics-speed")
    monkeypatch.setattr(figures_dynamics, "FIGURES", {name: FIGURES[name] for name in shown})
    monkeypatch.setattr(figures_dynamics, "save_figure", lambda figure, path: saved.update({path.name: figure}))
    save_figures(measured, None, tmp_path)
    path, speed = (saved[name] for name in shown)
    assert path.legends[0].get_window_extent().width <= path.bbox.width
    assert f"; {measured.teacher.num_stability_images} images of" in path.get_suptitle()
    assert f"; {measured.num_images} images of" in speed.get_suptitle()
    plt.close("all")
