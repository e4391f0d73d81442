"""Phases: the similarity of layers with the cuts outlined, what each cut gains, and how large a few values are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from raptor.phases.cut import Phases
from raptor.phases.evidence import CutEvidence
from raptor.phases.study import ModelPhases
from raptor.report.charts import Chart, Control, Figure, Section, Series, described, number, series_names
from raptor.report.markup import bullet_list, table

if TYPE_CHECKING:  # reading a run folder imports every kind of result, which `raptor phases` does not need
    from raptor.report.results import Results

_OWN = "run"  # the phases of the run, where they are not among those cut from the similarity
_MAX_COLUMNS = 4
_EVIDENCE_HEAD = (
    "states of",
    "phases",
    "boundaries, 95 % interval, share of resamples",
    "contrast",
    "shuffled (95 % below)",
    "smooth",
    "twin",
)


def phases(results: Results) -> Section:
    section = Section.named("similarity")
    if results.phases is None or not results.phases.models:
        section.hint = "raptor phases"
        return section
    entries = results.phases.models
    remarks = []
    rows = []
    costs: list[str] = []
    for entry in entries:
        remarks.append(f"{entry.whose}: {'; '.join(remarks_on(entry))}.")
        for k, found in entry.phases.items():
            cut = entry.evidence.get(k)
            if cut is not None and cut.cost is not None:
                costs.append(f"{entry.whose}, {found}: {cost_line(entry, found, cut)}.")
            elif cut is not None:
                rows.append((entry.whose, str(found), *evidence_cells(found, cut)))
    section.body.append(bullet_list(remarks))
    lengths = results.phase_lengths
    for chart in (similarity(entries, lengths), replacement(entries), gains(entries), outliers(entries, lengths)):
        if chart.series:
            section.body.append(chart)
    if rows:
        section.body.append(table(_EVIDENCE_HEAD, rows))
    if costs:
        section.body.append(bullet_list(costs))
    return section


def figure_phases(entries: Sequence[ModelPhases]) -> Figure:
    """On paper: one heat map per model, with the phases of each k outlined; under it what each cut gains."""
    panels: list[Sequence[Chart | None]] = []
    heights: list[float] = []
    for start in range(0, len(entries), _MAX_COLUMNS):
        columns = []
        for entry in entries[start : start + _MAX_COLUMNS]:
            heat_map = similarity([entry], None).only(tokens=entry.tokens)
            # Of each path its last part.
            data = " ".join(word.rstrip("/").rsplit("/", 1)[-1] for word in entry.data.split(" "))
            heat_map.title = f"{entry.whose.replace('timm/', '')}\n{data} ({entry.split})"
            costs = replacement([entry]).only(part="block")
            curve = gains([entry])
            curve.title = "no k is suggested" if entry.structure else f"suggested k = {entry.chosen_k}"
            for series in curve.series:
                if series.side != "null":
                    series.name = "measured"  # one entry of the legend for all models
            columns.append([chart if chart.series else None for chart in (heat_map, costs, curve)])
        for row, height in zip(zip(*columns), (4.1, 4.1, 2.1)):
            if any(row):  # replacements are measured only for a cut by function
                panels.append(row)
                heights.append(height)
    return Figure(panels, size=(3.6, 4.1), heights=heights)


def similarity(entries: Sequence[ModelPhases], lengths: Sequence[int] | None) -> Chart:
    """Every matrix of every model, each with all its cuts. lengths: the phases of the run, where the page starts."""
    first = entries[0]
    start = list(first.chosen or [])
    # The phases of a run fit a model of its depth only.
    if lengths and sum(lengths) == first.model.num_layers:
        start = list(lengths)
    is_own = bool(start) and start not in [list(cut.lengths) for cut in first.phases.values()]
    maps: list[Series] = []
    counts: dict[int | str, int] = {}
    for name, entry in zip(_names(entries), entries):
        cuts: dict[int | str, Sequence[int]] = {k: found.lengths for k, found in entry.phases.items()}
        if is_own and sum(start) == entry.model.num_layers:
            cuts[_OWN] = start
        for key, cut in cuts.items():
            counts[key] = len(cut)
        intervals: dict[Any, list[tuple[int, int]]] = {k: cut.boundaries for k, cut in entry.evidence.items()}
        series = Series(name, cuts=cuts, intervals=intervals, unit="cosine of the same token at two layers")
        for group, matrix in entry.similarity.items():
            maps.append(replace(series, z=matrix, when={"model": [name], "tokens": [group]}))
        if entry.cka is not None:
            maps.append(replace(series, z=entry.cka, unit="linear CKA", when={"model": [name], "tokens": ["cka"]}))
    options = []
    for key in sorted(counts, key=lambda key: (counts[key], key == _OWN)):  # the run's own after those that were found
        label = "1 phase" if counts[key] == 1 else f"{counts[key]} phases"
        if key == _OWN:
            label += " of the run"
        options.append((str(key), label))
    say = {"images": f"{number(first.num_images)} images of {first.data} at {first.image_size} px"}
    alt = f"Cut into phases {' | '.join(map(str, start))}"
    chart = described("similarity", maps, say, {"tokens": first.tokens}, alt=alt)
    if options:
        chart.controls.append(Control("k", "Phases k", options, _OWN if is_own else str(len(start)), slider=True))
    if len(entries) == 1:
        chart.title += f": states of {first.whose}"
    return chart


def replacement(entries: Sequence[ModelPhases]) -> Chart:
    """The cost of every replacement, of blocks and of their parts, with the cuts that were made by it."""
    units = series_names("replacement")
    maps: list[Series] = []
    num_images = 0
    for name, entry in zip(_names(entries), entries):
        cuts = {k: found.lengths for k, found in entry.phases.items()}
        for part, found in entry.replacement.items():
            # Logarithms, because a block that nothing replaces would leave all other costs in one colour.
            with np.errstate(divide="ignore"):
                cost = np.log10(found.cost)
            cost[~np.isfinite(cost)] = np.nan  # the diagonal, where nothing is replaced
            when = {"model": [name], "part": [part]}
            maps.append(Series(name, z=cost, cuts=cuts, unit=units[found.measure], when=when))
            num_images = found.num_images
    chart = described("replacement", maps, {"images": f"{number(num_images)} images"})
    if maps and maps[0].cuts:
        options = [(str(k), f"{k} phases") for k in sorted(maps[0].cuts)]
        chart.controls.append(Control("k", "Phases k", options, options[-1][0], slider=True))
    return chart


def gains(entries: Sequence[ModelPhases]) -> Chart:
    """The gain of each further cut, of the models and, for the first, of matrices without phases."""
    first = entries[0]
    series: list[Series] = []
    # The first cut makes two phases.
    for i, (name, entry) in enumerate(zip(_names(entries), entries)):
        if entry.gains:
            series.append(Series(name, 2, entry.gains, colour=f"palette-{i}"))
    null_names = series_names("gains")
    for name, values in first.null_gains.items():
        series.append(Series(null_names.get(name, name), 2, values, colour=f"null-{name}", side="null"))
    return described("gains", series, mark=None if first.structure else first.chosen_k)


def outliers(entries: Sequence[ModelPhases], lengths: list[int] | None) -> Chart:
    """The share of the squared norm in the largest coordinates and tokens, layer by layer."""
    series: list[Series] = []
    for i, (name, entry) in enumerate(zip(_names(entries), entries)):
        of_model = ""
        if len(entries) > 1:
            of_model = f"{name}: "
            lengths = None  # each model has its own phases
        shares = entry.outliers
        series += [
            Series(f"{of_model}top 1 % of coordinates", 1, shares.coordinates, colour=f"palette-{2 * i}"),
            Series(f"{of_model}top 1 % of tokens", 1, shares.tokens, colour=f"palette-{2 * i + 1}", side="surrogate"),
        ]
    return described("outliers", series, phases=lengths)


def _names(entries: Sequence[ModelPhases]) -> list[str]:
    """Names of the models, told apart by a number where two are the same."""
    names: list[str] = []
    for entry in entries:
        name = entry.whose
        if name in names:
            # Choosers go by name: two models of one name would be drawn over each other.
            name = f"{name} ({len(names) + 1})"
        names.append(name)
    return names


def remarks_on(entry: ModelPhases) -> list[str]:
    """The suggested k, the twin, and a warning of few images."""
    return [line for line in (entry.suggestion, entry.twin, entry.few_images) if line]


def evidence_cells(found: Phases, cut: CutEvidence) -> tuple[str, ...]:
    """The cells of `_EVIDENCE_HEAD` after the phases."""
    edges = []
    for edge, (low, high), share in zip(found.boundaries, cut.boundaries, cut.stability):
        edges.append(f"{edge} [{low}, {high}], {100 * share:.0f} %")
    contrast = number(cut.contrast)
    if cut.interval is not None:
        contrast += f" [{number(cut.interval[0])}, {number(cut.interval[1])}]"
    shuffled = number(cut.shuffled)
    if cut.shuffled_upper is not None:
        shuffled += f" ({number(cut.shuffled_upper)})"
    return "; ".join(edges) or "–", contrast, shuffled, number(cut.smooth), number(cut.twin)


def cost_line(entry: ModelPhases, found: Phases, cut: CutEvidence) -> str:
    """What a cut by function costs, beside other partitions."""
    unit = "nats of KL" if entry.replacement["block"].measure == "kl" else "relative error of the last state"
    blocks = ", ".join(map(str, found.representatives))
    return (
        f"replacing each phase by its representative (blocks {blocks}) costs {number(cut.cost)} {unit} in all; "
        f"the mean over partitions into {found.k} is {number(cut.random_cost)}"
    )
