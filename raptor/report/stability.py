"""How states react to a change: perturbed paths, growth of small turns, Lyapunov exponents, transplants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raptor.dynamics.measure import DynamicsFile
from raptor.dynamics.tangents import TangentsFile
from raptor.report.charts import EVERY, SIDE_NAMES, Chart, Series, described, of_group

_MAX_PATHS = 4  # perturbed paths for one choice of the controls


def stability_charts(measured: DynamicsFile, phases: list[int] | None) -> list[Chart]:
    """Sensitivity, perturbed paths and attraction; without series where they were not measured."""
    sensitivity: list[Series] = []
    paths: list[Series] = []
    attraction: list[Series] = []
    sizes: dict[str, str] = {}
    size = "a share of the token's norm"
    for side, result in measured.sides().items():
        found = result.stability
        if found is not None:
            # Sizes and targets are options of the command, so all sides have the same.
            sizes = {str(i): f"{size:g}" for i, size in enumerate(found.eps)}
            if found.kind != "relative":
                size = "times a Gaussian"
            # A path from every layer would be a grey area.
            layers = range(0, len(found.layers), -(-len(found.layers) // _MAX_PATHS))
            for t, target in enumerate(found.targets):
                for g, group in enumerate(found.groups):
                    # With every group only these: paths of several groups from several layers could not be told apart.
                    tokens = [group, EVERY] if group == "all" else [group]
                    for e in range(len(found.eps)):
                        when = {"target": [target], "eps": [str(e)]}
                        sensitivity.append(of_group(group, side, found.layers, found.angle_per_eps[t, g, e], **when))
                        for i in layers:
                            name = f"from layer {found.layers[i]}"
                            path = of_group(name, side, 0, found.path[t, g, e, i], **when, tokens=tokens)
                            path.colour = f"ramp-{i / max(len(found.layers) - 1, 1):.3f}"
                            paths.append(path)
        for phase in result.attraction:
            for group, angles in phase.angle.items():
                curve = Series(side, phase.first, angles, colour=group, side=side, when={"tokens": [group]})
                # One side only, because the words of both would cover each other.
                if side == "teacher":
                    curve.text = [""] * len(curve.x)
                    curve.text[len(curve.x) // 2] = f"×{phase.rate[group]:.2f}"
                attraction.append(curve)
    chosen: dict[str, Any] = {"starts": {"eps": str(len(sizes) // 2)}, "values": {"eps": sizes}, "phases": phases}
    charts = [
        described("sensitivity", sensitivity, {"size": size}, **chosen),
        described("perturbed-paths", paths, **chosen),
        described("attraction", attraction, phases=phases),
    ]
    # Perturbations are followed on fewer images than the rest of dynamics.json.
    source = f"{measured.teacher.num_stability_images} of {measured.images}"
    return [replace(chart, source=source) for chart in charts]


def tangent_charts(measured: TangentsFile) -> list[Chart]:
    """Every chart of tangents.json; a teacher has no tied block, and some models have no head to transplant for."""
    growth: list[Series] = []
    exponents: list[Series] = []
    fixed_points: list[Series] = []
    transplants: list[Series] = []
    shares: list[float] = []  # of the tokens that are transplanted, the same on every side
    for side, result in measured.sides().items():
        jacobians = result.jacobians
        for direction, grown in (("worst", jacobians.step), ("random", jacobians.step_random)):
            for group, spread in grown.items():
                growth.append(of_group(group, side, 1, spread, direction=[direction]))
        for group, values in result.lyapunov.exponents.items():
            # The twin has the phases of the other sides, so that one chooser serves all.
            for phase in range(len(measured.teacher.lyapunov.phases)):
                exponents.append(of_group(group, side, 1, values[phase], phase=[f"phase {phase + 1}"]))
        for continuation in result.fixed_points.continuations if result.fixed_points is not None else []:
            # Only the paper's depth MLP continues, so only the held depth compares kinds of surrogates.
            if continuation.depth == "held":
                base = f"phase {continuation.phase}"
                curve = Series(f"{base}, {SIDE_NAMES[side]}", 1, continuation.turn, side=side, base=base)
                curve.colour = f"palette-{continuation.phase - 1}"
                fixed_points.append(curve)
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
                curve = of_group(group, side, found.layers, outcome.mean[row], share=shown, given=[given])
                transplants.append(curve)
    shown_shares = {f"{share:g}": f"{share:.0%}" for share in shares}
    phases = measured.phases
    charts = [
        described("tangents-jacobian", growth, phases=phases),
        described("tangents-lyapunov", exponents),
        described("tangents-fixed-points", fixed_points),
        described("tangents-transplants", transplants, values={"share": shown_shares}, phases=phases),
    ]
    return [chart for chart in charts if chart.series]
