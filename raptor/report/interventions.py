"""Interventions: blocks swapped, phases run shorter and longer, a surrogate run past its last layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.repetition import Extrapolation, Repetition
from raptor.dynamics.swaps import Swaps
from raptor.report.charts import GROUP_NAMES, Chart, Control, Section, Series, described, number, with_band
from raptor.report.markup import bullet_list, paragraph
from raptor.report.results import Results
from raptor.streaming import Spread

LEAD = (
    "If depth is recurrence, blocks of one phase can change places, and a tied block can run on. Here both are tried."
)
_UNITS = {
    "agreement": "predictions kept (%)",
    "norm": "mean token norm |x|",
    "speed": "turn in one step (rad)",
    "turn": "angle to the last layer's state (rad)",
}
_TURN = "turn of the last state (rad)"


def interventions(results: Results) -> Section:
    section = Section("interventions", "Interventions", "Interventions", LEAD)
    measured = results.interventions
    if measured is None:
        section.hint = "raptor dynamics --interventions true"
        return section
    section.body.append(paragraph(f"Measured on {measured.images}.", "caption"))
    if measured.findings:
        section.body.append(bullet_list(measured.findings))
    for chart in intervention_charts(measured):
        # Predictions that only one side has are not offered: its chooser would be empty for the other one.
        (measure,) = (control for control in chart.controls if control.name == "measure")
        section.body.append(chart.only(measure=[value for value, _ in measure.options]))
    return section


def intervention_charts(measured: InterventionsFile) -> list[Chart]:
    """Every chart of interventions.json that was measured."""
    swapped: dict[str, Swaps] = {}
    repeated: dict[str, Repetition] = {}
    past: dict[str, Extrapolation] = {}
    for side, parts in measured.sides().items():
        # A measure of both sides stands on one chart, with a chooser of the model.
        swapped[side] = parts.swaps
        repeated[side] = parts.repetition
        if parts.extrapolation is not None:
            past[side] = parts.extrapolation
    charts = []
    if swapped:
        charts += [swaps(swapped), repetition(repeated)]
    if past:
        charts.append(extrapolation(past))
    return charts


def _controls(sides: Mapping[str, Any], measures: list[str], start: str) -> list[Control]:
    options = []
    for measure in measures:
        name, _, group = measure.partition("_")  # turn_cls
        if group:
            name += f" of {GROUP_NAMES[group]}"
        options.append((measure, name))
    return [
        Control("model", "Model", [(side, side) for side in sides], next(iter(sides))),
        Control("measure", "Measure", options, start),
    ]


def _measures(turns: Iterable[str], found: Iterable[Swaps | Repetition | Extrapolation]) -> list[str]:
    """The measures that every side has: `agreement` is missing where clean predictions hardly vary."""
    measures = list(turns)
    if all(side.agreement is not None for side in found):
        measures.append("agreement")
    return measures


def swaps(found: dict[str, Swaps]) -> Chart:
    """Turn of the last state and predictions kept, for every pair of blocks exchanged."""
    first = next(iter(found.values()))
    series: list[Series] = []
    for side, one in found.items():
        cuts = {"phases": list(one.phases)}
        for measure, values in _percent_kept(one.angle, one.agreement).items():
            when = {"model": [side], "measure": [measure]}
            series.append(
                Series(side, z=one.matrix(values.mean), cuts=cuts, unit=_UNITS.get(measure, _TURN), when=when)
            )
    measures = _measures((f"turn_{group}" for group in first.angle), found.values())
    compared = first.compare(first.angle["all"].mean)
    words = (
        f"Turn of the last state when two blocks are swapped: {number(compared['within'])} radians within a phase, "
        f"{number(compared['across'])} across phases"
    )
    outlines = Control("k", "Phases", [("phases", "phases")], "phases")
    return described("swaps", series, alt=words, controls=[*_controls(found, measures, "turn_all"), outlines])


def _percent_kept(angle: dict[str, Spread], agreement: Spread | None) -> dict[str, Spread]:
    """Measure -> its values: turns by token group, and predictions kept in percent."""
    found = {}
    for group, spread in angle.items():
        found[f"turn_{group}"] = spread
    if agreement is not None:
        found["agreement"] = Spread(100 * np.asarray(agreement.mean))
    return found


def repetition(found: dict[str, Repetition]) -> Chart:
    """Turn of the last state and predictions kept, when one phase runs fewer or more times than its length."""
    first = next(iter(found.values()))
    series: list[Series] = []
    for side, one in found.items():
        for j, length in enumerate(one.phases):
            base = f"phase {j + 1} ({length} blocks)"
            # Phases differ in length: runs are compared by their share of it.
            ratio = (np.array(one.counts[j]) / length).tolist()
            kept = None
            if one.agreement is not None:
                kept = one.agreement[j]
            for measure, values in _percent_kept(one.angle[j], kept).items():
                line = Series(base, ratio, values.mean, colour=f"palette-{j}", side=side, base=base)
                line.unit = _UNITS.get(measure, _TURN)
                line.when = {"model": [side], "measure": [measure]}
                series.append(line)
    measures = _measures((f"turn_{group}" for group in first.angle[0]), found.values())
    return described("repetition", series, controls=_controls(found, measures, "turn_all"))


def extrapolation(found: dict[str, Extrapolation]) -> Chart:
    """A surrogate past its last layer: turn from the last state, speed, norm and predictions kept."""
    series: list[Series] = []
    for side, past in found.items():
        spreads = {"turn": past.angle["all"], "speed": past.speed["all"], "norm": past.norm["all"]}
        if past.agreement is not None:
            spreads["agreement"] = Spread(100 * past.agreement.mean)
        for measure, spread in spreads.items():
            # The last layer itself has no speed, so a speed has one value fewer.
            layers = past.layers[-len(spread.mean) :]
            line = Series(side, layers, spread.mean, colour=f"side-{side}", unit=_UNITS.get(measure, _TURN))
            line.when = {"model": [side], "measure": [measure]}
            series.append(with_band(line, spread))
    conditioning = next(iter(found.values())).conditioning
    measures = _measures(("turn", "speed", "norm"), found.values())
    controls = _controls(found, measures, "speed")
    return described("extrapolation", series, {"conditioning": conditioning}, controls=controls)
