"""Probes on the page: scores and recovery are those of the probe files."""

from __future__ import annotations

from pathlib import Path

import pytest

from raptor.report.probes import probes
from raptor.report.results import read_results


def test_recovery_is_surrogate_over_teacher(full_run: Path) -> None:
    results = read_results(full_run)
    entry = results.probes["classify"]
    teacher, surrogate = (entry.results[side].chosen.mean["accuracy"] for side in ("teacher", "surrogate"))
    section = probes(results)
    (bars,) = section.charts[0].series
    assert bars.x == ["classify"] and bars.y == pytest.approx([100 * surrogate / teacher])
    assert f"{teacher:.3g}" in section.html and f"{surrogate:.3g}" in section.html
    assert "Not probed yet: segment, depth." in section.hint_reason
    assert section.hint == "raptor probe --task segment"


def test_a_probe_names_its_layer_its_closed_form_and_its_images(full_run: Path) -> None:
    results = read_results(full_run)
    assert results.facts is not None and ">classify, ridge in closed form<" in probes(results).html
    size = results.facts.image_size
    assert f"24 held-out images of scenes at {size} px" in probes(results).html
    for side in results.probes["classify"].results.values():
        side.layer, side.closed_form = 2, None
        side.size = (48, 64)
    results.probes["classify"].split = "train"
    assert ">classify, layer 2<" in probes(results).html
    assert "24 training images of scenes at 48 x 64 px" in probes(results).html


def test_a_model_by_itself_is_nobodys_teacher(full_run: Path) -> None:
    results = read_results(full_run)
    entry = results.probes["classify"]
    del entry.results["surrogate"]
    section = probes(results)
    assert "teacher" not in section.lead + section.html and "recovery" not in section.html
    assert f">{entry.results['teacher'].score:.3g}<" in section.html and not section.charts
