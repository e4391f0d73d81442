"""docs/figures.md explains every figure that the page and the figures folder may show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import ROOT, read

from raptor.report.figures_dynamics import FIGURES
from raptor.report.figures_interventions import INTERVENTION_FIGURES
from raptor.report.section_dynamics import PANELS
from raptor.report.section_fidelity import METRICS

HEADINGS = set(re.findall(r"^### (.+)$", read("docs/figures.md"), flags=re.M))
SECTIONS = sorted((ROOT / "raptor" / "report").glob("section_*.py"))


def chart_titles(path: Path) -> set[str]:
    """The titles that a section writes for its charts; those of tables of panels are read from the tables."""
    code = path.read_text()
    return set(re.findall(r"\btitle=f?\"([^\"{]+)", code)) | set(re.findall(r"Chart\(\s*\"\w+\",\s*\"([^\"]+)", code))


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: path.stem)
def test_every_chart_of_the_page_is_explained(path: Path) -> None:
    titles = {title.removesuffix(": states of ") for title in chart_titles(path)}
    assert titles <= HEADINGS, titles - HEADINGS


def test_every_panel_and_curve_is_explained() -> None:
    titles = {title for _, _, title, *_ in PANELS} | {title for _, title, *_ in METRICS}
    assert len(titles) > 8 and titles <= HEADINGS, titles - HEADINGS


def test_every_saved_figure_is_named() -> None:
    text = read("docs/figures.md")
    names = (*FIGURES, *INTERVENTION_FIGURES, "phases", "certificate")
    missing = [name for name in names if f"`{name}`" not in text]
    assert not missing, missing
