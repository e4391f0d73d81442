"""Depth as a dynamical system: what is measured along depth, teacher and surrogate over each other.

How states react to a change is in `stability.py`, changes of the model's depth in `interventions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.report.charts import (
    GROUP_NAMES,
    GROUPS,
    Axis,
    Chart,
    Control,
    Section,
    Series,
    chooser,
    described,
    descriptions,
    group_control,
    number,
    of_group,
    percent,
)
from raptor.report.markup import folded, paragraph
from raptor.report.results import Results
from raptor.report.stability import stability_charts, tangent_charts
from raptor.streaming import Spread

_ONLY_ON_PAPER = ("dynamics-speed-variance", "gathering-tokens", "gathering-updates", "attraction", "rank-sweep-error")
_POOLED = "one fit for all images"
_ROOM = 1.06  # around the eigenvalues, as a share of their plane

Sides = Mapping[str, DynamicsResult]


def dynamics(results: Results) -> Section:
    measured = results.dynamics
    section = Section.named("dynamics", measured is not None and measured.surrogate is not None)
    if measured is None:
        section.hint = "raptor dynamics"
        return section
    sides = measured.sides()
    section.controls = [group_control(list(measured.teacher.direction.norm))]
    names = [side.model.name for side in sides.values()]
    text = f"{' and '.join(names)}, {measured.images}."
    if measured.few_images:
        text += f" {measured.few_images.capitalize()}."
    section.body.append(paragraph(text, "caption"))
    for side, found in sides.items():
        # A model by itself is nobody's teacher.
        whose = f"the {side}" if len(sides) > 1 else found.model.name
        section.body.append(folded(f"In words: {whose}", found.findings + found.notes))
    tangents = results.tangents
    if tangents is not None:
        summary = f"In words: stability beside an untrained twin, {tangents.images}"
        section.body.append(folded(summary, tangents.findings + tangents.notes))
    for chart in dynamics_charts(measured, results.phase_lengths):
        if chart.id not in _ONLY_ON_PAPER and not chart.id.startswith("basin"):
            section.body.append(chart)
    if tangents is not None:
        section.body += tangent_charts(tangents)
    missing = []
    if measured.teacher.stability is None:
        missing.append("stability")
    # A model that has no surrogate lacks nothing here.
    if measured.surrogate is None and results.curves is not None:
        missing.append("the surrogate")
    if missing:
        section.hint = "raptor dynamics"
        section.hint_reason = f"Not measured: {', '.join(missing)}."
    return section


def basins(results: Results) -> Section:
    """Class basins: paths of a few classes through depth, and how far apart they come to lie."""
    section = Section.named("basins")
    measured = results.dynamics
    if measured is None or measured.teacher.basins is None:
        section.hint = "raptor dynamics"
        if measured is not None:
            section.hint_reason = "Not measured: basins need labelled images, several of each class."
        return section
    found = measured.teacher.basins
    charts = _basin_charts(measured, measured.phases or results.phase_lengths)
    section.controls = [chooser("tokens", "Tokens", charts[0].series, GROUP_NAMES)]
    section.body += charts
    section.hint_reason = found.note or ""
    return section


def dynamics_charts(measured: DynamicsFile, phases: list[int] | None = None) -> list[Chart]:
    """Every chart of dynamics.json that was measured. phases: of the run, where the file has none."""
    sides = measured.sides()
    phases = measured.phases or phases
    charts = []
    for name, pick in _CURVES.items():
        # A state stands at its layer, a step at the block that makes it.
        first = int(descriptions()[name]["x"] == "block")
        series = []
        for side, found in sides.items():
            spreads = pick(found)
            for group in GROUPS:
                if group in spreads:
                    series.append(of_group(group, side, first, spreads[group]))
        charts.append(described(name, series, phases=phases))
    charts += stability_charts(measured, phases)
    charts += _mode_charts(sides, phases)
    if measured.teacher.basins is not None:
        charts += _basin_charts(measured, phases)
    return [chart for chart in charts if chart.series]


def _speed_variance(found: DynamicsResult) -> Mapping[str, Spread]:
    spreads = {}
    for group, parts in found.direction.speed_variance.items():
        # The variance over all tokens of all images is that within images plus that between them.
        spreads[group] = Spread(parts["tokens"] + parts["images"])
    return spreads


# A quantity along depth of every token group: over states 0..L or over blocks 1..L.
_CURVES: dict[str, Callable[[DynamicsResult], Mapping[str, Spread]]] = {
    "dynamics-norm": lambda found: found.direction.norm,
    "dynamics-gamma": lambda found: found.direction.gamma,
    "dynamics-speed": lambda found: found.direction.speed,
    "dynamics-speed-variance": _speed_variance,
    "dynamics-stable-rank": lambda found: found.rank.stable_rank,
    "dynamics-effective-rank": lambda found: found.rank.effective_rank,
    "dynamics-coherence": lambda found: found.rank.coherence,
    "gathering-tokens": lambda found: found.gathering.alignment if found.gathering else {},
    "gathering-updates": lambda found: found.gathering.toward if found.gathering else {},
}


def _mode_charts(sides: Sides, phases: list[int] | None) -> list[Chart]:
    """Eigenvalues of a fit per image and of one pooled over all images; singular values, the states rebuilt by the
    fitted operator, and what the rank of the fit decides."""
    planes: list[Series] = []
    spectra: list[Series] = []
    rebuilt: list[Series] = []
    moduli: list[Series] = []
    errors: list[Series] = []
    words = ""
    # The unit circle is always in view, and no point lies off the axes.
    limit = 1.0
    for side, found in sides.items():
        for group, modes in found.modes.groups.items():
            # Entries past the rank of a fit are not numbers.
            fitted = modes.eigenvalues[np.isfinite(modes.eigenvalues)]
            pooled = modes.pooled.eigenvalues[np.isfinite(modes.pooled.eigenvalues)]
            small = of_group(group, side, fitted.real, fitted.imag, model=[side])
            name = f"{small.name}, {_POOLED}"
            large = replace(small, name=name, x=pooled.real, y=pooled.imag, base=_POOLED, large=True)
            large.when = {"model": [side], "tokens": [group]}
            planes += [small, large]
            limit = max(limit, np.abs(fitted).max(initial=0), np.abs(pooled).max(initial=0))
            if not words:
                radius = number(float(modes.spectral_radius.mean))
                modulus = number(float(modes.median_modulus.mean))
                words = f"{small.name}: mean spectral radius {radius}, median modulus {modulus}"
            # Shares of the largest one, because norms of mean states say nothing here.
            values = modes.singular_values.mean
            spectra.append(of_group(group, side, 1, values / (values[0] or 1.0)))
            rebuilt.append(of_group(group, side, 0, modes.reconstruction_error.mean))
            if side == "teacher":
                once = of_group(group, "null", 0, modes.pooled.reconstruction_error.mean, tokens=[group])
                rebuilt.append(replace(once, name="one pooled fit", base="one pooled fit"))
            ranks = sorted(modes.sweep)
            if ranks:
                median = [modes.sweep[r]["median_modulus"].mean for r in ranks]
                moduli.append(of_group(group, side, ranks, median))
                # Layer 0 is where the fit starts, so its error says nothing about the steps.
                error = [float(np.mean(modes.sweep[r]["reconstruction_error"].mean[1:])) for r in ranks]
                errors.append(of_group(group, side, ranks, error))
    reach = (-_ROOM * float(limit), _ROOM * float(limit))
    real = Axis("real part of λ", range=reach)
    imaginary = Axis("imaginary part of λ", range=reach)
    rank = next(iter(sides["teacher"].modes.groups.values())).rank
    return [
        described("eigenvalues", planes, alt=words, x=real, y=imaginary),
        described("singular-values", spectra),
        described("reconstruction", rebuilt, {"rank": rank}, phases=phases),
        described("rank-sweep", moduli),
        described("rank-sweep-error", errors),
    ]


def _basin_charts(measured: DynamicsFile, phases: list[int] | None) -> list[Chart]:
    """Paths of the classes, accuracy of the nearest class mean, and separation of the classes."""
    accuracy: list[Series] = []
    separation: list[Series] = []
    paths: list[Series] = []
    class_names = measured.class_names or {}
    sides = {side: found.basins for side, found in measured.sides().items() if found.basins is not None}
    for side, found in sides.items():
        names = [class_names.get(str(label), f"class {label}") for label in found.classes]
        for group, values in found.groups.items():
            accuracy.append(of_group(group, side, 0, 100 * values.accuracy))
            separation.append(of_group(group, side, 0, values.scatter_ratio))
            # Every side and group has its own components: axes of one model say nothing about another.
            axes = [f"PC{i + 1} ({percent(share)} of variance)" for i, share in enumerate(values.explained)]
            when = {"tokens": [group], "model": [side]}
            for i, (name, path) in enumerate(zip(names, values.class_paths)):
                x, y, z = path.T
                paths.append(Series(name, x, y, z, colour=f"palette-{i}", axes=axes, when=when))
    last = measured.teacher.model.num_layers
    layers = [(str(layer), f"layer {layer}") for layer in range(last + 1)]
    drawn = described("basin-paths", paths, phases=phases)
    drawn.controls.append(Control("depth", "Depth", layers, str(last), slider=True))
    # All classes have about as many images, so a guess is right for one of their number.
    chance = 100 * sides["teacher"].chance
    return [
        drawn,
        described("basins-accuracy", accuracy, phases=phases, level=chance),
        described("basins-scatter-ratio", separation, phases=phases),
    ]
