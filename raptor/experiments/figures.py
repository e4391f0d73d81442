"""Figures of the experiments: Figures 3, 4, 5, 11 and Table 2 of the paper, from the JSON each experiment writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from raptor.phases import Phases
from raptor.report.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    SKY,
    VERMILION,
    use_style,
    whole_numbers,
)

Rows = Sequence[dict[str, Any]]
HEATMAP_COLUMNS = 5
WAY_STYLE = {
    "maxcut": (VERMILION, "D", "max-cut"),
    "dp-weighted": (BLUE, "^", "exact, weighted"),
    "dp-mean": (GREEN, "v", "exact, mean"),
    "dp-cut": (ORANGE, "s", "exact, cut"),
}
KIND_COLOURS = {"trained": BLUE, "untrained": ORANGE, "overfitted": VERMILION}


def figure_stochastic_depth(rows: Rows, statistics: dict[str, Any]) -> Any:
    """Figure 4. A: similarity with phases; B: R2 by layer, cls and patches; C: accuracy; D: last R2; E: similarity and
    R2."""
    plt = use_style()
    shown = one_seed(rows)
    num_rows = -(-len(shown) // HEATMAP_COLUMNS)
    figure = plt.figure(figsize=(15, 2.9 * num_rows + 3.6))
    top, bottom = figure.subfigures(2, 1, height_ratios=[2.9 * num_rows, 3.6])
    _heatmaps(top, [(f"p = {row['p']:g}", row["similarity"]) for row in shown])
    axes = bottom.subplots(1, 5)
    _layer_curves(axes[0], shown, "cls")
    _layer_curves(axes[1], shown, "patches")
    _against_p(axes[2], rows, "teacher", lambda r: r["teacher"]["accuracy"], BLACK, "o")
    _against_p(axes[2], rows, "raptor", lambda r: r["raptor"]["accuracy"], VERMILION, "s")
    _label(axes[2], "C  accuracy, held-out", "p", "accuracy")
    _last_r2(axes[3], rows)
    _association(axes[4], rows, statistics)
    return figure


def one_seed(rows: Rows) -> list[dict[str, Any]]:
    """The rows of the first seed, by p."""
    first = min(row["seed"] for row in rows)
    return sorted((row for row in rows if row["seed"] == first), key=lambda row: row["p"])


def figure_partitions(values: dict[str, Any]) -> Any:
    """Figure 3: accuracy and R2 of random partitions as dots with mean and deviation, the chosen ones beside them."""
    plt = use_style()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for ax, (measure, title) in zip(axes, (("accuracy", "accuracy, teacher's head"), ("r2_last", "R2, last layer"))):
        _strip(ax, values["rows"], measure)
        _label(ax, title, "k", "")
    axes[0].legend()
    return figure


def figure_untrained(rows: Rows) -> Any:
    """Figure 11. A: similarity of each teacher; B: similarity within phases; C: R2 of the output cls, three ways."""
    plt = use_style()
    first = min(row["seed"] for row in rows)
    shown = [row for row in rows if row["seed"] == first]
    figure = plt.figure(figsize=(3.1 * len(shown) + 7, 3.6))
    left, right = figure.subfigures(1, 2, width_ratios=[3.1 * len(shown), 7])
    _heatmaps(left, [(row["kind"], row["similarity"]) for row in shown])
    axes = right.subplots(1, 2, width_ratios=[1.4, 2])
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    means: dict[str, Callable[[dict[str, Any]], float]] = {
        "within phases": lambda r: r["similarity"]["within_phases"],
        "off the diagonal": lambda r: r["similarity"]["off_diagonal"],
    }
    _bars(axes[0], rows, kinds, means)
    _label(axes[0], "B  similarity", "", "mean cosine")
    measures: dict[str, Callable[[dict[str, Any]], float]] = {
        "R2": lambda r: r["raptor"]["curves"]["cls"]["r2"][-1],
        "bounded R2": lambda r: r["raptor"]["curves"]["cls"]["bounded_r2"][-1],
        "correlation": lambda r: r["raptor"]["curves"]["cls"]["pearson"][-1],
    }
    _bars(axes[1], rows, kinds, measures)
    _label(axes[1], "C  raptor of the output cls", "", "")
    axes[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(kinds))
    return figure


def figure_swaps(rows: Rows) -> Any:
    """Accuracy after swapping each pair of blocks, as a matrix a teacher; and its means within and across phases."""
    plt = use_style()
    scored = [row for row in rows if "swapped_accuracy" in row] or list(rows)
    places = np.unique(np.linspace(0, len(scored) - 1, min(HEATMAP_COLUMNS, len(scored))).round().astype(int))
    shown = [scored[i] for i in places]
    figure = plt.figure(figsize=(3.0 * len(shown) + 4, 3.4))
    left, right = figure.subfigures(1, 2, width_ratios=[3.0 * len(shown), 4])
    image = None
    axes = np.atleast_1d(left.subplots(1, len(shown)))
    for ax, row in zip(axes, shown):
        image = _swap_matrix(ax, row)
    what = "accuracy kept" if "accuracy" in shown[0] else "turn (rad)"
    left.colorbar(image, ax=list(axes), shrink=0.7, label=what)
    ax = right.subplots()
    names = [row["cell"] for row in rows]
    for kind, colour, shift in (("within", BLUE, -0.2), ("across", VERMILION, 0.2)):
        places = np.arange(len(rows)) + shift
        ax.bar(places, [_kept(row, kind) for row in rows], 0.4, color=colour, label=f"{kind} phases")
        matched = [_kept(row, f"{kind}_matched") for row in rows]
        ax.plot(places, matched, "o", color=BLACK, markersize=3, label="at equal distance" if shift > 0 else None)
    ax.set_xticks(range(len(rows)), names, rotation=60, fontsize=7)
    _label(ax, "", "", f"{what}, mean over pairs")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=7)
    return figure


def figure_ablation(lines: Rows, published: dict[str, float]) -> Any:
    """Table 2 as bars: accuracy of each row as a share of the teacher's, beside the published one (%), by number."""
    plt = use_style()
    figure, ax = plt.subplots(figsize=(6.5, 0.45 * len(lines) + 1.3))
    places = np.arange(len(lines))
    ours = [100 * _number(line["accuracy"]) / (line["teacher_accuracy"] or np.nan) for line in lines]
    paper = [100 * published[line["number"]] / 84.5 for line in lines]
    ax.barh(places - 0.2, ours, 0.4, color=BLUE, label="measured")
    ax.barh(places + 0.2, paper, 0.4, color=GREY, label="paper, ImageNet-1k, of 84.5 %")
    ax.set_yticks(places, [f"{line['number']}  {line['row']}" for line in lines])
    ax.invert_yaxis()
    _label(ax, "", "accuracy, % of the teacher's", "")
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
    return figure


def figure_recovery(rows: Rows) -> Any:
    """Figure 5: accuracy as a share of the teacher's (and of the other tasks), and R2 of the last layer, against k."""
    plt = use_style()
    students = [row for row in rows if row["k"] != "teacher"]
    k = [int(row["k"]) for row in students]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4))
    titles = {"classify": ("accuracy", BLUE, "o"), "segment": ("mIoU", GREEN, "^"), "depth": ("1 / RMSE", ORANGE, "s")}
    for task, (title, colour, marker) in titles.items():
        if all(task in row["scores"] for row in students):
            _errors(axes[0], k, [row["scores"][task]["recovery"] for row in students], title, colour, marker, 100)
    axes[0].axhline(100, color=GREY, linestyle="--", linewidth=1)
    for group, colour, marker in (("all", BLACK, "o"), ("cls", VERMILION, "s"), ("patches", BLUE, "D")):
        if all(group in row["r2"] for row in students):
            _errors(axes[1], k, [row["r2"][group]["r2"] for row in students], group, colour, marker)
    for ax, title, label in zip(axes, ("share of the teacher's", "last layer"), ("% of the teacher's", "R2")):
        _label(ax, title, "k", label)
        whole_numbers(ax)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
    return figure


def figure_budgets(rows: Rows) -> Any:
    """Accuracy as a share of the teacher's against k, and R2 of every layer by k; the paper's recipe dashed."""
    plt = use_style()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    colours = dict(zip(sorted({row["k"] for row in rows}), cycle(PALETTE)))
    scores = {"refitted probe": ("recovery", BLUE, "o"), "teacher's head": ("recovery_head", ORANGE, "s")}
    for recipe, line in (("default", "-"), ("paper", "--")):
        found = [row for row in rows if row["recipe"] == recipe]
        for label, (name, colour, marker) in scores.items():
            known = [row for row in found if row[name] is not None]
            axes[0].plot(
                [row["k"] for row in known],
                [100 * row[name] for row in known],
                linestyle=line,
                color=colour,
                marker=marker,
                markerfacecolor=colour if recipe == "default" else "white",
                label=f"{label}, {recipe} recipe" if known else None,
            )
        for row in found:
            layers = range(1, len(row["r2"]) + 1)
            values = [_number(value) for value in row["r2"]]
            label = f"k={row['k']}" + (", paper's" if recipe == "paper" else "")
            axes[1].plot(layers, values, linestyle=line, color=colours[row["k"]], label=label)
    axes[0].axhline(100, color=GREY, linewidth=1, zorder=1)
    axes[0].set_ylim(bottom=0)
    _label(axes[0], "accuracy", "k", "% of the teacher's")
    _label(axes[1], "every layer", "layer", "R2")
    for ax in axes:
        whole_numbers(ax)
    axes[0].legend(loc="lower right")
    axes[1].legend()
    return figure


def _heatmaps(figure: Any, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Layer-layer matrices with dashed phase boundaries, under one colour scale."""
    columns = min(HEATMAP_COLUMNS, len(entries))
    axes = figure.subplots(-(-len(entries) // columns), columns, squeeze=False)
    matrices = [np.asarray(entry["matrices"]["all"]) for _, entry in entries]
    low, image = min(m.min() for m in matrices), None
    for ax, (title, entry), matrix in zip(axes.flat, entries, matrices):
        num = len(matrix)
        image = ax.imshow(matrix, cmap="Greys_r", vmin=low, vmax=1, extent=(0.5, num + 0.5, num + 0.5, 0.5))
        for boundary in Phases.from_lengths(entry["phases"]).boundaries:
            ax.axhline(boundary + 0.5, color=VERMILION, linestyle="--", linewidth=1.2)
            ax.axvline(boundary + 0.5, color=VERMILION, linestyle="--", linewidth=1.2)
        ax.set_title(f"{title}   ({'+'.join(map(str, entry['phases']))})", fontsize=9)
        ax.spines[:].set_visible(False)
        _layer_ticks(ax, num)
    for ax in axes[:-1].flat:
        ax.tick_params(labelbottom=False)
    for ax in list(axes.flat)[len(entries) :]:
        ax.axis("off")
    axes[0, 0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, shrink=0.8, label="cosine of the same token at two layers")
    figure.suptitle("A  layer-layer similarity, phases by max-cut", x=0.01, ha="left", fontsize=10)


def _layer_ticks(ax: Any, num: int) -> None:
    step = -(-num // 4)
    ticks = range(step, num + 1, step)
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)


def _layer_curves(ax: Any, rows: Rows, group: str) -> None:
    from matplotlib import colormaps

    for row in rows:
        curve = [_number(v) for v in row["raptor"]["curves"][group]["bounded_r2"]]
        label = f"p = {row['p']:g}" if row in (rows[0], rows[-1]) else None
        colour = colormaps["cividis"](row["p"] / max(0.9, rows[-1]["p"]))
        ax.plot(range(1, len(curve) + 1), curve, color=colour, label=label)
    whole_numbers(ax)
    _label(ax, f"B  {group}, one seed", "layer", "bounded R2")
    ax.legend()


def _against_p(ax: Any, rows: Rows, label: str, measure: Callable[[Any], float], colour: str, marker: str) -> None:
    """Every run as a point, the mean over seeds as a line."""
    by_p = defaultdict(list)
    for row in rows:
        by_p[row["p"]].append(_number(measure(row)))
    order = sorted(by_p)
    ax.plot(order, [np.mean(by_p[p]) for p in order], color=colour, label=label)
    values = [_number(measure(row)) for row in rows]
    ax.plot([row["p"] for row in rows], values, marker, color=colour, linestyle="none")
    ax.legend()


def _last_r2(ax: Any, rows: Rows) -> None:
    for name, metric, colour, marker in (("bounded R2", "bounded_r2", BLUE, "o"), ("R2", "r2", ORANGE, "s")):
        curves = f"{name}, all tokens"
        _against_p(ax, rows, curves, lambda r, m=metric: r["raptor"]["curves"]["all"][m][-1], colour, marker)  # type: ignore[misc]
    _label(ax, "D  last layer", "p", "R2")


def _association(ax: Any, rows: Rows, statistics: dict[str, Any]) -> None:
    x = [row["similarity"]["off_diagonal"] for row in rows]
    y = [_number(row["raptor"]["bounded_r2_last"]) for row in rows]
    dots = ax.scatter(x, y, c=[row["p"] for row in rows], cmap="cividis", s=28, edgecolor=BLACK, linewidth=0.5)
    ax.figure.colorbar(dots, ax=ax, label="p")
    found = statistics.get("correlations", {}).get("similarity/bounded_r2", {}).get("pearson")
    text = f"r = {found['value']:.2f} [{found['lower']:.2f}, {found['upper']:.2f}]" if found else "too few points"
    _label(ax, f"E  {text}", "mean similarity off the diagonal", "bounded R2, last layer")


def _strip(ax: Any, rows: Rows, measure: str) -> None:
    """Random partitions as dots with mean and deviation; the chosen ones as marks to their right."""
    ks = sorted({row["k"] for row in rows})
    for place, k in enumerate(ks):
        random = [r[measure] for r in rows if r["k"] == k and r["way"] == "random" and r[measure] is not None]
        shift = np.linspace(-0.12, 0.12, len(random)) if len(random) > 1 else np.zeros(len(random))
        ax.plot(place - 0.15 + shift, random, "o", color=SKY, label="random" if place == 0 else None)
        if len(random) > 1:
            mean, deviation = np.mean(random), np.std(random, ddof=1)
            label = "random, mean ± sd" if place == 0 else None
            ax.errorbar(place - 0.32, mean, deviation, fmt="_", color=BLACK, capsize=4, label=label)
        chosen = [r for r in rows if r["k"] == k and r["way"] != "random" and r[measure] is not None]
        for i, row in enumerate(chosen):
            colour, marker, label = WAY_STYLE[row["way"]]
            where = place + 0.1 + 0.09 * i
            ax.plot(where, row[measure], marker, color=colour, markersize=6, label=label if place == 0 else None)
    ax.set_xticks(range(len(ks)), ks)


def _bars(ax: Any, rows: Rows, kinds: Sequence[str], measures: dict[str, Callable[[dict[str, Any]], float]]) -> None:
    """A group of bars a measure, one bar a kind of teacher (mean over seeds, each seed a dot)."""
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        found = [[_number(measure(r)) for r in rows if r["kind"] == kind] for measure in measures.values()]
        places = np.arange(len(measures)) + (i - (len(kinds) - 1) / 2) * width
        ax.bar(places, [np.mean(v) for v in found], width, color=KIND_COLOURS.get(kind, PURPLE), label=kind)
        for place, values in zip(places, found):
            ax.plot([place] * len(values), values, "o", color=BLACK, markersize=2.5)
    ax.set_xticks(range(len(measures)), list(measures))
    ax.axhline(0, color=GREY, linewidth=0.8)


def _swap_matrix(ax: Any, row: dict[str, Any]) -> Any:
    num = max(j for _, j in row["pairs"])
    grid = np.full((num, num), np.nan)
    # Of a teacher that is never right no accuracy can be kept: the cells stay empty.
    whole = row.get("accuracy") or float("nan")
    kept = [a / whole for a in row["swapped_accuracy"]] if "accuracy" in row else row["angle"]
    for (i, j), value in zip(row["pairs"], kept):
        grid[i - 1, j - 1] = grid[j - 1, i - 1] = value
    limits = (0, 1) if "accuracy" in row else (0, None)
    image = ax.imshow(grid, cmap="cividis", vmin=limits[0], vmax=limits[1], extent=(0.5, num + 0.5, num + 0.5, 0.5))
    boundaries = Phases.from_lengths(row["phases"]).boundaries
    for boundary in boundaries:
        ax.axhline(boundary + 0.5, color=VERMILION, linestyle="--", linewidth=1.2)
        ax.axvline(boundary + 0.5, color=VERMILION, linestyle="--", linewidth=1.2)
    _layer_ticks(ax, num)
    _label(ax, f"p = {row['p']:g}" if "p" in row else row["cell"], "block", "swapped with")
    return image


def _kept(row: dict[str, Any], kind: str) -> float:
    """Share of the accuracy kept (else the turn), mean over pairs; NaN where there is no such pair."""
    if "accuracy" in row:
        value = row["compared_accuracy"][kind]
        return _number(value) / max(row["accuracy"], 1e-9)
    return _number(row["compared"]["all"][kind])


def _number(value: float | None) -> float:
    """NaN, which is not drawn, for what has no finite value."""
    return np.nan if value is None else value


def _errors(ax: Any, x: Sequence[int], found: Rows, label: str, colour: str, marker: str, scale: float = 1) -> None:
    mean = [scale * _number(f["mean"]) for f in found]
    deviation = [scale * (f["deviation"] or 0.0) for f in found]
    ax.errorbar(x, mean, deviation, color=colour, marker=marker, capsize=3, label=label)


def _label(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if not ax.images:
        ax.grid(True)
