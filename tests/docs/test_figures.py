"""docs/figures.md names every figure of the figures folder; tests/report/test_sections.py reads the page's."""

from __future__ import annotations

from pages import read

from raptor.report.figures import FIGURES


def test_every_saved_figure_is_named() -> None:
    text = read("docs/figures.md")
    names = (*FIGURES, "phases")
    missing = [name for name in names if f"`{name}`" not in text]
    assert not missing, missing
