"""The surrogate against its teacher, in the order of the argument: verdict, worst images, curves, costs, tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from raptor.certificate.certificate import Certificate, Cost
from raptor.certificate.complexity import Complexity
from raptor.certificate.error_curves import Array, Curves
from raptor.certificate.verdict import NULL_WORDS, GroupVerdict, named_images
from raptor.report.charts import (
    EVERY,
    GROUP_NAMES,
    Chart,
    Figure,
    Section,
    Series,
    described,
    group_control,
    number,
    percent,
)
from raptor.report.markup import bullet_list, paragraph, part, table
from raptor.report.results import Results
from raptor.report.strips import WorstImage
from raptor.report.style import data_title

LEAD = (
    "Run from the same first state, the surrogate must follow its teacher through every layer, not only arrive. "
    "Null models, the dotted curves, show what comes for free."
)
_METRICS = ("r2", "relative", "cosine", "bounded_r2")
_ON_PAPER = ("r2", "relative", "cosine")
_NULL_NAMES = {
    "identity": "null: input repeated",
    "mean": "null: data mean",
    "tied": "null: tied, untrained",
    "linear": "null: linear map per phase",
}

Part = Callable[[Results], list[str | Chart]]


def fidelity(results: Results) -> Section:
    section = Section("fidelity", "Fidelity", "Surrogate against teacher", LEAD)
    if results.curves is None:
        section.hint = "raptor distill"
        return section
    control = group_control(results.curves.groups)
    if "all" in results.curves.groups:
        control.start = "all"
    section.controls = [control]
    for describe in PARTS:
        section.body += describe(results)
    if results.certificate is None:
        section.hint = "raptor evaluate"
        section.hint_reason = "Null models, intervals, costs and run time come with the certificate:"
    return section


# Verdict and worst images ---------------------------------------------------------------------------------------------


def verdict(results: Results) -> list[str | Chart]:
    """Definition 1, how the surrogate was trained, and a column per token group."""
    judged = results.verdict
    if judged is None:
        return []
    body: list[str | Chart] = [
        part("Verdict", "Look at the upper end of the error, and at the null models that the surrogate does not beat.")
    ]
    if results.certificate is not None and results.certificate.definition is not None:
        definition = results.certificate.definition
        tone = "good" if definition.holds else "bad"
        body.append(paragraph(f"{definition.line()}.", f"definition {tone}"))
    trained = judged.lines()[0]
    body.append(paragraph(f"{trained[0].upper()}{trained[1:]}.", "caption"))
    groups = list(judged.groups.values())
    rows = [
        ["R² at the last layer, 95 % interval", *(str(group.r2_last) for group in groups)],
        ["lowest R²", *(f"{group.r2_lowest} at layer {group.lowest_layer}" for group in groups)],
    ]
    for null, words in NULL_WORDS.items():
        cells = [_against(null, group) for group in groups]
        if any(cells):
            rows.append([f"against {words}", *cells])
    if any(group.layers_ahead is not None for group in groups):
        ahead = [f"at {group.layers_ahead} of {judged.num_layers} layers" for group in groups]
        rows.append(["smaller mean error than every null model", *ahead])
    names = [GROUP_NAMES.get(name, name) for name in judged.groups]
    body.append(table(("tokens", *names), rows))
    return body


def _against(null: str, group: GroupVerdict) -> str:
    """How the surrogate's error at the last layer compares with a null model's; empty where they were not compared."""
    if null in group.better:
        return "better"
    if null in group.alike:
        return "no different"
    if null in group.worse:
        return "worse"
    if null == "mean" and group.no_better_than_mean:
        return "no better"
    return ""


def worst_images(results: Results) -> list[str | Chart]:
    """The images that the surrogate follows least, with their pictures."""
    worst = [] if results.images is None else results.images.worst
    if not worst:
        return []
    look_for = "Look for what makes them hard: crowded, cut off, or rare. The number is the image's relative error."
    pictures = "".join(_picture(image) for image in worst)
    return [part("Worst images", look_for), f'<div class="worst">{pictures}</div>']


def _picture(image: WorstImage) -> str:
    name = escape(image.name)
    return (
        f'<figure><img src="data:image/png;base64,{escape(image.image)}" alt="{name}">'
        f"<figcaption>{name}<br>{image.error:.3f} at layer {image.layer}</figcaption></figure>"
    )


# Curves ---------------------------------------------------------------------------------------------------------------


def curves(results: Results) -> list[str | Chart]:
    assert results.curves is not None
    body: list[str | Chart] = [
        part("Layer by layer", "Look for the layer where a curve leaves its best value, or meets a null model.")
    ]
    body += [error_curve(metric, results.curves, results.certificate, results.phase_lengths) for metric in _METRICS]
    return body


def error_curve(metric: str, curves: Curves, certificate: Certificate | None, phases: list[int] | None) -> Chart:
    """One metric over the layers 1..L by token group, with the certificate's intervals and null models."""
    by_group: dict[str, Array] = getattr(curves, metric)
    layers = list(range(1, curves.num_layers + 1))
    series: list[Series] = []
    for group, values in by_group.items():
        own = Series(GROUP_NAMES.get(group, group), layers, values, colour=group, when={"tokens": [group, EVERY]})
        series.append(own)
        if certificate is None:
            continue
        if metric in certificate.intervals:
            own.lower, own.upper = certificate.intervals[metric][group]
        for name, null in certificate.nulls.items():
            free = Series(_NULL_NAMES.get(name, f"null: {name}"), layers, getattr(null, metric)[group], side="null")
            free.colour = f"null-{name}"
            free.when = {"tokens": [group]}
            series.append(free)
    return described(f"fidelity-{metric.replace('_', '-')}", series, phases=phases)


def figure_certificate(certificate: Certificate) -> Figure:
    """On paper: the surrogate by token group with 95 % bands, null models over all tokens."""
    panels: list[Chart | None] = []
    for metric in _ON_PAPER:
        chart = error_curve(metric, certificate.curves, certificate, list(certificate.phases))
        chart.series = [series for series in chart.series if series.side != "null" or "all" in series.when["tokens"]]
        panels.append(chart)
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


# Costs ----------------------------------------------------------------------------------------------------------------


def costs(results: Results) -> list[str | Chart]:
    """What both sides cost: parameters against FLOPs, and the description length."""
    body: list[str | Chart] = []
    if results.certificate is not None:
        series: list[Series] = []
        for side in ("teacher", "surrogate"):
            cost = results.certificate.costs[side]
            point = Series(side, [cost.flops / 1e9], [cost.block_parameters / 1e6], colour=f"side-{side}", side=side)
            point.text = [f"{1e3 * cost.seconds_per_image:.2f} ms per image"]
            series.append(point)
        body.append(described("costs", series))
    if results.complexity is not None:
        body.append(_levin(results.complexity))
    if not body:
        return []
    heading = part("Cost", "Tied blocks save parameters, not time: look for both.")
    return [heading, *body]


def _levin(complexity: Complexity) -> Chart:
    bounds = complexity.bounds
    series = []
    for side in ("teacher", "surrogate"):
        megabits = [getattr(pair, side).total_bits / 1e6 for pair in bounds.values()]
        series.append(Series(side, list(bounds), megabits, colour=f"side-{side}"))
    rounding = ""
    added = {side: found["int8"]["relative_last"].added for side, found in complexity.quantisation.items()}
    if len(added) == 2:
        rounding = (
            f" Weights in int8 add {added['surrogate']:z.3f} to the relative error of the surrogate's last layer, and"
            f" {added['teacher']:z.3f} to the teacher's own."
        )
    return described("levin", series, {"rounding": rounding})


# Tables ---------------------------------------------------------------------------------------------------------------


def tables(results: Results) -> list[str | Chart]:
    """Predictions, costs, the errors that hold at every layer, and the certificate's notes."""
    certificate = results.certificate
    rows = _prediction_rows(results)
    body: list[str | Chart] = []
    if rows:
        body.append(table(("predictions", "value", "95 % interval"), rows))
    if certificate is None:
        return body
    body.append(table(("costs", "teacher", "surrogate", "ratio"), _cost_rows(certificate.costs)))
    relative, absolute = certificate.eps["relative"], certificate.eps["absolute"]
    rows = []
    for group, eps in relative.items():
        name = GROUP_NAMES.get(group, group)
        rows.append((name, number(eps.value), number(eps.upper), eps.layer, number(absolute[group].value)))
    body.append(table(("ε that holds at every layer", "relative", "at 95 %", "decided at layer", "absolute"), rows))
    images = named_images(certificate.curves.num_images, certificate.split, certificate.data, certificate.image_size)
    body.append(bullet_list([f"measured on {images}, against {certificate.teacher}", *certificate.notes]))
    return body


def _prediction_rows(results: Results) -> list[tuple[object, ...]]:
    """Predictions of the certificate, and accuracy kept on the run's own validation images."""
    rows: list[tuple[object, ...]] = []
    certificate = results.certificate
    if certificate is not None:
        for name, entry in certificate.predictions.items():
            interval = "none" if entry.lower is None else f"{percent(entry.lower)} to {percent(entry.upper)}"
            rows.append((f"{name.replace('_', ' ')} ({certificate.head})", percent(entry.value), interval))
    if results.distilled is not None:
        validation = results.distilled.validation
        where = "on the run's validation images"
        if validation.recovery_head is not None:
            head = validation.head or "the teacher’s own"
            rows.append((f"accuracy kept by one head for both ({head})", percent(validation.recovery_head), where))
        if validation.recovery is not None:
            rows.append(("accuracy kept by a ridge probe fitted to each side", percent(validation.recovery), where))
    return rows


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


# In the order of the page: stitching stands after the curves; rate and distortion, then shift, after the costs.
PARTS: tuple[Part, ...] = (verdict, worst_images, curves, costs, tables)
