"""Charts of the page as plain data: what is drawn, in which units, what to look for. `draw.js` gives them form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raptor.streaming import jsonable

_DIGITS = 5
GROUP_NAMES = {"all": "all tokens", "cls": "cls", "registers": "registers", "patches": "patches", "pooled": "pooled"}
EVERY = "every group"
Series = dict[str, Any]
"""A curve, heatmap or set of points as `draw.js` takes it."""
Axis = dict[str, Any]
"""Label, scale and limits of an axis as `draw.js` takes it."""


@dataclass
class Control:
    """A chooser above a chart or a section: `options` are (value, label) pairs; a `slider` moves through them."""

    name: str
    label: str
    options: list[tuple[str, str]]
    start: str
    slider: bool = False


@dataclass
class Chart:
    """One figure.

    Attributes:
        id: unique on the page, also the name of downloaded files.
        kind: lines, bars, points, heatmap or paths; what `draw.js` does with `series`.
        caption: one line saying what to look for.
        alt: the figure in words, with numbers.
        x, y: axes: label with unit, and optionally `log`, `range`, `integer`, `from_zero`, or `clip`: limits that
            null models may not push out.
        series: each `{name, x, y, ...}`; with `when` it shows only where the controls have those values.
        phases: phase lengths whose bands are drawn behind lines over depth.
        offset: the layer at which phase bands start: .5 where x is a state, -.5 where x is a step.
        wide: whether it takes the whole width of the page.
        extra: what only one kind needs.
    """

    id: str
    kind: str
    title: str
    caption: str
    alt: str
    series: list[Series]
    x: Axis = field(default_factory=dict)
    y: Axis = field(default_factory=dict)
    controls: list[Control] = field(default_factory=list)
    phases: list[int] | None = None
    offset: float = 0.5
    wide: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return rounded(asdict(self))


@dataclass
class Section:
    """A part of the argument: a heading, a lead, then HTML made here, controls for all its charts, and the charts.

    `nav` is its name in the bar. `after` is HTML below the charts.

    `hint` stands in for a part that was not measured: the command that adds it.
    """

    id: str
    nav: str
    title: str
    lead: str = ""
    html: str = ""
    controls: list[Control] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    after: str = ""
    hint: str | None = None
    hint_reason: str = ""


def rounded(value: Any) -> Any:
    """`value` with numbers to five digits and those that are not finite as None, so that the page stays small."""
    return jsonable(value, _DIGITS)


def series_name(group: str, side: str) -> dict[str, str]:
    """How a curve of a token group on one side is called, coloured and drawn: the surrogate dashed, markers open."""
    base = GROUP_NAMES.get(group, group)
    return {"name": base + (", surrogate" if side == "surrogate" else ""), "base": base, "colour": group, "side": side}


def group_control(groups: Sequence[str]) -> Control:
    """The chooser of a token group; where there are several, `every group` first."""
    options = [(EVERY, EVERY)] if len(groups) > 1 else []
    options += [(g, GROUP_NAMES.get(g, g)) for g in groups]
    return Control("tokens", "Tokens", options, options[0][0])


def number(value: Any, digits: int = 3) -> str:
    """A number for text: three figures, thousands separated, `-` when there is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text or abs(value) < 1e-4 else f"{value:.0f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}\u00a0%"


def finite_values(values: Iterable[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
