"""Class basins: paths of a few classes through depth, and how far apart they come to lie."""

from __future__ import annotations

import numpy as np

from raptor.dynamics.basins import BasinsResult
from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.report.charts import (
    GROUP_NAMES,
    SHOWN_ON_PAPER,
    Axis,
    Chart,
    Control,
    Figure,
    Section,
    Series,
    of_group,
    percent,
)
from raptor.report.results import Results

LEAD = "Do images of one class end in a basin of their own? Turn the plot, and move through depth."
GROUPS = ("cls", "patches", "registers")

Found = dict[str, BasinsResult]


def basins(results: Results) -> Section:
    section = Section("basins", "Basins", "Class basins", LEAD)
    measured = results.dynamics
    found = {} if measured is None else _found(measured.sides())
    if measured is None or not found:
        section.hint = "raptor dynamics"
        if measured is not None:
            section.hint_reason = "Not measured: basins need labelled images, several of each class."
        return section
    phases = measured.phases or results.phase_lengths
    groups = [group for group in GROUPS if group in next(iter(found.values())).groups]
    options = [(group, GROUP_NAMES[group]) for group in groups]
    section.controls = [Control("tokens", "Tokens", options, groups[0])]
    section.charts = [
        paths(found, measured.class_names or {}, phases),
        accuracy(found, phases),
        separation(found, phases),
    ]
    for basin in found.values():
        section.hint_reason = section.hint_reason or basin.note or ""
    return section


def _found(sides: dict[str, DynamicsResult]) -> Found:
    return {side: measures.basins for side, measures in sides.items() if measures.basins is not None}


def paths(found: Found, class_names: dict[str, str], phases: list[int] | None) -> Chart:
    """The mean path of each class on three principal components, for every token group of every side."""
    series: list[Series] = []
    num_states = 1
    for side, basin in found.items():
        names = [class_names.get(str(label), f"class {label}") for label in basin.classes]
        for group, values in basin.groups.items():
            num_states = values.class_paths.shape[1]
            axes = [f"PC{i + 1} ({percent(share)} of variance)" for i, share in enumerate(values.explained)]
            when = {"tokens": [group], "model": [side]}
            for i, (name, path) in enumerate(zip(names, values.class_paths)):
                x, y, z = path.T
                series.append(Series(name, x, y, z, colour=f"palette-{i}", axes=axes, when=when))
    layers = [(str(layer), f"layer {layer}") for layer in range(num_states)]
    controls = [Control("depth", "Depth", layers, str(num_states - 1), slider=True)]
    if len(found) > 1:
        controls.insert(0, Control("model", "Model", [(side, side) for side in found], "teacher"))
    return Chart(
        id="basin-paths",
        kind="paths",
        title="Paths of the classes through depth",
        caption="Mean path of each class on three principal components, large dots at the chosen depth. "
        "Look for where paths part. Each model has its own axes.",
        series=series,
        controls=controls,
        phases=phases,
        wide=True,
    )


def figure_paths(measured: DynamicsFile) -> Figure | None:
    """On paper: the first two components, a row per model and a column per token group."""
    if measured.teacher.basins is None:
        return None
    found = _found(measured.sides())
    chart = paths(found, measured.class_names or {}, measured.phases)
    rows: list[list[Chart | None]] = []
    for side, basin in found.items():
        row: list[Chart | None] = []
        for group in SHOWN_ON_PAPER:
            if group in basin.groups:
                title = f"{group}, {side}" if len(found) > 1 else group
                row.append(chart.only(tokens=group, model=side, title=title))
        rows.append(row)
    title = "Class paths through depth (circle: layer 0, star: last layer, bars: phase ends)"
    return Figure(rows, title, size=(3.2, 3.1))


def accuracy(found: Found, phases: list[int] | None) -> Chart:
    """How often an image is nearest to the mean of its own class."""
    series: list[Series] = []
    for side, basin in found.items():
        for group, values in basin.groups.items():
            series.append(_curve(group, side, 100 * values.accuracy))
    first = next(iter(found.values()))
    return Chart(
        id="basins-accuracy",
        kind="lines",
        title="Nearest class mean",
        caption="Look for the layer where classes become readable. Dotted: chance.",
        series=series,
        x=Axis("layer l", integer=True),
        y=Axis("images nearest to their own class (%)", from_zero=True),
        phases=phases,
        level=100 * first.chance,
    )


def separation(found: Found, phases: list[int] | None) -> Chart:
    """Between-class over within-class scatter."""
    series: list[Series] = []
    for side, basin in found.items():
        for group, values in basin.groups.items():
            series.append(_curve(group, side, values.scatter_ratio))
    return Chart(
        id="basins-scatter-ratio",
        kind="lines",
        title="Separation",
        caption="Above 1, classes lie further apart than they are wide.",
        series=series,
        x=Axis("layer l", integer=True),
        y=Axis("between / within scatter", from_zero=True),
        phases=phases,
    )


def figure_basins(measured: DynamicsFile) -> Figure | None:
    """On paper: both curves side by side, all token groups."""
    if measured.teacher.basins is None:
        return None
    found = _found(measured.sides())
    left = accuracy(found, measured.phases).only(title="Nearest class mean (dotted: chance)")
    return Figure([[left, separation(found, measured.phases)]], size=(4.3, 3.4))


def _curve(group: str, side: str, values: np.ndarray) -> Series:
    curve = of_group(group, side, list(range(len(values))), values)
    curve.when["tokens"] = [group]
    return curve
