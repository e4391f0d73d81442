"""Perturbed paths, and stability beside an untrained twin, against the committed results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raptor.dynamics.tangents import TangentsFile
from raptor.report.dynamics import dynamics
from raptor.report.results import Results
from raptor.report.stability import stability_charts, tangent_charts

COMMITTED = Path(__file__).parents[2] / "docs" / "results" / "dynamics" / "scenes-k3-tangents.json"


@pytest.fixture(scope="module")
def measured() -> TangentsFile:
    return TangentsFile.read_file(COMMITTED)


def test_curves_are_those_of_the_file(measured: TangentsFile) -> None:
    growth, _, tied, given = tangent_charts(measured)
    chart = growth.only(tokens="cls", direction="worst")
    assert [series.name for series in chart.series] == ["cls", "cls, surrogate", "cls, untrained twin"]
    assert [series.side for series in chart.series] == ["teacher", "surrogate", "twin"]
    for series, side in zip(chart.series, measured.sides().values()):
        np.testing.assert_array_equal(series.y, side.jacobians.step["cls"].mean)
    assert len(tied.series) == 2 * 3  # a teacher has no tied block
    assert len(given.only(tokens="cls", share="0.1", given="donor").series) == 3  # a single token, whole at every share


def test_the_page_has_them_and_a_result_without_head_or_tied_blocks_leaves_its_places_empty(
    measured: TangentsFile, committed: Results
) -> None:
    ids = [chart.id for chart in dynamics(replace(committed, tangents=measured)).charts]
    assert ids[-4:] == ["tangents-jacobian", "tangents-lyapunov", "tangents-fixed-points", "tangents-transplants"]
    teacher = replace(measured.teacher, transplants=None)
    alone = replace(measured, teacher=teacher, surrogate=None, twin=None)
    assert [chart.id for chart in tangent_charts(alone)] == ["tangents-jacobian", "tangents-lyapunov"]


def test_perturbed_paths_say_on_how_many_images_they_were_measured(committed: Results) -> None:
    assert committed.dynamics is not None
    charts = stability_charts(committed.dynamics, None)
    num = committed.dynamics.teacher.num_stability_images
    assert num != committed.dynamics.num_images
    assert all(chart.source.startswith(f"{num} of ") for chart in charts)
