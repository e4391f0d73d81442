"""Figures of the interventions on depth: blocks swapped, phases run longer, a surrogate run past its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raptor.dynamics.interventions import InterventionsFile
from raptor.phases import Phases
from raptor.report.style import BLACK, BLUE, GREEN, LINE_COLOUR, ORANGE, PALETTE, use_style, whole_numbers
from raptor.streaming import Spread


def figure_swaps(changed: InterventionsFile) -> Any:
    """Turn of the last state and predictions kept, for every pair of blocks exchanged; phases outlined."""
    plt = use_style()
    sides = {side: parts.swaps for side, parts in changed.sides().items()}
    turns = [swaps.matrix(swaps.angle["all"].mean) for swaps in sides.values()]
    kept = [None if s.agreement is None else 100 * s.matrix(s.agreement.mean) for s in sides.values()]
    panels: list[tuple[Sequence[np.ndarray | None], float, str, str]] = [
        (turns, max(np.nanmax(m) for m in turns), "turn of the last state (rad)", "viridis")
    ]
    if any(matrix is not None for matrix in kept):
        panels.append((kept, 100, "predictions kept (%)", "cividis"))
    figure, axes = plt.subplots(len(sides), len(panels), figsize=(4.3 * len(panels), 3.7 * len(sides)), squeeze=False)
    for column, (matrices, high, label, colours) in enumerate(panels):
        for ax, (side, swaps), matrix in zip(axes[:, column], sides.items(), matrices):
            if matrix is None:  # the clean predictions of this side hardly vary
                ax.set_axis_off()
                continue
            num = len(matrix)
            image = ax.imshow(matrix, cmap=colours, vmin=0, vmax=high, extent=(0.5, num + 0.5, num + 0.5, 0.5))
            _outline_phases(ax, swaps.phases)
            ax.set(xlabel="block", ylabel="block", title=f"{side}: two blocks swapped")
            ticks = np.unique(np.linspace(1, num, min(num, 7)).round().astype(int))
            ax.set_xticks(ticks)
            ax.set_yticks(ticks)
            ax.spines[:].set_visible(False)
            figure.colorbar(image, ax=ax, shrink=0.85, label=label)
    return figure


def figure_repetition(changed: InterventionsFile) -> Any:
    """Turn of the last state and predictions kept, when one phase runs fewer or more times than its length."""
    plt = use_style()
    sides = {side: parts.repetition for side, parts in changed.sides().items()}
    heads = any(found.agreement is not None for found in sides.values())
    figure, axes = plt.subplots(1, 1 + heads, figsize=(4.4 * (1 + heads), 3.4), squeeze=False)
    for side, found in sides.items():
        for j, length in enumerate(found.phases):
            ratio = [times / length for times in found.counts[j]]
            style = dict(
                color=PALETTE[1 + j % (len(PALETTE) - 1)],
                marker="o",
                linestyle="-" if side == "teacher" else (0, (4, 2)),
                markerfacecolor=None if side == "teacher" else "white",
                label=f"phase {j + 1} ({length} blocks)" + (f", {side}" if len(sides) > 1 else ""),
            )
            axes[0, 0].plot(ratio, found.angle[j]["all"].mean, **style)
            if found.agreement is not None:
                axes[0, 1].plot(ratio, 100 * found.agreement[j].mean, **style)
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


def figure_extrapolation(changed: InterventionsFile) -> Any:
    """A surrogate past its last layer: turn from the last state, speed, norm and predictions kept."""
    plt = use_style()
    assert changed.surrogate is not None and changed.surrogate.extrapolation is not None
    found = changed.surrogate.extrapolation
    layers = found.layers
    panels: list[tuple[Spread, str, str, float | None]] = [
        (found.angle["all"], "angle to $a_L$ (rad)", BLUE, None),
        (found.speed["all"], "turn in one step (rad)", ORANGE, None),
        (found.norm["all"], "mean token norm", BLACK, None),
    ]
    if found.agreement is not None:
        panels.append((Spread(100 * found.agreement.mean), "predictions kept (%)", GREEN, 103))
    figure, axes = plt.subplots(1, len(panels), figsize=(2.7 * len(panels), 3.0), squeeze=False)
    for ax, (spread, label, colour, top) in zip(axes[0], panels):
        shown = layers[-len(spread.mean) :]  # the last layer has no speed
        ax.plot(shown, spread.mean, color=colour, marker=".")
        low, high = spread.quantile(0.25), spread.quantile(0.75)
        if low is not None:
            ax.fill_between(shown, low, high, color=colour, alpha=0.18, linewidth=0)
        ax.axvspan(layers[0], layers[-1], color="#F5F5F5", zorder=0)
        ax.set(xlabel="layer $l > L$", ylabel=label, ylim=(0, top))
        whole_numbers(ax)
    figure.suptitle(f"Past the last layer L = {layers[0]}: extrapolation ({found.conditioning})", fontsize=10)
    return figure


INTERVENTION_FIGURES: dict[str, tuple[str, Callable[[InterventionsFile], Any]]] = {
    "interventions-swaps": ("swaps", figure_swaps),
    "interventions-repetition": ("repetition", figure_repetition),
    "interventions-extrapolation": ("extrapolation", figure_extrapolation),
}


def _outline_phases(ax: Any, lengths: Sequence[int]) -> None:
    from matplotlib.patches import Rectangle

    for first, last in Phases.from_lengths(lengths).spans:
        corner, length = first - 0.5, last - first + 1
        ax.add_patch(Rectangle((corner, corner), length, length, fill=False, edgecolor="#D55E00", linewidth=1.8))
