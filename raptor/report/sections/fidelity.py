"""The surrogate against its teacher: error curves beside null models, recovery, costs."""

from __future__ import annotations

from typing import Any

from raptor.report.charts import EVERY, GROUP_NAMES, Chart, Section, finite_values, group_control, number, percent
from raptor.report.markup import bullet_list, table
from raptor.report.results import Results

LEAD = (
    "Run from the same first state, the surrogate must follow its teacher through every layer, not only arrive. "
    "Dotted curves are null models: what comes for free."
)
METRICS = (
    ("r2", "R² of the states", "R²", "1 is perfect. Look for the surrogate staying above every null model.", (-1, 1)),
    ("relative", "Relative error", "E|a − ã| / E|a|", "0 is perfect. Look for errors that build up with depth.",
     (0, 2)),
    ("cosine", "Direction", "mean cosine over tokens", "1 is perfect. Look for a token group that turns away.",
     (-0.25, 1)),
    ("bounded_r2", "Shape, up to scale and offset", "squared correlation",
     "1 is perfect. Far above the plain R² where the surrogate is right but for its scale.", (0, 1)),
)  # fmt: skip
NULLS = {
    "identity": "null: input repeated",
    "mean": "null: data mean",
    "tied": "null: tied, untrained",
    "linear": "null: linear map a phase",
}


def fidelity(results: Results) -> Section:
    section = Section("fidelity", "Fidelity", "Surrogate against teacher", LEAD)
    certificate, summary = results.get("certificate"), results.get("summary")
    measured = certificate or (summary or {}).get("validation")
    if not measured or not measured.get("curves"):
        section.hint = f"raptor distill MODEL --data DATA --k 3 --out {results.folder}"
        return section
    curves = measured["curves"]
    section.controls = [group_control(list(curves))]
    section.controls[0].start = "all" if "all" in curves else section.controls[0].options[0][0]
    section.charts = [_curve(measured, results.phase_lengths, *metric) for metric in METRICS]
    section.charts += [chart for chart in (_costs(certificate or {}), _levin(results)) if chart]
    section.after = _tables(certificate or {}, summary or {})
    if not certificate:
        section.hint = f"raptor evaluate {results.folder}"
        section.hint_reason = "Null models, intervals, costs and run time come with the certificate:"
    return section


def _curve(
    measured: dict[str, Any], phases: list[int] | None, metric: str, title: str, label: str, caption: str, limits: Any
) -> Chart:
    series: list[dict[str, Any]] = []
    ends = (measured.get("intervals") or {}).get(metric) or {}
    for group, curves in measured["curves"].items():
        values = curves[metric]
        layers = list(range(1, len(values) + 1))
        line = {"name": GROUP_NAMES.get(group, group), "x": layers, "y": values, "colour": group}
        lower, upper = ends.get(group) or (None, None)
        series.append({**line, "when": {"tokens": [group, EVERY]}, "lower": lower, "upper": upper})
        for name, null in (measured.get("nulls") or {}).items():
            series.append({
                "name": NULLS.get(name, f"null: {name}"), "x": layers, "y": null[group][metric],
                "colour": f"null-{name}", "side": "null", "when": {"tokens": [group]},
            })  # fmt: skip
    first = measured["curves"].get("all") or next(iter(measured["curves"].values()))
    known = finite_values(first[metric])
    alt = f"{title} over {len(first[metric])} layers, all tokens: from {number(known[0] if known else None)} at the "
    alt += f"first layer to {number(known[-1] if known else None)} at the last."
    return Chart(
        id=f"fidelity-{metric.replace('_', '-')}", kind="lines", title=title, caption=caption, alt=alt, series=series,
        x={"label": "layer", "integer": True}, y={"label": label, "clip": limits}, phases=phases,
    )  # fmt: skip


def _costs(certificate: dict[str, Any]) -> Chart | None:
    costs = certificate.get("costs") or {}
    if not costs.get("teacher") or not costs.get("surrogate"):
        return None
    series = [
        {
            "name": side, "x": [cost["flops"] / 1e9], "y": [cost["block_parameters"] / 1e6], "colour": f"side-{side}",
            "text": [f"{1e3 * cost['seconds_per_image']:.2f} ms an image"], "side": side,
        }
        for side in ("teacher", "surrogate")
        for cost in [costs[side]]
    ]  # fmt: skip
    words = [
        f"{side}: {costs[side]['block_parameters'] / 1e6:.2f} M and {costs[side]['flops'] / 1e9:.3g} GFLOPs"
        for side in ("teacher", "surrogate")
    ]
    return Chart(
        id="costs", kind="points", title="Parameters against FLOPs",
        caption="Look for a fall straight down: fewer parameters for the same work.",
        alt=f"Block parameters and FLOPs. {'; '.join(words)}.",
        series=series, x={"label": "GFLOPs an image", "from_zero": True},
        y={"label": "block parameters (M)", "from_zero": True}, extra={"large": True},
    )  # fmt: skip


def _levin(results: Results) -> Chart | None:
    saved = results.get("complexity") or {}
    bounds = {p: b for p, b in (saved.get("bounds") or saved).items() if isinstance(b, dict) and "ratio" in b}
    if not bounds:
        return None
    series = [
        {
            "name": side, "x": list(bounds), "y": [b[side]["total_bits"] / 1e6 for b in bounds.values()],
            "colour": f"side-{side}",
        }
        for side in ("teacher", "surrogate")
    ]  # fmt: skip
    ratios = ", ".join(f"{b['ratio']:.2f} in {p}" for p, b in bounds.items() if b.get("ratio"))
    return Chart(
        id="levin", kind="bars", title="Description length (Levin bound)",
        caption="Bits to write down blocks, schedule and the logarithm of their time. Lower is simpler."
        + _rounding(saved.get("quantisation") or {}),
        alt=f"Levin bound of surrogate over teacher: {ratios}.", series=series,
        x={"label": "precision of the weights"}, y={"label": "megabits", "from_zero": True},
    )  # fmt: skip


def _rounding(quantisation: dict[str, Any]) -> str:
    """What int8 weights cost each side, as a sentence."""
    added = {
        side: found["int8"]["relative_last"]["added"]
        for side, found in quantisation.items()
        if side in ("surrogate", "teacher")
    }
    if len(added) < 2:
        return ""
    return (
        f" Weights in int8 add {added['surrogate']:.3f} to the relative error of the surrogate's last layer, and"
        f" {added['teacher']:.3f} to the teacher's own."
    )


def _tables(certificate: dict[str, Any], summary: dict[str, Any]) -> str:
    html, rows = "", []
    for name, entry in (certificate.get("predictions") or {}).items():
        value = percent(entry["value"])
        rows.append((name.replace("_", " "), value, f"{percent(entry.get('lower'))} to {percent(entry.get('upper'))}"))
    validation = summary.get("validation") or {}
    for name, label in (
        ("recovery_head", "accuracy kept, teacher's head"),
        ("recovery", "accuracy kept, refitted probe"),
    ):
        if validation.get(name) is not None:
            rows.append((label, percent(validation[name]), "on the run's validation images"))
    if rows:
        html += table(("predictions", "value", "95 % interval"), rows)
    costs = certificate.get("costs") or {}
    if costs.get("teacher") and costs.get("surrogate"):
        html += table(("costs", "teacher", "surrogate", "ratio"), _cost_rows(costs))
    eps = certificate.get("eps") or {}
    if eps.get("relative"):
        found = [
            (GROUP_NAMES.get(g, g), number(e["value"]), number(e.get("upper")), e["layer"],
             number((eps.get("absolute") or {}).get(g, {}).get("value")))
            for g, e in eps["relative"].items()
        ]  # fmt: skip
        html += table(("ε that holds at every layer", "relative", "at 95 %", "decided at layer", "absolute"), found)
    return html + (bullet_list(certificate["notes"]) if certificate.get("notes") else "")


def _cost_rows(costs: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for label, name, scale in (
        ("parameters (M)", "num_parameters", 1e6),
        ("block parameters (M)", "block_parameters", 1e6),
        ("GFLOPs an image", "flops", 1e9),
        ("milliseconds an image", "seconds_per_image", 1e-3),
    ):
        old, new = costs["teacher"][name] / scale, costs["surrogate"][name] / scale
        rows.append((label, number(old), number(new), f"{new / old:.2f}" if old else "–"))
    return rows
