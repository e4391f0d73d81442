"""Figures of the experiments: Figures 3, 4, 5, 11 and Table 2 of the paper, from what each experiment writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sweep import Json, column, sum_of, where

from raptor import Phases

# Okabe and Ito's colours, which are told apart with any colour vision.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"
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
}
_PAPER_TEACHER = 84.5  # accuracy of the paper's teacher, %
_HEATMAP_COLUMNS = 5


def pyplot() -> Any:
    # Imported where a figure is drawn: matplotlib takes a second, which --help need not wait for.
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)  # type: ignore[arg-type]
    return plt


# Figure 4


def figure_stochastic_depth(rows: Sequence[Json], statistics: Json) -> Any:
    """Figure 4. A: similarity with phases; B: R2 by layer, cls and patches; C: accuracy; D: R2 of the last layer; E:
    R2 against similarity."""
    plt = pyplot()
    shown = sorted(_of_first_seed(rows), key=lambda row: row["p"])
    num_rows = -(-len(shown) // _HEATMAP_COLUMNS)
    figure = plt.figure(figsize=(15, 2.9 * num_rows + 3.6))
    top, bottom = figure.subfigures(2, 1, height_ratios=[2.9 * num_rows, 3.6])
    _heatmaps(top, [f"p = {row['p']:g}" for row in shown], shown)
    by_layer_cls, by_layer_patches, accuracy, last, against = bottom.subplots(1, 5)

    _layer_curves(by_layer_cls, shown, "cls")
    _layer_curves(by_layer_patches, shown, "patches")
    _against_p(accuracy, rows, "teacher", "teacher/accuracy", BLACK, "o")
    _against_p(accuracy, rows, "raptor", "raptor/accuracy", VERMILION, "s")
    _label(accuracy, "C  accuracy, held-out", "p", "accuracy")
    _against_p(last, rows, "bounded R2, all tokens", "raptor/curves/all/bounded_r2/-1", BLUE, "o")
    _against_p(last, rows, "R2, all tokens", "raptor/curves/all/r2/-1", ORANGE, "s")
    _label(last, "D  last layer", "p", "R2")

    similarity = _column(rows, "similarity/off_diagonal")
    r2 = _column(rows, "raptor/bounded_r2_last")
    dots = against.scatter(similarity, r2, c=_column(rows, "p"), cmap="cividis", s=28, edgecolor=BLACK, linewidth=0.5)
    bottom.colorbar(dots, ax=against, label="p")
    known = statistics["correlations"].get("similarity/bounded_r2")
    text = "too few points"
    if known and known["pearson"]:
        r = known["pearson"]
        text = f"r = {r['value']:.2f} [{r['lower']:.2f}, {r['upper']:.2f}]"
    _label(against, f"E  {text}", "mean similarity off the diagonal", "bounded R2, last layer")
    return figure


def _layer_curves(ax: Any, rows: Sequence[Json], group: str) -> None:
    """A curve over layers for each p; the first and the last p are named."""
    from matplotlib import colormaps

    for row in rows:
        curve = np.array(row["raptor"]["curves"][group]["bounded_r2"], dtype=float)
        label = f"p = {row['p']:g}" if row is rows[0] or row is rows[-1] else None
        colour = colormaps["cividis"](row["p"] / max(0.9, rows[-1]["p"]))
        ax.plot(range(1, len(curve) + 1), curve, color=colour, label=label)
    _whole_numbers(ax)
    _label(ax, f"B  {group}, one seed", "layer", "bounded R2")
    ax.legend()


def _against_p(ax: Any, rows: Sequence[Json], label: str, path: str, colour: str, marker: str) -> None:
    """Every run as a point, the mean over seeds as a line."""
    p = _column(rows, "p")
    values = _column(rows, path)
    order = np.unique(p)
    ax.plot(order, [values[p == each].mean() for each in order], color=colour, label=label)
    ax.plot(p, values, marker, color=colour, linestyle="none")
    ax.legend()


# Figure 3


def figure_partitions(rows: Sequence[Json]) -> Any:
    """Figure 3: accuracy and R2 of random partitions as dots with mean and deviation, the chosen ones beside them."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    _strip(axes[0], rows, "accuracy")
    _label(axes[0], "accuracy, teacher's head", "k", "")
    _strip(axes[1], rows, "r2_last")
    _label(axes[1], "R2, last layer", "k", "")
    handles, labels = axes[0].get_legend_handles_labels()
    once = dict(zip(labels, handles))  # every k has its own marks
    axes[0].legend(once.values(), once.keys())
    return figure


def _strip(ax: Any, rows: Sequence[Json], measure: str) -> None:
    styles = {
        "maxcut": (VERMILION, "D", "max-cut"),
        "dp-weighted": (BLUE, "^", "exact, weighted"),
        "dp-mean": (GREEN, "v", "exact, mean"),
        "dp-cut": (ORANGE, "s", "exact, cut"),
    }
    ks = sorted(set(column(rows, "k")))
    known = [row for row in rows if row[measure] is not None]
    for place, k in enumerate(ks):
        of_k = where(known, k=k)
        random = column(where(of_k, way="random"), measure)
        shift = np.linspace(-0.12, 0.12, len(random))
        ax.plot(place - 0.15 + shift, random, "o", color=SKY, label="random")
        if len(random) > 1:
            label = "random, mean ± sd"
            mean = np.mean(random)
            ax.errorbar(place - 0.32, mean, np.std(random, ddof=1), fmt="_", color=BLACK, capsize=4, label=label)
        right = place + 0.1
        for row in of_k:
            if row["way"] != "random":
                colour, marker, label = styles[row["way"]]
                ax.plot(right, row[measure], marker, color=colour, markersize=6, label=label)
                right += 0.09
    ax.set_xticks(range(len(ks)), ks)


# Figure 11


def figure_untrained(rows: Sequence[Json]) -> Any:
    """Figure 11. A: similarity of each teacher; B: similarity within phases; C: R2 of the output cls, three ways."""
    plt = pyplot()
    shown = _of_first_seed(rows)
    figure = plt.figure(figsize=(3.1 * len(shown) + 7, 3.6))
    left, right = figure.subfigures(1, 2, width_ratios=[3.1 * len(shown), 7])
    _heatmaps(left, column(shown, "kind"), shown)
    axes = right.subplots(1, 2, width_ratios=[1.4, 2])
    means = {"within phases": "similarity/within_phases", "off the diagonal": "similarity/off_diagonal"}
    _bars(axes[0], rows, means)
    _label(axes[0], "B  similarity", "", "mean cosine")
    curves = "raptor/curves/cls"
    measures = {"R2": f"{curves}/r2/-1", "bounded R2": f"{curves}/bounded_r2/-1", "correlation": f"{curves}/pearson/-1"}
    _bars(axes[1], rows, measures)
    _label(axes[1], "C  raptor of the output cls", "", "")
    axes[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    return figure


def _bars(ax: Any, rows: Sequence[Json], measures: dict[str, str]) -> None:
    """A group of bars per measure, with one bar per kind of teacher: the mean over seeds, each seed as a dot."""
    colours = {"trained": BLUE, "untrained": ORANGE, "overfitted": VERMILION}
    kinds = list(dict.fromkeys(column(rows, "kind")))
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        of_kind = where(rows, kind=kind)
        places = np.arange(len(measures)) + (i - (len(kinds) - 1) / 2) * width
        found = np.stack([_column(of_kind, path) for path in measures.values()])
        ax.bar(places, found.mean(axis=1), width, color=colours[kind], label=kind)
        ax.plot(np.repeat(places, len(of_kind)), found.ravel(), "o", color=BLACK, markersize=2.5)
    ax.set_xticks(range(len(measures)), list(measures))
    ax.axhline(0, color=GREY, linewidth=0.8)


# Swaps


def figure_swaps(rows: Sequence[Json]) -> Any:
    """Accuracy after swapping each pair of blocks, one matrix per teacher; and its means within and across phases.

    Without a classifier it is the turn of the last state.
    """
    plt = pyplot()
    scored = [row for row in rows if row["swapped_accuracy"] is not None]
    what = "accuracy kept" if scored else "turn (rad)"
    shown = scored or list(rows)
    num_shown = min(_HEATMAP_COLUMNS, len(shown))
    chosen = np.unique(np.linspace(0, len(shown) - 1, num_shown).round().astype(int))
    figure = plt.figure(figsize=(3.0 * len(chosen) + 4, 3.4))
    left, right = figure.subfigures(1, 2, width_ratios=[3.0 * len(chosen), 4])
    axes = np.atleast_1d(left.subplots(1, len(chosen)))
    image = None
    for ax, place in zip(axes, chosen):
        image = _swap_matrix(ax, shown[place])
    left.colorbar(image, ax=list(axes), shrink=0.7, label=what)

    ax = right.subplots()
    for kind, colour, shift in (("within", BLUE, -0.2), ("across", VERMILION, 0.2)):
        places = np.arange(len(rows)) + shift
        ax.bar(places, _mean_kept(rows, kind), 0.4, color=colour, label=f"{kind} phases")
        ax.plot(places, _mean_kept(rows, f"{kind}_matched"), "o", color=BLACK, markersize=3)
    ax.lines[-1].set_label("at equal distance")
    ax.set_xticks(range(len(rows)), column(rows, "cell"), rotation=60 if len(rows) > 1 else 0, fontsize=7)
    _label(ax, "", "", f"{what}, mean over pairs")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=7)
    return figure


def _swap_matrix(ax: Any, row: Json) -> Any:
    values = row["angle"]
    highest = None
    if row["swapped_accuracy"] is not None:
        # A teacher that is never right has no accuracy to keep: its matrix stays empty.
        values = np.array(row["swapped_accuracy"]) / (row["accuracy"] or np.nan)
        highest = 1
    num = sum(row["phases"])
    grid = np.full((num, num), np.nan)
    for (i, j), value in zip(row["pairs"], values):
        grid[i - 1, j - 1] = value
        grid[j - 1, i - 1] = value
    image = _layer_matrix(ax, grid, row["phases"], cmap="cividis", vmin=0, vmax=highest)
    _label(ax, row["cell"] if row["p"] is None else f"p = {row['p']:g}", "block", "swapped with")
    return image


def _mean_kept(rows: Sequence[Json], kind: str) -> np.ndarray:
    """Share of the accuracy kept (or the turn, without a classifier), mean over pairs; NaN where there are none."""
    accuracy = _column(rows, "accuracy")
    kept = _column(rows, f"compared_accuracy/{kind}") / np.maximum(accuracy, 1e-9)
    return np.where(np.isnan(accuracy), _column(rows, f"compared/all/{kind}"), kept)


# Tables 1 and 2


def figure_ablation(lines: Sequence[Json], published: dict[str, float]) -> Any:
    """Table 2 as bars: accuracy of each row as a share of the teacher's, beside the published one (%), by number."""
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(6.5, 0.45 * len(lines) + 1.3))
    names = [f"{line['number']}  {line['row']}" for line in lines]
    ours = 100 * _column(lines, "accuracy") / _column(lines, "teacher_accuracy")
    paper = [100 * published[line["number"]] / _PAPER_TEACHER for line in lines]
    places = np.arange(len(lines))
    ax.barh(places - 0.2, ours, 0.4, color=BLUE, label="measured")
    ax.barh(places + 0.2, paper, 0.4, color=GREY, label=f"paper, ImageNet-1k, of {_PAPER_TEACHER} %")
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    _label(ax, "", "accuracy, % of the teacher's", "")
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
    return figure


def figure_recovery(rows: Sequence[Json]) -> Any:
    """Figure 5: accuracy as a share of the teacher's (and of the other tasks), and R2 of the last layer, against k."""
    plt = pyplot()
    students = [row for row in rows if row["k"] != "teacher"]
    figure, (kept, r2) = plt.subplots(1, 2, figsize=(8, 3.4))
    titles = {"classify": ("accuracy", BLUE, "o"), "segment": ("mIoU", GREEN, "^"), "depth": ("1 / RMSE", ORANGE, "s")}
    for task, (title, colour, marker) in titles.items():
        if task in students[0]["scores"]:
            _against_k(kept, students, f"scores/{task}/recovery", title, colour, marker, scale=100)
    kept.axhline(100, color=GREY, linestyle="--", linewidth=1)
    for group, colour, marker in (("all", BLACK, "o"), ("cls", VERMILION, "s"), ("patches", BLUE, "D")):
        if group in students[0]["r2"]:
            _against_k(r2, students, f"r2/{group}/r2", group, colour, marker)
    _label(kept, "share of the teacher's", "k", "% of the teacher's")
    _label(r2, "last layer", "k", "R2")
    for ax in (kept, r2):
        _whole_numbers(ax)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
    return figure


def _against_k(
    ax: Any, rows: Sequence[Json], path: str, label: str, colour: str, marker: str, scale: float = 1
) -> None:
    """Means over seeds against k; bars for the deviation where there is more than one seed."""
    k = list(map(int, column(rows, "k")))
    mean = scale * _column(rows, f"{path}/mean")
    deviation = scale * _column(rows, f"{path}/deviation")
    bars = None if np.isnan(deviation).all() else deviation
    ax.errorbar(k, mean, bars, color=colour, marker=marker, capsize=3, label=label)


# Shared


def _of_first_seed(rows: Sequence[Json]) -> list[Json]:
    return where(rows, seed=min(column(rows, "seed")))


def _column(rows: Sequence[Json], path: str) -> np.ndarray:
    """The numbers of the rows at `a/b/-1`; NaN, which is not drawn, for those without one."""
    return np.array(column(rows, path), dtype=float)


def _heatmaps(figure: Any, titles: Sequence[str], rows: Sequence[Json]) -> None:
    """Layer-layer matrices with dashed phase boundaries, under one colour scale."""
    num_columns = min(_HEATMAP_COLUMNS, len(rows))
    grid = figure.subplots(-(-len(rows) // num_columns), num_columns, squeeze=False)
    axes = list(grid.flat)
    matrices = np.array(column(rows, "similarity/matrices/all"))
    image = None
    for ax, title, row, matrix in zip(axes, titles, rows, matrices):
        phases = row["similarity"]["phases"]
        image = _layer_matrix(ax, matrix, phases, cmap="Greys_r", vmin=matrices.min(), vmax=1)
        ax.set_title(f"{title}   ({sum_of(phases)})", fontsize=9)
        ax.spines[:].set_visible(False)
    for ax in grid[:-1].flat:
        ax.tick_params(labelbottom=False)
    for ax in axes[len(rows) :]:
        ax.axis("off")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=grid, shrink=0.8, label="cosine of the same token at two layers")
    figure.suptitle("A  layer-layer similarity, phases by max-cut", x=0.01, ha="left", fontsize=10)


def _layer_matrix(ax: Any, matrix: np.ndarray, phases: Sequence[int], **options: Any) -> Any:
    """A layer-layer matrix with dashed lines between phases and about four ticks."""
    num = len(matrix)
    image = ax.imshow(matrix, extent=(0.5, num + 0.5, num + 0.5, 0.5), **options)
    for boundary in Phases.from_lengths(phases).boundaries:
        ax.axhline(boundary + 0.5, color=VERMILION, linestyle="--", linewidth=1.2)
        ax.axvline(boundary + 0.5, color=VERMILION, linestyle="--", linewidth=1.2)
    step = -(-num // 4)
    ticks = range(step, num + 1, step)
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    return image


def _whole_numbers(ax: Any) -> None:
    """Ticks only at whole layers."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _label(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if not ax.images:
        ax.grid(True)
