"""Class basins: paths of a few classes through depth, and how far apart they come to lie."""

from __future__ import annotations

from collections.abc import Mapping

from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.report.charts import GROUP_NAMES, Chart, Control, Section, Series, described, percent
from raptor.report.dynamics import depth_curves
from raptor.report.results import Results
from raptor.streaming import Spread

LEAD = "Do images of one class end in a basin of their own? Turn the plot, and move through depth."
GROUPS = ("cls", "patches", "registers")


def basins(results: Results) -> Section:
    section = Section("basins", "Basins", "Class basins", LEAD)
    measured = results.dynamics
    if measured is None or measured.teacher.basins is None:
        section.hint = "raptor dynamics"
        if measured is not None:
            section.hint_reason = "Not measured: basins need labelled images, several of each class."
        return section
    found = measured.teacher.basins
    tokens = Control("tokens", "Tokens", [], next(group for group in GROUPS if group in found.groups))
    for group in GROUPS:
        if group in found.groups:
            tokens.options.append((group, GROUP_NAMES[group]))
    section.controls = [tokens]
    section.body += basin_charts(measured, measured.phases or results.phase_lengths)
    section.hint_reason = found.note or ""
    return section


def basin_charts(measured: DynamicsFile, phases: list[int] | None) -> list[Chart]:
    """Paths, accuracy of the nearest class mean, and separation of the classes; empty where they were not measured."""
    if measured.teacher.basins is None:
        return []
    sides = measured.sides()
    # All classes have about as many images, so a guess is right for one of their number.
    accuracy = depth_curves("basins-accuracy", sides, phases, _accuracy)
    accuracy.level = 100 * measured.teacher.basins.chance
    return [paths(measured, phases), accuracy, depth_curves("basins-scatter-ratio", sides, phases, _separation)]


def paths(measured: DynamicsFile, phases: list[int] | None) -> Chart:
    """The mean path of each class on three principal components, for every token group of every side."""
    class_names = measured.class_names or {}
    series: list[Series] = []
    models: list[tuple[str, str]] = []
    for side, result in measured.sides().items():
        if result.basins is None:
            continue
        models.append((side, side))
        names = [class_names.get(str(label), f"class {label}") for label in result.basins.classes]
        for group, values in result.basins.groups.items():
            # Every side and group has its own components: axes of one model say nothing about another.
            axes = [f"PC{i + 1} ({percent(share)} of variance)" for i, share in enumerate(values.explained)]
            when = {"tokens": [group], "model": [side]}
            for i, (name, path) in enumerate(zip(names, values.class_paths)):
                x, y, z = path.T
                series.append(Series(name, x, y, z, colour=f"palette-{i}", axes=axes, when=when))
    last = measured.teacher.model.num_layers
    layers = [(str(layer), f"layer {layer}") for layer in range(last + 1)]
    controls = [Control("model", "Model", models, "teacher"), Control("depth", "Depth", layers, str(last), slider=True)]
    return described("basin-paths", series, controls=controls, phases=phases)


def _accuracy(found: DynamicsResult) -> Mapping[str, Spread]:
    """How often an image is nearest to the mean of its own class, in percent."""
    spreads = {}
    if found.basins is not None:
        for group, values in found.basins.groups.items():
            spreads[group] = Spread(100 * values.accuracy)
    return spreads


def _separation(found: DynamicsResult) -> Mapping[str, Spread]:
    """Between-class over within-class scatter."""
    spreads = {}
    if found.basins is not None:
        for group, values in found.basins.groups.items():
            spreads[group] = Spread(values.scatter_ratio)
    return spreads
