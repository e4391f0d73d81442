"""Figures of the interventions on depth: blocks swapped, phases run longer, a surrogate run past its end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np

from raptor.report.style import BLACK, BLUE, GREEN, LINE_COLOUR, ORANGE, PALETTE, use_style, whole_numbers

SIDES = ("teacher", "surrogate")
Changed = dict[str, Any]


def figure_swaps(changed: Changed) -> Any:
    """Turn of the last state and predictions kept, for every pair of blocks exchanged; phases outlined."""
    plt = use_style()
    sides = [(side, changed[side]["swaps"]) for side in SIDES if changed.get(side)]
    panels = [("turn_all", "turn of the last state (rad)", "viridis"), ("agreement", "predictions kept (%)", "cividis")]
    panels = [panel for panel in panels if panel[0] in sides[0][1]]
    figure, axes = plt.subplots(len(sides), len(panels), figsize=(4.3 * len(panels), 3.7 * len(sides)), squeeze=False)
    for column, (name, label, colours) in enumerate(panels):
        matrices = [
            100 * np.array(s[name], float) if name == "agreement" else np.array(s[name], float) for _, s in sides
        ]
        low, high = 0, 100 if name == "agreement" else max(np.nanmax(m) for m in matrices)
        for ax, (side, swaps), matrix in zip(axes[:, column], sides, matrices):
            num = len(matrix)
            image = ax.imshow(matrix, cmap=colours, vmin=low, vmax=high, extent=(0.5, num + 0.5, num + 0.5, 0.5))
            _outline_phases(ax, swaps["phases"])
            ax.set(xlabel="block", ylabel="block", title=f"{side}: two blocks swapped")
            ticks = np.unique(np.linspace(1, num, min(num, 7)).round().astype(int))
            ax.set_xticks(ticks)
            ax.set_yticks(ticks)
            ax.spines[:].set_visible(False)
            figure.colorbar(image, ax=ax, shrink=0.85, label=label)
    return figure


def figure_repetition(changed: Changed) -> Any:
    """Turn of the last state and predictions kept, when one phase runs fewer or more times than its length."""
    plt = use_style()
    sides = [(side, changed[side]["repetition"]) for side in SIDES if changed.get(side)]
    heads = "agreement" in sides[0][1]["rows"][0]
    figure, axes = plt.subplots(1, 1 + heads, figsize=(4.4 * (1 + heads), 3.4), squeeze=False)
    for side, found in sides:
        for j, length in enumerate(found["phases"]):
            rows = [row for row in found["rows"] if row["phase"] == j + 1]
            ratio = [row["times"] / length for row in rows]
            style = dict(
                color=PALETTE[1 + j % (len(PALETTE) - 1)], marker="o",
                linestyle="-" if side == "teacher" else (0, (4, 2)),
                markerfacecolor=None if side == "teacher" else "white",
                label=f"phase {j + 1} ({length} blocks)" + (f", {side}" if len(sides) > 1 else ""),
            )  # fmt: skip
            axes[0, 0].plot(ratio, [row["turn_all"] for row in rows], **style)
            if heads:
                axes[0, 1].plot(ratio, [100 * row["agreement"] for row in rows], **style)
    axes[0, 0].set(title="Direction", ylabel="turn of the last state (rad)", ylim=(0, None))
    if heads:
        axes[0, 1].set(title="Prediction", ylabel="predictions kept (%)", ylim=(0, 103))
    for ax in axes[0]:
        ax.axvline(1, color=LINE_COLOUR, linewidth=1, zorder=1)
        ax.set_xlabel("times the phase runs / its length")
        ax.grid(axis="y")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    half = len(labels) // len(sides)
    order = [i + side * half for i in range(half) for side in range(len(sides))]
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    figure.legend(handles, labels, loc="outside lower center", ncols=half)
    return figure


def figure_extrapolation(changed: Changed) -> Any:
    """A surrogate past its last layer: turn from the last state, speed, norm and predictions kept."""
    plt = use_style()
    found = changed["surrogate"]["extrapolation"]
    layers = found["layers"]
    panels = [
        ("turn", "angle to $a_L$ (rad)", BLUE),
        ("speed", "turn in one step (rad)", ORANGE),
        ("norm", "mean token norm", BLACK),
    ]
    panels += [("agreement", "predictions kept (%)", GREEN)] if "agreement" in found else []
    figure, axes = plt.subplots(1, len(panels), figsize=(2.7 * len(panels), 3.0), squeeze=False)
    for ax, (name, label, colour) in zip(axes[0], panels):
        values = np.array(found[name], dtype=float) * (100 if name == "agreement" else 1)
        ax.plot(layers, values, color=colour, marker=".")
        band = found["spreads"].get(name, {}).get("all", {}).get("quantiles")
        if band:
            x = layers[1:] if name == "speed" else layers
            ax.fill_between(x, band["q25"], band["q75"], color=colour, alpha=0.18, linewidth=0)
        ax.axvspan(layers[0], layers[-1], color="#F5F5F5", zorder=0)
        ax.set(xlabel="layer $l > L$", ylabel=label, ylim=(0, 103 if name == "agreement" else None))
        whole_numbers(ax)
    figure.suptitle(f"Past the last layer L = {layers[0]}: extrapolation ({found['conditioning']})", fontsize=10)
    return figure


INTERVENTION_FIGURES: dict[str, tuple[str, Callable[[Changed], Any]]] = {
    "interventions-swaps": ("swaps", figure_swaps),
    "interventions-repetition": ("repetition", figure_repetition),
    "interventions-extrapolation": ("extrapolation", figure_extrapolation),
}


def _outline_phases(ax: Any, lengths: list[int]) -> None:
    from matplotlib.patches import Rectangle

    for end, length in zip(accumulate(lengths), lengths):
        corner = end - length + 0.5
        ax.add_patch(Rectangle((corner, corner), length, length, fill=False, edgecolor="#D55E00", linewidth=1.8))
