"""As a tool: depth on demand, watching, editing and correcting, each beside its baselines and null models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from raptor.recurrence.correct import CorrectFile
from raptor.recurrence.depth import FULL, DepthFile
from raptor.recurrence.edit import EditFile
from raptor.recurrence.watch import WATCHER, WatchFile
from raptor.report.charts import Chart, Section, Series, described, series_names
from raptor.report.markup import bullet_list, paragraph, pictures, table
from raptor.report.results import Results
from raptor.report.strips import png

_CLEAN = "undisturbed"
_NULL_COLOURS = {"random": "null-shuffled", "shorter": "null-smooth"}
_PICTURES = "The highest scores; below each image the patches on which both models disagree most are bright."


def tool(results: Results) -> Section:
    """Depth on demand, watching, editing and correcting, as far as they were measured."""
    section = Section.named("tool")
    for name, (command, make) in _PARTS.items():
        file = getattr(results, name)
        if file is None:
            # A section has one hint: the first part that is missing.
            section.hint = section.hint or command
            continue
        section.add_part(name, bullet_list(file.findings), *make(file), images=file.images)
        if name == "watch":
            section.body += _watch_details(file)
    return section


def depth_charts(measured: DepthFile) -> list[Chart]:
    """Agreement against cost: a curve for each rule, from its strictest threshold to its loosest."""
    series: list[Series] = []
    for side, points in measured.sides().items():
        for place, (family, name) in enumerate(series_names("depth").items()):
            if not any(point.family == family for point in points):
                continue
            # Every curve begins at full depth, which is the model as it is.
            of_rule = [point for point in points if point.family in (FULL, family)]
            agreement = [100 * point.agreement for point in of_rule]
            for cost in ("milliseconds", "gflops"):
                curve = Series(name, [getattr(point, cost) for point in of_rule], agreement, base=name)
                curve.colour = _NULL_COLOURS.get(family, f"palette-{place}")
                curve.side = "null" if family in _NULL_COLOURS else ""
                curve.when = {"model": [side], "cost": [cost]}
                series.append(curve)
    return [described("depth", series, {"images": measured.images})]


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
            line = scores.setdefault(score, Series(_score_name(score), [], [], colour=f"palette-{len(scores)}"))
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


def _score_name(score: str) -> str:
    """Files call the watcher by what it needs, a surrogate."""
    return "watcher" if score == WATCHER else score


def _watch_details(measured: WatchFile) -> list[str]:
    """The table of scores with their intervals, and the images with the highest scores."""
    body = []
    head: list[str] = []
    rows = []
    for one in measured.sets:
        if one.scores:
            head = ["AUROC (95 %)", *map(_score_name, one.scores)]
            row = [_short(one.name)]
            for found in one.scores.values():
                low, high = found.auroc_interval
                row.append(f"{found.auroc:.3f} ({low:.3f} to {high:.3f})")
            rows.append(row)
    if rows:
        body.append(table(head, rows))
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


def edit_charts(measured: EditFile) -> list[Chart]:
    """Shares of images that the edit and its controls flip, at the end of each phase."""
    series: list[Series] = []
    for side, results in measured.sides().items():
        for place, (key, name) in enumerate(series_names("edit").items()):
            line = Series(name, [], [], colour=f"palette-{place}", base=name, when={"model": [side]})
            for one in results:
                share = one.flipped
                if key != "flipped":
                    # The controls are measured on the images that the edit flips.
                    share *= getattr(one, key) or 0.0
                line.x.append(one.phase)
                line.y.append(100 * share)
            series.append(line)
    return [described("edit", series, {"name": measured.class_name})]


def correct_charts(measured: CorrectFile) -> list[Chart]:
    """Agreement with the clean image after a disturbance, by the number of further steps of a phase."""
    series: list[Series] = []
    for side, corrections in measured.sides.items():
        curves = {(f"{one.disturbance} {one.size:g}", one.phase): one.agreement for one in corrections}
        # What the steps cost an undisturbed image is the same beside every disturbance of a phase.
        curves |= {(_CLEAN, one.phase): one.agreement_clean for one in corrections}
        for (name, phase), agreement in curves.items():
            shares = (100 * np.array(agreement)).tolist()
            when = {"model": [side], "disturbance": [name]}
            series.append(Series(f"phase {phase}", 0, shares, colour=f"palette-{phase - 1}", when=when))
    return [described("correct", series)]


_PARTS: dict[str, tuple[str, Callable[[Any], list[Chart]]]] = {
    "depth": ("raptor depth", depth_charts),
    "watch": ("raptor watch --unusual noise blur", watch_charts),
    "edit": ("raptor edit --to CLASS", edit_charts),
    "correct": ("raptor correct", correct_charts),
}
"""The command and the charts of each part."""
