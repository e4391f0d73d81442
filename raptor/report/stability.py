"""How states react to a change: perturbed paths, growth of small turns, Lyapunov exponents, transplants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raptor.dynamics.measure import DynamicsFile
from raptor.dynamics.stability import StabilityResult
from raptor.dynamics.tangents import TangentsFile
from raptor.report.charts import EVERY, GROUP_NAMES, SIDE_NAMES, Chart, Series, chooser, described, of_group

_MAX_PATHS = 4  # perturbed paths for one choice of the controls


def stability_charts(measured: DynamicsFile, phases: list[int] | None) -> list[Chart]:
    """Sensitivity, perturbed paths and attraction; without series where they were not measured."""
    sensitivity: list[Series] = []
    paths: list[Series] = []
    sizes: dict[str, str] = {}
    size = "a share of the token's norm"
    for side, result in measured.sides().items():
        found = result.stability
        if found is None:
            continue
        # Sizes and targets are options of the command, so all sides have the same.
        sizes = {str(i): f"{size:g}" for i, size in enumerate(found.eps)}
        if found.kind != "relative":
            size = "times a Gaussian"
        for place, group, when in _responses(found):
            sensitivity.append(of_group(group, side, found.layers, found.angle_per_eps[place], **when))
            paths += _paths(found, side, place, group, when)
    middle = str(len(sizes) // 2)
    controls = [
        chooser("target", "Perturb", sensitivity, GROUP_NAMES),
        chooser("eps", "Size ε", sensitivity, sizes, middle),
    ]
    charts = [
        described("sensitivity", sensitivity, {"size": size}, controls=controls, phases=phases),
        described("perturbed-paths", paths, controls=controls, phases=phases),
        _attraction(measured, phases),
    ]
    # Perturbations are followed on fewer images than the rest of dynamics.json.
    for chart in charts:
        chart.source = f"{measured.teacher.num_stability_images} of {measured.images}"
    return charts


def _responses(found: StabilityResult) -> Iterator[tuple[tuple[int, int, int], str, dict[str, list[str]]]]:
    """Place (target, group, size) in the arrays, the group, and the values of the controls."""
    for t, target in enumerate(found.targets):
        for g, group in enumerate(found.groups):
            for e in range(len(found.eps)):
                yield (t, g, e), group, {"target": [target], "eps": [str(e)]}


def _paths(
    found: StabilityResult, side: str, place: tuple[int, int, int], group: str, when: dict[str, list[str]]
) -> Iterator[Series]:
    """Angle between perturbed and clean path, from a few layers of injection on."""
    # A path from every layer would be a grey area.
    every = -(-len(found.layers) // _MAX_PATHS)
    tokens = [group]
    # With every group only these: paths of several groups from several layers could not be told apart.
    if group == "all":
        tokens.append(EVERY)
    for i in range(0, len(found.layers), every):
        angles = found.path[(*place, i)]
        path = of_group(f"from layer {found.layers[i]}", side, 0, angles, **when, tokens=tokens)
        yield replace(path, colour=f"ramp-{i / max(len(found.layers) - 1, 1):.3f}")


def _attraction(measured: DynamicsFile, phases: list[int] | None) -> Chart:
    """Angle between perturbed and clean states inside each phase, perturbed where the phase begins."""
    series = []
    for side, found in measured.sides().items():
        for phase in found.attraction:
            for group, angles in phase.angle.items():
                curve = Series(side, phase.first, angles, colour=group, side=side, when={"tokens": [group]})
                # One side only, because the words of both would cover each other.
                if side == "teacher":
                    curve.text = [""] * len(curve.x)
                    curve.text[len(curve.x) // 2] = f"×{phase.rate[group]:.2f}"
                series.append(curve)
    return described("attraction", series, phases=phases)


# Beside an untrained twin ---------------------------------------------------------------------------------------------


def tangent_charts(measured: TangentsFile) -> list[Chart]:
    """Every chart of tangents.json; a teacher has no tied block, and some models have no head to transplant for."""
    charts = [_growth(measured), _exponents(measured), _fixed_points(measured), _transplants(measured)]
    return [chart for chart in charts if chart.series]


def _growth(measured: TangentsFile) -> Chart:
    """Growth of a small turn in each step, in the worst direction and in random ones."""
    series: list[Series] = []
    for side, found in measured.sides().items():
        for direction, growth in (("worst", found.jacobians.step), ("random", found.jacobians.step_random)):
            for group, spread in growth.items():
                series.append(of_group(group, side, 1, spread, direction=[direction]))
    controls = [chooser("direction", "Direction", series)]
    return described("tangents-jacobian", series, controls=controls, phases=measured.phases)


def _exponents(measured: TangentsFile) -> Chart:
    """The leading finite-time Lyapunov exponents of each phase."""
    num_phases = len(measured.teacher.lyapunov.phases)
    series: list[Series] = []
    for side, found in measured.sides().items():
        for group, exponents in found.lyapunov.exponents.items():
            # The twin has the phases of the other sides, so that one chooser serves all.
            for phase in range(num_phases):
                series.append(of_group(group, side, 1, exponents[phase], phase=[f"phase {phase + 1}"]))
    return described("tangents-lyapunov", series, controls=[chooser("phase", "Phase", series)])


def _fixed_points(measured: TangentsFile) -> Chart:
    """Turn per step of each tied block past its phase."""
    series: list[Series] = []
    for side, found in measured.sides().items():
        if found.fixed_points is None:
            continue
        for continuation in found.fixed_points.continuations:
            # Only the paper's depth MLP continues, so only the held depth compares kinds of surrogates.
            if continuation.depth == "held":
                base = f"phase {continuation.phase}"
                name = f"{base}, {SIDE_NAMES[side]}"
                colour = f"palette-{continuation.phase - 1}"
                series.append(Series(name, 1, continuation.turn, colour=colour, side=side, base=base))
    return described("tangents-fixed-points", series)


def _transplants(measured: TangentsFile) -> Chart:
    """How often the donor's class comes out, by layer, group and share of tokens; and with random states instead."""
    series: list[Series] = []
    shares: list[float] = []  # the same on every side
    for side, result in measured.sides().items():
        found = result.transplants
        if found is None:
            continue
        shares = sorted({share for _, share in found.parts})
        groups = [group for group, _ in found.parts]
        for row, (group, share) in enumerate(found.parts):
            shown = [f"{share:g}"]
            if groups.count(group) == 1:
                # A single token is replaced whole, whatever the share of the other groups.
                shown = [f"{one:g}" for one in shares]
            for given, outcome in (("donor", found.donor), ("random", found.random_donor)):
                series.append(of_group(group, side, found.layers, outcome.mean[row], share=shown, given=[given]))
    controls = [
        chooser("share", "Share of tokens", series, {f"{share:g}": f"{share:.0%}" for share in shares}, "0.5"),
        chooser("given", "Replaced by", series, {"donor": "the donor's tokens", "random": "random ones, as far away"}),
    ]
    return described("tangents-transplants", series, controls=controls, phases=measured.phases)
