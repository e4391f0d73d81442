"""Similarity of layers and the phases cut from it."""

from __future__ import annotations

from collections.abc import Sequence

from raptor.phases import ModelPhases
from raptor.report.charts import GROUP_NAMES, Chart, Control, Section, Series, finite_values, number
from raptor.report.figures_phases import NULL_LABELS
from raptor.report.markup import bullet_list, table
from raptor.report.results import Results

_OWN = "run"  # the phases of the run, where they are not among those cut from the similarity
LEAD = (
    "Each cell compares the same token after two blocks. Squares along the diagonal are stretches of depth that do "
    "much the same thing: the phases."
)


def phases(results: Results) -> Section:
    section = Section("similarity", "Phases", "Phases of depth", LEAD)
    entries = results.phases.models if results.phases else []
    if not entries:
        section.hint, section.hint_reason = results.adds("phases"), results.notes.get("phases", "")
        return section
    section.html = bullet_list([f"{entry.whose}: {'; '.join(_remarks(entry))}." for entry in entries])
    section.after = _evidence_table(entries)
    section.charts = [_heatmap(entries, results.phase_lengths)]
    section.charts += [chart for chart in (_gains(entries), _outliers(entries, results.phase_lengths)) if chart.series]
    return section


def _remarks(entry: ModelPhases) -> list[str]:
    return [remark for remark in (entry.suggestion, entry.twin, entry.few_images) if remark]


def _evidence_table(entries: list[ModelPhases]) -> str:
    """Every cut with the interval of its boundaries, and its contrast beside that of matrices without phases."""
    rows = []
    for name, entry in zip(_names(entries), entries):
        for k, found in entry.phases.items():
            cut = entry.evidence.get(k)
            if cut is None:
                continue
            pairs = zip(found.boundaries, cut.boundaries, cut.stability)
            edges = "; ".join(f"{edge} [{low}, {high}], {100 * share:.0f} %" for edge, (low, high), share in pairs)
            ends = "" if cut.interval is None else f" [{number(cut.interval[0])}, {number(cut.interval[1])}]"
            shuffled = number(cut.shuffled) + ("" if cut.shuffled_upper is None else f" ({number(cut.shuffled_upper)})")
            contrast = f"{number(cut.contrast)}{ends}"
            nulls = (shuffled, number(cut.smooth), number(cut.twin))
            rows.append((name, str(found), edges or "–", contrast, *nulls))
    head = ("states of", "phases", "boundaries, 95 % interval, share of resamples", "contrast")
    return table((*head, "shuffled (95 % below)", "smooth", "twin"), rows) if rows else ""


def _heatmap(entries: list[ModelPhases], lengths: list[int] | None) -> Chart:
    names, first = _names(entries), entries[0]
    cut = lengths if lengths and sum(lengths) == first.model.num_layers else list(first.chosen or [])
    own = [] if cut in [list(found.lengths) for found in first.phases.values()] else cut
    maps: list[Series] = []
    options: dict[int | str, str] = {}
    tokens: dict[str, str] = {}
    for name, entry in zip(names, entries):
        matrices = dict(entry.similarity)
        if entry.cka is not None:
            matrices["cka"] = entry.cka
        cuts: dict[int | str, Sequence[int]] = {k: found.lengths for k, found in entry.phases.items()}
        if sum(own) == entry.model.num_layers:
            cuts[_OWN] = own
        options |= {key: _count(len(found)) + (" of the run" if key == _OWN else "") for key, found in cuts.items()}
        for group, matrix in matrices.items():
            tokens[group] = "linear CKA" if group == "cka" else GROUP_NAMES.get(group, group)
            unit = "linear CKA" if group == "cka" else "cosine similarity"
            when = {"model": [name], "tokens": [group]}
            maps.append({"name": name, "z": matrix, "cuts": cuts, "unit": unit, "when": when})
    start = _OWN if own else str(len(cut))
    controls = [Control("tokens", "Tokens", list(tokens.items()), first.tokens)]
    if len(entries) > 1:
        controls.insert(0, Control("model", "Model", [(n, n) for n in names], names[0]))
    if options:
        ordered = sorted(options, key=lambda key: (len(own) if key == _OWN else key, key == _OWN))
        choices = [(str(key), options[key]) for key in ordered]
        controls.append(Control("k", "Phases k", choices, start, slider=True))
    alt = (
        f"Layer by layer similarity of {names[0]}, {len(first.similarity['all'])} layers, values from "
        f"{number(float(first.similarity[first.tokens].min()))} to 1; cut into phases "
        f"{' | '.join(map(str, cut))}."
    )
    images = f"{number(first.num_images)} images of {first.data} at {first.image_size} px"
    return Chart(
        id="similarity",
        kind="heatmap",
        title=f"Similarity between layers: states of {names[0]}" if len(names) == 1 else "Similarity between layers",
        caption=f"Look for squares: move k and see where depth is cut. Mean over {images}.",
        alt=alt,
        series=maps,
        x={"label": "layer l", "integer": True},
        y={"label": "layer m", "integer": True},
        controls=controls,
        extra={"unit": "cosine similarity", "readout": True},
    )


def _count(num: int) -> str:
    return "1 phase" if num == 1 else f"{num} phases"


def _gains(entries: list[ModelPhases]) -> Chart:
    series = [
        {"name": name, "x": list(range(2, len(e.gains) + 2)), "y": e.gains, "colour": f"palette-{i}"}
        for i, (name, e) in enumerate(zip(_names(entries), entries))
        if e.gains
    ]
    first = entries[0]
    gains, chosen = first.gains or [0], first.chosen_k
    series += [
        {
            "name": NULL_LABELS.get(name, name),
            "x": list(range(2, len(values) + 2)),
            "y": values,
            "colour": f"palette-{len(entries) + i}",
            "side": "null",
        }
        for i, (name, values) in enumerate(first.null_gains.items())
    ]
    return Chart(
        id="gains",
        kind="lines",
        title="What each further cut gains",
        caption=f"Look for the bend: later cuts separate layers that were alike. {first.whose}: {first.suggestion}.",
        alt=f"The first cut gains {number(gains[0])}, the last {number(gains[-1])}; {first.suggestion}.",
        series=series,
        x={"label": "number of phases k", "integer": True},
        y={"label": "distance across the cut", "from_zero": True},
        extra={} if first.structure else {"mark": chosen},
    )


def _outliers(entries: list[ModelPhases], lengths: list[int] | None) -> Chart:
    series: list[Series] = []
    for i, (name, entry) in enumerate(zip(_names(entries), entries)):
        prefix = f"{name}: " if len(entries) > 1 else ""
        shares = (("coordinates", entry.outliers.coordinates), ("tokens", entry.outliers.tokens))
        for j, (what, values) in enumerate(shares):
            series.append(
                {
                    "name": f"{prefix}top 1 % of {what}",
                    "x": list(range(1, len(values) + 1)),
                    "y": values,
                    "colour": f"palette-{2 * i + j}",
                    "side": "surrogate" if j else "teacher",
                }
            )
    highest = max((max(finite_values(s["y"]), default=0.0) for s in series), default=0.0)
    return Chart(
        id="outliers",
        kind="lines",
        title="Do a few values rule the cosines?",
        caption="Near 0 is healthy; near 1 the similarity is that of a few huge coordinates or tokens.",
        alt=f"Share of the squared norm in the top 1 % of coordinates and of tokens, at most {number(highest)}.",
        series=series,
        x={"label": "layer", "integer": True},
        y={"label": "share of squared norm", "range": [0, 1]},
        phases=lengths if len(entries) == 1 else None,
    )


def _names(entries: list[ModelPhases]) -> list[str]:
    """Names of the models, told apart by a number where two are the same."""
    names: list[str] = []
    for entry in entries:
        name = entry.whose
        names.append(f"{name} ({len(names) + 1})" if name in names else name)
    return names
