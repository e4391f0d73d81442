"""The charts of the four tools, against the committed results of the built-in models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raptor.recurrence.correct import CorrectFile
from raptor.recurrence.depth import DepthFile
from raptor.recurrence.edit import EditFile
from raptor.recurrence.watch import WatchFile
from raptor.report.figures import drawn
from raptor.report.results import Results
from raptor.report.tool import (
    correct_charts,
    depth_charts,
    edit_charts,
    tool,
    watch_charts,
)

COMMITTED = Path(__file__).parents[2] / "docs" / "results" / "recurrence"


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(
        COMMITTED,
        depth=DepthFile.read(COMMITTED),
        watch=WatchFile.read(COMMITTED),
        edit=EditFile.read(COMMITTED),
        correct=CorrectFile.read(COMMITTED),
    )


def test_a_curve_for_each_rule_starts_at_full_depth(results: Results) -> None:
    assert results.depth is not None
    chart = depth_charts(results.depth)[0].only(model="teacher", cost="milliseconds")
    assert [series.name for series in chart.series][-2:] == ["at random", "shorter for all"]
    full = results.depth.teacher[0]
    for series in chart.series:
        assert full.milliseconds in series.x and max(series.y) == 100 * full.agreement == 100
        assert (series.x[0], series.y[0]) == (full.milliseconds, 100)


def test_the_section_shows_what_was_measured(results: Results) -> None:
    section = tool(results)
    assert [chart.id for chart in section.charts] == ["depth", "watch", "watch-scores", "edit", "correct"]
    assert not section.hint and section.html.count('class="map"') == len(results.watch.shown)
    less = tool(replace(results, watch=None, edit=None))
    assert [chart.id for chart in less.charts] == ["depth", "correct"] and less.hint.startswith("raptor watch")
    assert tool(Results(COMMITTED)).hint == "raptor depth"


def test_scores_are_those_of_the_file(results: Results) -> None:
    assert results.watch is not None
    profiles, chart = watch_charts(results.watch)
    assert chart.series[0].name == "watcher" and profiles.level == results.watch.threshold
    unusual = results.watch.sets[1:]
    assert chart.series[0].y == [one.scores["surrogate"].auroc for one in unusual if one.scores]
    assert f"{unusual[0].scores['norm'].auroc:.3f} (" in tool(results).html
    assert len(watch_charts(replace(results.watch, sets=results.watch.sets[:1]))) == 1


def test_edits_and_corrections_are_in_percent_of_all_images(results: Results) -> None:
    assert results.edit is not None and results.correct is not None
    flipped, stays = edit_charts(results.edit)[0].only(model="surrogate").series[:2]
    for place, one in enumerate(results.edit.surrogate):
        assert flipped.y[place] == 100 * one.flipped
        assert stays.y[place] == pytest.approx(100 * one.flipped * (one.stays or 0))
    first = results.correct.sides["teacher"][0]
    chart = correct_charts(results.correct)[0].only(model="teacher", disturbance="noise 0.3")
    assert chart.series[0].y == [100 * share for share in first.agreement] and len(chart.series) == 3


def test_figures_on_paper(results: Results) -> None:
    assert results.depth and results.watch and results.edit and results.correct
    num_axes = {
        "depth": (depth_charts(results.depth), 4),
        "watch": (watch_charts(results.watch), 1),
        "watch-scores": (watch_charts(results.watch), 1),
        "edit": (edit_charts(results.edit), 2),
        "correct": (correct_charts(results.correct), 5 * 3),
    }
    for name, (charts, num) in num_axes.items():
        assert len(drawn(name, charts, "").axes) == num
