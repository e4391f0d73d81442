"""Fidelity on the page: curves, null models, costs and tables are those of the certificate or the summary."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raptor.report.results import Results, read_results
from raptor.report.section_fidelity import fidelity


def test_the_certificate_gives_curves_null_models_and_costs(full_run: Path) -> None:
    results = read_results(full_run)
    certificate = results.certificate
    assert certificate is not None
    section = fidelity(results)
    charts = {chart.id: chart for chart in section.charts}
    series = charts["fidelity-r2"].series
    nulls = [s for s in series if s.get("side") == "null"]
    assert len(series) - len(nulls) == len(certificate.curves.groups)
    assert len(nulls) == len(certificate.nulls) * len(certificate.curves.groups)
    (cls,) = (s for s in series if s["colour"] == "cls")
    np.testing.assert_array_equal(cls["y"], certificate.curves.r2["cls"])
    costs = {s["side"]: (s["x"][0], s["y"][0]) for s in charts["costs"].series}
    for side, cost in certificate.costs.items():
        assert costs[side] == (cost.flops / 1e9, cost.block_parameters / 1e6)
    assert "GFLOPs per image" in section.after and section.hint is None
    size = f"{certificate.image_size} px"
    assert f"measured on 24 held-out images of the data at {size}, against scenes" in section.after


def test_a_summary_gives_curves_and_asks_for_the_certificate(committed: Results) -> None:
    section = fidelity(committed)
    assert committed.curves is not None
    chart = next(chart for chart in section.charts if chart.id == "fidelity-relative")
    (every,) = (s for s in chart.series if s["colour"] == "all")
    np.testing.assert_array_equal(every["y"], committed.curves.relative["all"])
    assert section.hint == f"raptor evaluate {committed.folder}"


def test_without_a_surrogate_there_is_a_hint(committed: Results) -> None:
    section = fidelity(Results(committed.folder))
    assert section.charts == [] and section.hint is not None and section.hint.startswith("raptor distill")
