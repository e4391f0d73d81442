"""Charts of stability: sensitivity against the layer of injection, and perturbed paths."""

from __future__ import annotations

from typing import Any

from raptor.report.charts import EVERY, GROUP_NAMES, Chart, Control, number, series_name

MAX_PATHS = 8


def stability_charts(sides: dict[str, Any], phases: list[int] | None) -> list[Chart]:
    found = {side: measures["stability"] for side, measures in sides.items() if measures.get("stability")}
    return [_sensitivity(found, phases), _paths(found, phases)] if found else []


def _controls(measured: dict[str, Any]) -> list[Control]:
    eps, targets = measured["eps"], measured["targets"]
    middle = str(len(eps) // 2)
    return [
        Control("target", "Perturb", [(t, GROUP_NAMES.get(t, t)) for t in targets], targets[0]),
        Control("eps", "Size ε", [(str(i), f"{e:g}") for i, e in enumerate(eps)], middle),
    ]


def _sensitivity(found: dict[str, Any], phases: list[int] | None) -> Chart:
    series: list[dict[str, Any]] = []
    for side, measured in found.items():
        spread = measured["angle_per_eps"]
        quantiles = spread.get("quantiles") or {}
        for t, target in enumerate(measured["targets"]):
            for g, group in enumerate(measured["groups"]):
                for e in range(len(measured["eps"])):
                    ends = {end: q[t][g][e] for end, name in (("lower", "q25"), ("upper", "q75"))
                            if (q := quantiles.get(name))}  # fmt: skip
                    series.append({
                        **series_name(group, side), "x": measured["layers"], "y": spread["mean"][t][g][e],
                        "when": {"target": [target], "eps": [str(e)], "tokens": [group, EVERY]}, **ends,
                    })  # fmt: skip
    first = next(iter(found.values()))
    kind = "of the token's norm" if first.get("kind", "relative") == "relative" else "times a Gaussian"
    slope = _slope(first)
    return Chart(
        id="sensitivity", kind="lines", title="Sensitivity", series=series, controls=_controls(first),
        caption=f"ε is a share {kind}. A straight fall means the same contraction at every layer." if kind[0] == "o"
        else "Look for a straight fall: the same contraction at every layer.",
        alt=f"Final angle over size of the perturbation, by the layer it enters{slope}.",
        x={"label": "layer of injection", "integer": True}, y={"label": "final angle / ε (radians)", "log": True},
        phases=phases,
    )  # fmt: skip


def _slope(measured: dict[str, Any]) -> str:
    slopes = measured.get("log_slope")
    if not slopes:
        return ""
    value = slopes[0][measured["groups"].index("all")][len(measured["eps"]) // 2]
    return f"; its logarithm changes by {number(value)} a layer over all tokens"


def _paths(found: dict[str, Any], phases: list[int] | None) -> Chart:
    """Angle between perturbed and clean path, for all tokens, from a few layers of injection."""
    series: list[dict[str, Any]] = []
    for side, measured in found.items():
        g, layers = measured["groups"].index("all"), measured["layers"]
        shown = range(0, len(layers), -(-len(layers) // MAX_PATHS))
        for t, target in enumerate(measured["targets"]):
            for e in range(len(measured["eps"])):
                for i in shown:
                    path = measured["path"][t][g][e][i]
                    series.append({
                        "name": f"from layer {layers[i]}" + (", surrogate" if side == "surrogate" else ""),
                        "base": f"from layer {layers[i]}",
                        "x": list(range(len(path))), "y": path, "colour": f"ramp-{i / max(len(layers) - 1, 1):.3f}",
                        "side": side, "when": {"target": [target], "eps": [str(e)]},
                    })  # fmt: skip
    first = next(iter(found.values()))
    return Chart(
        id="perturbed-paths", kind="lines", title="Perturbed paths", series=series, controls=_controls(first),
        caption="Look for paths that bend back: depth forgets what was added.",
        alt="Angle between the perturbed and the clean path at every layer, for several layers of injection.",
        x={"label": "layer", "integer": True}, y={"label": "angle (radians)", "log": True}, phases=phases,
    )  # fmt: skip
