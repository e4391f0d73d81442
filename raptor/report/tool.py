"""As a tool: depth on demand, watching, editing and correcting, each beside its baselines and null models."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from raptor.recurrence.correct import CorrectFile
from raptor.recurrence.depth import FULL, DepthFile
from raptor.recurrence.edit import EditFile
from raptor.recurrence.watch import WATCHER, WatchFile
from raptor.report.charts import Chart, Section, Series, chooser, described
from raptor.report.markup import bullet_list, paragraph, part, pictures, table
from raptor.report.results import Results
from raptor.report.strips import png
from raptor.report.style import use_style

LEAD = (
    "A recurrent view of depth offers four tools. Each stands beside its baselines and null models, and beside the "
    "teacher: what the teacher can do as well is not due to recurrence."
)
_RULES = {
    "turn": "turn of cls",
    "second": "second difference",
    "entropy": "entropy",
    "kl": "change of the read-out",
    "random": "at random",
    "shorter": "shorter for all",
}
_EDITS = {
    "flipped": "by the edit",
    "stays": "still after four further steps",
    "random": "by a random direction",
    "at_the_end": "same step at the last layer",
    "gradient": "along the head's gradient",
}
_CLEAN = "undisturbed"
_MODELS = {"twin": "untrained twin", "beside": "other surrogate"}
_NULL_COLOURS = {"random": "null-shuffled", "shorter": "null-smooth"}
_COSTS = {"milliseconds": "ms per image", "gflops": "GFLOPs per image"}
_PICTURES = "The highest scores; below each image the patches on which both models disagree most are bright."


def tool(results: Results) -> Section:
    """Depth on demand, watching, editing and correcting, as far as they were measured."""
    section = Section("tool", "As a tool", "Recurrence as a tool", LEAD)
    for name, (title, command, make) in _PARTS.items():
        file = getattr(results, name)
        if file is None:
            # A section has one hint: the first part that is missing.
            section.hint = section.hint or command
            continue
        section.body += [part(title, f"Measured on {file.images}."), bullet_list(file.findings), *make(file)]
        if name == "watch":
            section.body += _watch_details(file)
    return section


def depth_charts(measured: DepthFile) -> list[Chart]:
    """Agreement against cost: a curve for each rule, from its strictest threshold to its loosest."""
    series: list[Series] = []
    for side, points in measured.sides().items():
        for place, (family, name) in enumerate(_RULES.items()):
            # Every curve begins at full depth, which is the model as it is.
            of_rule = [point for point in points if point.family in (FULL, family)]
            if all(point.family == FULL for point in of_rule):
                continue
            for cost in _COSTS:
                curve = Series(name, colour=_NULL_COLOURS.get(family, f"palette-{place}"), base=name)
                if family in _NULL_COLOURS:
                    curve.side = "null"
                curve.x = [getattr(point, cost) for point in of_rule]
                curve.y = [100 * point.agreement for point in of_rule]
                curve.when = {"model": [side], "cost": [cost]}
                series.append(curve)
    controls = [chooser("model", "Model", series), chooser("cost", "Cost", series, _COSTS)]
    return [described("depth", series, {"images": measured.images}, controls=controls)]


def watch_charts(measured: WatchFile) -> list[Chart]:
    """Where in depth both models disagree on each set; and how well each score tells unusual images from usual ones."""
    profiles: list[Series] = []
    scores: dict[str, Series] = {}
    for place, one in enumerate(measured.sets):
        name = _short(one.name)
        # An attack that fools no image leaves none to judge.
        if one.profile:
            profile = Series(name, 1, one.profile, colour=f"palette-{place}", lower=one.lower, upper=one.upper)
            profiles.append(profile)
        for score, found in (one.scores or {}).items():
            label = "watcher" if score == WATCHER else score
            line = scores.setdefault(score, Series(label, [], [], colour=f"palette-{len(scores)}"))
            line.x.append(name)
            line.y.append(found.auroc)
    say = {"num": measured.num_calibration, "calibration": measured.calibration}
    charts = [described("watch", profiles, say, phases=measured.phases, level=measured.threshold)]
    if scores:
        charts.append(described("watch-scores", list(scores.values())))
    return charts


def _short(name: str) -> str:
    """The name of a set without its folders and the ending of an archive."""
    return name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".zip")


def _watch_details(measured: WatchFile) -> list[str]:
    """The table of scores with their intervals, and the images with the highest scores."""
    body = []
    names: list[str] = []
    rows = []
    for one in measured.sets:
        if one.scores:
            # The first score is the watcher's. Files call it by what it needs, a surrogate.
            names = ["watcher", *list(one.scores)[1:]]
            row = [_short(one.name)]
            for found in one.scores.values():
                low, high = found.auroc_interval
                row.append(f"{found.auroc:.3f} ({low:.3f} to {high:.3f})")
            rows.append(row)
    if rows:
        body.append(table(["AUROC (95 %)", *names], rows))
    shown = []
    for image in measured.shown:
        # A pixel for each patch, bright where both models disagree most.
        map_hw = torch.tensor(image.map)
        map_png = png((map_hw / map_hw.max())[..., None].expand(-1, -1, 3))
        words = f"{image.of}, {image.name}: score {image.score:.3g} at layer {image.layer}, {image.group}"
        shown.append((image.name, [image.picture, map_png], words))
    if shown:
        body += [paragraph(_PICTURES, "caption"), pictures(shown)]
    return body


def draw_watched_images(measured: WatchFile) -> Any:
    """The images with the highest scores: the image, where in it both models disagree, and where in depth."""
    plt = use_style()
    figure, axes = plt.subplots(len(measured.shown), 3, figsize=(7.2, 1.9 * len(measured.shown)), squeeze=False)
    for row, image in zip(axes, measured.shown):
        row[0].imshow(Image.open(io.BytesIO(base64.b64decode(image.picture))))
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


def edit_charts(measured: EditFile) -> list[Chart]:
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
    return [described("edit", series, {"name": measured.class_name}, controls=[chooser("model", "Model", series)])]


def correct_charts(measured: CorrectFile) -> list[Chart]:
    """Agreement with the clean image after a disturbance, by the number of further steps of a phase."""
    series: list[Series] = []
    for side, corrections in measured.sides.items():
        curves = {}
        for one in corrections:
            curves[f"{one.disturbance} {one.size:g}", one.phase] = one.agreement
        # What the steps cost an undisturbed image is the same beside every disturbance of a phase.
        for one in corrections:
            curves[_CLEAN, one.phase] = one.agreement_clean
        for (name, phase), agreement in curves.items():
            shares = (100 * np.array(agreement)).tolist()
            when = {"model": [side], "disturbance": [name]}
            series.append(Series(f"phase {phase}", 0, shares, colour=f"palette-{phase - 1}", when=when))
    controls = [chooser("model", "Model", series, _MODELS), chooser("disturbance", "Disturbance", series)]
    return [described("correct", series, controls=controls)]


_PARTS: dict[str, tuple[str, str, Callable[[Any], list[Chart]]]] = {
    "depth": ("Depth on demand", "raptor depth", depth_charts),
    "watch": ("Watching", "raptor watch --unusual noise blur", watch_charts),
    "edit": ("Editing", "raptor edit --to CLASS", edit_charts),
    "correct": ("Correcting", "raptor correct", correct_charts),
}
"""Title, command and charts of each part."""
