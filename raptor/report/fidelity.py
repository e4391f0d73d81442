"""The surrogate against its teacher: error curves beside null models, costs, and what the certificate says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raptor.certificate.certificate import Certificate, Cost
from raptor.certificate.complexity import Complexity
from raptor.certificate.error_curves import Array, Curves
from raptor.certificate.verdict import named_images
from raptor.report.charts import (
    EVERY,
    GROUP_NAMES,
    Axis,
    Chart,
    Figure,
    Section,
    Series,
    group_control,
    number,
    percent,
)
from raptor.report.markup import bullet_list, table
from raptor.report.results import Results
from raptor.report.style import data_title
from raptor.train.validation import Scores

LEAD = (
    "Run from the same first state, the surrogate must follow its teacher through every layer, not only arrive. "
    "Dotted curves are null models: what comes for free."
)
# metric: title, label of the axis, what to look for, limits that null models may not push out
METRICS: dict[str, tuple[str, str, str, tuple[float, float]]] = {
    "r2": ("R² of the states", "R²", "1 is perfect. Look for the surrogate staying above every null model.", (-1, 1)),
    "relative": (
        "Relative error",
        "E|a − ã| / E|a|",
        "0 is perfect. Look for errors that build up with depth.",
        (0, 2),
    ),
    "cosine": (
        "Direction",
        "mean cosine over tokens",
        "1 is perfect. Look for a token group that turns away.",
        (-0.25, 1),
    ),
    "bounded_r2": (
        "Shape, up to scale and offset",
        "squared correlation",
        "1 is perfect. Far above the plain R² where the surrogate is right but for its scale.",
        (0, 1),
    ),
}
_ON_PAPER = ("r2", "relative", "cosine")
_NULL_NAMES = {
    "identity": "null: input repeated",
    "mean": "null: data mean",
    "tied": "null: tied, untrained",
    "linear": "null: linear map per phase",
}


def fidelity(results: Results) -> Section:
    section = Section("fidelity", "Fidelity", "Surrogate against teacher", LEAD)
    certificate, curves = results.certificate, results.curves
    if curves is None:
        section.hint = "raptor distill"
        section.hint_reason = results.notes.get("certificate", "")
        return section
    control = group_control(curves.groups)
    control.start = "all" if "all" in curves.groups else control.options[0][0]
    section.controls = [control]
    section.charts = [error_curve(metric, curves, certificate, results.phase_lengths) for metric in METRICS]
    if certificate is not None:
        section.charts.append(_costs(certificate.costs))
    if results.complexity is not None:
        section.charts.append(_levin(results.complexity))
    section.after = _scores_table(certificate, None if results.distilled is None else results.distilled.validation)
    if certificate is not None:
        section.after += _certificate_tables(certificate)
    else:
        section.hint = "raptor evaluate"
        note = results.notes.get("certificate", "")
        section.hint_reason = f"{note} Null models, intervals, costs and run time come with the certificate:".strip()
    return section


def figure_certificate(certificate: Certificate) -> Figure:
    """On paper: the surrogate by token group with 95 % bands, null models over all tokens."""
    panels: list[Chart | None] = []
    for metric in _ON_PAPER:
        chart = error_curve(metric, certificate.curves, certificate, list(certificate.phases))
        kept = [series for series in chart.series if series.side != "null" or "all" in series.when["tokens"]]
        panels.append(replace(chart, series=kept))
    which = data_title(certificate.data, certificate.split)
    images = f"{certificate.curves.num_images:,} images of {which} at {certificate.image_size} px"
    judged = certificate.judged
    training = "" if judged.training is None else str(judged.training)
    if judged.undertrained:
        training = f"undertrained: {training}" if training else "undertrained"
    lines = [f"{certificate.surrogate}: {images}", _bound(certificate), training]
    return Figure([panels], "\n".join(line for line in lines if line), size=(4.0, 4.2))


def _bound(certificate: Certificate) -> str:
    """The relative error that holds at every layer: of all tokens, and of each token group where it is larger."""
    found = {group: eps.value for group, eps in certificate.eps["relative"].items() if eps.value is not None}
    if "all" not in found:
        return ""
    larger = [f"{group} {value:.3f}" for group, value in found.items() if round(value, 3) > round(found["all"], 3)]
    of_groups = f" over all tokens ({', '.join(larger)})" if larger else ""
    return f"relative error at most {found['all']:.3f}{of_groups} at every layer"


def error_curve(metric: str, curves: Curves, certificate: Certificate | None, phases: list[int] | None) -> Chart:
    """One metric over the layers 1..L by token group, with the certificate's intervals and null models."""
    title, label, caption, limits = METRICS[metric]
    by_group: dict[str, Array] = getattr(curves, metric)
    ends = None if certificate is None else certificate.intervals.get(metric)
    nulls = {} if certificate is None else certificate.nulls
    layers = list(range(1, curves.num_layers + 1))
    series: list[Series] = []
    for group, values in by_group.items():
        own = Series(GROUP_NAMES.get(group, group), layers, values, colour=group, when={"tokens": [group, EVERY]})
        if ends is not None:
            own.lower, own.upper = ends[group]
        series.append(own)
        for name, null in nulls.items():
            series.append(
                Series(
                    _NULL_NAMES.get(name, f"null: {name}"),
                    layers,
                    getattr(null, metric)[group],
                    colour=f"null-{name}",
                    side="null",
                    when={"tokens": [group]},
                )
            )
    return Chart(
        id=f"fidelity-{metric.replace('_', '-')}",
        kind="lines",
        title=title,
        caption=caption,
        series=series,
        x=Axis("layer l", integer=True),
        y=Axis(label, clip=limits),
        phases=phases,
        offset=0.5,
    )


def _costs(costs: dict[str, Cost]) -> Chart:
    series: list[Series] = []
    for side in ("teacher", "surrogate"):
        cost = costs[side]
        millions, gigaflops = cost.block_parameters / 1e6, cost.flops / 1e9
        time = [f"{1e3 * cost.seconds_per_image:.2f} ms per image"]
        series.append(Series(side, [gigaflops], [millions], colour=f"side-{side}", side=side, text=time))
    return Chart(
        id="costs",
        kind="points",
        title="Parameters against FLOPs",
        caption="Look for a fall straight down: fewer parameters for the same work.",
        series=series,
        x=Axis("GFLOPs per image", from_zero=True),
        y=Axis("block parameters (M)", from_zero=True),
        labelled=True,
    )


def _levin(complexity: Complexity) -> Chart:
    precisions = list(complexity.bounds)
    pairs = complexity.bounds.values()
    teacher = [pair.teacher.total_bits / 1e6 for pair in pairs]
    surrogate = [pair.surrogate.total_bits / 1e6 for pair in pairs]
    return Chart(
        id="levin",
        kind="bars",
        title="Description length (Levin bound)",
        caption="Bits to write down blocks, schedule and the logarithm of their time. Lower is simpler."
        + _rounding(complexity),
        series=[
            Series("teacher", precisions, teacher, colour="side-teacher"),
            Series("surrogate", precisions, surrogate, colour="side-surrogate"),
        ],
        x=Axis("precision of the weights"),
        y=Axis("megabits", from_zero=True),
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


def _scores_table(certificate: Certificate | None, validation: Scores | None) -> str:
    """Predictions of the certificate, and accuracy kept on the run's own validation images."""
    rows = []
    if certificate is not None:
        for name, entry in certificate.predictions.items():
            interval = "none" if entry.lower is None else f"{percent(entry.lower)} to {percent(entry.upper)}"
            rows.append((f"{name.replace('_', ' ')} ({certificate.head})", percent(entry.value), interval))
    if validation is not None:
        where = "on the run's validation images"
        if validation.recovery_head is not None:
            head = validation.head or "the teacher’s own"
            rows.append((f"accuracy kept by one head for both ({head})", percent(validation.recovery_head), where))
        if validation.recovery is not None:
            rows.append(("accuracy kept by a ridge probe fitted to each side", percent(validation.recovery), where))
    return table(("predictions", "value", "95 % interval"), rows) if rows else ""


def _certificate_tables(certificate: Certificate) -> str:
    """Costs of both sides, the errors that hold at every layer, and the certificate's notes."""
    html = table(("costs", "teacher", "surrogate", "ratio"), _cost_rows(certificate.costs))
    relative, absolute = certificate.eps["relative"], certificate.eps["absolute"]
    rows = []
    for group, eps in relative.items():
        name = GROUP_NAMES.get(group, group)
        rows.append((name, number(eps.value), number(eps.upper), eps.layer, number(absolute[group].value)))
    html += table(("ε that holds at every layer", "relative", "at 95 %", "decided at layer", "absolute"), rows)
    num, size = certificate.curves.num_images, certificate.image_size
    images = named_images(num, certificate.split, certificate.data, size)
    return html + bullet_list([f"measured on {images}, against {certificate.teacher}", *certificate.notes])


def _cost_rows(costs: dict[str, Cost]) -> Sequence[tuple[str, ...]]:
    teacher, surrogate = costs["teacher"], costs["surrogate"]
    compared = {
        "parameters (M)": (teacher.num_parameters / 1e6, surrogate.num_parameters / 1e6),
        "block parameters (M)": (teacher.block_parameters / 1e6, surrogate.block_parameters / 1e6),
        "GFLOPs per image": (teacher.flops / 1e9, surrogate.flops / 1e9),
        "milliseconds per image": (1e3 * teacher.seconds_per_image, 1e3 * surrogate.seconds_per_image),
    }
    rows = []
    for label, (old, new) in compared.items():
        rows.append((label, number(old), number(new), f"{new / old:.2f}" if old else "–"))
    return rows
