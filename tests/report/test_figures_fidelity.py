"""The figure of the certificate: curves by token group, null models and phase lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raptor.fidelity.certificate import Certificate
from raptor.report.figures_fidelity import figure_certificate


def test_the_curves_of_the_certificate_are_drawn(full_run: Path, tmp_path: Path) -> None:
    certificate = Certificate.read(full_run)
    figure = figure_certificate(certificate)
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_allclose(lines["cls"].get_ydata(), certificate.curves.r2["cls"])
    np.testing.assert_allclose(lines["null: linear"].get_ydata(), certificate.nulls["linear"].r2["all"])
    assert [line.get_xdata()[0] for line in axes.get_lines() if len(line.get_xdata()) == 2] == [3.5, 6.5]
    figure.savefig(tmp_path / "certificate.png")
    assert (tmp_path / "certificate.png").stat().st_size > 10_000
