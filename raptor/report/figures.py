"""Figures in files: the charts of the page on paper, where a chooser becomes columns or rows of panels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile
from raptor.dynamics.tangents import TangentsFile
from raptor.report.basins import basin_charts
from raptor.report.charts import EVERY, GROUP_NAMES, Chart, Figure
from raptor.report.dynamics import dynamics_charts
from raptor.report.interventions import intervention_charts
from raptor.report.paper import draw
from raptor.report.style import data_title, save_figure
from raptor.report.tangents import tangent_charts

_TOKENS = ("cls", "registers", "patches")  # all tokens are nearly the patches
_PERTURBED = ("sensitivity", "perturbed-paths", "attraction")


@dataclass(frozen=True)
class OnPaper:
    """How charts of the page stand in a file.

    Attributes:
        charts: side by side; a chart with `columns` or `rows` stands alone.
        columns, rows: the chooser whose values become panels.
        only: chooser -> the values that are drawn. Other choosers stay where the page starts.
    """

    charts: tuple[str, ...]
    columns: str = ""
    rows: str = ""
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    size: tuple[float, float] = (4.3, 3.4)
    same_y: bool = False


_SMALL = (3.2, 3.2)
_ALL_TOKENS = {"tokens": ("all",)}
FIGURES: dict[str, OnPaper] = {
    "dynamics-norm": OnPaper(("dynamics-norm",)),
    "dynamics-gamma": OnPaper(("dynamics-gamma",)),
    "dynamics-speed": OnPaper(("dynamics-speed",)),
    "dynamics-speed-variance": OnPaper(("dynamics-speed-variance",)),
    "dynamics-gathering": OnPaper(("gathering-tokens", "gathering-updates")),
    "dynamics-stable-rank": OnPaper(("dynamics-stable-rank",)),
    "dynamics-effective-rank": OnPaper(("dynamics-effective-rank",)),
    "dynamics-coherence": OnPaper(("dynamics-coherence",)),
    "dynamics-sensitivity": OnPaper(("sensitivity",), "target", only={"eps": ("0",)}, same_y=True),
    "dynamics-perturbed-path": OnPaper(("perturbed-paths",), "tokens", size=_SMALL, same_y=True),
    "dynamics-attraction": OnPaper(("attraction",), "tokens", size=_SMALL, same_y=True),
    "dynamics-eigenvalues": OnPaper(("eigenvalues",), "tokens", "model", size=_SMALL),
    "dynamics-singular-values": OnPaper(("singular-values",)),
    "dynamics-rank-sweep": OnPaper(("rank-sweep-error", "rank-sweep")),
    "dynamics-paths": OnPaper(("basin-paths",), "tokens", "model", size=_SMALL),
    "dynamics-basins": OnPaper(("basins-accuracy", "basins-scatter-ratio")),
    "interventions-swaps": OnPaper(("swaps",), "measure", "model", {"measure": ("turn_all", "agreement")}),
    "interventions-repetition": OnPaper(
        ("repetition",), "measure", only={"measure": ("turn_all", "agreement"), "model": ("teacher", "surrogate")}
    ),
    "interventions-extrapolation": OnPaper(("extrapolation",), "measure", size=(2.9, 3.0)),
    "tangents-jacobian": OnPaper(("tangents-jacobian",), "direction", only=_ALL_TOKENS),
    "tangents-lyapunov": OnPaper(("tangents-lyapunov",), "phase", only=_ALL_TOKENS, size=_SMALL, same_y=True),
    "tangents-fixed-points": OnPaper(("tangents-fixed-points",)),
    "tangents-transplants": OnPaper(("tangents-transplants",), "given", same_y=True),
}


def on_paper(about: OnPaper, charts: Mapping[str, Chart]) -> Figure | None:
    """The figure of `charts`, by id; None where one of them was not measured."""
    if not charts.keys() >= set(about.charts):
        return None
    chosen = {"tokens": _TOKENS, **about.only}
    if not about.columns:
        return Figure([[charts[name].only(**chosen) for name in about.charts]], size=about.size)
    (name,) = about.charts
    chart = charts[name]
    title = chart.title
    for control in chart.controls:
        if control.name not in (*chosen, about.columns, about.rows):
            chosen[control.name] = (control.start,)
        values = chosen.get(control.name, ())
        is_choice = len(control.options) > 1 and not control.slider  # a path on paper is drawn through all of depth
        if is_choice and len(values) == 1 and control.name not in (about.columns, about.rows):
            title += f", {control.label.lower()} {dict(control.options)[values[0]]}"
    panels = []
    columns = _values(chart, about.columns, chosen)
    for row in _values(chart, about.rows, chosen):
        panels.append([_panel(chart, about, column, row, chosen) for column in columns])
    return Figure(panels, title, about.size, same_y=about.same_y)


def _values(chart: Chart, control: str, chosen: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The values of a chooser that the chart has series for, in the order asked for; one empty value without a name."""
    if not control:
        return [""]
    found: dict[str, None] = {}
    for series in chart.series:
        found |= dict.fromkeys(series.when.get(control, []))
    # All groups together are a choice of the page. On paper they would repeat the panels.
    found.pop(EVERY, None)
    asked = chosen.get(control, tuple(found))
    return [value for value in asked if value in found]


def _panel(chart: Chart, about: OnPaper, column: str, row: str, chosen: Mapping[str, tuple[str, ...]]) -> Chart | None:
    """The chart with one value of each chooser that became panels, under the names of these values."""
    values = dict(chosen)
    names = []
    for control, value in ((about.columns, column), (about.rows, row)):
        if control:
            values[control] = (value,)
            names.append(_label(chart, control, value))
    panel = replace(chart.only(**values), title=", ".join(names))
    # One side may lack what another has, and its place stays empty.
    if not panel.series:
        return None
    if about.rows == "model":  # the title names the side
        for i, series in enumerate(panel.series):
            panel.series[i] = replace(series, name=series.base or series.name, side="")
    return panel


def _label(chart: Chart, name: str, value: str) -> str:
    for control in chart.controls:
        if control.name == name:
            return dict(control.options).get(value, value)
    return GROUP_NAMES.get(value, value)


def charts_of(
    measured: DynamicsFile, interventions: InterventionsFile | None = None, tangents: TangentsFile | None = None
) -> dict[str, Chart]:
    """Every chart of the results of `raptor dynamics`, by id."""
    charts = dynamics_charts(measured.sides(), measured.phases) + basin_charts(measured, measured.phases)
    if interventions is not None:
        charts += intervention_charts(interventions)
    if tangents is not None:
        charts += tangent_charts(tangents)
    found = {}
    for chart in charts:
        found[chart.id] = chart
    return found


def save_figures(
    measured: DynamicsFile,
    interventions: InterventionsFile | None,
    folder: str | Path,
    tangents: TangentsFile | None = None,
) -> list[str]:
    """Write every figure whose data is there, as PNG and SVG; returns their names.

    Figures of an earlier result are removed; figures of interventions and tangents only where there are new results,
    because their files stay.
    """
    charts = charts_of(measured, interventions, tangents)
    sources = _sources(measured, (interventions, tangents))
    written = []
    for name, about in FIGURES.items():
        path = Path(folder) / name
        figure = on_paper(about, charts)
        if figure is not None:
            # Perturbations are followed on fewer images than the rest of dynamics.json.
            source = sources["perturbed" if about.charts[0] in _PERTURBED else name.partition("-")[0]]
            save_figure(draw(replace(figure, source=source)), path)
            written.append(name)
        elif name.partition("-")[0] in sources:
            # A figure of an earlier result would otherwise pass for one of this result.
            for kind in ("png", "svg"):
                path.with_name(f"{name}.{kind}").unlink(missing_ok=True)
    return written


def _sources(measured: DynamicsFile, others: Iterable[InterventionsFile | TangentsFile | None]) -> dict[str, str]:
    """First word of a figure's name -> the models and images it was measured on; only of the results that are there."""
    names = ", ".join(side.model.name for side in measured.sides().values())
    images = f"images of {data_title(measured.data, measured.split)}"
    sources = {
        "dynamics": f"{names}; {measured.num_images} {images}",
        "perturbed": f"{names}; {measured.teacher.num_stability_images} {images}",
    }
    for file in others:
        if file is not None:
            source = f"{file.num_images} images of {data_title(file.data, file.split)}"
            sources[file.FILE.removesuffix(".json")] = source
    return sources
