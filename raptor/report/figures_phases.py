"""phases.json as text and as layer-layer heatmaps with phases outlined (the paper's Figures 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raptor.phases import ModelPhases, PhasesFile
from raptor.report.style import PALETTE, save_figure, use_style
from raptor.streaming import Result


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
                rows.append({**row, "suggested": k == entry.chosen_k})
        return rows

    def plot(self) -> Any:
        """The heatmaps."""
        return figure_phases(self.models)

    def text(self) -> str:
        lines = []
        for entry in self.models:
            facts = entry.model
            groups = ", ".join(f"{n} {name}" for name, n in facts.groups.to_dict().items() if n)
            lines.append(
                f"{facts.name}: {facts.num_layers} blocks, dim {facts.dim}, {groups}; "
                f"{entry.num_images} images of {entry.data} at {entry.image_size} px"
            )
            for k, found in entry.phases.items():
                within, across = ("none" if mean is None else f"{mean:.3f}" for mean in entry.within[k])
                lines.append(f"  k={k:>2}  {found!s:<24} similarity within {within}, across {across}")
            lines.append(f"  the gains of further cuts suggest k={entry.chosen_k}")
            if entry.bad_images:
                lines.append(
                    f"  {len(entry.bad_images)} unreadable images were passed over: see bad_images in phases.json"
                )
        return "\n".join([*lines, f"written to {self.folder}/phases.json and {self.folder}/figures/phases.png"])


def save_phases(found: PhasesFile, folder: Path) -> SavedPhases:
    """Write phases.json and figures/phases into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found.write(folder)
    save_figure(figure_phases(found.models), folder / "figures" / "phases")
    return SavedPhases(found.models, folder)


def figure_phases(entries: Sequence[ModelPhases]) -> Any:
    """One heatmap per model; the phases of each k are outlined in their own colour."""
    plt = use_style()
    columns = min(4, len(entries))
    rows = -(-len(entries) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.6 * columns, 4.1 * rows), squeeze=False)
    low = min(float(e.similarity[e.tokens].min()) for e in entries)
    image = None
    for ax, entry in zip(axes.flat, entries):
        image = _draw_heatmap(ax, entry, low)
    for ax in list(axes.flat)[len(entries) :]:
        ax.axis("off")
    figure.colorbar(image, ax=axes, shrink=0.7, label="cosine of the same token at two layers")
    return figure


def _draw_heatmap(ax: Any, entry: ModelPhases, low: float | None = None) -> Any:
    """The similarity that was cut, layers 1..L both ways, with an outline per phase for every k."""
    matrix = entry.similarity[entry.tokens]
    num = len(matrix)
    vmin = matrix.min() if low is None else low
    image = ax.imshow(matrix, cmap="Greys_r", vmin=vmin, vmax=1, extent=(0.5, num + 0.5, num + 0.5, 0.5))
    for i, (k, found) in enumerate(entry.phases.items()):
        start, inset = 0.5, 0.09 * i
        for j, length in enumerate(found.lengths):
            ax.add_patch(
                _outline(start + inset, length - 2 * inset, PALETTE[(i + 1) % len(PALETTE)], k if j == 0 else None)
            )
            start += length
    ax.set_title(_title(entry), fontsize=9)
    ax.set_xlabel("layer")
    ax.set_ylabel("layer")
    ticks = np.arange(1, num + 1, -(-num // 8))
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    ax.spines[:].set_visible(False)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=4, handlelength=1.0, columnspacing=1.0)
    return image


def _outline(start: float, length: float, colour: str, k: int | None) -> Any:
    from matplotlib.patches import Rectangle

    label = f"k = {k}" if k else None
    return Rectangle((start, start), length, length, fill=False, edgecolor=colour, linewidth=1.8, label=label)


def _title(entry: ModelPhases) -> str:
    name = entry.model.name.removeprefix("timm/")
    return f"{name}\n{next(iter(entry.phases.values()), '')}"
