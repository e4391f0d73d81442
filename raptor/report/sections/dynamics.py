"""Depth as a dynamical system: every panel, teacher and surrogate over each other, phase bands behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raptor.report.charts import EVERY, Chart, Section, finite_values, group_control, number, series_name
from raptor.report.markup import bullet_list
from raptor.report.results import Results
from raptor.report.sections.modes import mode_charts
from raptor.report.sections.stability import stability_charts

LEAD = (
    "Read depth as time. Solid lines are the teacher, dashed ones the surrogate, bands the phases. "
    "Choose one token group to see its spread over images (middle half)."
)
SIDES = ("teacher", "surrogate")
GROUPS = ("all", "cls", "registers", "patches")
Panel = tuple[str, str, str, str, str, str, dict[str, Any]]
STATE, STEP = "layer", "step from layer l to l + 1"

# measure, quantity, title, axis, caption, unit, options of the y axis
PANELS: tuple[Panel, ...] = (
    ("direction", "norm", "Norm", STATE, "Look for growth, and for groups that grow faster.", "|x|", {"log": True}),
    ("direction", "gamma", "Directional convergence", STATE,
     "Look for an S-shape, and for the group that arrives first.", "cosine with the last layer", {}),
    ("direction", "speed", "Angular speed", STEP,
     "Look for jumps where a phase ends, and a late turn of cls.", "radians a layer", {"from_zero": True}),
    ("rank", "stable_rank", "Stable rank of updates", STEP,
     "Look for a fall: fewer and fewer directions shared by all tokens.", "stable rank", {"from_zero": True}),
    ("rank", "effective_rank", "Effective rank of updates", STEP,
     "The same with small directions counted too.", "effective rank", {"from_zero": True}),
    ("rank", "coherence", "Coherence of updates", STEP,
     "1 means all tokens move as one. Look for a late peak.", "cosine with the mean update", {"range": [0, 1]}),
)  # fmt: skip


def dynamics(results: Results) -> Section:
    section = Section("dynamics", "Dynamics", "Depth as a dynamical system", LEAD)
    measured = results.get("dynamics")
    if not measured:
        section.hint = f"raptor dynamics {results.folder} --data DATA --out {results.folder}"
        return section
    sides = {side: measured[side] for side in SIDES if measured.get(side)}
    phases = measured.get("phases") or results.phase_lengths
    groups = _groups(sides)
    if groups:
        section.controls = [group_control(groups)]
    section.charts = [chart for panel in PANELS if (chart := _panel(sides, phases, *panel)).series]
    more: tuple[Callable[..., list[Chart]], ...] = (stability_charts, mode_charts)
    for charts in more:
        section.charts += charts(sides, phases)
    section.html = _findings(sides)
    known = sides.get("teacher") or {}
    missing = [name for name in ("direction", "rank", "stability", "modes") if not known.get(name)]
    if missing or "surrogate" not in sides:
        section.hint = f"raptor dynamics {results.folder} --data DATA --out {results.folder}"
        lacking = missing + ([] if "surrogate" in sides else ["the surrogate"])
        section.hint_reason = f"Not measured: {', '.join(lacking)}."
    return section


def _findings(sides: dict[str, Any]) -> str:
    """The findings of each side in words, folded away."""
    html = ""
    for side, measures in sides.items():
        lines = [*(measures.get("findings") or []), *(measures.get("notes") or [])]
        if lines:
            html += f"<details><summary>In words: the {side}</summary>{bullet_list(lines)}</details>"
    return html


def _groups(sides: dict[str, Any]) -> list[str]:
    found = {
        g
        for measures in sides.values()
        for quantity in ((measures.get("direction") or {}).get("norm"), (measures.get("rank") or {}).get("stable_rank"))
        for g in quantity or {}
    }
    return [g for g in GROUPS if g in found]


def _panel(
    sides: dict[str, Any], phases: list[int] | None, measure: str, quantity: str, title: str, axis: str, caption: str,
    unit: str, y: dict[str, Any],
) -> Chart:  # fmt: skip
    series = []
    for side, measures in sides.items():
        spreads = (measures.get(measure) or {}).get(quantity) or {}
        for group in GROUPS:
            if group in spreads.keys():  # noqa: SIM118 - a list here is damage, and must not pass
                spread = spreads[group]
                series.append({**line(group, side, spread["mean"], spread), "when": {"tokens": [group, EVERY]}})
    return Chart(
        id=f"dynamics-{quantity.replace('_', '-')}", kind="lines", title=title, caption=caption,
        alt=_alt(title, series), series=series, x={"label": axis, "integer": True}, y={"label": unit, **y},
        phases=phases, offset=0.5 if axis == STATE else -0.5,
    )  # fmt: skip


def line(group: str, side: str, values: list[Any], spread: dict[str, Any] | None = None) -> dict[str, Any]:
    """A curve over depth from index 0, with the middle half of the images as its band where it is known."""
    quantiles = (spread or {}).get("quantiles") or {}
    return {
        **series_name(group, side), "x": list(range(len(values))), "y": values,
        "lower": quantiles.get("q25"), "upper": quantiles.get("q75"),
    }  # fmt: skip


def _alt(title: str, series: list[dict[str, Any]]) -> str:
    ends = []
    for s in series:
        values = finite_values(s["y"])
        if values:
            ends.append(f"{s['name']} from {number(values[0])} to {number(values[-1])}")
    return f"{title} along depth: {'; '.join(ends)}."
