"""Figures described once: what is drawn, in which units, what to look for.

`draw.js` draws a `Chart` on the page and `paper.py` in files; neither knows which measure a curve is of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from raptor.streaming import Spread, jsonable

_DIGITS = 5
_MAX_IN_WORDS = 8  # series
GROUP_NAMES = {"all": "all tokens", "cls": "cls", "registers": "registers", "patches": "patches", "pooled": "pooled"}
GROUPS = ("all", "cls", "registers", "patches")
SHOWN_ON_PAPER = ("cls", "registers", "patches")  # all tokens are nearly the patches
EVERY = "every group"


@dataclass
class Axis:
    """An axis with its unit.

    Attributes:
        integer: ticks at whole numbers only, and half a step of room at both ends.
        from_zero: whether 0 is always in view.
        range: the ends of the axis.
        clip: limits that null models may not push out.
        symlog: logarithmic on paper where values are large; gains may be zero, so a plain logarithm cannot be taken.
    """

    label: str = ""
    log: bool = False
    integer: bool = False
    from_zero: bool = False
    range: tuple[float, float] | None = None
    clip: tuple[float, float] | None = None
    symlog: bool = False


STATE = Axis("layer l", integer=True)
BLOCK = Axis("block l (from state l−1 to l)", integer=True)


@dataclass
class Series:
    """A curve, a set of points or bars, a path, or a matrix.

    Attributes:
        z: the matrix of a heat map, or the third coordinate of a path.
        lower, upper: a band around a curve.
        colour: a token group, `null-NAME`, `side-NAME`, `palette-I`, or `ramp-SHARE` of a colour ramp.
        side: teacher (solid), surrogate (dashed), null (dotted), or empty.
        base: the name without the side, where teacher and surrogate share a colour.
        when: values of the controls with which the series is shown.
        text: words beside each point.
        unit: of a matrix, or of `y` where it differs between the series of a chart.
        cuts: key -> phase lengths that are outlined on a matrix. intervals: key -> interval of each boundary.
        axes: labels of the three axes of a path.
        plain: a curve without markers. large: points that stand out from the other series.
    """

    name: str
    x: Any = None
    y: Any = None
    z: Any = None
    lower: Any = None
    upper: Any = None
    colour: str = "soft"
    side: str = ""
    base: str = ""
    when: dict[str, list[str]] = field(default_factory=dict)
    text: list[str] | None = None
    unit: str = ""
    cuts: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    intervals: Mapping[Any, list[tuple[int, int]]] = field(default_factory=dict)
    axes: list[str] | None = None
    plain: bool = False
    large: bool = False

    def is_shown(self, chosen: dict[str, Sequence[str]]) -> bool:
        """Whether the series is on view with the `chosen` values of the controls."""
        return all(set(self.when[name]) & set(values) for name, values in chosen.items() if name in self.when)


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
    """One pair of axes and what is drawn in them.

    Attributes:
        id: unique on the page, also the name of downloaded files.
        caption: one line saying what to look for; a figure that is only drawn on paper may have none.
        alt: what its words say besides the ends of its curves.
        phases: phase lengths that are marked behind lines over depth.
        offset: where phases begin on the axis of layers: 0 where states `a_0..a_L` stand at whole numbers, .5 where
            blocks 1..L do.
        level, mark: a horizontal and a vertical line.
        circle: whether the unit circle is drawn. labelled: whether points carry their series' name.
        cells: what the rows of a heat map are.
        wide: whether it takes the whole width of the page.
    """

    id: str
    kind: Literal["lines", "bars", "points", "heatmap", "paths"]
    title: str
    series: list[Series]
    caption: str = ""
    alt: str = ""
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    controls: list[Control] = field(default_factory=list)
    phases: list[int] | None = None
    offset: float = 0.0
    level: float | None = None
    mark: float | None = None
    circle: bool = False
    labelled: bool = False
    cells: str = "layers"
    wide: bool = False

    def only(self, *, title: str | None = None, **chosen: str | Sequence[str]) -> Chart:
        """The chart with the series that are on view with these values of the controls, and optionally a new title."""
        values = {name: [value] if isinstance(value, str) else value for name, value in chosen.items()}
        kept = [series for series in self.series if series.is_shown(values)]
        return replace(self, series=kept, title=self.title if title is None else title)

    def words(self) -> str:
        """The chart in words, with numbers, for readers who do not see it."""
        parts = []
        for series in self.series[:_MAX_IN_WORDS]:
            values = finite_values(np.ravel(series.z if self.kind == "heatmap" else series.y).tolist())
            if values and self.kind == "heatmap":
                parts.append(f"{series.name} from {number(min(values))} to {number(max(values))}")
            elif values:
                parts.append(f"{series.name} from {number(values[0])} to {number(values[-1])}")
        axes = f"{self.y.label} by {self.x.label}" if self.x.label and self.y.label else ""
        found = [part for part in (axes, "; ".join(parts), self.alt) if part]
        return f"{self.title}: {'. '.join(found)}."

    def to_dict(self) -> dict[str, Any]:
        """The chart for `draw.js`; what a series does not have is left out."""
        saved = rounded(asdict(self))
        for series in saved["series"]:
            for name in [name for name, value in series.items() if value in (None, False, {})]:
                del series[name]
        assert isinstance(saved, dict)
        return saved


@dataclass
class Figure:
    """Charts side by side in a file, under one title and over one legend.

    Attributes:
        panels: rows of charts; None leaves a place empty.
        source: the models and images it was measured on.
        size: width and height of a panel in inches.
        heights: height of each row, where they differ.
        same_y: whether the panels of a row share their vertical axis.
    """

    panels: Sequence[Sequence[Chart | None]]
    title: str = ""
    size: tuple[float, float] = (4.6, 3.4)
    heights: list[float] | None = None
    same_y: bool = False
    source: str = ""


@dataclass
class Section:
    """A part of the argument: a heading, a lead, then HTML made here, controls for all its charts, and the charts.

    `nav` is its name in the bar. `after` is HTML below the charts.

    `hint` stands in for a part that was not measured: the command that adds it. `hint_reason` says why it is missing.
    """

    id: str
    nav: str
    title: str
    lead: str = ""
    html: str = ""
    controls: list[Control] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    after: str = ""
    hint: str = ""
    hint_reason: str = ""


def rounded(value: Any) -> Any:
    """`value` with numbers to five digits and those that are not finite as None, so that the page stays small."""
    return jsonable(value, _DIGITS)


def of_group(group: str, side: str, x: Any, y: Any, **when: list[str]) -> Series:
    """Values of one token group of one side, shown with its group or with every group."""
    base = GROUP_NAMES.get(group, group)
    name = f"{base}, surrogate" if side == "surrogate" else base
    return Series(name, x, y, colour=group, side=side, base=base, when={**when, "tokens": [group, EVERY]})


def with_band(series: Series, spread: Spread) -> Series:
    """The series with the middle half of the images as a band, where it is known."""
    return replace(series, lower=spread.quantile(0.25), upper=spread.quantile(0.75))


def along_depth(group: str, side: str, spread: Spread, first: int) -> Series:
    """A quantity of one token group over the layers from `first` on, with its band."""
    layers = list(range(first, first + len(spread.mean)))
    return with_band(of_group(group, side, layers, spread.mean), spread)


def group_control(groups: Sequence[str]) -> Control:
    """The chooser of a token group; where there are several, `every group` first."""
    options = [(EVERY, EVERY)] if len(groups) > 1 else []
    options += [(group, GROUP_NAMES.get(group, group)) for group in groups]
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
