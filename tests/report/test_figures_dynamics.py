"""Figures of the dynamics: the curves drawn are the numbers of dynamics.json."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np

from raptor.report.figures_dynamics import FIGURES, figure_basins, figure_gamma, figure_rank_sweep, figure_speed
from raptor.report.results import Results


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
