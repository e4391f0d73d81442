"""Depth as a dynamical system: what is measured along depth, teacher and surrogate over each other.

Class basins are in `basins.py`, interventions in `interventions.py`, an untrained twin's stability in `tangents.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html import escape

import numpy as np

from raptor.dynamics.measure import DynamicsResult
from raptor.dynamics.modes import GroupModes
from raptor.dynamics.stability import StabilityResult
from raptor.report.charts import (
    EVERY,
    GROUP_NAMES,
    GROUPS,
    Axis,
    Chart,
    Control,
    Section,
    Series,
    described,
    descriptions,
    group_control,
    number,
    of_group,
    with_band,
)
from raptor.report.markup import bullet_list, paragraph
from raptor.report.results import Results
from raptor.report.tangents import tangent_charts
from raptor.streaming import Spread

LEAD = (
    "Read depth as time. Solid lines are the teacher, dashed ones the surrogate, bands the phases. "
    "Choose one token group to see its spread over images (middle half)."
)
_ONLY_ON_PAPER = ("dynamics-speed-variance", "gathering-tokens", "gathering-updates", "attraction", "rank-sweep-error")
_POOLED = "one fit for all images"
_MAX_PATHS = 4  # perturbed paths for one choice of the controls
_ROOM = 1.06  # around the eigenvalues, as a share of their plane

Sides = Mapping[str, DynamicsResult]
Pick = Callable[[DynamicsResult], Mapping[str, Spread]]


def dynamics(results: Results) -> Section:
    section = Section("dynamics", "Dynamics", "Depth as a dynamical system", LEAD)
    measured = results.dynamics
    if measured is None:
        section.hint = "raptor dynamics"
        return section
    sides = measured.sides()
    phases = measured.phases or results.phase_lengths
    section.controls = [group_control(list(measured.teacher.direction.norm))]
    names = [side.model.name for side in sides.values()]
    text = f"{' and '.join(names)}, {measured.images}."
    if measured.few_images:
        text += f" {measured.few_images.capitalize()}."
    section.body = [paragraph(text, "caption")]
    charts: list[Chart] = []
    for side, found in sides.items():
        section.body.append(_folded(f"In words: the {side}", found.findings + found.notes))
    for chart in dynamics_charts(sides, phases):
        if chart.id not in _ONLY_ON_PAPER:
            charts.append(chart)
    if results.tangents is not None:
        lines = results.tangents.findings + results.tangents.notes
        images = results.tangents.images
        section.body.append(_folded(f"In words: stability beside an untrained twin, {images}", lines))
        charts += tangent_charts(results.tangents)
    section.body += charts
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


def _folded(summary: str, lines: list[str]) -> str:
    if not lines:
        return ""
    return f"<details><summary>{escape(summary)}</summary>{bullet_list(lines)}</details>"


def dynamics_charts(sides: Sides, phases: list[int] | None) -> list[Chart]:
    """Every chart of dynamics.json but the basins; those that were not measured are left out."""
    charts = [depth_curves(name, sides, phases, pick) for name, pick in _CURVES.items()]
    perturbed = {side: found.stability for side, found in sides.items() if found.stability is not None}
    if perturbed:
        charts += [sensitivity(perturbed, phases), perturbed_paths(perturbed, phases), attraction(sides, phases)]
    charts.append(eigenvalues(sides))
    charts += _mode_curves(sides, phases)
    return [chart for chart in charts if chart.series]


# Curves over depth ----------------------------------------------------------------------------------------------------


def _speed_variance(found: DynamicsResult) -> Mapping[str, Spread]:
    spreads = {}
    for group, parts in found.direction.speed_variance.items():
        # The variance over all tokens of all images is that within images plus that between them.
        spreads[group] = Spread(parts["tokens"] + parts["images"])
    return spreads


def _gathered(name: str) -> Pick:
    """`alignment` or `toward` of the gathering, where it was measured."""

    def pick(found: DynamicsResult) -> Mapping[str, Spread]:
        if found.gathering is None:
            return {}
        spreads: Mapping[str, Spread] = getattr(found.gathering, name)
        return spreads

    return pick


_CURVES: dict[str, Pick] = {
    "dynamics-norm": lambda found: found.direction.norm,
    "dynamics-gamma": lambda found: found.direction.gamma,
    "dynamics-speed": lambda found: found.direction.speed,
    "dynamics-speed-variance": _speed_variance,
    "dynamics-stable-rank": lambda found: found.rank.stable_rank,
    "dynamics-effective-rank": lambda found: found.rank.effective_rank,
    "dynamics-coherence": lambda found: found.rank.coherence,
    "gathering-tokens": _gathered("alignment"),
    "gathering-updates": _gathered("toward"),
}


def depth_curves(name: str, sides: Sides, phases: list[int] | None, pick: Pick) -> Chart:
    """A quantity along depth, every token group of every side: over states 0..L or over blocks 1..L."""
    # A state stands at its layer, a step at the block that makes it.
    first = int(descriptions()[name]["x"] == "block")
    series = []
    for side, found in sides.items():
        spreads = pick(found)
        for group in GROUPS:
            if group in spreads:
                layers = list(range(first, first + len(spreads[group].mean)))
                series.append(with_band(of_group(group, side, layers, spreads[group].mean), spreads[group]))
    return described(name, series, phases=phases)


# Perturbations --------------------------------------------------------------------------------------------------------


def _size_controls(measured: StabilityResult) -> list[Control]:
    targets = Control("target", "Perturb", [], measured.targets[0])
    for target in measured.targets:
        targets.options.append((target, GROUP_NAMES.get(target, target)))
    sizes = Control("eps", "Size ε", [], str(len(measured.eps) // 2))
    for i, size in enumerate(measured.eps):
        sizes.options.append((str(i), f"{size:g}"))
    return [targets, sizes]


def _responses(measured: StabilityResult) -> Iterator[tuple[tuple[int, int, int], str, dict[str, list[str]]]]:
    """Place (target, group, size) in the arrays, the group, and the values of the controls."""
    for t, target in enumerate(measured.targets):
        for g, group in enumerate(measured.groups):
            for e in range(len(measured.eps)):
                yield (t, g, e), group, {"target": [target], "eps": [str(e)]}


def sensitivity(found: Mapping[str, StabilityResult], phases: list[int] | None) -> Chart:
    """Angle at the last layer over the size of a perturbation, against the layer where it enters."""
    series = []
    for side, measured in found.items():
        for place, group, when in _responses(measured):
            spread = measured.angle_per_eps[place]
            series.append(with_band(of_group(group, side, measured.layers, spread.mean, **when), spread))
    # Sizes and targets are options of the command, so all sides have the same.
    first = next(iter(found.values()))
    size = "a share of the token's norm" if first.kind == "relative" else "times a Gaussian"
    return described("sensitivity", series, {"size": size}, controls=_size_controls(first), phases=phases)


def perturbed_paths(found: Mapping[str, StabilityResult], phases: list[int] | None) -> Chart:
    """Angle between perturbed and clean path, from a few layers of injection on."""
    first = next(iter(found.values()))
    # A path from every layer would be a grey area.
    every = -(-len(first.layers) // _MAX_PATHS)
    series = []
    for side, measured in found.items():
        for place, group, when in _responses(measured):
            when["tokens"] = [group]
            # With every group only these: paths of several groups from several layers could not be told apart.
            if group == "all":
                when["tokens"].append(EVERY)
            for i in range(0, len(measured.layers), every):
                angles = measured.path[(*place, i)]
                base = f"from layer {measured.layers[i]}"
                path = of_group(base, side, list(range(len(angles))), angles)
                colour = f"ramp-{i / max(len(measured.layers) - 1, 1):.3f}"
                series.append(replace(path, colour=colour, when=when))
    return described("perturbed-paths", series, controls=_size_controls(first), phases=phases)


def attraction(sides: Sides, phases: list[int] | None) -> Chart:
    """Angle between perturbed and clean states inside each phase, perturbed where the phase begins."""
    series = []
    for side, found in sides.items():
        for phase in found.attraction:
            for group, angles in phase.angle.items():
                layers = list(range(phase.first, phase.last + 1))
                curve = Series(side, layers, angles, colour=group, side=side, when={"tokens": [group]})
                # One side only, because the words of both would cover each other.
                if side == "teacher":
                    curve.text = [""] * len(layers)
                    curve.text[len(layers) // 2] = f"×{phase.rate[group]:.2f}"
                series.append(curve)
    return described("attraction", series, phases=phases)


# Modes ----------------------------------------------------------------------------------------------------------------


def _modes(sides: Sides) -> Iterator[tuple[str, str, GroupModes]]:
    for side, found in sides.items():
        for group in GROUPS:
            if group in found.modes.groups:
                yield side, group, found.modes.groups[group]


def eigenvalues(sides: Sides) -> Chart:
    """Eigenvalues on the complex plane: of one fit per image, and of the fit pooled over all images."""
    series: list[Series] = []
    words = ""
    # The unit circle is always in view, and no point lies off the axes.
    limit = 1.0
    for side, group, modes in _modes(sides):
        # Entries past the rank of a fit are not numbers.
        fitted = modes.eigenvalues[np.isfinite(modes.eigenvalues)]
        pooled = modes.pooled.eigenvalues[np.isfinite(modes.pooled.eigenvalues)]
        small = of_group(group, side, fitted.real, fitted.imag, model=[side])
        name = f"{small.name}, {_POOLED}"
        large = replace(small, name=name, x=pooled.real, y=pooled.imag, base=_POOLED, large=True)
        large.when = {"model": [side], "tokens": [group]}
        series += [small, large]
        limit = max(limit, np.abs(fitted).max(initial=0), np.abs(pooled).max(initial=0))
        if not words:
            radius = number(float(modes.spectral_radius.mean))
            modulus = number(float(modes.median_modulus.mean))
            words = f"{small.name}: mean spectral radius {radius}, median modulus {modulus}"
    reach = (-_ROOM * float(limit), _ROOM * float(limit))
    real = Axis("real part of λ", range=reach)
    imaginary = Axis("imaginary part of λ", range=reach)
    return described("eigenvalues", series, alt=words, x=real, y=imaginary)


def _mode_curves(sides: Sides, phases: list[int] | None) -> list[Chart]:
    """Singular values, the states rebuilt by the fitted operator, and what the rank of the fit decides."""
    spectra: list[Series] = []
    rebuilt: list[Series] = []
    moduli: list[Series] = []
    errors: list[Series] = []
    rank = 0
    for side, group, modes in _modes(sides):
        # Shares of the largest one, because norms of mean states say nothing here.
        values = modes.singular_values.mean
        spectra.append(of_group(group, side, list(range(1, len(values) + 1)), values / (values[0] or 1.0)))
        error = modes.reconstruction_error.mean
        layers = list(range(len(error)))
        rebuilt.append(of_group(group, side, layers, error))
        if side == "teacher":
            pooled = of_group(group, "null", layers, modes.pooled.reconstruction_error.mean)
            name = "one pooled fit"
            rebuilt.append(replace(pooled, name=name, base=name, when={"tokens": [group]}))
        ranks = sorted(modes.sweep)
        if ranks:
            median = []
            mean_error = []
            for r in ranks:
                median.append(modes.sweep[r]["median_modulus"].mean)
                # Layer 0 is where the fit starts, so its error says nothing about the steps.
                mean_error.append(float(np.mean(modes.sweep[r]["reconstruction_error"].mean[1:])))
            moduli.append(of_group(group, side, ranks, median))
            errors.append(of_group(group, side, ranks, mean_error))
        rank = rank or modes.rank
    return [
        described("singular-values", spectra),
        described("reconstruction", rebuilt, {"rank": rank}, phases=phases),
        described("rank-sweep", moduli),
        described("rank-sweep-error", errors),
    ]
