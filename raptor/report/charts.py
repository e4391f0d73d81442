"""Figures described once: what is drawn, in which units, what to look for.

`draw.js` draws a `Chart` on the page and `paper.py` in files; neither knows which measure a curve is of. The words of
each chart stand in `charts.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from raptor.report.markup import part
from raptor.streaming import Spread, jsonable

_DIGITS = 5
_MAX_IN_WORDS = 8  # series
GROUP_NAMES = {"all": "all tokens", "cls": "cls", "registers": "registers", "patches": "patches", "pooled": "pooled"}
GROUPS = ("all", "cls", "registers", "patches")
SIDE_NAMES = {"teacher": "teacher", "surrogate": "surrogate", "twin": "untrained twin"}
EVERY = "every group"
Kind = Literal["lines", "bars", "points", "heatmap", "paths"]


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


# Axes over depth, and where a phase begins on them: on the state that ends the phase before it, or between two blocks.
_DEPTH = {
    "state": (Axis("layer l", integer=True), 0.0),
    "layer": (Axis("layer l", integer=True), 0.5),
    "block": (Axis("block l (from state l−1 to l)", integer=True), 0.5),
}


@dataclass
class Series:
    """A curve, a set of points or bars, a path, or a matrix.

    Attributes:
        x: the places of the values, or the first of successive whole numbers.
        y: the values, or a spread over images, whose middle half becomes the band.
        z: the matrix of a heat map, or the third coordinate of a path.
        lower, upper: a band around a curve.
        colour: a token group, `null-NAME`, `side-NAME`, `palette-I`, or `ramp-SHARE` of a colour ramp.
        side: teacher (solid), surrogate (dashed), twin or null (dotted), or empty.
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

    def __post_init__(self) -> None:
        if isinstance(self.y, Spread):
            self.lower = self.y.quantile(0.25)
            self.upper = self.y.quantile(0.75)
            self.y = self.y.mean
        if isinstance(self.x, int):
            self.x = list(range(self.x, self.x + len(self.y)))


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
        circle: whether the unit circle is drawn.
        cells: what the rows of a heat map are.
        wide: whether it takes the whole width of the page.
        file: the result file that its numbers come from.
        source: the images that it was measured on, where they are others than those of its file.
    """

    id: str
    kind: Kind
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
    cells: str = "layers"
    wide: bool = False
    file: str = ""
    source: str = ""

    def only(self, **chosen: str | Sequence[str]) -> Chart:
        """The chart with the series that are on view with these values of the controls."""
        kept = self.series
        for name, value in chosen.items():
            values = {value} if isinstance(value, str) else set(value)
            # A series that does not know a control is shown with every value of it.
            kept = [series for series in kept if name not in series.when or values & set(series.when[name])]
        return replace(self, series=kept)

    def words(self) -> str:
        """The chart in words, with numbers, for readers who do not see it."""
        parts = []
        for series in self.series[:_MAX_IN_WORDS]:
            drawn = series.z if self.kind == "heatmap" else series.y
            values = finite_values(np.ravel(drawn).tolist())
            if values and self.kind == "heatmap":
                parts.append(f"{series.name} from {number(min(values))} to {number(max(values))}")
            elif values:
                parts.append(f"{series.name} from {number(values[0])} to {number(values[-1])}")
        found = []
        if self.x.label and self.y.label:
            found.append(f"{self.y.label} by {self.x.label}")
        found += ["; ".join(parts), self.alt]
        return f"{self.title}: {'. '.join(filter(None, found))}."

    def to_dict(self) -> dict[str, Any]:
        """The chart for `draw.js`; what a series does not have is left out."""
        saved: dict[str, Any] = rounded(asdict(self))
        for series in saved["series"]:
            # A list of the keys, because entries are deleted on the way.
            for key in list(series):
                if series[key] in (None, False, {}):
                    del series[key]
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
    """A part of the argument: a heading, a lead, controls for all its charts, and its body.

    Attributes:
        nav: its name in the bar.
        parts: key of a part of the section -> its heading and what to look for in it.
        body: HTML made here and charts, in the order of the page; charts that follow each other share a grid.
        hint: stands in for a part that was not measured: the command that adds it. hint_reason: why it is missing.
    """

    id: str
    nav: str
    title: str
    lead: str = ""
    parts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    controls: list[Control] = field(default_factory=list)
    body: list[str | Chart] = field(default_factory=list)
    hint: str = ""
    hint_reason: str = ""

    @classmethod
    def named(cls, name: str, has_surrogate: bool = True) -> Section:
        """The section `name` of `sections.yaml`; a model without a surrogate may have a lead of its own."""
        words = dict(_section_words()[name])
        alone = words.pop("lead_alone", words.get("lead", ""))
        if not has_surrogate:
            words["lead"] = alone
        return cls(name, **words)

    def add_part(self, key: str, *body: str | Chart, **say: object) -> None:
        """Add a part with its heading. say: what fills the names in its words."""
        title, look_for = self.parts[key]
        self.body += [part(title, look_for.format(**say)), *body]

    @property
    def charts(self) -> list[Chart]:
        return [part for part in self.body if isinstance(part, Chart)]

    @property
    def html(self) -> str:
        """The body without its charts."""
        return "".join(part for part in self.body if isinstance(part, str))


def _read_words(name: str) -> Any:
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@cache
def _section_words() -> dict[str, dict[str, Any]]:
    """Id of a section -> its words in `sections.yaml`."""
    found: dict[str, dict[str, Any]] = _read_words("sections.yaml")
    return found


@cache
def descriptions() -> dict[str, dict[str, Any]]:
    """Id of a chart -> its words in `charts.yaml`, with its file."""
    found: dict[str, dict[str, Any]] = {}
    for file, charts in _read_words("charts.yaml").items():
        for name, words in charts.items():
            found[name] = {"kind": "lines", "file": file, **words}
    return found


def series_names(name: str) -> dict[str, str]:
    """What the curves of the chart `name` are called, by their keys in the file."""
    return dict(descriptions()[name]["series"])


def described(
    name: str,
    series: list[Series],
    say: Mapping[str, object] | None = None,
    starts: Mapping[str, str] | None = None,
    values: Mapping[str, Mapping[str, str]] | None = None,
    **more: Any,
) -> Chart:
    """The chart `name` of `charts.yaml`, with a chooser for each of its controls.

    Args:
        say: what fills the names in its caption.
        starts: control -> the value it starts at, where the result decides it.
        values: control -> the words for its values, where the result decides them.
        more: what else depends on the result, such as phases; it goes before the file's words.
    """
    words = deepcopy(descriptions()[name])  # the file is read once, and a chart may change its words
    words.pop("series", None)
    words["caption"] = words["caption"].format(**(say or {}))
    controls = []
    for control, about in words.pop("controls", {}).items():
        if isinstance(about, str):
            about = {"label": about}
        names = (values or {}).get(control, about.get("options"))
        start = (starts or {}).get(control, about.get("start", ""))
        controls.append(chooser(control, about["label"], series, names, start))
    x = words.pop("x", {})
    if isinstance(x, str):
        words["x"], words["offset"] = _DEPTH[x]
    else:
        words["x"] = Axis(**x)
    words["y"] = Axis(**words.pop("y", {}))
    return Chart(id=name, series=series, controls=controls, **{**words, **more})


def rounded(value: Any) -> Any:
    """`value` with numbers to five digits and those that are not finite as None, so that the page stays small."""
    return jsonable(value, _DIGITS)


def of_group(group: str, side: str, x: Any, y: Any, **when: list[str]) -> Series:
    """Values of one token group of one side, shown with its group or with every group."""
    base = GROUP_NAMES.get(group, group)
    name = base
    if side in ("surrogate", "twin"):
        name += f", {SIDE_NAMES[side]}"
    return Series(name, x, y, colour=group, side=side, base=base, when={"tokens": [group, EVERY], **when})


def group_control(groups: Sequence[str]) -> Control:
    """The chooser of a token group; where there are several, `every group` first."""
    options = [(group, GROUP_NAMES.get(group, group)) for group in groups]
    # Spreads over images are drawn for one group only: bands of four would cover each other.
    if len(groups) > 1:
        options.insert(0, (EVERY, EVERY))
    return Control("tokens", "Tokens", options, options[0][0])


def chooser(
    name: str, label: str, series: Iterable[Series], names: Mapping[str, str] | None = None, start: str = ""
) -> Control:
    """A chooser of the values that the series have, by their `names`; without `start` it starts at the first one."""
    values: dict[str, None] = {}
    for one in series:
        values |= dict.fromkeys(one.when.get(name, []))
    options = [(value, (names or {}).get(value, value)) for value in values if value != EVERY]
    return Control(name, label, options, start or next(iter(values), ""))


def number(value: Any, digits: int = 3) -> str:
    """A number for text: three figures, thousands separated, a dash when there is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, int):  # a count, which is exact
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:z.{digits}g}"  # z: no "-0"
    # To three figures 999.6 would be 1e+03.
    if "e" in text and abs(value) >= 1e-4:
        return f"{value:.0f}"
    return text


def percent(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:z.1f}\u00a0%"  # a number and its unit stay on one line


def finite_values(values: Iterable[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
