"""Similarity on the page: the matrices, cuts, gains and outlier shares are those of phases.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from raptor.phases import PhasesFile
from raptor.report.results import Results
from raptor.report.section_phases import phases


def test_charts_hold_the_saved_numbers(committed: Results) -> None:
    assert committed.phases is not None
    entry = committed.phases.models[0]
    charts = {chart.id: chart for chart in phases(committed).charts}
    for series in charts["similarity"].series:
        (group,) = series["when"]["tokens"]
        expected = entry.cka if group == "cka" else entry.similarity[group]
        np.testing.assert_array_equal(series["z"], expected)
        assert series["cuts"] == {k: cut.lengths for k, cut in entry.phases.items()}
    assert {s["when"]["tokens"][0] for s in charts["similarity"].series} >= set(entry.similarity)
    gains = charts["gains"].series[0]
    assert list(gains["y"]) == list(entry.gains) and gains["x"][0] == 2
    shares = [np.asarray(s["y"], dtype=float) for s in charts["outliers"].series]
    np.testing.assert_array_equal(shares, [entry.outliers.coordinates, entry.outliers.tokens])


def test_without_phases_there_is_a_hint(committed: Results) -> None:
    section = phases(Results(committed.folder))
    assert section.charts == [] and section.hint == f"raptor phases MODEL --data DATA --out {committed.folder}"


def test_a_run_is_its_own_model(full_run: Path) -> None:
    assert phases(Results(full_run)).hint == f"raptor phases {full_run}"


def test_very_few_images_are_told_of(committed: Results) -> None:
    assert committed.phases is not None
    entry = committed.phases.models[0]
    assert "very few images" not in phases(committed).html
    few = PhasesFile([replace(entry, num_images=1, split="val", data="photos")])
    html = phases(Results(committed.folder, phases=few)).html
    assert "very few images (1)" in html and "--split all or a larger --num_images" in html
