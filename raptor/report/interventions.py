"""Interventions: blocks swapped, phases run shorter and longer, a surrogate run past its last layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raptor.dynamics.interventions import InterventionsFile
from raptor.report.charts import Chart, Control, Section, Series, described, number
from raptor.report.markup import bullet_list, paragraph
from raptor.report.results import Results
from raptor.streaming import Spread

_UNITS = {
    "agreement": "predictions kept (%)",
    "norm": "mean token norm |x|",
    "speed": "turn in one step (rad)",
    "turn": "angle to the last layer's state (rad)",
}
_TURN = "turn of the last state (rad)"


def interventions(results: Results) -> Section:
    section = Section.named("interventions")
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
        for measure, values in _measures(swaps.angle, swaps.agreement).items():
            matrix = Series(side, z=swaps.matrix(values.mean), cuts={"phases": list(swaps.phases)})
            swapped.append(_of_measure(matrix, side, measure))
        compared = swaps.compare(swaps.angle["all"].mean)
        words = words or (
            f"Turn of the last state when two blocks are swapped: {number(compared['within'])} radians within a "
            f"phase, {number(compared['across'])} across phases"
        )
        repetition = found.repetition
        for j, length in enumerate(repetition.phases):
            # Phases differ in length: runs are compared by their share of it.
            ratio = (np.array(repetition.counts[j]) / length).tolist()
            kept = None if repetition.agreement is None else repetition.agreement[j]
            name = f"phase {j + 1} ({length} blocks)"
            for measure, values in _measures(repetition.angle[j], kept).items():
                line = Series(name, ratio, values.mean, colour=f"palette-{j}", side=side, base=name)
                repeated.append(_of_measure(line, side, measure))
        beyond = found.extrapolation
        if beyond is not None:
            conditioning = beyond.conditioning
            spreads = {"turn": beyond.angle["all"], "speed": beyond.speed["all"], "norm": beyond.norm["all"]}
            for measure, spread in (spreads | _measures({}, beyond.agreement)).items():
                # The last layer itself has no speed, so a speed has one value fewer.
                line = Series(side, beyond.layers[-len(spread.mean) :], spread, colour=f"side-{side}", side=side)
                past.append(_of_measure(line, side, measure))
    charts = [
        described("swaps", swapped, alt=words),
        described("repetition", repeated),
        described("extrapolation", past, {"conditioning": conditioning}),
    ]
    charts[0].controls.append(Control("k", "Phases", [("phases", "phases")], "phases"))
    for chart in charts:
        _leave_out_gaps(chart)
    return [chart for chart in charts if chart.series]


def _measures(angle: Mapping[str, Spread], agreement: Spread | None) -> dict[str, Spread]:
    """Measure -> its values: turns by token group, and predictions kept in percent."""
    found = {f"turn_{group}": spread for group, spread in angle.items()}
    if agreement is not None:
        found["agreement"] = Spread(100 * np.asarray(agreement.mean))
    return found


def _of_measure(series: Series, side: str, measure: str) -> Series:
    """A series that is shown with its side and its measure."""
    series.unit = _UNITS.get(measure, _TURN)
    series.when = {"model": [side], "measure": [measure]}
    return series


def _leave_out_gaps(chart: Chart) -> None:
    """Let the chart offer only measures that every model has.

    `agreement` is missing where clean predictions hardly vary, and the chart of that model would be empty.
    """
    models, measures, *_ = chart.controls
    for side, _ in models.options:
        known = {value for one in chart.series if one.when["model"] == [side] for value in one.when["measure"]}
        measures.options = [option for option in measures.options if option[0] in known]
