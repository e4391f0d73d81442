"""The figure of phases: the matrix that was cut, with one outline per phase and k."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np

from raptor.report.figures_phases import figure_phases
from raptor.report.results import Results


def test_every_phase_of_every_k_is_outlined(committed: Results) -> None:
    assert committed.phases is not None
    (entry,) = committed.phases.models
    figure = figure_phases([entry])
    ax = figure.axes[0]
    np.testing.assert_array_equal(ax.get_images()[0].get_array(), entry.similarity[entry.tokens])
    # Each further k is drawn a little inside the one before.
    widths = [round(p.get_width() + 2 * 0.09 * i) for i, p in zip(_ks(entry.phases), ax.patches)]
    assert widths == [length for cut in entry.phases.values() for length in cut.lengths]
    assert ax.get_legend_handles_labels()[1] == [f"k = {k}: {cut}" for k, cut in entry.phases.items()]
    plt.close(figure)


def _ks(phases: dict) -> list[int]:
    """For each outline, the position of its k."""
    return [i for i, cut in enumerate(phases.values()) for _ in cut.lengths]
