"""One look for every figure: colours told apart with any colour vision, phase lines, saving as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raptor.files import replacing

# Okabe and Ito's colours.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"

PALETTE = (BLACK, VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY, YELLOW)
GROUP_COLOURS = {"all": BLACK, "cls": VERMILION, "registers": GREEN, "patches": BLUE}
GROUP_MARKERS = {"all": "o", "cls": "s", "registers": "^", "patches": "D"}
CLASS_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK, YELLOW)
LINE_COLOUR = "#BBBBBB"

STYLE: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#EEEEEE",
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",  # text stays text, which can be searched and edited
    "svg.hashsalt": "raptor",  # the same bytes for the same figure: a figure in git changes only with its data
}


def use_style() -> Any:
    """matplotlib's pyplot with the project's look set."""
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)  # type: ignore[arg-type]
    return plt


def save_figure(figure: Any, path: str | Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write `path`.png and `path`.svg, the same bytes for the same figure, close it, and give the files written."""
    plt = use_style()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{kind}") for kind in formats]
    for file, kind in zip(files, formats):
        with replacing(file) as partial:
            figure.savefig(partial, format=kind, metadata={"Date": None} if kind == "svg" else None)
    plt.close(figure)
    return files
