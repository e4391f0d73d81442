"""As a tool: depth on demand, watching, editing and correcting, each beside its baselines and null models."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np
from PIL import Image

from raptor.recurrence.correct import CorrectFile
from raptor.recurrence.depth import FULL, DepthFile, DepthPoint
from raptor.recurrence.edit import EditFile
from raptor.recurrence.watch import WATCHER, WatchFile
from raptor.report.charts import Axis, Chart, Control, Figure, Section, Series, described
from raptor.report.markup import bullet_list, paragraph, part, table
from raptor.report.results import Results

_RULES = {
    "turn": "turn of cls",
    "second": "second difference",
    "entropy": "entropy",
    "kl": "change of the read-out",
    "random": "at random",
    "shorter": "shorter for all",
}
_CLEAN = "undisturbed"
_MODELS = {"twin": "untrained twin", "beside": "other surrogate"}
_NULL_COLOURS = {"random": "null-shuffled", "shorter": "null-smooth"}
_COSTS = {"milliseconds": "ms per image", "gflops": "GFLOPs per image"}


def depth_chart(measured: DepthFile) -> Chart:
    """Agreement against cost: a curve for each rule, from its strictest threshold to its loosest."""
    series: list[Series] = []
    for side, points in measured.sides().items():
        families: dict[str, list[DepthPoint]] = {}
        for point in points:
            families.setdefault(point.family, []).append(point)
        for place, (family, name) in enumerate(_RULES.items()):
            # Every curve begins at full depth, which is the model as it is.
            if family in families:
                colour = _NULL_COLOURS.get(family, f"palette-{place}")
                series += _depth_curves(side, name, families[FULL] + families[family], colour)
    controls = [_model_control(measured.sides()), Control("cost", "Cost", list(_COSTS.items()), "milliseconds")]
    return described("depth", series, {"images": measured.images}, controls=controls)


def _depth_curves(side: str, name: str, points: list[DepthPoint], colour: str) -> list[Series]:
    """A rule's curve by each cost, from its strictest threshold to its loosest; null models are dotted."""
    curves = []
    style = "null" if colour.startswith("null") else ""
    for cost in _COSTS:
        line = Series(name, [], [], colour=colour, side=style, base=name)
        line.when = {"model": [side], "cost": [cost]}
        for point in points:
            line.x.append(getattr(point, cost))
            line.y.append(100 * point.agreement)
        curves.append(line)
    return curves


def _model_control(sides: Iterable[str]) -> Control:
    """The chooser of a model, the surrogate first."""
    return Control("model", "Model", [(side, _MODELS.get(side, side)) for side in sides], "surrogate")


def depth_figure(measured: DepthFile) -> Figure:
    """Surrogate and teacher, by milliseconds and by FLOPs."""
    chart = depth_chart(measured)
    panels = []
    for cost, unit in _COSTS.items():
        row = []
        for side in measured.sides():
            panel = chart.only(model=side, cost=cost)
            panel.title = side
            # On the page one axis serves both costs.
            panel.x = Axis(unit)
            row.append(panel)
        panels.append(row)
    return Figure(panels, "Depth on demand", same_y=True, source=measured.images)


def watch_chart(measured: WatchFile) -> Chart:
    """Where in depth both models disagree, for each set of images."""
    series: list[Series] = []
    for place, one in enumerate(measured.sets):
        # An attack that fools no image leaves none to judge.
        if one.profile:
            layers = list(range(1, len(one.profile) + 1))
            line = Series(
                _short(one.name), layers, one.profile, colour=f"palette-{place}", lower=one.lower, upper=one.upper
            )
            series.append(line)
    say = {"num": measured.num_calibration, "calibration": measured.calibration}
    return described("watch", series, say, phases=measured.phases, level=measured.threshold)


def scores_chart(measured: WatchFile) -> Chart | None:
    """How well the watcher and the other scores tell each unusual set from the usual images; None without any."""
    series: dict[str, Series] = {}
    for one in measured.sets:
        for score, found in (one.scores or {}).items():
            name = "watcher" if score == WATCHER else score
            line = series.setdefault(score, Series(name, [], [], colour=f"palette-{len(series)}"))
            line.x.append(_short(one.name))
            line.y.append(found.auroc)
    if not series:
        return None
    # A score with an AUROC of .5 tells no more than a coin.
    return described("watch-scores", list(series.values()), level=0.5)


def _short(name: str) -> str:
    """The name of a set without its folders and the ending of an archive."""
    return name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".zip")


def watch_figure(measured: WatchFile) -> Figure:
    """Where in depth both models disagree."""
    return Figure([[watch_chart(measured)]], size=(6.4, 3.6), source=measured.images)


def scores_figure(measured: WatchFile) -> Figure | None:
    """The watcher beside the scores without a surrogate; None where no set is known to be unusual."""
    chart = scores_chart(measured)
    if chart is None:
        return None
    return Figure([[chart]], size=(6.4, 3.6), source=measured.images)


def _scores_table(measured: WatchFile) -> str:
    """AUROC of every score on every set with its interval, a row for each set."""
    names: list[str] = []
    rows = []
    for one in measured.sets:
        cells = [_short(one.name)]
        for score, found in (one.scores or {}).items():
            low, high = found.auroc_interval
            cells.append(f"{found.auroc:.3f} ({low:.3f} to {high:.3f})")
            if score not in names:
                names.append(score)
        if len(cells) > 1:
            rows.append(cells)
    # The first score is the watcher's. Files call it by what it needs, a surrogate.
    names[0] = "watcher"
    return table(["AUROC (95 %)", *names], rows)


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
        for place, (key, name) in enumerate(_EDITS.items()):
            line = Series(name, [], [], colour=f"palette-{place}", base=name, when={"model": [side]})
            for one in results:
                share = one.flipped
                if key != "flipped":
                    # The controls are measured on the images that the edit flips.
                    share *= getattr(one, key) or 0.0
                line.x.append(one.phase)
                line.y.append(100 * share)
            series.append(line)
    controls = [_model_control(measured.sides())]
    return described("edit", series, {"name": measured.class_name}, controls=controls)


def edit_figure(measured: EditFile) -> Figure:
    """Surrogate and teacher side by side."""
    chart = edit_chart(measured)
    panels = [replace(chart.only(model=side), title=side) for side in measured.sides()]
    return Figure([panels], f"Edits towards {measured.class_name}", (3.8, 3.2), same_y=True, source=measured.images)


def correct_chart(measured: CorrectFile) -> Chart:
    """Agreement with the clean image after a disturbance, by the number of further steps of a phase."""
    series: list[Series] = []
    names: dict[str, str] = {}
    for side, corrections in measured.sides.items():
        for one in corrections:
            name = f"{one.disturbance} {one.size:g}"
            names[name] = name
            series.append(_correction(side, name, one.phase, one.agreement))
        # What the steps cost an undisturbed image is the same beside every disturbance of a phase.
        clean = {one.phase: one.agreement_clean for one in corrections}
        for phase, agreement in clean.items():
            series.append(_correction(side, _CLEAN, phase, agreement))
    names[_CLEAN] = _CLEAN
    chooser = Control("disturbance", "Disturbance", list(names.items()), next(iter(names)))
    return described("correct", series, controls=[_model_control(measured.sides), chooser])


def _correction(side: str, name: str, phase: int, agreement: list[float]) -> Series:
    shares = (100 * np.array(agreement)).tolist()
    line = Series(f"phase {phase}", list(range(len(shares))), shares, colour=f"palette-{phase - 1}")
    line.when = {"model": [side], "disturbance": [name]}
    return line


def correct_figure(measured: CorrectFile) -> Figure:
    """A column for each model, a row for each disturbance."""
    chart = correct_chart(measured)
    models, disturbances = chart.controls
    # The panels are too small for the words of the page.
    short_x = replace(chart.x, label="further steps")
    short_y = replace(chart.y, label="agreement (%)")
    panels = []
    for name, _ in disturbances.options:
        row = []
        for side, label in models.options:
            panel = chart.only(model=side, disturbance=name)
            row.append(replace(panel, title=f"{label}, {name}", x=short_x, y=short_y))
        panels.append(row)
    return Figure(panels, "Further steps after a disturbance", (2.9, 2.4), same_y=True, source=measured.images)


LEAD = (
    "A recurrent view of depth offers four tools. Each stands beside its baselines and null models, and beside the "
    "teacher: what the teacher can do as well is not due to recurrence."
)


def tool(results: Results) -> Section:
    """Depth on demand, watching, editing and correcting, as far as they were measured."""
    section = Section("tool", "As a tool", "Recurrence as a tool", LEAD)
    for name, (title, command, makers) in _PARTS.items():
        file = getattr(results, name)
        if file is None:
            # A section has one hint: the first part that is missing.
            section.hint = section.hint or command
            continue
        section.body += [part(title, f"Measured on {file.images}."), bullet_list(file.findings)]
        for make in makers:
            chart = make(file)
            if chart is not None:
                section.body.append(chart)
        if name == "watch":
            section.body += _watch_details(file)
    return section


def _watch_details(measured: WatchFile) -> list[str]:
    """The table of scores and the pictures, as far as there are any."""
    body = []
    if scores_chart(measured) is not None:
        body.append(_scores_table(measured))
    if measured.shown:
        body += [paragraph(_PICTURES, "caption"), _watched_pictures(measured)]
    return body


_PICTURES = "The highest scores; below each image the patches on which both models disagree most are bright."
_PARTS: dict[str, tuple[str, str, tuple[Callable[[Any], Chart | None], ...]]] = {
    "depth": ("Depth on demand", "raptor depth", (depth_chart,)),
    "watch": ("Watching", "raptor watch --unusual noise blur", (watch_chart, scores_chart)),
    "edit": ("Editing", "raptor edit --to CLASS", (edit_chart,)),
    "correct": ("Correcting", "raptor correct", (correct_chart,)),
}
"""Title, command and charts of each part."""


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
