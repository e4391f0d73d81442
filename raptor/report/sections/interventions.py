"""Interventions: blocks swapped, phases run shorter and longer, a surrogate run past its last layer."""

from __future__ import annotations

from typing import Any

from raptor.report.charts import GROUP_NAMES, Chart, Control, Section, finite_values, number
from raptor.report.markup import bullet_list
from raptor.report.results import Results

LEAD = "If depth is recurrence, blocks of one phase may change places, and a tied block may run on. Break it and see."
Sides = dict[str, dict[str, Any]]


def interventions(results: Results) -> Section:
    section = Section("interventions", "Interventions", "Interventions", LEAD)
    measured = results.get("interventions")
    if not measured:
        section.hint = f"raptor dynamics {results.folder} --data DATA --interventions true"
        return section
    if measured.get("findings"):
        section.html = bullet_list(measured["findings"])
    sides = {side: measured[side] for side in ("teacher", "surrogate") if measured.get(side)}
    made = [
        _swaps(_part(sides, "swaps")),
        _repetition(_part(sides, "repetition")),
        _past(_part(sides, "extrapolation")),
    ]
    section.charts = [chart for chart in made if chart]
    return section


def _part(sides: Sides, name: str) -> Sides:
    return {side: parts[name] for side, parts in sides.items() if parts.get(name)}


def _words(measure: str) -> str:
    """`turn_cls` as `turn of cls`, `agreement` as it is."""
    name, _, group = measure.partition("_")
    return f"{name} of {GROUP_NAMES.get(group, group)}" if group else name


def _unit(measure: str) -> str:
    units = {"agreement": "share of predictions that stay", "norm": "|x|", "speed": "radians a step"}
    return units.get(measure, "turn of the last state (radians)")


def _controls(found: Sides, measures: list[str], start: str) -> list[Control]:
    options = [(m, _words(m)) for m in measures]
    controls = [Control("measure", "Measure", options, start if start in measures else measures[0])]
    sides = [(side, side) for side in found]
    return [Control("model", "Model", sides, sides[0][0]), *controls] if len(sides) > 1 else controls


def _swaps(found: Sides) -> Chart | None:
    if not found:
        return None
    first = next(iter(found.values()))
    measures = [m for m, value in first.items() if m.startswith("turn_") or (m == "agreement" and value)]
    lengths = first["phases"]
    series = [
        {"name": side, "z": swaps[m], "cuts": {"phases": lengths}, "unit": _unit(m),
         "when": {"model": [side], "measure": [m]}}
        for side, swaps in found.items()
        for m in measures
        if m in swaps
    ]  # fmt: skip
    compared = first["compared"]["turn_all"]
    return Chart(
        id="swaps", kind="heatmap", title="Two blocks swapped", series=series,
        caption="Look at the squares: a swap within a phase should cost less than one across.",
        alt=f"Turn of the last state when two blocks are swapped: {number(compared['within'])} radians within a phase, "
        f"{number(compared['across'])} across phases.",
        x={"label": "block", "integer": True}, y={"label": "block", "integer": True},
        controls=[*_controls(found, measures, "turn_all"), Control("k", "Phases", [("phases", "phases")], "phases")],
        extra={"unit": _unit("turn"), "what": "blocks"},
    )  # fmt: skip


def _repetition(found: Sides) -> Chart | None:
    if not found:
        return None
    rows = next(iter(found.values()))["rows"]
    measures = [m for m in rows[0] if m.startswith("turn_") or m == "agreement"]
    series = []
    for side, repetition in found.items():
        for phase in sorted({row["phase"] for row in repetition["rows"]}):
            own = [row for row in repetition["rows"] if row["phase"] == phase]
            for m in measures:
                series.append({
                    "name": f"phase {phase} (× {own[0]['length']})", "x": [row["times"] / row["length"] for row in own],
                    "y": [row.get(m) for row in own], "colour": f"palette-{phase - 1}", "unit": _unit(m),
                    "when": {"model": [side], "measure": [m]},
                })  # fmt: skip
    turns = finite_values([row["turn_all"] for row in rows])
    return Chart(
        id="repetition", kind="lines", title="A phase run shorter and longer", series=series,
        caption="1 is the model as it is. Look for a flat curve: a phase that bears being run on.",
        alt=f"Turn of the last state as each phase runs one time fewer to twice as often: at most {number(max(turns))} "
        "radians.",
        x={"label": "times the phase runs, over its own count"}, y={"label": "", "from_zero": True},
        controls=_controls(found, measures, "turn_all"), extra={"mark": 1},
    )  # fmt: skip


def _past(found: Sides) -> Chart | None:
    if not found:
        return None
    first = next(iter(found.values()))
    measures = [m for m in ("speed", "turn", "norm", "agreement") if first.get(m)]
    series = [
        {"name": _words(m), "x": past["layers"], "y": past[m], "colour": f"side-{side}", "unit": _unit(m),
         "when": {"model": [side], "measure": [m]}}
        for side, past in found.items()
        for m in measures
    ]  # fmt: skip
    speeds = finite_values(first["speed"])
    return Chart(
        id="extrapolation", kind="lines", title="Run on past the last layer", series=series,
        caption="The surrogate's last block keeps running. Look for a speed that falls: the state settles.",
        alt=f"Past layer {first['layers'][0]} the speed goes from {number(speeds[0])} to {number(speeds[-1])} radians.",
        x={"label": "layer", "integer": True}, y={"label": "", "from_zero": True},
        controls=_controls(found, measures, "speed"), wide=True,
    )  # fmt: skip
