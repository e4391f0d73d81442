"""Interventions: blocks swapped, phases run shorter and longer, a surrogate run past its last layer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from raptor.dynamics.repetition import Extrapolation, Repetition
from raptor.dynamics.swaps import Swaps
from raptor.report.charts import GROUP_NAMES, Chart, Control, Section, Series, finite_values, number
from raptor.report.markup import bullet_list, paragraph
from raptor.report.results import Results

LEAD = (
    "If depth is recurrence, blocks of one phase can change places, and a tied block can run on. Here both are tried."
)


def interventions(results: Results) -> Section:
    section = Section("interventions", "Interventions", "Interventions", LEAD)
    measured = results.interventions
    if measured is None:
        section.hint = results.adds("dynamics", "--interventions true")
        return section
    section.html = paragraph(f"Measured on {measured.images}.", "caption")
    if measured.findings:
        section.html += bullet_list(measured.findings)
    sides = measured.sides()
    if sides:
        section.charts = [
            _swaps({side: parts.swaps for side, parts in sides.items()}),
            _repetition({side: parts.repetition for side, parts in sides.items()}),
        ]
    past = {side: parts.extrapolation for side, parts in sides.items() if parts.extrapolation is not None}
    if past:
        section.charts.append(_past(past))
    return section


def _words(measure: str) -> str:
    """`turn_cls` as `turn of cls`, `agreement` as it is."""
    name, _, group = measure.partition("_")
    return f"{name} of {GROUP_NAMES.get(group, group)}" if group else name


def _unit(measure: str) -> str:
    units = {"agreement": "share of predictions that stay", "norm": "|x|", "speed": "radians per step"}
    return units.get(measure, "turn of the last state (radians)")


def _controls(sides: Iterable[str], measures: Iterable[str], start: str) -> list[Control]:
    measures = list(measures)
    options = [(m, _words(m)) for m in measures]
    controls = [Control("measure", "Measure", options, start if start in measures else measures[0])]
    models = [(side, side) for side in sides]
    return [Control("model", "Model", models, models[0][0]), *controls] if len(models) > 1 else controls


def _agreement(found: Iterable[Swaps | Repetition | Extrapolation]) -> list[str]:
    """The measure `agreement`, if every side has it: one whose clean predictions hardly vary has none."""
    return ["agreement"] if all(side.agreement is not None for side in found) else []


def _swaps(found: dict[str, Swaps]) -> Chart:
    first = next(iter(found.values()))
    measures = [f"turn_{group}" for group in first.angle] + _agreement(found.values())
    series: list[Series] = [
        {
            "name": side,
            "z": swaps.matrix(values),
            "cuts": {"phases": list(first.phases)},
            "unit": _unit(m),
            "when": {"model": [side], "measure": [m]},
        }
        for side, swaps in found.items()
        for m, values in _swap_means(swaps).items()
        if m in measures
    ]
    compared = first.compare(first.angle["all"].mean)
    return Chart(
        id="swaps",
        kind="heatmap",
        title="Two blocks swapped",
        series=series,
        caption="Look at the squares: a swap within a phase should cost less than one across.",
        alt=f"Turn of the last state when two blocks are swapped: {number(compared['within'])} radians within a phase, "
        f"{number(compared['across'])} across phases.",
        x={"label": "block", "integer": True},
        y={"label": "block", "integer": True},
        controls=[*_controls(found, measures, "turn_all"), Control("k", "Phases", [("phases", "phases")], "phases")],
        extra={"unit": _unit("turn"), "what": "blocks"},
    )


def _swap_means(swaps: Swaps) -> dict[str, np.ndarray]:
    """Measure -> its mean over images, per pair of blocks."""
    means = {f"turn_{group}": spread.mean for group, spread in swaps.angle.items()}
    return means if swaps.agreement is None else means | {"agreement": swaps.agreement.mean}


def _repetition(found: dict[str, Repetition]) -> Chart:
    first = next(iter(found.values()))
    measures = [f"turn_{group}" for group in first.angle[0]] + _agreement(found.values())
    series: list[Series] = []
    for side, repetition in found.items():
        for j, length in enumerate(repetition.phases):
            means = {f"turn_{group}": spread.mean for group, spread in repetition.angle[j].items()}
            if repetition.agreement is not None:
                means["agreement"] = repetition.agreement[j].mean
            ratio = [times / length for times in repetition.counts[j]]
            series += [
                {
                    "name": f"phase {j + 1} (× {length})",
                    "x": ratio,
                    "y": means[m],
                    "colour": f"palette-{j}",
                    "unit": _unit(m),
                    "when": {"model": [side], "measure": [m]},
                }
                for m in measures
            ]
    turns = finite_values(value for by_group in first.angle for value in by_group["all"].mean)
    return Chart(
        id="repetition",
        kind="lines",
        title="A phase run shorter and longer",
        series=series,
        caption="1 is the model as it is. Look for a flat curve: a phase that can run on.",
        alt=f"Turn of the last state as each phase runs one time fewer to twice as often: at most {number(max(turns))} "
        "radians.",
        x={"label": "times the phase runs, over its own count"},
        y={"label": "", "from_zero": True},
        controls=_controls(found, measures, "turn_all"),
        extra={"mark": 1},
    )


def _past(found: dict[str, Extrapolation]) -> Chart:
    first = next(iter(found.values()))
    measures = ["speed", "turn", "norm", *_agreement(found.values())]
    series: list[Series] = []
    for side, past in found.items():
        means = {
            "speed": [None, *past.speed["all"].mean],  # the last layer itself has none
            "turn": past.angle["all"].mean,
            "norm": past.norm["all"].mean,
            "agreement": None if past.agreement is None else past.agreement.mean,
        }
        series += [
            {
                "name": _words(m),
                "x": past.layers,
                "y": means[m],
                "colour": f"side-{side}",
                "unit": _unit(m),
                "when": {"model": [side], "measure": [m]},
            }
            for m in measures
        ]
    speeds = finite_values(first.speed["all"].mean)
    return Chart(
        id="extrapolation",
        kind="lines",
        title="Run on past the last layer",
        series=series,
        caption="The surrogate's last block keeps running. Look for a speed that falls: the state settles.",
        alt=f"Past layer {first.layers[0]} the speed goes from {number(speeds[0])} to {number(speeds[-1])} radians.",
        x={"label": "layer", "integer": True},
        y={"label": "", "from_zero": True},
        controls=_controls(found, measures, "speed"),
        wide=True,
    )
