"""The drawer of figures for papers: a `Figure` as a matplotlib figure, saved as PNG and SVG.

Every chart is drawn from its description alone. Colours, dashes and markers are chosen here, those of the page in
`draw.js`.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import numpy as np

from raptor.phases.cut import Phases
from raptor.report.charts import SIDE_NAMES, Axis, Chart, Figure, Series
from raptor.report.style import (
    BLUE,
    CLASS_COLOURS,
    GROUP_COLOURS,
    GROUP_MARKERS,
    LINE_COLOUR,
    PALETTE,
    STYLE,
    VERMILION,
)

_GREY = "#777777"
_DASHED = (0, (4, 2))
_NULLS: dict[str, tuple[str, Any]] = {
    "null-identity": ("#999999", ":"),
    "null-mean": ("#CC79A7", "-."),
    "null-tied": ("#8C6D31", "--"),
    "null-linear": ("#56B4E9", (0, (5, 1, 1, 1, 1, 1))),
    "null-shuffled": ("#999999", ":"),
    "null-smooth": ("#E69F00", "--"),
    "null-twin": ("#CC79A7", "-."),
}
_SIDE_COLOURS = {"side-teacher": BLUE, "side-surrogate": VERMILION}
_MANY_POINTS = 24  # markers of longer curves would touch
_MAX_COLUMNS = 8  # of a legend
_OUTLINE_STEP = 0.09  # each further cut is outlined a little inside the one before
_TICKS = 8
_LEGEND_POINT = 6.0
_DECADE = 10
_LETTER = 0.55  # mean width of a letter, as a share of the font size


def draw(figure: Figure) -> Any:
    """The matplotlib figure. pyplot does not know of it, so that it need not be closed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    num_columns = max(len(row) for row in figure.panels)
    width, height = figure.size
    heights = figure.heights or [height] * len(figure.panels)
    charts = [chart for row in figure.panels for chart in row if chart is not None]
    # Maps of one unit share a colour scale and a colour bar.
    values: dict[str, list[np.ndarray]] = defaultdict(list)
    for chart in charts:
        if chart.kind == "heatmap":
            values[chart.series[0].unit].append(np.ravel(chart.series[0].z))
    limits = {unit: (np.nanmin(np.concatenate(z)), np.nanmax(np.concatenate(z))) for unit, z in values.items()}
    maps: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    # Only inside, so that the settings of the user's own figures stay.
    with rc_context(STYLE):  # type: ignore[arg-type]
        canvas = Canvas(figsize=(width * num_columns, sum(heights)), layout="constrained")
        axes = canvas.subplots(
            len(heights), num_columns, squeeze=False, height_ratios=heights, sharey="row" if figure.same_y else "none"
        )
        for row, panels in zip(axes, figure.panels):
            for ax, panel in zip_longest(row, panels):
                if panel is None:
                    ax.set_axis_off()
                elif panel.kind == "heatmap":
                    unit = panel.series[0].unit
                    maps[unit].append((ax, _draw_map(ax, panel, limits[unit])))
                else:
                    _DRAWERS[panel.kind](ax, panel)
        for unit, drawn in maps.items():
            canvas.colorbar(drawn[0][1], ax=[ax for ax, _ in drawn], shrink=0.7, label=unit, aspect=30)
        _write_title(canvas, figure)
        _draw_legend(canvas, charts)
    return canvas


def _write_title(canvas: Any, figure: Figure) -> None:
    """The title, and below it what was measured on, small and grey where it stands alone."""
    size = 10
    colour = "black"
    if not figure.title:
        size = 6
        colour = "grey"
    # matplotlib does not break a title that is wider than its figure.
    num_letters = int(canvas.bbox.width / canvas.dpi * 72 / (_LETTER * size))
    lines = [*figure.title.split("\n"), figure.source]
    text = "\n".join(textwrap.fill(line, num_letters) for line in lines if line)
    if text:
        canvas.suptitle(text, fontsize=size, color=colour)


def _draw_lines(ax: Any, chart: Chart) -> None:
    for i, series in enumerate(chart.series):
        style = _style(chart, series)
        ax.plot(series.x, series.y, label=_label(series), **style)
        if series.lower is not None:
            # Two bands of one colour lie over each other: the surrogate's is hardly seen beside its dashed curve.
            alpha = 0.08 if series.side == "surrogate" else 0.18
            ax.fill_between(series.x, series.lower, series.upper, color=style["color"], alpha=alpha, linewidth=0)
        # Words above one curve and below the next do not meet.
        offset, edge = ((4, "bottom"), (-4, "top"))[i % 2]
        for x, y, text in zip(series.x, series.y, series.text or []):
            ax.annotate(text, (x, y), (0, offset), textcoords="offset points", ha="center", va=edge, fontsize=7)
    # Where a phase begins: between two blocks, or on the state that ends the phase before it.
    for boundary in _boundaries(chart):
        ax.axvline(boundary + chart.offset, color=LINE_COLOUR, linewidth=1, zorder=1)
    if chart.level is not None:
        ax.axhline(chart.level, color=_GREY, linestyle=":", linewidth=1)
    if chart.mark is not None:
        ax.axvline(chart.mark, color=LINE_COLOUR, linewidth=1, zorder=1)
    _set_axes(ax, chart)
    ax.grid(axis="y")


def _draw_points(ax: Any, chart: Chart) -> None:
    for series in chart.series:
        ax.plot(series.x, series.y, label=_label(series), alpha=1 if series.large else 0.35, **_style(chart, series))
    if chart.circle:
        turn = np.linspace(0, 2 * np.pi, 400)
        ax.plot(np.cos(turn), np.sin(turn), color=LINE_COLOUR, linewidth=1, zorder=1)
        ax.axhline(0, color="#EEEEEE", zorder=0)
        ax.axvline(0, color="#EEEEEE", zorder=0)
        # Otherwise the unit circle would be an ellipse.
        ax.set_aspect("equal")
    _set_axes(ax, chart)


def _draw_paths(ax: Any, chart: Chart) -> None:
    """Paths on their first two components; a circle where they start, a star where they end, bars at phase ends."""
    ends = _boundaries(chart)
    for series in chart.series:
        style = _style(chart, series)
        colour = style["color"]
        x = np.asarray(series.x)
        y = np.asarray(series.y)
        ax.plot(x, y, zorder=2, label=_label(series), **style)
        ax.plot(x[0], y[0], "o", color="white", markeredgecolor=colour, markersize=5, zorder=3)
        ax.plot(x[-1], y[-1], "*", color=colour, markersize=10, markeredgecolor="white", zorder=4)
        ax.plot(x[ends], y[ends], "|", color="black", markersize=7, linestyle="none", zorder=3)
    across, upward, *_ = chart.series[0].axes or ["", "", ""]
    ax.set(title=chart.title, xlabel=across, ylabel=upward)


_DRAWERS = {"lines": _draw_lines, "points": _draw_points, "paths": _draw_paths}


def _draw_map(ax: Any, chart: Chart, limits: tuple[float, float]) -> Any:
    """The matrix of the chart's first series, with an outline per phase for every cut; the image of it."""
    from matplotlib.patches import Rectangle

    series = chart.series[0]
    num = len(series.z)
    # Outlines of several cuts have several colours, which only stand out from grey.
    colours = "Greys_r" if len(series.cuts) > 1 else "viridis"
    # Cells are centred on the numbers of their layers, which begin at 1.
    extent = (0.5, num + 0.5, num + 0.5, 0.5)
    image = ax.imshow(series.z, cmap=colours, vmin=limits[0], vmax=limits[1], extent=extent)
    for place, (key, lengths) in enumerate(series.cuts.items()):
        colour = PALETTE[(place + 1) % len(PALETTE)]
        inset = _OUTLINE_STEP * place
        label = None
        if isinstance(key, int):
            label = f"k = {key}: {' | '.join(map(str, lengths))}"
        start = 0.5
        for length in lengths:
            side = length - 2 * inset
            square = Rectangle((start + inset, start + inset), side, side)
            square.set(fill=False, edgecolor=colour, linewidth=1.8, label=label)
            ax.add_patch(square)
            label = None  # one entry of the legend for all phases of the cut
            start += length
        # On the diagonal the intervals of the boundaries.
        for lower, upper in series.intervals.get(key, []):
            if upper > lower:
                ends = (lower + 0.5, upper + 0.5)
                ax.plot(ends, ends, color=colour, linewidth=3, solid_capstyle="butt", label="boundary, 95 %")
    ax.set_title(chart.title, fontsize=9)
    ax.set(xlabel=chart.x.label, ylabel=chart.y.label)
    ticks = np.arange(1, num + 1, -(-num // _TICKS))
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    ax.spines[:].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    labelled = dict(zip(labels, handles))  # one entry for all intervals
    if labelled:
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "fontsize": 7, "ncols": 2}
        ax.legend(labelled.values(), labelled, columnspacing=1.0, **below)
    return image


# Legend ---------------------------------------------------------------------------------------------------------------


def _label(series: Series) -> str:
    """What a curve is called: where curves of several models share a colour, by what it shows and by its model."""
    if series.base and series.side in SIDE_NAMES:
        return f"{series.base}, {SIDE_NAMES[series.side]}"
    return series.name


def _draw_legend(canvas: Any, charts: Sequence[Chart]) -> None:
    """One legend for all panels. Where curves of several models share their colours: a colour each, then the models."""
    entries = _legend_entries(charts)
    if len(entries) < 2:
        return
    columns = min(len(entries), _MAX_COLUMNS)
    small = {"fontsize": 7.5, "handlelength": 2.0, "columnspacing": 1.2}
    while True:
        legend = canvas.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=columns, **small
        )
        # matplotlib knows the width only of a legend that is made, so one that is too wide is made again.
        if columns == 1 or legend.get_window_extent().width <= canvas.bbox.width:
            return
        legend.remove()
        columns -= 1


def _legend_entries(charts: Sequence[Chart]) -> dict[str, Any]:
    """Label -> a line that is drawn as in the panels; grey where two panels draw it in different colours."""
    from matplotlib.lines import Line2D

    drawn = [(chart, series) for chart in charts if chart.kind != "heatmap" for series in chart.series]
    has_models = len({series.side for _, series in drawn if series.side in SIDE_NAMES}) > 1
    found: list[tuple[int, str, dict[str, Any]]] = []  # curves first, then models, then null models and large points
    for chart, series in drawn:
        style = _style(chart, series)
        if has_models and series.side in SIDE_NAMES:
            found.append((1, SIDE_NAMES[series.side], {**style, "color": _GREY}))
            if series.base:
                found.append((0, series.base, _style(chart, replace(series, side="teacher"))))
        else:
            found.append((2 if series.side == "null" or series.large else 0, series.name, style))
    entries: dict[str, Any] = {}
    for _, label, style in sorted(found, key=itemgetter(0)):
        handle = Line2D([], [], **style)
        if handle.get_linestyle() == "None":
            handle.set_markersize(max(handle.get_markersize(), _LEGEND_POINT))  # points of a cloud are too small here
        known = entries.setdefault(label, handle)
        if known.get_color() != handle.get_color():
            known.set_color(_GREY)
            known.set_markeredgecolor(_GREY)
    return entries


# Styles and axes ------------------------------------------------------------------------------------------------------


def _style(chart: Chart, series: Series) -> dict[str, Any]:
    """Colour, dashes and markers; a null model has its own."""
    style: dict[str, Any] = {"color": _colour(series.colour)}
    if chart.kind == "paths":
        return style | {"marker": ".", "linewidth": 1.2}
    if chart.kind == "points" and series.large:
        large = {"marker": "D", "markersize": 5.0, "markeredgewidth": 1, "markerfacecolor": "white"}
        return style | {"linestyle": "none", **large}
    if chart.kind == "points":
        return style | {"linestyle": "none", "marker": ".", "markersize": 3.0, "markeredgewidth": 0}
    style |= {"linestyle": "-", "zorder": 3}
    if series.side in ("null", "twin"):
        style |= {"linestyle": ":", "zorder": 2}
        if series.colour in _NULLS:
            _, style["linestyle"] = _NULLS[series.colour]
        return style
    if not series.plain:
        style["marker"] = GROUP_MARKERS.get(series.colour, "o")
        style["markersize"] = 3.5 if len(series.x) <= _MANY_POINTS else 2
    if series.side == "surrogate":
        style.update(linestyle=_DASHED, markerfacecolor="white")
    return style


def _colour(key: str) -> Any:
    """The colour that a series is said to have."""
    kind, _, index = key.rpartition("-")
    if key in GROUP_COLOURS:
        return GROUP_COLOURS[key]
    if key in _NULLS:
        return _NULLS[key][0]
    if kind == "palette":
        return CLASS_COLOURS[int(index) % len(CLASS_COLOURS)]
    if kind == "ramp":
        from matplotlib import colormaps

        return colormaps["viridis"](0.85 * float(index))
    return _SIDE_COLOURS.get(key, _GREY)


def _boundaries(chart: Chart) -> list[int]:
    if not chart.phases:
        return []
    return list(Phases.from_lengths(chart.phases).boundaries)


def _set_axes(ax: Any, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set(title=chart.title, xlabel=chart.x.label, ylabel=chart.y.label or chart.series[0].unit)
    if chart.x.integer:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _scale(ax, chart.y)
    if chart.x.range is not None:
        ax.set_xlim(chart.x.range)
    if chart.y.range is not None:
        ax.set_ylim(chart.y.range)
    if chart.y.clip is not None:
        _clip(ax, chart, chart.y.clip)


def _scale(ax: Any, axis: Axis) -> None:
    """The vertical axis: logarithmic with numbers such as 2, 5 and 10, or from zero."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    if axis.log:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        digits: tuple[float, ...] = (1, 2, 5)
        if high < _DECADE * low:  # three digits a decade would leave one tick or none
            digits = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
        ax.yaxis.set_major_locator(LogLocator(base=10, subs=digits))
        ax.yaxis.set_major_formatter(plain)
        ax.yaxis.set_minor_formatter(NullFormatter())
    elif axis.symlog and ax.get_ylim()[1] > _DECADE:
        ax.set_yscale("symlog")
        ax.yaxis.set_major_formatter(plain)
        # A symmetric logarithm has room for negative values, and gains are never negative.
        ax.set_ylim(bottom=0)
    elif axis.from_zero:
        ax.set_ylim(bottom=min(0, ax.dataLim.y0))


def _clip(ax: Any, chart: Chart, limits: tuple[float, float]) -> None:
    """The scale of the values within the limits. A note says how far curves that are not null models lie beyond."""
    drawn = np.concatenate([np.asarray(series.y, float) for series in chart.series])
    drawn = drawn[np.isfinite(drawn)]
    if chart.y.log:
        ax.set_ylim(max(drawn.min(), limits[0]) / 1.2, min(drawn.max(), limits[1]) * 1.2)
        return
    floor, ceiling = limits
    best = 1 if ceiling == 1 else 0  # 1 is the best value of a share, 0 that of an error
    low = max(drawn.min(initial=0), floor)
    high = min(drawn.max(initial=best), ceiling)
    below = []
    above = []
    for series in chart.series:
        if series.side in ("null", "twin"):
            continue
        if np.nanmin(series.y) < low:
            below.append(f"{series.name} to {np.nanmin(series.y):.3g}")
        if np.nanmax(series.y) > high:
            above.append(f"{series.name} to {np.nanmax(series.y):.3g}")
    if below or above:
        height, edge = (0.02, "bottom") if below else (0.98, "top")
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        note = f"off the axis: {', '.join(below + above)}"
        ax.text(0.02, height, note, transform=ax.transAxes, va=edge, fontsize=7, color="#555555", bbox=box, zorder=5)
    margin = 0.05 * (high - low)
    bottom = low
    if low < 0:
        bottom -= margin
    ax.set_ylim(bottom, high + margin)
