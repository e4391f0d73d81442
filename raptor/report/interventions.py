"""Interventions: blocks swapped, phases run shorter and longer, a surrogate run past its last layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.repetition import Extrapolation, Repetition
from raptor.dynamics.swaps import Swaps
from raptor.report.charts import GROUP_NAMES, Axis, Chart, Control, Figure, Section, Series, number
from raptor.report.markup import bullet_list, paragraph
from raptor.report.results import Results

LEAD = (
    "If depth is recurrence, blocks of one phase can change places, and a tied block can run on. Here both are tried."
)
_KEPT = "predictions kept (%)"
_UNITS = {"agreement": _KEPT, "norm": "mean token norm |x|", "speed": "turn in one step (rad)"}
_PAST_ON_PAPER = ("turn", "speed", "norm", "agreement")


def interventions(results: Results) -> Section:
    section = Section("interventions", "Interventions", "Interventions", LEAD)
    measured = results.interventions
    if measured is None:
        section.hint = "raptor dynamics --interventions true"
        return section
    section.html = paragraph(f"Measured on {measured.images}.", "caption")
    if measured.findings:
        section.html += bullet_list(measured.findings)
    if measured.sides():
        section.charts = [_as_offered(swaps(_swaps(measured))), _as_offered(repetition(_repetitions(measured)))]
    past = _extrapolations(measured)
    if past:
        section.charts.append(extrapolation(past))
    return section


def _swaps(measured: InterventionsFile) -> dict[str, Swaps]:
    return {side: parts.swaps for side, parts in measured.sides().items()}


def _repetitions(measured: InterventionsFile) -> dict[str, Repetition]:
    return {side: parts.repetition for side, parts in measured.sides().items()}


def _extrapolations(measured: InterventionsFile) -> dict[str, Extrapolation]:
    return {side: parts.extrapolation for side, parts in measured.sides().items() if parts.extrapolation is not None}


def _words(measure: str) -> str:
    """`turn_cls` as `turn of cls`, `agreement` as it is."""
    name, _, group = measure.partition("_")
    return f"{name} of {GROUP_NAMES.get(group, group)}" if group else name


def _unit(measure: str) -> str:
    return _UNITS.get(measure, "turn of the last state (rad)")


def _controls(sides: Iterable[str], measures: list[str], start: str) -> list[Control]:
    options = [(measure, _words(measure)) for measure in measures]
    controls = [Control("measure", "Measure", options, start)]
    models = [(side, side) for side in sides]
    return [Control("model", "Model", models, models[0][0]), *controls] if len(models) > 1 else controls


def _as_offered(chart: Chart) -> Chart:
    """The chart without measures that its chooser does not offer, because only one side has them."""
    (measure,) = (control for control in chart.controls if control.name == "measure")
    return chart.only(measure=[value for value, _ in measure.options])


def _agreement(found: Iterable[Swaps | Repetition | Extrapolation]) -> list[str]:
    """The measure `agreement`, if every side has it: one whose clean predictions hardly vary has none."""
    return ["agreement"] if all(side.agreement is not None for side in found) else []


# Swaps ----------------------------------------------------------------------------------------------------------------


def swaps(found: dict[str, Swaps]) -> Chart:
    """Turn of the last state and predictions kept, for every pair of blocks exchanged."""
    first = next(iter(found.values()))
    series: list[Series] = []
    for side, one in found.items():
        for measure, values in _swap_means(one).items():
            when = {"model": [side], "measure": [measure]}
            cuts = {"phases": list(one.phases)}
            series.append(Series(side, z=one.matrix(values), cuts=cuts, unit=_unit(measure), when=when))
    measures = [f"turn_{group}" for group in first.angle] + _agreement(found.values())
    compared = first.compare(first.angle["all"].mean)
    return Chart(
        id="swaps",
        kind="heatmap",
        title="Two blocks swapped",
        caption="Look at the squares: a swap within a phase should cost less than one across.",
        alt=f"Turn of the last state when two blocks are swapped: {number(compared['within'])} radians within a phase, "
        f"{number(compared['across'])} across phases",
        series=series,
        x=Axis("block", integer=True),
        y=Axis("block", integer=True),
        controls=[*_controls(found, measures, "turn_all"), Control("k", "Phases", [("phases", "phases")], "phases")],
        cells="blocks",
    )


def _swap_means(found: Swaps) -> dict[str, np.ndarray]:
    """Measure -> its mean over images, per pair of blocks."""
    means = {f"turn_{group}": spread.mean for group, spread in found.angle.items()}
    if found.agreement is not None:
        means["agreement"] = 100 * found.agreement.mean
    return means


def figure_swaps(measured: InterventionsFile) -> Figure | None:
    """On paper: a row per model; turns, and predictions where a side has them."""
    found = _swaps(measured)
    if not found:
        return None
    chart = swaps(found)
    has_head = any(one.agreement is not None for one in found.values())
    rows: list[list[Chart | None]] = []
    for side, one in found.items():
        title = f"{side}: two blocks swapped"
        row: list[Chart | None] = [chart.only(model=side, measure="turn_all", title=title)]
        if has_head:
            kept = chart.only(model=side, measure="agreement", title=title)
            row.append(None if one.agreement is None else kept)
        rows.append(row)
    return Figure(rows, size=(4.3, 3.7))


# Repetition -----------------------------------------------------------------------------------------------------------


def repetition(found: dict[str, Repetition]) -> Chart:
    """Turn of the last state and predictions kept, when one phase runs fewer or more times than its length."""
    first = next(iter(found.values()))
    series: list[Series] = []
    for side, one in found.items():
        for j in range(len(one.phases)):
            series += _repeated_phase(one, j, side)
    measures = [f"turn_{group}" for group in first.angle[0]] + _agreement(found.values())
    return Chart(
        id="repetition",
        kind="lines",
        title="A phase run shorter and longer",
        caption="1 is the model as it is. Look for a flat curve: a phase that can run on.",
        series=series,
        x=Axis("times the phase runs / its length"),
        y=Axis(from_zero=True),
        controls=_controls(found, measures, "turn_all"),
        mark=1,
    )


def _repeated_phase(found: Repetition, j: int, side: str) -> list[Series]:
    """The curves of phase `j`, one a measure."""
    length = found.phases[j]
    means = {f"turn_{group}": spread.mean for group, spread in found.angle[j].items()}
    if found.agreement is not None:
        means["agreement"] = 100 * found.agreement[j].mean
    base = f"phase {j + 1} ({length} blocks)"
    ratio = [times / length for times in found.counts[j]]
    series = []
    for measure, values in means.items():
        when = {"model": [side], "measure": [measure]}
        unit = _unit(measure)
        series.append(Series(base, ratio, values, colour=f"palette-{j}", side=side, base=base, unit=unit, when=when))
    return series


def figure_repetition(measured: InterventionsFile) -> Figure | None:
    """On paper: direction, and predictions where a side has them; both models in each panel."""
    found = _repetitions(measured)
    if not found:
        return None
    chart = repetition(found)
    panels: list[Chart | None] = [chart.only(measure="turn_all", title="Direction")]
    if any(one.agreement is not None for one in found.values()):
        panels.append(chart.only(measure="agreement", title="Prediction"))
    return Figure([panels], size=(4.4, 3.4))


# Extrapolation --------------------------------------------------------------------------------------------------------


def extrapolation(found: dict[str, Extrapolation]) -> Chart:
    """A surrogate past its last layer: turn from the last state, speed, norm and predictions kept."""
    series: list[Series] = []
    for side, past in found.items():
        spreads = {"speed": past.speed["all"], "turn": past.angle["all"], "norm": past.norm["all"]}
        for measure, spread in spreads.items():
            layers = past.layers[-len(spread.mean) :]  # the last layer itself has no speed
            when = {"model": [side], "measure": [measure]}
            series.append(
                Series(
                    _words(measure),
                    layers,
                    spread.mean,
                    lower=spread.quantile(0.25),
                    upper=spread.quantile(0.75),
                    colour=f"side-{side}",
                    unit=_unit(measure) if measure != "turn" else "angle to the last layer's state (rad)",
                    when=when,
                )
            )
        if past.agreement is not None:
            when = {"model": [side], "measure": ["agreement"]}
            kept = 100 * past.agreement.mean
            series.append(Series("agreement", past.layers, kept, colour=f"side-{side}", unit=_KEPT, when=when))
    return Chart(
        id="extrapolation",
        kind="lines",
        title="Run on past the last layer",
        caption="The surrogate's last block keeps running. Look for a speed that falls: the state settles.",
        series=series,
        x=Axis("layer l > L", integer=True),
        y=Axis(from_zero=True),
        controls=_controls(found, ["speed", "turn", "norm", *_agreement(found.values())], "speed"),
        wide=True,
    )


def figure_extrapolation(measured: InterventionsFile) -> Figure | None:
    """On paper: a panel per measure, of the surrogate."""
    found = _extrapolations(measured)
    if "surrogate" not in found:
        return None
    past = found["surrogate"]
    chart = extrapolation(found)
    panels: list[Chart | None] = []
    for measure in _PAST_ON_PAPER:
        own = chart.only(model="surrogate", measure=measure, title="")
        if own.series:
            (series,) = own.series
            panels.append(replace(own, series=[replace(series, name="")]))  # the axis says what it is
    title = f"Past the last layer L = {past.layers[0]}: extrapolation ({past.conditioning})"
    return Figure([panels], title, size=(2.7, 3.0))


INTERVENTION_FIGURES: dict[str, Callable[[InterventionsFile], Figure | None]] = {
    "interventions-swaps": figure_swaps,
    "interventions-repetition": figure_repetition,
    "interventions-extrapolation": figure_extrapolation,
}
