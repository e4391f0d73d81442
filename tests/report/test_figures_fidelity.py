"""The figure of the certificate: curves by token group, null models and phase lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raptor.fidelity.certificate import Certificate, Eps
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


def test_the_title_gives_the_error_of_all_tokens_and_of_groups_where_it_is_larger(full_run: Path) -> None:
    certificate = Certificate.read(full_run)
    relative = {"all": Eps(0.5731, 12), "cls": Eps(0.7304, 12), "registers": Eps(None, 1), "patches": Eps(0.5734, 12)}
    certificate.eps["relative"] = relative
    title = figure_certificate(certificate).get_suptitle()
    assert "\nrelative error at most 0.573 over all tokens (cls 0.730) at every layer" in title
    relative["cls"] = Eps(0.2, 12)
    assert figure_certificate(certificate).get_suptitle().split("\n")[1].endswith("at most 0.573 at every layer")
    relative["all"] = Eps(None, 12)
    assert "relative error" not in figure_certificate(certificate).get_suptitle()
