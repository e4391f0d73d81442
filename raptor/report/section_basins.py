"""Class basins: paths of a few classes through depth, and how far apart they come to lie."""

from __future__ import annotations

from raptor.dynamics.basins import BasinsResult
from raptor.report.charts import GROUP_NAMES, Chart, Control, Section, Series, number, percent
from raptor.report.results import Results

LEAD = "Do images of one class end in a basin of their own? Turn the plot, and move through depth."
GROUPS = ("cls", "patches", "registers")


def basins(results: Results) -> Section:
    section = Section("basins", "Basins", "Class basins", LEAD)
    measured = results.dynamics
    sides = {} if measured is None else measured.sides()
    found = {side: measures.basins for side, measures in sides.items() if measures.basins is not None}
    if measured is None or not found:
        section.hint = results.adds("dynamics", "--data LABELLED" if measured and results.has_model else "")
        section.hint_reason = "Not measured: basins need labelled images, several of each class." if measured else ""
        return section
    phases = measured.phases or results.phase_lengths
    groups = [g for g in GROUPS if g in next(iter(found.values())).groups]
    options = [(g, GROUP_NAMES[g]) for g in groups]
    section.controls = [Control("tokens", "Tokens", options, groups[0])]
    section.charts = [_paths(found, measured.class_names or {}), *_curves(found, phases)]
    notes = [basin.note for basin in found.values() if basin.note]
    section.hint_reason = notes[0] if notes else ""
    return section


def _class_names(basins: BasinsResult, names: dict[str, str]) -> list[str]:
    """Names of the basins' classes where they are known, else their numbers."""
    return [names.get(str(label), f"class {label}") for label in basins.classes]


def _paths(found: dict[str, BasinsResult], class_names: dict[str, str]) -> Chart:
    series: list[Series] = []
    num_states = 1
    for side, basin in found.items():
        names = _class_names(basin, class_names)
        for group, values in basin.groups.items():
            num_states = values.class_paths.shape[1]
            axes = [f"PC{i + 1} ({percent(share)})" for i, share in enumerate(values.explained)]
            for i, (name, path) in enumerate(zip(names, values.class_paths)):
                x, y, z = path.T
                series.append(
                    {
                        "name": name,
                        "x": x,
                        "y": y,
                        "z": z,
                        "colour": f"palette-{i}",
                        "axes": axes,
                        "when": {"tokens": [group], "model": [side]},
                    }
                )
    controls = [
        Control("depth", "Depth", [(str(l), f"layer {l}") for l in range(num_states)], str(num_states - 1), True)
    ]
    if len(found) > 1:
        controls.insert(0, Control("model", "Model", [(side, side) for side in found], "teacher"))
    names = _class_names(next(iter(found.values())), class_names)
    return Chart(
        id="basin-paths",
        kind="paths",
        title="Paths of the classes through depth",
        series=series,
        controls=controls,
        caption="Mean path of each class on three principal components, large dots at the chosen depth. "
        "Look for where paths part. Each model has its own axes.",
        alt=f"Three-dimensional paths of {len(names)} classes ({', '.join(names)}) over {num_states} states.",
        wide=True,
    )


def _curves(found: dict[str, BasinsResult], phases: list[int] | None) -> list[Chart]:
    charts = []
    for quantity, title, unit, caption in (
        (
            "accuracy",
            "Nearest class mean",
            "accuracy (%)",
            "Look for the layer where classes become readable. Dotted: chance.",
        ),
        (
            "scatter_ratio",
            "Separation",
            "between / within scatter",
            "Above 1, classes lie further apart than they are wide.",
        ),
    ):
        scale = 100 if quantity == "accuracy" else 1
        series: list[Series] = [
            {
                "name": side,
                "x": list(range(len(getattr(values, quantity)))),
                "y": scale * getattr(values, quantity),
                "colour": f"side-{side}",
                "side": side,
                "when": {"tokens": [group]},
            }
            for side, basin in found.items()
            for group, values in basin.groups.items()
        ]
        first = next(iter(found.values()))
        group = next(g for g in GROUPS if g in first.groups)
        values = getattr(first.groups[group], quantity)
        charts.append(
            Chart(
                id=f"basins-{quantity.replace('_', '-')}",
                kind="lines",
                title=title,
                caption=caption,
                series=series,
                alt=f"{title}, {GROUP_NAMES[group]} of the teacher: from {number(values[0])} at layer 0 to "
                f"{number(values[-1])} at the last layer.",
                x={"label": "layer", "integer": True},
                y={"label": unit, "from_zero": True},
                phases=phases,
                extra={"line": 100 * first.chance} if quantity == "accuracy" else {},
            )
        )
    return charts
