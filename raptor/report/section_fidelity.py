"""The surrogate against its teacher: error curves beside null models, recovery, costs."""

from __future__ import annotations

from raptor.fidelity.certificate import Certificate, Cost
from raptor.fidelity.complexity import Complexity
from raptor.fidelity.error_curves import Array, Curves
from raptor.fidelity.verdict import named_images
from raptor.report.charts import (
    EVERY,
    GROUP_NAMES,
    Chart,
    Section,
    Series,
    finite_values,
    group_control,
    number,
    percent,
)
from raptor.report.markup import bullet_list, table
from raptor.report.results import Results
from raptor.train.validation import Scores

LEAD = (
    "Run from the same first state, the surrogate must follow its teacher through every layer, not only arrive. "
    "Dotted curves are null models: what comes for free."
)
METRICS = (
    ("r2", "R² of the states", "R²", "1 is perfect. Look for the surrogate staying above every null model.", (-1, 1)),
    (
        "relative",
        "Relative error",
        "E|a − ã| / E|a|",
        "0 is perfect. Look for errors that build up with depth.",
        (0, 2),
    ),
    (
        "cosine",
        "Direction",
        "mean cosine over tokens",
        "1 is perfect. Look for a token group that turns away.",
        (-0.25, 1),
    ),
    (
        "bounded_r2",
        "Shape, up to scale and offset",
        "squared correlation",
        "1 is perfect. Far above the plain R² where the surrogate is right but for its scale.",
        (0, 1),
    ),
)
_NULLS = {
    "identity": "null: input repeated",
    "mean": "null: data mean",
    "tied": "null: tied, untrained",
    "linear": "null: linear map per phase",
}


def fidelity(results: Results) -> Section:
    section = Section("fidelity", "Fidelity", "Surrogate against teacher", LEAD)
    certificate, curves = results.certificate, results.curves
    if curves is None:
        section.hint = f"raptor distill MODEL --data DATA --k 3 --out {results.folder}"
        section.hint_reason = results.notes.get("certificate", "")
        return section
    section.controls = [group_control(curves.groups)]
    section.controls[0].start = "all" if "all" in curves.groups else section.controls[0].options[0][0]
    section.charts = [_curve(curves, certificate, results.phase_lengths, *metric) for metric in METRICS]
    if certificate is not None:
        section.charts.append(_costs(certificate.costs))
    if results.complexity is not None:
        section.charts.append(_levin(results.complexity))
    section.after = _tables(certificate, None if results.distilled is None else results.distilled.validation)
    if certificate is None:
        section.hint = results.on_run("evaluate")
        note = results.notes.get("certificate", "")
        section.hint_reason = f"{note} Null models, intervals, costs and run time come with the certificate:".strip()
    return section


def _curve(
    curves: Curves,
    certificate: Certificate | None,
    phases: list[int] | None,
    metric: str,
    title: str,
    label: str,
    caption: str,
    limits: tuple[float, float],
) -> Chart:
    series: list[Series] = []
    by_group: dict[str, Array] = getattr(curves, metric)
    ends = None if certificate is None else certificate.intervals.get(metric)
    nulls = {} if certificate is None else certificate.nulls
    layers = list(range(1, curves.num_layers + 1))
    for group, values in by_group.items():
        lower, upper = (None, None) if ends is None else ends[group]
        series.append(
            {
                "name": GROUP_NAMES.get(group, group),
                "x": layers,
                "y": values,
                "colour": group,
                "when": {"tokens": [group, EVERY]},
                "lower": lower,
                "upper": upper,
            }
        )
        for name, null in nulls.items():
            series.append(
                {
                    "name": _NULLS.get(name, f"null: {name}"),
                    "x": layers,
                    "y": getattr(null, metric)[group],
                    "colour": f"null-{name}",
                    "side": "null",
                    "when": {"tokens": [group]},
                }
            )
    known = finite_values(by_group.get("all", next(iter(by_group.values()))))
    alt = f"{title} over {curves.num_layers} layers, all tokens: from {number(known[0] if known else None)} at the "
    alt += f"first layer to {number(known[-1] if known else None)} at the last."
    return Chart(
        id=f"fidelity-{metric.replace('_', '-')}",
        kind="lines",
        title=title,
        caption=caption,
        alt=alt,
        series=series,
        x={"label": "layer", "integer": True},
        y={"label": label, "clip": limits},
        phases=phases,
    )


def _costs(costs: dict[str, Cost]) -> Chart:
    sides = {side: costs[side] for side in ("teacher", "surrogate")}
    series: list[Series] = [
        {
            "name": side,
            "x": [cost.flops / 1e9],
            "y": [cost.block_parameters / 1e6],
            "colour": f"side-{side}",
            "text": [f"{1e3 * cost.seconds_per_image:.2f} ms per image"],
            "side": side,
        }
        for side, cost in sides.items()
    ]
    words = [
        f"{side}: {cost.block_parameters / 1e6:.2f} M and {cost.flops / 1e9:.3g} GFLOPs" for side, cost in sides.items()
    ]
    return Chart(
        id="costs",
        kind="points",
        title="Parameters against FLOPs",
        caption="Look for a fall straight down: fewer parameters for the same work.",
        alt=f"Block parameters and FLOPs. {'; '.join(words)}.",
        series=series,
        x={"label": "GFLOPs per image", "from_zero": True},
        y={"label": "block parameters (M)", "from_zero": True},
        extra={"large": True},
    )


def _levin(complexity: Complexity) -> Chart:
    bounds = complexity.bounds
    series: list[Series] = [
        {"name": side, "x": list(bounds), "y": [b.total_bits / 1e6 for b in pair], "colour": f"side-{side}"}
        for side, pair in (
            ("teacher", [b.teacher for b in bounds.values()]),
            ("surrogate", [b.surrogate for b in bounds.values()]),
        )
    ]
    ratios = ", ".join(f"{pair.ratio:.2f} in {precision}" for precision, pair in bounds.items())
    return Chart(
        id="levin",
        kind="bars",
        title="Description length (Levin bound)",
        caption="Bits to write down blocks, schedule and the logarithm of their time. Lower is simpler."
        + _rounding(complexity),
        alt=f"Levin bound of surrogate over teacher: {ratios}.",
        series=series,
        x={"label": "precision of the weights"},
        y={"label": "megabits", "from_zero": True},
    )


def _rounding(complexity: Complexity) -> str:
    """What int8 weights cost each side, as a sentence."""
    added = {side: found["int8"]["relative_last"].added for side, found in complexity.quantisation.items()}
    if len(added) < 2:
        return ""
    return (
        f" Weights in int8 add {added['surrogate']:.3f} to the relative error of the surrogate's last layer, and"
        f" {added['teacher']:.3f} to the teacher's own."
    )


def _tables(certificate: Certificate | None, validation: Scores | None) -> str:
    rows = []
    head = f" ({certificate.head})" if certificate else ""
    for name, entry in (certificate.predictions if certificate else {}).items():
        interval = "none" if entry.lower is None else f"{percent(entry.lower)} to {percent(entry.upper)}"
        rows.append((name.replace("_", " ") + head, percent(entry.value), interval))
    if validation is not None:
        for kept, label in (
            (
                validation.recovery_head,
                f"accuracy kept by one head for both ({validation.head or 'the teacher’s own'})",
            ),
            (validation.recovery, "accuracy kept by a ridge probe fitted to each side"),
        ):
            if kept is not None:
                rows.append((label, percent(kept), "on the run's validation images"))
    html = table(("predictions", "value", "95 % interval"), rows) if rows else ""
    if certificate is None:
        return html
    html += table(("costs", "teacher", "surrogate", "ratio"), _cost_rows(certificate.costs))
    relative, absolute = certificate.eps["relative"], certificate.eps["absolute"]
    found = [
        (GROUP_NAMES.get(g, g), number(e.value), number(e.upper), e.layer, number(absolute[g].value))
        for g, e in relative.items()
    ]
    html += table(("ε that holds at every layer", "relative", "at 95 %", "decided at layer", "absolute"), found)
    num, size = certificate.curves.num_images, certificate.image_size
    images = named_images(num, certificate.split, certificate.data, size)
    measured = f"measured on {images}, against {certificate.teacher}"
    return html + bullet_list([measured, *certificate.notes])


def _cost_rows(costs: dict[str, Cost]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for label, name, scale in (
        ("parameters (M)", "num_parameters", 1e6),
        ("block parameters (M)", "block_parameters", 1e6),
        ("GFLOPs per image", "flops", 1e9),
        ("milliseconds per image", "seconds_per_image", 1e-3),
    ):
        old, new = (getattr(costs[side], name) / scale for side in ("teacher", "surrogate"))
        rows.append((label, number(old), number(new), f"{new / old:.2f}" if old else "–"))
    return rows
