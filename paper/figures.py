"""Figures of the experiments: Figures 3, 4, 5, 11 and Table 2 of the paper, from what each experiment writes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from sweep import Json, entry

from raptor import Phases

# Okabe and Ito's colours, which are told apart with any colour vision.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"
PALETTE = (BLACK, VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY, YELLOW)
STYLE: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#EEEEEE",
    "lines.markersize": 3.5,
    "svg.hashsalt": "raptor",
}
_PAPER_TEACHER = 84.5  # accuracy of the paper's teacher, %
_HEATMAP_COLUMNS = 5
_LONG_NAME = 20  # letters of a title over a matrix
_WAY_STYLE = {
    "maxcut": (VERMILION, "D", "max-cut"),
    "dp-weighted": (BLUE, "^", "exact, weighted"),
    "dp-mean": (GREEN, "v", "exact, mean"),
    "dp-cut": (ORANGE, "s", "exact, cut"),
}
_KIND_COLOURS = {"trained": BLUE, "untrained": ORANGE, "overfitted": VERMILION}


def pyplot() -> Any:
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)  # type: ignore[arg-type]
    return plt


def _column(rows: Sequence[Json], path: str) -> np.ndarray:
    """The numbers of the rows at `a/b/-1`; NaN, which is not drawn, for those without one."""
    return np.array([entry(row, path) for row in rows], dtype=float)


def figure_stochastic_depth(rows: Sequence[Json], statistics: Json) -> Any:
    """Figure 4. A: similarity with phases; B: R2 by layer, cls and patches; C: accuracy; D: R2 of the last layer; E:
    R2 against similarity."""
    plt = pyplot()
    shown = _one_seed(rows)
    num_rows = -(-len(shown) // _HEATMAP_COLUMNS)
    figure = plt.figure(figsize=(15, 2.9 * num_rows + 3.6))
    top, bottom = figure.subfigures(2, 1, height_ratios=[2.9 * num_rows, 3.6])
    _heatmaps(top, [(f"p = {row['p']:g}", row["similarity"]) for row in shown])
    axes = bottom.subplots(1, 5)
    _layer_curves(axes[0], shown, "cls")
    _layer_curves(axes[1], shown, "patches")
    _against_p(axes[2], rows, "teacher", "teacher/accuracy", BLACK, "o")
    _against_p(axes[2], rows, "raptor", "raptor/accuracy", VERMILION, "s")
    _label(axes[2], "C  accuracy, held-out", "p", "accuracy")
    _last_r2(axes[3], rows)
    _association(axes[4], rows, statistics)
    return figure


def _one_seed(rows: Sequence[Json]) -> list[Json]:
    """The rows of the first seed, by p."""
    first = min(row["seed"] for row in rows)
    return sorted((row for row in rows if row["seed"] == first), key=lambda row: row["p"])


def figure_partitions(rows: Sequence[Json]) -> Any:
    """Figure 3: accuracy and R2 of random partitions as dots with mean and deviation, the chosen ones beside them."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for ax, (measure, title) in zip(axes, (("accuracy", "accuracy, teacher's head"), ("r2_last", "R2, last layer"))):
        _strip(ax, rows, measure)
        _label(ax, title, "k", "")
    handles, labels = axes[0].get_legend_handles_labels()
    once = dict(zip(labels, handles))  # every k has its own marks
    axes[0].legend(once.values(), once.keys())
    return figure


def figure_untrained(rows: Sequence[Json]) -> Any:
    """Figure 11. A: similarity of each teacher; B: similarity within phases; C: R2 of the output cls, three ways."""
    plt = pyplot()
    first = min(row["seed"] for row in rows)
    shown = [row for row in rows if row["seed"] == first]
    figure = plt.figure(figsize=(3.1 * len(shown) + 7, 3.6))
    left, right = figure.subfigures(1, 2, width_ratios=[3.1 * len(shown), 7])
    _heatmaps(left, [(row["kind"], row["similarity"]) for row in shown])
    axes = right.subplots(1, 2, width_ratios=[1.4, 2])
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    means = {"within phases": "similarity/within_phases", "off the diagonal": "similarity/off_diagonal"}
    _bars(axes[0], rows, kinds, means)
    _label(axes[0], "B  similarity", "", "mean cosine")
    curves = "raptor/curves/cls"
    measures = {"R2": f"{curves}/r2/-1", "bounded R2": f"{curves}/bounded_r2/-1", "correlation": f"{curves}/pearson/-1"}
    _bars(axes[1], rows, kinds, measures)
    _label(axes[1], "C  raptor of the output cls", "", "")
    axes[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(kinds))
    return figure


def figure_swaps(rows: Sequence[Json]) -> Any:
    """Accuracy after swapping each pair of blocks, one matrix per teacher; and its means within and across phases."""
    plt = pyplot()
    scored = [row for row in rows if row["swapped_accuracy"] is not None] or list(rows)
    places = np.unique(np.linspace(0, len(scored) - 1, min(_HEATMAP_COLUMNS, len(scored))).round().astype(int))
    shown = [scored[i] for i in places]
    figure = plt.figure(figsize=(3.0 * len(shown) + 4, 3.4))
    left, right = figure.subfigures(1, 2, width_ratios=[3.0 * len(shown), 4])
    image = None
    axes = np.atleast_1d(left.subplots(1, len(shown)))
    for ax, row in zip(axes, shown):
        image = _swap_matrix(ax, row)
    what = "accuracy kept" if shown[0]["accuracy"] is not None else "turn (rad)"
    left.colorbar(image, ax=list(axes), shrink=0.7, label=what)
    ax = right.subplots()
    names = [_swap_title(row) for row in rows]
    for kind, colour, shift in (("within", BLUE, -0.2), ("across", VERMILION, 0.2)):
        places = np.arange(len(rows)) + shift
        ax.bar(places, [_kept(row, kind) for row in rows], 0.4, color=colour, label=f"{kind} phases")
        matched = [_kept(row, f"{kind}_matched") for row in rows]
        ax.plot(places, matched, "o", color=BLACK, markersize=3, label="at equal distance" if shift > 0 else None)
    ax.set_xticks(range(len(rows)), names, rotation=60 if len(rows) > 1 else 0, fontsize=7)
    _label(ax, "", "", f"{what}, mean over pairs")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=7)
    return figure


def figure_ablation(lines: Sequence[Json], published: dict[str, float]) -> Any:
    """Table 2 as bars: accuracy of each row as a share of the teacher's, beside the published one (%), by number."""
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(6.5, 0.45 * len(lines) + 1.3))
    places = np.arange(len(lines))
    ours = [100 * _number(line["accuracy"]) / (line["teacher_accuracy"] or np.nan) for line in lines]
    paper = [100 * published[line["number"]] / _PAPER_TEACHER for line in lines]
    ax.barh(places - 0.2, ours, 0.4, color=BLUE, label="measured")
    ax.barh(places + 0.2, paper, 0.4, color=GREY, label=f"paper, ImageNet-1k, of {_PAPER_TEACHER} %")
    ax.set_yticks(places, [f"{line['number']}  {line['row']}" for line in lines])
    ax.invert_yaxis()
    _label(ax, "", "accuracy, % of the teacher's", "")
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
    return figure


def figure_recovery(rows: Sequence[Json]) -> Any:
    """Figure 5: accuracy as a share of the teacher's (and of the other tasks), and R2 of the last layer, against k."""
    plt = pyplot()
    students = [row for row in rows if row["k"] != "teacher"]
    k = [int(row["k"]) for row in students]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4))
    titles = {"classify": ("accuracy", BLUE, "o"), "segment": ("mIoU", GREEN, "^"), "depth": ("1 / RMSE", ORANGE, "s")}
    for task, (title, colour, marker) in titles.items():
        if all(task in row["scores"] for row in students):
            recovery = [row["scores"][task]["recovery"] or {"mean": None, "deviation": None} for row in students]
            _errors(axes[0], k, recovery, title, colour, marker, 100)
    axes[0].axhline(100, color=GREY, linestyle="--", linewidth=1)
    for group, colour, marker in (("all", BLACK, "o"), ("cls", VERMILION, "s"), ("patches", BLUE, "D")):
        if all(group in row["r2"] for row in students):
            _errors(axes[1], k, [row["r2"][group]["r2"] for row in students], group, colour, marker)
    for ax, title, label in zip(axes, ("share of the teacher's", "last layer"), ("% of the teacher's", "R2")):
        _label(ax, title, "k", label)
        whole_numbers(ax)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
    return figure


def figure_budgets(rows: Sequence[Json]) -> Any:
    """Accuracy as a share of the teacher's against k, and R2 of every layer by k; the paper's recipe dashed."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    colours = dict(zip(sorted({row["k"] for row in rows}), cycle(PALETTE)))
    scores = {"refitted probe": ("recovery", BLUE, "o"), "teacher's head": ("recovery_head", ORANGE, "s")}
    for recipe, line in (("default", "-"), ("paper", "--")):
        found = [row for row in rows if row["recipe"] == recipe]
        for label, (score, colour, marker) in scores.items():
            known = [row for row in found if row[score] is not None]
            if not known:
                continue
            axes[0].plot(
                _column(known, "k"),
                100 * _column(known, score),
                linestyle=line,
                color=colour,
                marker=marker,
                markerfacecolor=colour if recipe == "default" else "white",
                label=f"{label}, {recipe} recipe",
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


def whole_numbers(ax: Any) -> None:
    """Ticks only at whole layers."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _heatmaps(figure: Any, entries: Sequence[tuple[str, Json]]) -> None:
    """Layer-layer matrices with dashed phase boundaries, under one colour scale."""
    columns = min(_HEATMAP_COLUMNS, len(entries))
    axes = figure.subplots(-(-len(entries) // columns), columns, squeeze=False)
    matrices = [np.asarray(similarity["matrices"]["all"]) for _, similarity in entries]
    low, image = min(m.min() for m in matrices), None
    for ax, (title, similarity), matrix in zip(axes.flat, entries, matrices):
        num = len(matrix)
        image = ax.imshow(matrix, cmap="Greys_r", vmin=low, vmax=1, extent=(0.5, num + 0.5, num + 0.5, 0.5))
        _draw_boundaries(ax, similarity["phases"])
        ax.set_title(f"{title}   ({'+'.join(map(str, similarity['phases']))})", fontsize=9)
        ax.spines[:].set_visible(False)
        _layer_ticks(ax, num)
    for ax in axes[:-1].flat:
        ax.tick_params(labelbottom=False)
    for ax in list(axes.flat)[len(entries) :]:
        ax.axis("off")
    axes[0, 0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, shrink=0.8, label="cosine of the same token at two layers")
    figure.suptitle("A  layer-layer similarity, phases by max-cut", x=0.01, ha="left", fontsize=10)


def _draw_boundaries(ax: Any, lengths: Sequence[int]) -> None:
    """Dashed lines between phases of these lengths, in both directions of a layer-layer matrix."""
    for boundary in Phases.from_lengths(lengths).boundaries:
        ax.axhline(boundary + 0.5, color=VERMILION, linestyle="--", linewidth=1.2)
        ax.axvline(boundary + 0.5, color=VERMILION, linestyle="--", linewidth=1.2)


def _layer_ticks(ax: Any, num: int) -> None:
    step = -(-num // 4)
    ticks = range(step, num + 1, step)
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)


def _layer_curves(ax: Any, rows: Sequence[Json], group: str) -> None:
    from matplotlib import colormaps

    for row in rows:
        curve = [_number(v) for v in row["raptor"]["curves"][group]["bounded_r2"]]
        label = f"p = {row['p']:g}" if row is rows[0] or row is rows[-1] else None
        colour = colormaps["cividis"](row["p"] / max(0.9, rows[-1]["p"]))
        ax.plot(range(1, len(curve) + 1), curve, color=colour, label=label)
    whole_numbers(ax)
    _label(ax, f"B  {group}, one seed", "layer", "bounded R2")
    ax.legend()


def _against_p(ax: Any, rows: Sequence[Json], label: str, path: str, colour: str, marker: str) -> None:
    """Every run as a point, the mean over seeds as a line."""
    p, values = _column(rows, "p"), _column(rows, path)
    order = np.unique(p)
    ax.plot(order, [values[p == each].mean() for each in order], color=colour, label=label)
    ax.plot(p, values, marker, color=colour, linestyle="none")
    ax.legend()


def _last_r2(ax: Any, rows: Sequence[Json]) -> None:
    bounded = "bounded R2, all tokens"
    _against_p(ax, rows, bounded, "raptor/curves/all/bounded_r2/-1", BLUE, "o")
    _against_p(ax, rows, "R2, all tokens", "raptor/curves/all/r2/-1", ORANGE, "s")
    _label(ax, "D  last layer", "p", "R2")


def _association(ax: Any, rows: Sequence[Json], statistics: Json) -> None:
    x, y = _column(rows, "similarity/off_diagonal"), _column(rows, "raptor/bounded_r2_last")
    dots = ax.scatter(x, y, c=_column(rows, "p"), cmap="cividis", s=28, edgecolor=BLACK, linewidth=0.5)
    ax.figure.colorbar(dots, ax=ax, label="p")
    known = statistics["correlations"].get("similarity/bounded_r2")
    r = known["pearson"] if known else None
    text = f"r = {r['value']:.2f} [{r['lower']:.2f}, {r['upper']:.2f}]" if r else "too few points"
    _label(ax, f"E  {text}", "mean similarity off the diagonal", "bounded R2, last layer")


def _strip(ax: Any, rows: Sequence[Json], measure: str) -> None:
    """Random partitions as dots with mean and deviation; the chosen ones as marks to their right."""
    ks = sorted({row["k"] for row in rows})
    for place, k in enumerate(ks):
        known = [row for row in rows if row["k"] == k and row[measure] is not None]
        random = _column([row for row in known if row["way"] == "random"], measure)
        shift = np.linspace(-0.12, 0.12, len(random))
        ax.plot(place - 0.15 + shift, random, "o", color=SKY, label="random")
        if len(random) > 1:
            label = "random, mean ± sd"
            ax.errorbar(place - 0.32, random.mean(), random.std(ddof=1), fmt="_", color=BLACK, capsize=4, label=label)
        chosen = [row for row in known if row["way"] != "random"]
        for i, row in enumerate(chosen):
            colour, marker, label = _WAY_STYLE[row["way"]]
            ax.plot(place + 0.1 + 0.09 * i, row[measure], marker, color=colour, markersize=6, label=label)
    ax.set_xticks(range(len(ks)), ks)


def _bars(
    ax: Any,
    rows: Sequence[Json],
    kinds: Sequence[str],
    measures: dict[str, str],
) -> None:
    """A group of bars per measure, with one bar per kind of teacher: the mean over seeds, each seed as a dot."""
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        of_kind = [row for row in rows if row["kind"] == kind]
        places = np.arange(len(measures)) + (i - (len(kinds) - 1) / 2) * width
        found = np.stack([_column(of_kind, path) for path in measures.values()])
        ax.bar(places, found.mean(axis=1), width, color=_KIND_COLOURS.get(kind, PURPLE), label=kind)
        ax.plot(np.repeat(places, len(of_kind)), found.ravel(), "o", color=BLACK, markersize=2.5)
    ax.set_xticks(range(len(measures)), list(measures))
    ax.axhline(0, color=GREY, linewidth=0.8)


def _swap_matrix(ax: Any, row: Json) -> Any:
    num = max(j for _, j in row["pairs"])
    grid = np.full((num, num), np.nan)
    # A teacher that is never right has no accuracy to keep: its matrix stays empty.
    whole = row["accuracy"] or np.nan
    kept = row["angle"] if row["swapped_accuracy"] is None else [a / whole for a in row["swapped_accuracy"]]
    for (i, j), value in zip(row["pairs"], kept):
        grid[i - 1, j - 1] = grid[j - 1, i - 1] = value
    limits = (0, None) if row["swapped_accuracy"] is None else (0, 1)
    image = ax.imshow(grid, cmap="cividis", vmin=limits[0], vmax=limits[1], extent=(0.5, num + 0.5, num + 0.5, 0.5))
    _draw_boundaries(ax, row["phases"])
    _layer_ticks(ax, num)
    _label(ax, _swap_title(row) if row["p"] is None else f"p = {row['p']:g}", "block", "swapped with")
    return image


def _swap_title(row: Json) -> str:
    """The teacher's name, a long one on two lines."""
    if len(row["cell"]) <= _LONG_NAME or "_" not in row["cell"]:
        return row["cell"]
    cuts = [i for i, letter in enumerate(row["cell"]) if letter == "_"]
    middle = min(cuts, key=lambda i: abs(i - len(row["cell"]) / 2))
    return f"{row['cell'][: middle + 1]}\n{row['cell'][middle + 1 :]}"


def _kept(row: Json, kind: str) -> float:
    """Share of the accuracy kept (or the angle, without a classifier), mean over pairs; NaN where there are none."""
    if row["accuracy"] is not None and row["compared_accuracy"] is not None:
        return _number(row["compared_accuracy"][kind]) / max(row["accuracy"], 1e-9)
    return _number(row["compared"]["all"][kind])


def _number(value: float | None) -> float:
    """NaN for None: it is not drawn."""
    return np.nan if value is None else value


def _errors(
    ax: Any,
    x: Sequence[int],
    found: Sequence[Json],
    label: str,
    colour: str,
    marker: str,
    scale: float = 1,
) -> None:
    mean = [scale * _number(f["mean"]) for f in found]
    deviation = [scale * _number(f["deviation"]) for f in found]  # nan, so no bar, for one seed
    bars = None if all(f["deviation"] is None for f in found) else deviation
    ax.errorbar(x, mean, bars, color=colour, marker=marker, capsize=3, label=label)


def _label(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if not ax.images:
        ax.grid(True)
