"""Interventions: blocks swapped, phases run shorter and longer, a surrogate run past its last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from raptor.dynamics.interventions import InterventionsFile
from raptor.report.charts import GROUP_NAMES, Chart, Control, Section, Series, chooser, described, number
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
    section.body.append(bullet_list(measured.findings))
    section.body += intervention_charts(measured)
    return section


def intervention_charts(measured: InterventionsFile) -> list[Chart]:
    """Every chart of interventions.json that was measured; both sides share a chart, with a chooser of the model."""
    swapped: list[Series] = []
    repeated: list[Series] = []
    past: list[Series] = []
    words = ""
    conditioning = ""
    for side, found in measured.sides().items():
        swaps = found.swaps
        cuts = {"phases": list(swaps.phases)}
        for measure, values in _measures(swaps.angle, swaps.agreement).items():
            unit = _UNITS.get(measure, _TURN)
            when = {"model": [side], "measure": [measure]}
            swapped.append(Series(side, z=swaps.matrix(values.mean), cuts=cuts, unit=unit, when=when))
        compared = swaps.compare(swaps.angle["all"].mean)
        words = words or (
            f"Turn of the last state when two blocks are swapped: {number(compared['within'])} radians within a "
            f"phase, {number(compared['across'])} across phases"
        )
        repetition = found.repetition
        for j, length in enumerate(repetition.phases):
            # Phases differ in length: runs are compared by their share of it.
            ratio = (np.array(repetition.counts[j]) / length).tolist()
            kept = None
            if repetition.agreement is not None:
                kept = repetition.agreement[j]
            for measure, values in _measures(repetition.angle[j], kept).items():
                name = f"phase {j + 1} ({length} blocks)"
                line = _line(name, side, ratio, values.mean, measure, f"palette-{j}")
                line.base = name
                repeated.append(line)
        beyond = found.extrapolation
        if beyond is not None:
            conditioning = beyond.conditioning
            spreads = {"turn": beyond.angle["all"], "speed": beyond.speed["all"], "norm": beyond.norm["all"]}
            if beyond.agreement is not None:
                spreads["agreement"] = Spread(100 * beyond.agreement.mean)
            for measure, spread in spreads.items():
                # The last layer itself has no speed, so a speed has one value fewer.
                layers = beyond.layers[-len(spread.mean) :]
                past.append(_line(side, side, layers, spread, measure, f"side-{side}"))
    outlines = Control("k", "Phases", [("phases", "phases")], "phases")
    charts = [
        described("swaps", swapped, alt=words, controls=[*_choosers(swapped, "turn_all"), outlines]),
        described("repetition", repeated, controls=_choosers(repeated, "turn_all")),
        described("extrapolation", past, {"conditioning": conditioning}, controls=_choosers(past, "speed")),
    ]
    return [chart for chart in charts if chart.series]


def _measures(angle: Mapping[str, Spread], agreement: Spread | None) -> dict[str, Spread]:
    """Measure -> its values: turns by token group, and predictions kept in percent."""
    found = {}
    for group, spread in angle.items():
        found[f"turn_{group}"] = spread
    if agreement is not None:
        found["agreement"] = Spread(100 * np.asarray(agreement.mean))
    return found


def _line(name: str, side: str, x: list[Any], y: Any, measure: str, colour: str) -> Series:
    when = {"model": [side], "measure": [measure]}
    return Series(name, x, y, colour=colour, side=side, unit=_UNITS.get(measure, _TURN), when=when)


def _choosers(series: list[Series], start: str) -> list[Control]:
    """Choosers of the model, and of the measures that every model has."""
    model = chooser("model", "Model", series)
    names = {}
    for group, words in GROUP_NAMES.items():
        names[f"turn_{group}"] = f"turn of {words}"
    measure = chooser("measure", "Measure", series, names, start)
    # `agreement` is missing where clean predictions hardly vary, and the chart of that model would be empty.
    for side, _ in model.options:
        known = {value for one in series if one.when["model"] == [side] for value in one.when["measure"]}
        measure.options = [option for option in measure.options if option[0] in known]
    return [model, measure]
