"""Similarity on the page: the matrices, cuts, gains and outlier shares are those of phases.json."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from raptor.phases.study import PhasesFile
from raptor.report.paper import draw
from raptor.report.phases import figure_phases, phases
from raptor.report.results import Results


def test_charts_hold_the_saved_numbers(committed: Results) -> None:
    assert committed.phases is not None
    entry = committed.phases.models[0]
    charts = {chart.id: chart for chart in phases(committed).charts}
    for series in charts["similarity"].series:
        (group,) = series.when["tokens"]
        expected = entry.cka if group == "cka" else entry.similarity[group]
        np.testing.assert_array_equal(series.z, expected)
        assert {k: cut for k, cut in series.cuts.items() if k != "run"} == {
            k: cut.lengths for k, cut in entry.phases.items()
        }
    assert {s.when["tokens"][0] for s in charts["similarity"].series} >= set(entry.similarity)
    gains = charts["gains"].series[0]
    assert list(gains.y) == list(entry.gains) and gains.x[0] == 2
    shares = [np.asarray(s.y, dtype=float) for s in charts["outliers"].series]
    np.testing.assert_array_equal(shares, [entry.outliers.coordinates, entry.outliers.tokens])


def _started(results: Results) -> tuple[str, list[int], list[str], str]:
    """Label and phases that the page starts at, all labels of the slider, and the figure in words."""
    chart = next(chart for chart in phases(results).charts if chart.id == "similarity")
    control = next(control for control in chart.controls if control.name == "k")
    cuts = {str(key): list(cut) for key, cut in chart.series[0].cuts.items()}
    return dict(control.options)[control.start], cuts[control.start], [label for _, label in control.options], chart.alt


@pytest.mark.parametrize("lengths", [[12], [1, 11], [7, 3, 2], [3, 3, 2, 2, 2]])
def test_the_page_starts_at_the_cut_of_the_run(lengths: list[int], committed: Results) -> None:
    """Whether max-cut was asked for this k or not, and whether it cuts there or elsewhere."""
    assert committed.phases is not None and committed.distilled is not None
    assert lengths not in [list(cut.lengths) for cut in committed.phases.models[0].phases.values()]
    run = replace(committed, summary=replace(committed.distilled, phases=lengths), dynamics=None)
    label, cut, labels, alt = _started(run)
    many = "phase" if len(lengths) == 1 else "phases"
    assert cut == lengths and label == f"{len(lengths)} {many} of the run"
    assert alt == f"Cut into phases {' | '.join(map(str, lengths))}"
    counts = [int(label.split()[0]) for label in labels]
    assert counts == sorted(counts)


def test_a_cut_of_the_run_that_max_cut_finds_is_there_once(committed: Results) -> None:
    assert committed.phases is not None and committed.distilled is not None
    found = list(committed.phases.models[0].phases[2].lengths)
    label, cut, labels, _ = _started(replace(committed, summary=replace(committed.distilled, phases=found)))
    assert (label, cut) == ("2 phases", found) and not any("of the run" in label for label in labels)


def test_very_few_images_are_told_of(committed: Results) -> None:
    assert committed.phases is not None
    entry = committed.phases.models[0]
    assert "very few images" not in phases(committed).html
    few = PhasesFile([replace(entry, num_images=1, split="val", data="photos")])
    html = phases(Results(committed.folder, phases=few)).html
    assert "very few images (1)" in html and "--split all reads more than the held-out ones" in html


def test_every_phase_of_every_k_is_outlined(committed: Results) -> None:
    assert committed.phases is not None
    (entry,) = committed.phases.models
    figure = draw(figure_phases([entry]))
    ax = figure.axes[0]
    np.testing.assert_array_equal(ax.get_images()[0].get_array(), entry.similarity[entry.tokens])
    # Each further k is drawn a little inside the one before.
    widths = [round(p.get_width() + 2 * 0.09 * i) for i, p in zip(_ks(entry.phases), ax.patches)]
    assert widths == [length for cut in entry.phases.values() for length in cut.lengths]
    assert ax.get_legend_handles_labels()[1] == [f"k = {k}: {cut}" for k, cut in entry.phases.items()]


def _ks(phases: dict) -> list[int]:
    """For each outline, the position of its k."""
    return [i for i, cut in enumerate(phases.values()) for _ in cut.lengths]
