"""The sections of the page: each has its own id, and each gives a hint when nothing was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from pages import read

from raptor.report.results import Results, read_results
from raptor.report.sections import SECTIONS, images, provenance


def test_an_empty_run_gives_a_hint_per_measurement(tmp_path: Path) -> None:
    found = [section(Results(tmp_path)) for section in SECTIONS]
    assert len({section.id for section in found}) == len(SECTIONS) == 10
    assert found[0].id == "glance" and found[-1].id == "made"
    assert not any(section.charts for section in found)
    hints = [section.hint for section in found[1:-1]]
    assert all(hint is not None and hint.startswith("raptor ") for hint in hints)


def test_a_full_run_gives_charts_with_words(committed: Results) -> None:
    charts = [chart for section in SECTIONS for chart in section(committed).charts]
    assert len({chart.id for chart in charts}) == len(charts) > 15
    assert all(len(chart.words()) > 30 and chart.caption for chart in charts)


def test_every_chart_of_the_page_is_explained(full_run: Path, committed: Results) -> None:
    headings = set(re.findall(r"^### (.+)$", read("docs/figures.md"), flags=re.M))
    trained = replace(committed, losses={"stage1": [(step, 1.0) for step in range(3)]})
    for results in (read_results(full_run), trained):
        titles = {chart.title.partition(": states of ")[0] for make in SECTIONS for chart in make(results).charts}
        assert len(titles) > 15 and titles <= headings, titles - headings


def test_the_caption_has_the_mean_cosine_of_the_last_layer(full_run: Path, full_page: str) -> None:
    results = read_results(full_run)
    assert results.images is not None
    ends = [row.cosine[-1] for row in results.images.images if row.cosine]
    assert len(ends) == 2 and f"patches is {sum(ends) / 2:.3g}." in images(results).html


def test_every_file_has_a_row_with_its_command(committed: Results) -> None:
    html = provenance(committed).html
    for name, found in committed.provenance().items():
        assert f'<th scope="row">{name}.json</th>' in html
        assert found.command is None or found.command.split()[0] in html


def test_the_training_curve_is_thinned_and_split_by_stage(tmp_path: Path) -> None:
    curve = [(step, 1.0 / (step + 1)) for step in range(900)]
    (chart,) = provenance(Results(tmp_path, losses={"stage1": curve, "stage2": curve})).charts
    assert [s.name for s in chart.series] == ["stage1", "stage2"]
    assert all(len(s.x) <= 400 and list(s.y) == [1.0 / (x + 1) for x in s.x] for s in chart.series)
    assert chart.y.log is True
    assert provenance(Results(tmp_path, losses={"stage1": curve[:1]})).charts == []


def test_the_config_is_text(tmp_path: Path) -> None:
    html = provenance(Results(tmp_path, config={"model": "<b>"})).html
    assert "&lt;b&gt;" in html and "<b>" not in html
