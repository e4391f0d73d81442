"""phases.json as text and as layer-layer heatmaps with phases outlined (the paper's Figures 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raptor.phases import CutEvidence, ModelPhases, Phases, PhasesFile
from raptor.report.style import PALETTE, data_title, save_figure, use_style
from raptor.streaming import Result

NULL_STYLES = {"shuffled": ("#999999", ":"), "smooth": ("#E69F00", "--"), "twin": ("#CC79A7", "-.")}
NULL_LABELS = {"shuffled": "null: layers shuffled", "smooth": "null: smooth", "twin": "untrained twin"}


@dataclass
class SavedPhases(Result):
    """What was found, one entry per model as in phases.json, and the folder it was written to."""

    models: list[ModelPhases]
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        return {"models": [entry.to_dict() for entry in self.models], "folder": str(self.folder)}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per model and k."""
        rows = []
        for entry in self.models:
            for k, found in entry.phases.items():
                within, across = entry.within[k]
                row = {"model": entry.model.name, "k": k, "phases": str(found), "within": within, "across": across}
                rows.append({**row, "suggested": k == entry.chosen_k and not entry.structure})
        return rows

    def plot(self) -> Any:
        """The heatmaps."""
        return figure_phases(self.models)

    def text(self) -> str:
        lines = []
        for entry in self.models:
            facts = entry.model
            groups = ", ".join(f"{where.stop - where.start} {name}" for name, where in facts.groups.present())
            lines.append(
                f"{entry.whose}: {facts.num_layers} blocks, dim {facts.dim}, {groups}; "
                f"{entry.num_images} images of {entry.data} at {entry.image_size} px"
            )
            for k, found in entry.phases.items():
                within, across = ("none" if mean is None else f"{mean:.3f}" for mean in entry.within[k])
                lines.append(f"  k={k:>2}  {found!s:<24} similarity within {within}, across {across}")
                lines += [f"        {line}" for line in _evidence_lines(found, entry.evidence.get(k))]
            lines += [f"  {line}" for line in (entry.suggestion, entry.twin, entry.few_images) if line]
            if entry.bad_images:
                lines.append(f"  {len(entry.bad_images)} unreadable images were skipped: see bad_images in phases.json")
        return "\n".join([*lines, f"written to {self.folder}/phases.json and {self.folder}/figures/phases.png"])


def _evidence_lines(found: Phases, cut: CutEvidence | None) -> list[str]:
    """Boundaries with their 95 % intervals, and the contrast beside that of matrices without phases."""
    if cut is None:
        return []
    lines = []
    if cut.boundaries:
        ends = [
            f"{edge} [{low}, {high}] in {share:.0%} of resamples"
            for edge, (low, high), share in zip(found.boundaries, cut.boundaries, cut.stability)
        ]
        lines.append(f"boundary after layer {'; '.join(ends)}")
    if cut.contrast is not None:
        interval = "" if cut.interval is None else f" [{cut.interval[0]:.3f}, {cut.interval[1]:.3f}]"
        nulls = {"shuffled": cut.shuffled, "smooth": cut.smooth, "untrained twin": cut.twin}
        upper = {"shuffled": "" if cut.shuffled_upper is None else f" (95 % below {cut.shuffled_upper:.3f})"}
        known = ", ".join(f"{name} {v:.3f}{upper.get(name, '')}" for name, v in nulls.items() if v is not None)
        lines.append(f"contrast (within less across) {cut.contrast:.3f}{interval}; {known}")
    return lines


def save_phases(found: PhasesFile, folder: Path) -> SavedPhases:
    """Write phases.json and figures/phases into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found.write(folder)
    save_figure(figure_phases(found.models), folder / "figures" / "phases")
    return SavedPhases(found.models, folder)


def figure_phases(entries: Sequence[ModelPhases]) -> Any:
    """One heatmap per model, with the phases of each k outlined; under it what each cut gains, beside null matrices."""
    plt = use_style()
    columns = min(4, len(entries))
    rows = -(-len(entries) // columns)
    heights = [4.1, 2.1] * rows
    figure, axes = plt.subplots(
        2 * rows, columns, figsize=(3.6 * columns, sum(heights)), squeeze=False, height_ratios=heights
    )
    low = min(float(e.similarity[e.tokens].min()) for e in entries)
    image = None
    for i in range(rows * columns):
        upper, lower = axes[2 * (i // columns), i % columns], axes[2 * (i // columns) + 1, i % columns]
        if i < len(entries):
            image = _draw_heatmap(upper, entries[i], low)
            _draw_gains(lower, entries[i])
        else:
            upper.axis("off")
            lower.axis("off")
    figure.colorbar(image, ax=axes[::2], shrink=0.7, label="cosine of the same token at two layers")
    return figure


def _draw_gains(ax: Any, entry: ModelPhases) -> None:
    """The gain of each further cut, of the model and of matrices without phases."""
    ks = np.arange(2, len(entry.gains) + 2)
    ax.plot(ks, entry.gains, color="#0072B2", marker="o", markersize=3, label="measured", zorder=3)
    for name, (colour, dashes) in NULL_STYLES.items():
        if name in entry.null_gains:
            gains = entry.null_gains[name]
            ax.plot(ks[: len(gains)], gains, color=colour, linestyle=dashes, linewidth=1.3, label=NULL_LABELS[name])
    scale = "symlog" if max(entry.gains, default=0) > 10 else "linear"
    ax.set(xlabel="number of phases k", ylabel="gain of the cut", yscale=scale)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_title("no k is suggested" if entry.structure else f"suggested k = {entry.chosen_k}", fontsize=8)
    ax.legend(fontsize=6)


def _draw_heatmap(ax: Any, entry: ModelPhases, low: float) -> Any:
    """The similarity that was cut, layers 1..L both ways, with an outline per phase for every k."""
    matrix = entry.similarity[entry.tokens]
    num = len(matrix)
    image = ax.imshow(matrix, cmap="Greys_r", vmin=low, vmax=1, extent=(0.5, num + 0.5, num + 0.5, 0.5))
    for i, (k, found) in enumerate(entry.phases.items()):
        start, inset, colour = 0.5, 0.09 * i, PALETTE[(i + 1) % len(PALETTE)]
        for j, length in enumerate(found.lengths):
            label = f"k = {k}: {found}" if j == 0 else None
            ax.add_patch(_outline(start + inset, length - 2 * inset, colour, label))
            start += length
        cut = entry.evidence.get(k)
        for lower, upper in cut.boundaries if cut else ():
            if upper > lower:  # along the diagonal
                ends, label = (lower + 0.5, upper + 0.5), "boundary, 95 %"
                ax.plot(ends, ends, color=colour, linewidth=3, solid_capstyle="butt", label=label)
    ax.set_title(_title(entry), fontsize=9)
    ax.set_xlabel("layer")
    ax.set_ylabel("layer")
    ticks = np.arange(1, num + 1, -(-num // 8))
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    ax.spines[:].set_visible(False)
    shown = dict(zip(*reversed(ax.get_legend_handles_labels())))
    ax.legend(
        shown.values(), shown, loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=7, ncols=2, columnspacing=1.0
    )
    return image


def _outline(start: float, length: float, colour: str, label: str | None) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((start, start), length, length, fill=False, edgecolor=colour, linewidth=1.8, label=label)


def _title(entry: ModelPhases) -> str:
    name = entry.whose.replace("timm/", "")
    return f"{name}\n{data_title(entry.data, entry.split)}"
