"""Figures of the interventions: matrices and curves drawn are the numbers of interventions.json."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np

from raptor.dynamics.interventions import InterventionsFile
from raptor.report.figures_interventions import figure_extrapolation, figure_repetition, figure_swaps
from raptor.report.results import Results


def test_swaps_draw_the_matrix_with_an_outline_per_phase(committed: Results) -> None:
    changed = committed.interventions
    assert changed is not None
    figure = figure_swaps(changed)
    swaps = changed.teacher.swaps
    image = figure.axes[0].get_images()[0].get_array()
    np.testing.assert_array_equal(np.ma.filled(image, np.nan), swaps.matrix(swaps.angle["all"].mean))
    assert [p.get_width() for p in figure.axes[0].patches] == list(swaps.phases)
    plt.close(figure)


def test_repetition_is_drawn_over_the_length_of_the_phase(committed: Results) -> None:
    changed = committed.interventions
    assert changed is not None
    figure = figure_repetition(changed)
    found = changed.teacher.repetition
    line = figure.axes[0].get_lines()[0]
    np.testing.assert_allclose(line.get_xdata(), np.array(found.counts[0]) / found.phases[0])
    np.testing.assert_array_equal(line.get_ydata(), found.angle[0]["all"].mean)
    plt.close(figure)


def test_a_side_without_agreement_leaves_its_place_empty(one_sided: tuple[str, InterventionsFile]) -> None:
    without, changed = one_sided
    other = next(side for side in changed.sides() if side != without)
    matrices = {ax.get_title(): ax.get_images()[0].get_array() for ax in figure_swaps(changed).axes if ax.get_title()}
    kept = changed.sides()[other].swaps
    assert list(matrices) == ["teacher: two blocks swapped", "surrogate: two blocks swapped"]
    assert kept.agreement is not None
    shown = np.ma.filled(matrices[f"{other}: two blocks swapped"], np.nan)
    np.testing.assert_array_equal(shown, 100 * kept.matrix(kept.agreement.mean))
    lines = figure_repetition(changed).axes[1].get_lines()
    assert len(lines) == 1 + len(changed.sides()[other].repetition.phases)
    plt.close("all")


def test_extrapolation_starts_at_the_last_layer(committed: Results) -> None:
    changed = committed.interventions
    assert changed is not None and changed.surrogate is not None and changed.surrogate.extrapolation is not None
    past = changed.surrogate.extrapolation
    figure = figure_extrapolation(changed)
    angle, speed = (ax.get_lines()[0] for ax in figure.axes[:2])
    assert list(angle.get_xdata()) == past.layers and list(speed.get_xdata()) == past.layers[1:]
    np.testing.assert_array_equal(angle.get_ydata(), past.angle["all"].mean)
    plt.close(figure)
