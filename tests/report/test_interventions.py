"""Interventions: matrices, repetition and extrapolation, on the page and on paper, are those of interventions.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from raptor.dynamics.interventions import InterventionsFile
from raptor.report.charts import Figure
from raptor.report.interventions import figure_extrapolation, figure_repetition, figure_swaps, interventions
from raptor.report.paper import draw
from raptor.report.results import Results


def test_swaps_repetition_and_extrapolation_are_the_saved_ones(committed: Results) -> None:
    assert committed.interventions is not None
    sides = committed.interventions.sides()
    section = interventions(committed)
    charts = {chart.id: chart for chart in section.charts}
    for series in charts["swaps"].series:
        swaps, measure = sides[series.name].swaps, series.when["measure"][0]
        spread = swaps.agreement if measure == "agreement" else swaps.angle[measure.removeprefix("turn_")]
        assert spread is not None
        upper = [series.z[i - 1, j - 1] for i, j in swaps.pairs]
        np.testing.assert_array_equal(upper, spread.mean * (100 if measure == "agreement" else 1))
        np.testing.assert_array_equal(series.z, np.asarray(series.z).T)
    for series in charts["repetition"].series:
        at_one = np.asarray(series.y)[list(series.x).index(1.0)]
        measure = series.when["measure"][0]
        assert at_one == (100 if measure == "agreement" else 0) or abs(at_one) < 1e-2  # run as usual, nothing changes
    past = sides["surrogate"].extrapolation
    assert past is not None
    speed = next(s for s in charts["extrapolation"].series if s.when["measure"] == ["speed"])
    assert speed.x == past.layers[1:]  # the last layer itself has none
    np.testing.assert_array_equal(speed.y, past.speed["all"].mean)
    assert all(line.split(":")[0] in section.html for line in committed.interventions.findings)


def test_agreement_is_offered_where_both_sides_have_it(
    committed: Results, one_sided: tuple[str, InterventionsFile]
) -> None:
    section = interventions(Results(committed.folder, interventions=one_sided[1]))
    for chart in section.charts[:2]:
        offered = {value for control in chart.controls if control.name == "measure" for value, _ in control.options}
        assert "turn_all" in offered and "agreement" not in offered
        assert {series.when["measure"][0] for series in chart.series} == offered


def test_without_interventions_there_is_a_hint(committed: Results) -> None:
    section = interventions(Results(committed.folder))
    assert section.charts == [] and "--interventions true" in str(section.hint)


def test_swaps_draw_the_matrix_with_an_outline_per_phase(committed: Results) -> None:
    changed = committed.interventions
    assert changed is not None
    figure = drawn(figure_swaps(changed))
    swaps = changed.teacher.swaps
    image = figure.axes[0].get_images()[0].get_array()
    np.testing.assert_array_equal(np.ma.filled(image, np.nan), swaps.matrix(swaps.angle["all"].mean))
    assert [p.get_width() for p in figure.axes[0].patches] == list(swaps.phases)


def drawn(figure: Figure | None) -> Any:
    assert figure is not None
    return draw(figure)


def test_repetition_is_drawn_over_the_length_of_the_phase(committed: Results) -> None:
    changed = committed.interventions
    assert changed is not None
    figure = drawn(figure_repetition(changed))
    found = changed.teacher.repetition
    line = figure.axes[0].get_lines()[0]
    np.testing.assert_allclose(line.get_xdata(), np.array(found.counts[0]) / found.phases[0])
    np.testing.assert_array_equal(line.get_ydata(), found.angle[0]["all"].mean)


def test_a_side_without_agreement_leaves_its_place_empty(one_sided: tuple[str, InterventionsFile]) -> None:
    without, changed = one_sided
    other = next(side for side in changed.sides() if side != without)
    matrices = {
        ax.get_title(): ax.get_images()[0].get_array() for ax in drawn(figure_swaps(changed)).axes if ax.get_title()
    }
    kept = changed.sides()[other].swaps
    assert list(matrices) == ["teacher: two blocks swapped", "surrogate: two blocks swapped"]
    assert kept.agreement is not None
    shown = np.ma.filled(matrices[f"{other}: two blocks swapped"], np.nan)
    np.testing.assert_array_equal(shown, 100 * kept.matrix(kept.agreement.mean))
    lines = drawn(figure_repetition(changed)).axes[1].get_lines()
    assert len(lines) == 1 + len(changed.sides()[other].repetition.phases)


def test_extrapolation_starts_at_the_last_layer(committed: Results) -> None:
    changed = committed.interventions
    assert changed is not None and changed.surrogate is not None and changed.surrogate.extrapolation is not None
    past = changed.surrogate.extrapolation
    figure = drawn(figure_extrapolation(changed))
    angle, speed = (ax.get_lines()[0] for ax in figure.axes[:2])
    assert list(angle.get_xdata()) == past.layers and list(speed.get_xdata()) == past.layers[1:]
    np.testing.assert_array_equal(angle.get_ydata(), past.angle["all"].mean)
