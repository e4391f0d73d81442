"""What takes long in every command and is not what most tests are about."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from raptor.certificate.complexity import run_times


def short_run_times(patch: pytest.MonkeyPatch) -> None:
    """Models are timed in three rounds, not for a second."""
    patch.setattr(inspect.unwrap(run_times), "__defaults__", ("fp32", 0.0))


def blank_figures(patch: pytest.MonkeyPatch) -> None:
    """Figures are made and written by matplotlib as ever, but nothing is drawn on them."""
    from matplotlib.figure import Figure

    savefig = Figure.savefig

    def save_blank(figure: Figure, *args: Any, **options: Any) -> None:
        figure.clear()
        figure.set_layout_engine("none")
        figure.set_size_inches(0.2, 0.2)
        savefig(figure, *args, **options)

    patch.setattr(Figure, "savefig", save_blank)
