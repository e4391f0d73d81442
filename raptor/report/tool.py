"""As a tool: depth on demand, watching, editing and correcting, each beside its baselines and null models."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np
from PIL import Image

from raptor.recurrence.correct import CorrectFile
from raptor.recurrence.depth import FULL, NULLS, DepthFile, DepthPoint
from raptor.recurrence.edit import EditFile
from raptor.recurrence.watch import WATCHER, WatchFile
from raptor.report.charts import Axis, Chart, Control, Figure, Section, Series, described
from raptor.report.markup import bullet_list, part
from raptor.report.results import Results

_RULES = {
    "turn": "turn of cls",
    "second": "second difference",
    "entropy": "entropy",
    "kl": "change of the read-out",
    "random": "at random",
    "shorter": "shorter for all",
}
_NULL_COLOURS = {"random": "null-shuffled", "shorter": "null-smooth"}
_COSTS = {"milliseconds": "ms per image", "gflops": "GFLOPs per image"}


def depth_chart(measured: DepthFile) -> Chart:
    """Agreement against cost: a curve for each rule, from its strictest threshold to its loosest."""
    series: list[Series] = []
    for side, points in measured.sides().items():
        full = [point for point in points if point.family == FULL]
        for place, (family, name) in enumerate(_RULES.items()):
            own = [point for point in points if point.family == family]
            colour = _NULL_COLOURS.get(family, f"palette-{place}")
            if own:
                series += _depth_curves(side, name, full + own, colour, "null" if family in NULLS else "")
    options = [(side, side) for side in measured.sides()]
    controls = [
        Control("model", "Model", options, "surrogate"),
        Control("cost", "Cost", list(_COSTS.items()), "milliseconds"),
    ]
    return described("depth", series, {"images": measured.images}, controls=controls)


def _depth_curves(side: str, name: str, points: list[DepthPoint], colour: str, style: str) -> list[Series]:
    curves = []
    for cost in _COSTS:
        ordered = sorted(points, key=lambda point: getattr(point, cost))
        costs = [getattr(point, cost) for point in ordered]
        agreement = [100 * point.agreement for point in ordered]
        when = {"model": [side], "cost": [cost]}
        curves.append(Series(name, costs, agreement, colour=colour, side=style, base=name, when=when))
    return curves


def depth_figure(measured: DepthFile) -> Figure:
    """Surrogate and teacher, by milliseconds and by FLOPs."""
    chart = depth_chart(measured)
    panels = []
    for cost, unit in _COSTS.items():
        row = []
        for side in measured.sides():
            panel = chart.only(model=side, cost=cost)
            panel.title = side
            panel.x = Axis(unit)
            row.append(panel)
        panels.append(row)
    return Figure(panels, "Depth on demand", same_y=True, source=measured.images)


def watch_chart(measured: WatchFile) -> Chart:
    """Where in depth both models disagree, for each set of images."""
    series: list[Series] = []
    for place, one in enumerate(measured.sets):
        if one.profile:
            layers = list(range(1, len(one.profile) + 1))
            line = Series(one.name, layers, one.profile, colour=f"palette-{place}", lower=one.lower, upper=one.upper)
            series.append(line)
    say = {"num": measured.num_calibration, "calibration": measured.calibration}
    return described("watch", series, say, phases=measured.phases, level=measured.threshold)


def scores_chart(measured: WatchFile) -> Chart | None:
    """How well the watcher and the other scores tell each unusual set from the usual images; None without any."""
    compared = [one for one in measured.sets if one.scores]
    if not compared:
        return None
    series: list[Series] = []
    for place, score in enumerate(compared[0].scores or {}):
        found = [(one.scores or {})[score] for one in compared]
        name = "watcher" if score == WATCHER else score
        line = Series(name, [one.name for one in compared], [one.auroc for one in found], colour=f"palette-{place}")
        line.lower = [one.auroc_interval[0] for one in found]
        line.upper = [one.auroc_interval[1] for one in found]
        series.append(line)
    return described("watch-scores", series, level=0.5)


def watch_figure(measured: WatchFile) -> Figure:
    """Where in depth, and how well beside other scores."""
    return Figure([[watch_chart(measured), scores_chart(measured)]], "Watching", (5.2, 3.4), source=measured.images)


def draw_watched_images(measured: WatchFile) -> Any:
    """The images with the highest scores: the image, where in it both models disagree, and where in depth."""
    from raptor.report.style import use_style

    plt = use_style()
    figure, axes = plt.subplots(len(measured.shown), 3, figsize=(7.2, 1.9 * len(measured.shown)), squeeze=False)
    for row, image in zip(axes, measured.shown):
        row[0].imshow(_decoded(image.picture))
        row[0].set_title(f"{image.of}: {image.name}", fontsize=7)
        row[1].imshow(image.map, cmap="viridis")
        row[1].set_title(f"layer {image.layer}, times the median patch", fontsize=7)
        for cell in row[:2]:
            cell.set_axis_off()
        row[2].plot(range(1, len(image.profile) + 1), image.profile)
        row[2].axhline(measured.threshold, linestyle=":", color="grey")
        row[2].set_title(f"score {image.score:.3g} ({image.group})", fontsize=7)
        row[2].tick_params(labelsize=6)
    return figure


def _decoded(picture: str) -> np.ndarray:
    """A PNG in base64 as an array."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))))


_EDITS = {
    "flipped": "by the edit",
    "stays": "still after four further steps",
    "random": "by a random direction",
    "at_the_end": "same step at the last layer",
    "gradient": "along the head's gradient",
}


def edit_chart(measured: EditFile) -> Chart:
    """Shares of images that the edit and its controls flip, at the end of each phase."""
    series: list[Series] = []
    for side, results in measured.sides().items():
        phases = [one.phase for one in results]
        for place, (key, name) in enumerate(_EDITS.items()):
            shares = []
            for one in results:
                value = getattr(one, key)
                # The controls are measured on the images that the edit flips.
                share = one.flipped if key == "flipped" else one.flipped * (value or 0.0)
                shares.append(100 * share)
            when = {"model": [side]}
            series.append(Series(name, phases, shares, colour=f"palette-{place}", base=name, when=when))
    control = Control("model", "Model", [(side, side) for side in measured.sides()], "surrogate")
    return described("edit", series, {"name": measured.class_name}, controls=[control])


def edit_figure(measured: EditFile) -> Figure:
    """Surrogate and teacher side by side."""
    chart = edit_chart(measured)
    panels = [replace(chart.only(model=side), title=side) for side in measured.sides()]
    return Figure([panels], f"Edits towards {measured.class_name}", (3.8, 3.2), same_y=True, source=measured.images)


def correct_chart(measured: CorrectFile) -> Chart:
    """Agreement with the clean image after a disturbance, by the number of further steps of a phase."""
    series: list[Series] = []
    names: list[str] = []
    for side, corrections in measured.sides.items():
        for one in corrections:
            name = f"{one.disturbance} {one.size:g}"
            if name not in names:
                names.append(name)
            steps = list(range(len(one.agreement)))
            shares = [100 * share for share in one.agreement]
            line = Series(f"phase {one.phase}", steps, shares, colour=f"palette-{one.phase - 1}")
            line.when = {"model": [side], "disturbance": [name]}
            series.append(line)
    controls = [
        Control("model", "Model", [(side, _MODELS.get(side, side)) for side in measured.sides], "surrogate"),
        Control("disturbance", "Disturbance", [(name, name) for name in names], names[0]),
    ]
    return described("correct", series, controls=controls)


_MODELS = {"twin": "untrained twin", "beside": "other surrogate"}


def correct_figure(measured: CorrectFile) -> Figure:
    """A column for each model, a row for each disturbance."""
    chart = correct_chart(measured)
    models, disturbances = chart.controls
    panels = []
    for name, _ in disturbances.options:
        row = []
        for side, label in models.options:
            row.append(replace(chart.only(model=side, disturbance=name), title=f"{label}, {name}"))
        panels.append(row)
    return Figure(panels, "Further steps after a disturbance", (2.9, 2.4), same_y=True, source=measured.images)


LEAD = (
    "A recurrent view of depth offers four tools. Each stands beside its baselines and null models, and beside the "
    "teacher: what the teacher can do as well is not due to recurrence."
)


def tool(results: Results) -> Section:
    """Depth on demand, watching, editing and correcting, as far as they were measured."""
    section = Section("tool", "As a tool", "Recurrence as a tool", LEAD)
    for name, charts in (
        ("depth", _charts(results.depth, depth_chart)),
        ("watch", _charts(results.watch, watch_chart, scores_chart)),
        ("edit", _charts(results.edit, edit_chart)),
        ("correct", _charts(results.correct, correct_chart)),
    ):
        file = getattr(results, name)
        if file is None:
            section.hint = section.hint or _COMMANDS[name]
            continue
        section.body.append(part(_TITLES[name], f"Measured on {file.images}."))
        section.body.append(bullet_list(file.findings))
        section.body += charts
        if name == "watch" and file.shown:
            section.body.append(_watched_pictures(file))
    return section


_TITLES = {"depth": "Depth on demand", "watch": "Watching", "edit": "Editing", "correct": "Correcting"}
_COMMANDS = {
    "depth": "raptor depth",
    "watch": "raptor watch --unusual noise blur",
    "edit": "raptor edit --to CLASS",
    "correct": "raptor correct",
}


def _charts(file: Any, *makers: Callable[[Any], Chart | None]) -> list[Chart]:
    if file is None:
        return []
    charts = [maker(file) for maker in makers]
    return [chart for chart in charts if chart is not None]


def _watched_pictures(measured: WatchFile) -> str:
    """The images with the highest scores, and beside each the map of its patches."""
    pictures = ""
    for image in measured.shown:
        words = f"{image.of}, {image.name}: score {image.score:.3g} at layer {image.layer}, {image.group}"
        pictures += (
            f'<figure><img src="data:image/png;base64,{escape(image.picture)}" alt="{escape(image.name)}">'
            f'<img class="map" src="data:image/png;base64,{_map_picture(image.map)}" alt="map of {escape(image.name)}">'
            f"<figcaption>{escape(words)}</figcaption></figure>"
        )
    return f'<div class="worst">{pictures}</div>'


def _map_picture(values: list[list[float]]) -> str:
    """A map over patches as a PNG in base64, a pixel for each patch, bright where both models disagree most."""
    map_hw = np.asarray(values)
    shades = (255 * map_hw / map_hw.max()).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
