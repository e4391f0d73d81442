"""Figures in files: the charts of the page on paper, where a chooser becomes columns or rows of panels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from raptor.report.charts import EVERY, GROUP_NAMES, Chart, Figure, descriptions
from raptor.report.paper import draw
from raptor.report.style import save_figure

_TOKENS = ["cls", "registers", "patches"]  # all tokens are nearly the patches


@dataclass(frozen=True)
class OnPaper:
    """How charts of the page stand in a file; `figures.yaml` says it for each figure.

    Attributes:
        charts: side by side; a chart with `columns` or `rows` stands alone.
        columns, rows: the chooser whose values become panels.
        only: chooser -> the values that are drawn. Other choosers stay where the page starts.
    """

    charts: list[str]
    columns: str = ""
    rows: str = ""
    only: Mapping[str, list[str]] = field(default_factory=dict)
    size: tuple[float, float] = (4.3, 3.4)
    same_y: bool = False


_LAYOUTS = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))
FIGURES = {name: OnPaper(**{"charts": [name], **about}) for name, about in _LAYOUTS.items()}


def save_figures(charts: Iterable[Chart], folder: str | Path, source: str) -> list[str]:
    """Write every figure whose charts are there to `folder`, as PNG and SVG; returns their names.

    source: the models and images of the charts. Other figures of the same result files are removed.
    """
    found = list(charts)
    files = {chart.file for chart in found}
    written = []
    for name, about in FIGURES.items():
        path = Path(folder) / name
        figure = on_paper(name, found, source)
        if figure is not None:
            save_figure(draw(figure), path)
            written.append(name)
        elif descriptions()[about.charts[0]]["file"] in files:
            # A figure of an earlier result would otherwise pass for one of this result.
            for kind in ("png", "svg"):
                path.with_name(f"{name}.{kind}").unlink(missing_ok=True)
    return written


def drawn(name: str, charts: Iterable[Chart], source: str) -> Any:
    """The figure `name` for matplotlib."""
    figure = on_paper(name, charts, source)
    assert figure is not None, f"nothing of {name} was measured"
    return draw(figure)


def on_paper(name: str, charts: Iterable[Chart], source: str = "") -> Figure | None:
    """The figure `name` of those `charts` that belong to it; None where none of them does."""
    about = FIGURES[name]
    by_id = {chart.id: chart for chart in charts}
    own = [by_id[chart] for chart in about.charts if chart in by_id]
    if not own:
        return None
    chosen: dict[str, list[str]] = {"tokens": _TOKENS, **about.only}
    source = own[0].source or source
    if not about.columns:
        return Figure([[chart.only(**chosen) for chart in own]], size=about.size, source=source)
    (chart,) = own
    title = chart.title
    for control in chart.controls:
        if control.name in (about.columns, about.rows):
            continue
        values = chosen.setdefault(control.name, [control.start])
        is_choice = len(control.options) > 1 and not control.slider  # a path on paper is drawn through all of depth
        if is_choice and len(values) == 1:
            title += f", {control.label.lower()} {dict(control.options)[values[0]]}"
    labels: dict[str, str] = dict(GROUP_NAMES)
    for control in chart.controls:
        labels |= dict(control.options)
    panels: list[list[Chart | None]] = []
    rows = _values(chart, about.rows, chosen)
    for row in rows:
        panels.append([])
        for column in _values(chart, about.columns, chosen):
            one = {about.columns: [column]}
            names = [labels.get(column, column)]
            if about.rows:
                one[about.rows] = [row]
            if len(rows) > 1:  # a single row needs no name
                names.append(labels.get(row, row))
            panel = replace(chart.only(**{**chosen, **one}), title=", ".join(names))
            if about.rows == "model":  # the title names the side
                panel.series = [replace(series, name=series.base or series.name, side="") for series in panel.series]
            # One side may lack what another has, and its place stays empty.
            panels[-1].append(panel if panel.series else None)
    return Figure(panels, title, about.size, same_y=about.same_y, source=source)


def _values(chart: Chart, control: str, chosen: Mapping[str, list[str]]) -> list[str]:
    """The values of a chooser that the chart has series for, in the order asked for; one empty value without a name."""
    if not control:
        return [""]
    found: dict[str, None] = {}
    for series in chart.series:
        found |= dict.fromkeys(series.when.get(control, []))
    # All groups together are a choice of the page. On paper they would repeat the panels.
    found.pop(EVERY, None)
    return [value for value in chosen.get(control, found) if value in found]
