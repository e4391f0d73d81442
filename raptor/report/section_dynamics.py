"""Depth as a dynamical system: every panel, teacher and surrogate over each other, phase bands behind."""

from __future__ import annotations

from typing import Any

import numpy as np

from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.dynamics.modes import GroupModes
from raptor.dynamics.stability import StabilityResult
from raptor.report.charts import (
    EVERY,
    GROUP_NAMES,
    Axis,
    Chart,
    Control,
    Section,
    Series,
    finite_values,
    group_control,
    number,
    series_name,
)
from raptor.report.markup import bullet_list, paragraph
from raptor.report.results import Results
from raptor.streaming import Spread

LEAD = (
    "Read depth as time. Solid lines are the teacher, dashed ones the surrogate, bands the phases. "
    "Choose one token group to see its spread over images (middle half)."
)
GROUPS = ("all", "cls", "registers", "patches")
STATE, STEP = "layer", "step from layer l to l + 1"
Modes = tuple[str, str, GroupModes]  # side, group, its modes
_MAX_PATHS = 8  # perturbed paths drawn at once
_MAX_POINTS = 96  # eigenvalues drawn for one group of one side

# measure, quantity, title, axis, caption, unit, options of the y axis
PANELS: tuple[tuple[str, str, str, str, str, str, Axis], ...] = (
    ("direction", "norm", "Norm", STATE, "Look for growth, and for groups that grow faster.", "|x|", {"log": True}),
    (
        "direction",
        "gamma",
        "Directional convergence",
        STATE,
        "Look for an S-shape, and for the group that arrives first.",
        "cosine with the last layer",
        {},
    ),
    (
        "direction",
        "speed",
        "Angular speed",
        STEP,
        "Look for jumps where a phase ends, and a late turn of cls.",
        "radians per layer",
        {"from_zero": True},
    ),
    (
        "rank",
        "stable_rank",
        "Stable rank of updates",
        STEP,
        "Look for a fall: fewer and fewer directions shared by all tokens.",
        "stable rank",
        {"from_zero": True},
    ),
    (
        "rank",
        "effective_rank",
        "Effective rank of updates",
        STEP,
        "The same with small directions counted too.",
        "effective rank",
        {"from_zero": True},
    ),
    (
        "rank",
        "coherence",
        "Coherence of updates",
        STEP,
        "1 means all tokens move as one. Look for a late peak.",
        "cosine with the mean update",
        {"range": [0, 1]},
    ),
)


def dynamics(results: Results) -> Section:
    section = Section("dynamics", "Dynamics", "Depth as a dynamical system", LEAD)
    measured = results.dynamics
    if measured is None:
        section.hint, section.hint_reason = results.adds("dynamics"), results.notes.get("dynamics", "")
        return section
    sides = measured.sides()
    phases = measured.phases or results.phase_lengths
    section.controls = [group_control([g for g in GROUPS if any(g in m.direction.norm for m in sides.values())])]
    section.charts = [_panel(sides, phases, *panel) for panel in PANELS]
    stability = {side: m.stability for side, m in sides.items() if m.stability is not None}
    if stability:
        section.charts += [_sensitivity(stability, phases), _perturbed_paths(stability, phases)]
    modes = [(side, g, m.modes.groups[g]) for side, m in sides.items() for g in GROUPS if g in m.modes.groups]
    section.charts += [_eigenvalues(modes), _spectrum(modes), _reconstruction(modes, phases), _sweep(modes)]
    section.html = _measured(measured) + _findings(sides)
    missing = [] if "teacher" in stability else ["stability"]
    if missing or measured.surrogate is None:
        section.hint = results.adds("dynamics")
        lacking = missing + ([] if measured.surrogate is not None else ["the surrogate"])
        section.hint_reason = f"Not measured: {', '.join(lacking)}."
    return section


def _measured(measured: DynamicsFile) -> str:
    """The models and the images, and a warning where these are very few."""
    names = " and ".join(side.model.name for side in measured.sides().values())
    few = f" {measured.few_images.capitalize()}." if measured.few_images else ""
    return paragraph(f"{names}, {measured.images}.{few}", "caption")


def _findings(sides: dict[str, DynamicsResult]) -> str:
    """The findings of each side in words, folded away."""
    html = ""
    for side, measures in sides.items():
        lines = measures.findings + measures.notes
        if lines:
            html += f"<details><summary>In words: the {side}</summary>{bullet_list(lines)}</details>"
    return html


def _panel(
    sides: dict[str, DynamicsResult],
    phases: list[int] | None,
    measure: str,
    quantity: str,
    title: str,
    axis: str,
    caption: str,
    unit: str,
    y: Axis,
) -> Chart:
    series = []
    for side, measures in sides.items():
        spreads: dict[str, Spread] = getattr(getattr(measures, measure), quantity)
        for group, spread in ((g, spreads[g]) for g in GROUPS if g in spreads):
            series.append(_with_band(_of_group(group, side, list(range(len(spread.mean))), spread.mean), spread))
    return Chart(
        id=f"dynamics-{quantity.replace('_', '-')}",
        kind="lines",
        title=title,
        caption=caption,
        alt=_alt(title, series),
        series=series,
        x={"label": axis, "integer": True},
        y={"label": unit, **y},
        phases=phases,
        offset=0.5 if axis == STATE else -0.5,
    )


def _of_group(group: str, side: str, x: Any, y: Any, **when: list[str]) -> Series:
    """Values of one token group of one side, shown with its group or with every group."""
    return {**series_name(group, side), "x": x, "y": y, "when": {**when, "tokens": [group, EVERY]}}


def _with_band(series: Series, spread: Spread) -> Series:
    """The middle half of the images as a band, where it is known."""
    return {**series, "lower": spread.quantile(0.25), "upper": spread.quantile(0.75)}


def _alt(title: str, series: list[Series]) -> str:
    ends = []
    for s in series:
        values = finite_values(s["y"])
        if values:
            ends.append(f"{s['name']} from {number(values[0])} to {number(values[-1])}")
    return f"{title} along depth: {'; '.join(ends)}."


def _size_controls(measured: StabilityResult) -> list[Control]:
    eps, targets = measured.eps, measured.targets
    middle = str(len(eps) // 2)
    return [
        Control("target", "Perturb", [(t, GROUP_NAMES.get(t, t)) for t in targets], targets[0]),
        Control("eps", "Size ε", [(str(i), f"{e:g}") for i, e in enumerate(eps)], middle),
    ]


def _sensitivity(found: dict[str, StabilityResult], phases: list[int] | None) -> Chart:
    series: list[Series] = []
    for side, measured in found.items():
        for t, target in enumerate(measured.targets):
            for g, group in enumerate(measured.groups):
                for e in range(len(measured.eps)):
                    spread = measured.angle_per_eps[t, g, e]
                    line = _of_group(group, side, measured.layers, spread.mean, target=[target], eps=[str(e)])
                    series.append(_with_band(line, spread))
    first = next(iter(found.values()))
    kind = "of the token's norm" if first.kind == "relative" else "times a Gaussian"
    slope = _slope(first)
    return Chart(
        id="sensitivity",
        kind="lines",
        title="Sensitivity",
        series=series,
        controls=_size_controls(first),
        caption=f"ε is a share {kind}. A straight fall means the same contraction at every layer."
        if kind[0] == "o"
        else "Look for a straight fall: the same contraction at every layer.",
        alt=f"Final angle over size of the perturbation, by the layer it enters{slope}.",
        x={"label": "layer of injection", "integer": True},
        y={"label": "final angle / ε (radians)", "log": True},
        phases=phases,
    )


def _slope(measured: StabilityResult) -> str:
    value = float(measured.log_slope()[0, measured.groups.index("all"), len(measured.eps) // 2])
    return f"; its logarithm changes by {number(value)} per layer over all tokens"


def _perturbed_paths(found: dict[str, StabilityResult], phases: list[int] | None) -> Chart:
    """Angle between perturbed and clean path, for all tokens, from a few layers of injection."""
    series: list[Series] = []
    for side, measured in found.items():
        g, layers = measured.groups.index("all"), measured.layers
        shown = range(0, len(layers), -(-len(layers) // _MAX_PATHS))
        for t, target in enumerate(measured.targets):
            for e in range(len(measured.eps)):
                for i in shown:
                    path = measured.path[t, g, e, i]
                    series.append(
                        {
                            "name": f"from layer {layers[i]}" + (", surrogate" if side == "surrogate" else ""),
                            "base": f"from layer {layers[i]}",
                            "x": list(range(len(path))),
                            "y": path,
                            "colour": f"ramp-{i / max(len(layers) - 1, 1):.3f}",
                            "side": side,
                            "when": {"target": [target], "eps": [str(e)]},
                        }
                    )
    first = next(iter(found.values()))
    return Chart(
        id="perturbed-paths",
        kind="lines",
        title="Perturbed paths",
        series=series,
        controls=_size_controls(first),
        caption="Look for paths that bend back: depth forgets what was added.",
        alt="Angle between the perturbed and the clean path at every layer, for several layers of injection.",
        x={"label": "layer", "integer": True},
        y={"label": "angle (radians)", "log": True},
        phases=phases,
    )


def _eigenvalues(found: list[Modes]) -> Chart:
    series: list[Series] = []
    for side, group, modes in found:
        flat = modes.eigenvalues[np.isfinite(modes.eigenvalues)]
        flat = flat[:: -(-len(flat) // _MAX_POINTS) or 1]
        series.append(_of_group(group, side, flat.real, flat.imag))
    side, group, first = found[0]
    radius, modulus = float(first.spectral_radius.mean), float(first.median_modulus.mean)
    return Chart(
        id="eigenvalues",
        kind="points",
        title="DMD eigenvalues",
        series=series,
        caption="Inside the circle contracts, the angle rotates. Look for a cluster near +1.",
        alt=f"Eigenvalues on the complex plane; {series_name(group, side)['name']}: mean spectral radius "
        f"{number(radius)}, median modulus {number(modulus)}.",
        x={"label": "real part"},
        y={"label": "imaginary part"},
        extra={"circle": True},
    )


def _spectrum(found: list[Modes]) -> Chart:
    series: list[Series] = []
    for side, group, modes in found:
        values = modes.singular_values.mean
        series.append(_of_group(group, side, list(range(1, len(values) + 1)), values / (values[0] or 1.0)))
    return Chart(
        id="singular-values",
        kind="lines",
        title="Singular spectrum",
        series=series,
        caption="Look for a fast fall: few directions carry the whole path through depth.",
        alt="Singular values of the trajectory matrix, relative to the largest, by token group.",
        x={"label": "index", "integer": True},
        y={"label": "relative singular value", "log": True},
    )


def _reconstruction(found: list[Modes], phases: list[int] | None) -> Chart:
    series: list[Series] = []
    for side, group, modes in found:
        values = modes.reconstruction_error.mean
        layers = list(range(len(values)))
        series.append(_of_group(group, side, layers, values))
        if side == "teacher":
            pooled = {"name": "one pooled fit", "base": "one pooled fit", "colour": group, "side": "null"}
            values = modes.pooled.reconstruction_error.mean
            series.append({**pooled, "x": layers, "y": values, "when": {"tokens": [group]}})
    rank = found[0][2].rank
    return Chart(
        id="reconstruction",
        kind="lines",
        title="Rebuilt by a linear operator",
        series=series,
        phases=phases,
        caption=f"Error of t steps of a rank-{rank} linear map. Small is nearly linear, but a high rank fits anything.",
        alt=f"Reconstruction error of exact DMD at rank {rank} over depth, by token group.",
        x={"label": "layer", "integer": True},
        y={"label": "relative error", "from_zero": True},
    )


def _sweep(found: list[Modes]) -> Chart:
    series: list[Series] = []
    for side, group, modes in found:
        ranks = sorted(modes.sweep)
        if ranks:
            series.append(_of_group(group, side, ranks, [modes.sweep[r].median_modulus.mean for r in ranks]))
    return Chart(
        id="rank-sweep",
        kind="lines",
        title="Does the rank decide it?",
        series=series,
        caption="Trust a modulus that stays as the rank grows; one that drifts is an artefact of the fit.",
        alt="Median modulus of the DMD eigenvalues against the rank of the fit, by token group.",
        x={"label": "rank r of the fit", "integer": True},
        y={"label": "median |λ|", "from_zero": True},
    )
