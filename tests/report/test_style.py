"""The look of figures: colours that differ, and files that do not change."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from raptor.report.style import CLASS_COLOURS, GROUP_COLOURS, PALETTE, save_figure, use_style


def test_colours_are_told_apart() -> None:
    for colours in (PALETTE, CLASS_COLOURS, tuple(GROUP_COLOURS.values())):
        rgb = [to_rgb(colour) for colour in colours]
        distances = [sum((x - y) ** 2 for x, y in zip(a, b)) ** 0.5 for i, a in enumerate(rgb) for b in rgb[:i]]
        assert min(distances) > 0.2


@pytest.mark.usefixtures("drawn_figures")
def test_a_figure_is_saved_with_the_same_bytes_and_closed(tmp_path: Path) -> None:
    plt = use_style()
    saved = []
    for name in ("a", "b"):
        figure, ax = plt.subplots(figsize=(2, 2))
        ax.plot([0, 1], [1, 0], label="line")
        files = save_figure(figure, tmp_path / "new" / name)
        assert [file.name for file in files] == [f"{name}.png", f"{name}.svg"]
        assert not plt.fignum_exists(figure.number)
        saved.append([file.read_bytes() for file in files])
    assert saved[0] == saved[1]
