"""The sections of the page: each has its own id, and each gives a hint when nothing was measured."""

from __future__ import annotations

from pathlib import Path

from raptor.report.results import Results
from raptor.report.sections import SECTIONS


def test_an_empty_run_gives_a_hint_per_measurement(tmp_path: Path) -> None:
    found = [section(Results(tmp_path)) for section in SECTIONS]
    assert len({section.id for section in found}) == len(SECTIONS) == 9
    assert found[0].id == "glance" and found[-1].id == "made"
    hints = [section.hint for section in found[1:-1]]
    assert all(hint is not None and hint.startswith("raptor ") for hint in hints)


def test_a_full_run_gives_charts_with_words(committed: Results) -> None:
    charts = [chart for section in SECTIONS for chart in section(committed).charts]
    assert len({chart.id for chart in charts}) == len(charts) > 15
    assert all(chart.alt.endswith(".") and chart.caption for chart in charts)
