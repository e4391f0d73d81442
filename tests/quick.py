"""What takes long in every command and is not what most tests are about."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
from matplotlib.figure import Figure

from raptor.certificate.complexity import run_times

DRAWN = Figure.savefig
"""matplotlib's own, for tests of what a figure looks like."""


def short_run_times(patch: pytest.MonkeyPatch) -> None:
    """Models are timed in two or three rounds, not for a second."""
    patch.setattr(inspect.unwrap(run_times), "__defaults__", ("fp32", 0.0))
    patch.setattr(import_module("raptor.commands.export"), "TIMED_CALLS", 2)


def blank_figures(patch: pytest.MonkeyPatch) -> None:
    """Figures are made and written by matplotlib as ever, but nothing is drawn on them."""

    def save_blank(figure: Figure, *args: Any, **options: Any) -> None:
        figure.clear()
        figure.set_layout_engine("none")
        figure.set_size_inches(0.2, 0.2)
        DRAWN(figure, *args, **options)

    patch.setattr(Figure, "savefig", save_blank)
