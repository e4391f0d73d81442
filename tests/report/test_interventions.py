"""Interventions: matrices, repetition and extrapolation on the page are those of interventions.json."""

from __future__ import annotations

import numpy as np

from raptor.dynamics.interventions import InterventionsFile
from raptor.report.interventions import interventions
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
        assert {series.when["measure"][0] for series in chart.series} > offered
