"""Perturbations: how far a state that was moved ends from the clean one, its way there, and whether phases attract."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.dynamics.stability import StabilityResult
from raptor.report.charts import (
    EVERY,
    GROUP_NAMES,
    SHOWN_ON_PAPER,
    STATE,
    Axis,
    Chart,
    Control,
    Figure,
    Series,
    of_group,
    with_band,
)

_MAX_PATHS = 8  # perturbed paths on the page for one choice of the controls
_PATHS_ON_PAPER = (0, 0.25, 0.5, 0.75)  # from which layers, as shares of depth


def perturbed(sides: dict[str, DynamicsResult]) -> dict[str, StabilityResult]:
    return {side: found.stability for side, found in sides.items() if found.stability is not None}


def _size_controls(measured: StabilityResult) -> list[Control]:
    eps, targets = measured.eps, measured.targets
    sizes = [(str(i), f"{size:g}") for i, size in enumerate(eps)]
    return [
        Control("target", "Perturb", [(target, GROUP_NAMES.get(target, target)) for target in targets], targets[0]),
        Control("eps", "Size ε", sizes, str(len(eps) // 2)),
    ]


def sensitivity(found: dict[str, StabilityResult], phases: list[int] | None) -> Chart:
    """Angle at the last layer over the size of a perturbation, against the layer where it enters."""
    series: list[Series] = []
    for side, measured in found.items():
        for t, target in enumerate(measured.targets):
            for g, group in enumerate(measured.groups):
                for e in range(len(measured.eps)):
                    spread = measured.angle_per_eps[t, g, e]
                    line = of_group(group, side, measured.layers, spread.mean, target=[target], eps=[str(e)])
                    series.append(with_band(line, spread))
    first = next(iter(found.values()))
    look = "a straight fall means the same contraction at every layer."
    size = "a share of the token's norm" if first.kind == "relative" else "times a Gaussian"
    return Chart(
        id="sensitivity",
        kind="lines",
        title="Sensitivity",
        caption=f"ε is {size}; {look}",
        series=series,
        x=Axis("layer of the perturbation", integer=True),
        y=Axis("angle at the last layer / ε (rad)", log=True),
        controls=_size_controls(first),
        phases=phases,
    )


def figure_sensitivity(measured: DynamicsFile) -> Figure | None:
    """On paper, at the smallest size: all tokens perturbed, and only the group that is followed."""
    found = perturbed(measured.sides())
    if "teacher" not in found:
        return None
    chart = sensitivity(found, measured.phases).only(eps="0", tokens=SHOWN_ON_PAPER)
    every = chart.only(target="all", title=f"All tokens perturbed (ε = {found['teacher'].eps[0]:g})")
    own = [series for series in chart.series if series.when["target"] == series.when["tokens"][:1]]
    alone = replace(chart, series=own, title="Only the group perturbed")
    return Figure([[every, alone]], size=(4.3, 3.4), same_y=True)


def evenly_spaced(found: dict[str, StabilityResult]) -> list[int]:
    """The layers of injection that the page shows."""
    layers = next(iter(found.values())).layers
    return layers[:: -(-len(layers) // _MAX_PATHS)]


def perturbed_paths(found: dict[str, StabilityResult], phases: list[int] | None, layers: list[int]) -> Chart:
    """Angle between perturbed and clean path, from each of `layers` on."""
    series: list[Series] = []
    for side, measured in found.items():
        for t, target in enumerate(measured.targets):
            for g, group in enumerate(measured.groups):
                tokens = [group, EVERY] if group == "all" else [group]
                for e in range(len(measured.eps)):
                    when = {"target": [target], "eps": [str(e)], "tokens": tokens}
                    for layer in layers:
                        i = measured.layers.index(layer)
                        path = _path(measured.path[t, g, e, i], measured.layers, i, side)
                        series.append(replace(path, when=when))
    first = next(iter(found.values()))
    return Chart(
        id="perturbed-paths",
        kind="lines",
        title="Perturbed paths",
        caption="Look for paths that bend back: depth forgets what was added.",
        series=series,
        x=STATE,
        y=Axis("angle to the clean path (rad)", log=True),
        controls=_size_controls(first),
        phases=phases,
    )


def _path(angles: np.ndarray, layers: list[int], i: int, side: str) -> Series:
    base = f"from layer {layers[i]}"
    name = f"{base}, surrogate" if side == "surrogate" else base
    colour = f"ramp-{i / max(len(layers) - 1, 1):.3f}"
    return Series(name, list(range(len(angles))), angles, colour=colour, side=side, base=base)


def figure_perturbed_path(measured: DynamicsFile) -> Figure | None:
    """On paper, at the middle size: one panel a token group, from four layers of injection."""
    found = perturbed(measured.sides())
    if "teacher" not in found:
        return None
    first = found["teacher"]
    middle = len(first.eps) // 2
    last = len(first.layers) - 1
    layers = sorted({first.layers[round(share * last)] for share in _PATHS_ON_PAPER})
    chart = perturbed_paths(found, measured.phases, layers).only(target="all", eps=str(middle))
    size = "of their norm" if first.kind == "relative" else "times a standard normal vector"
    title = f"Perturbed paths, all tokens moved by {first.eps[middle]:g} {size}"
    groups = [group for group in SHOWN_ON_PAPER if group in first.groups]
    return Figure([[chart.only(tokens=group, title=group) for group in groups]], title, (3.2, 3.3), same_y=True)


def figure_attraction(measured: DynamicsFile) -> Figure | None:
    """On paper: angle between perturbed and clean states inside each phase, perturbed where the phase begins."""
    if not measured.teacher.attraction:
        return None
    groups = [group for group in SHOWN_ON_PAPER if group in measured.teacher.attraction[0].angle]
    title = "Attraction within phases (numbers: factor per step)"
    return Figure([[_attraction(group, measured) for group in groups]], title, (3.2, 3.3), same_y=True)


def _attraction(group: str, measured: DynamicsFile) -> Chart:
    series: list[Series] = []
    for side, found in measured.sides().items():
        for phase in found.attraction:
            layers = list(range(phase.first, phase.last + 1))
            curve = Series(side, layers, phase.angle[group], colour=group, side=side)
            if side == "teacher":
                curve.text = [""] * len(layers)
                curve.text[len(layers) // 2] = f"×{phase.rate[group]:.2f}"
            series.append(curve)
    return Chart(
        id=f"attraction-{group}",
        kind="lines",
        title=group,
        caption="Below 1 the phase attracts: what was added shrinks at every step.",
        series=series,
        x=STATE,
        y=Axis("angle to the clean path (rad)", log=True),
        phases=measured.phases,
    )
