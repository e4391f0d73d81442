"""Class basins: paths of a few classes through depth, and how far apart they come to lie."""

from __future__ import annotations

from typing import Any

from raptor.report.charts import GROUP_NAMES, Chart, Control, Section, number, percent
from raptor.report.results import Results

LEAD = "Do images of one class end in a basin of their own? Turn the plot, and move through depth."
GROUPS = ("cls", "patches", "registers")


def basins(results: Results) -> Section:
    section = Section("basins", "Basins", "Class basins", LEAD)
    measured = results.get("dynamics") or {}
    found = {
        side: measured[side]["basins"] for side in ("teacher", "surrogate") if (measured.get(side) or {}).get("basins")
    }
    if not found:
        section.hint = f"raptor dynamics {results.folder} --data DATA --out {results.folder}"
        return section
    phases = measured.get("phases") or results.phase_lengths
    groups = [g for g in GROUPS if g in next(iter(found.values()))["groups"]]
    options = [(g, GROUP_NAMES[g]) for g in groups]
    section.controls = [Control("tokens", "Tokens", options, groups[0])]
    section.charts = [_paths(found, measured), *_curves(found, phases)]
    notes = [basin["note"] for basin in found.values() if basin.get("note")]
    section.hint_reason = notes[0] if notes else ""
    return section


def class_names(measured: dict[str, Any], basin: dict[str, Any]) -> list[str]:
    """Names of the basins' classes, where the file has them; else their numbers."""
    names = measured.get("class_names") or basin.get("names") or {}
    if isinstance(names, list):
        names = {str(c): n for c, n in zip(basin["classes"], names)} if len(names) == len(basin["classes"]) else {
            str(c): names[int(c)] for c in basin["classes"] if int(c) < len(names)
        }  # fmt: skip
    return [str(names.get(str(c), f"class {c}")) for c in basin["classes"]]


def _paths(found: dict[str, Any], measured: dict[str, Any]) -> Chart:
    series, num_states = [], 1
    for side, basin in found.items():
        names = class_names(measured, basin)
        for group, values in basin["groups"].items():
            num_states = len(values["class_paths"][0])
            axes = [f"PC{i + 1} ({percent(share)})" for i, share in enumerate(values["explained"])]
            for i, (name, path) in enumerate(zip(names, values["class_paths"])):
                x, y, z = ([point[axis] for point in path] for axis in range(3))
                series.append({
                    "name": name, "x": x, "y": y, "z": z, "colour": f"palette-{i}", "axes": axes,
                    "when": {"tokens": [group], "model": [side]},
                })  # fmt: skip
    controls = [
        Control("depth", "Depth", [(str(l), f"layer {l}") for l in range(num_states)], str(num_states - 1), True)
    ]
    if len(found) > 1:
        controls.insert(0, Control("model", "Model", [(side, side) for side in found], "teacher"))
    names = class_names(measured, next(iter(found.values())))
    return Chart(
        id="basin-paths", kind="paths", title="Paths of the classes through depth", series=series, controls=controls,
        caption="Mean path of each class on three principal components, large dots at the chosen depth. "
        "Look for where paths part. Each model has axes of its own.",
        alt=f"Three-dimensional paths of {len(names)} classes ({', '.join(names)}) over {num_states} states.",
        wide=True,
    )  # fmt: skip


def _curves(found: dict[str, Any], phases: list[int] | None) -> list[Chart]:
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
        series = [
            {
                "name": side, "x": list(range(len(values[quantity]))),
                "y": [None if v is None else scale * v for v in values[quantity]], "colour": f"side-{side}",
                "side": side, "when": {"tokens": [group]},
            }
            for side, basin in found.items()
            for group, values in basin["groups"].items()
        ]  # fmt: skip
        first = next(iter(found.values()))
        group = next(g for g in GROUPS if g in first["groups"])
        values = first["groups"][group][quantity]
        charts.append(Chart(
            id=f"basins-{quantity.replace('_', '-')}", kind="lines", title=title, caption=caption, series=series,
            alt=f"{title}, {GROUP_NAMES[group]} of the teacher: from {number(values[0])} at layer 0 to "
            f"{number(values[-1])} at the last layer.",
            x={"label": "layer", "integer": True}, y={"label": unit, "from_zero": True}, phases=phases,
            extra={"line": 100 * first["chance"]} if quantity == "accuracy" and first.get("chance") else {},
        ))  # fmt: skip
    return charts
