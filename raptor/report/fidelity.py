"""The surrogate against its teacher, in the order of the argument.

Verdict, worst images, curves with null models, stitching, rate and distortion, shift; then costs and tables.
"""

from __future__ import annotations

from typing import Any

from raptor.certificate.certificate import Certificate
from raptor.certificate.error_curves import Array, Curves
from raptor.certificate.rate import Complexity
from raptor.certificate.verdict import Verdict
from raptor.report.charts import (
    EVERY,
    GROUP_NAMES,
    Chart,
    Section,
    Series,
    described,
    group_control,
    percent,
    series_names,
)
from raptor.report.markup import bullet_list, paragraph, pictures, table
from raptor.report.results import Results

_METRICS = ("r2", "relative", "cosine", "bounded_r2")


def fidelity(results: Results) -> Section:
    section = Section.named("fidelity")
    certificate = results.certificate
    if results.curves is None:
        section.hint = "raptor distill"
        return section
    section.controls = [group_control(results.curves.groups)]
    section.controls[0].start = "all"
    if results.verdict is not None:
        section.add_part("verdict", *_verdict(results.verdict, certificate))
    shown = []
    if certificate is not None and certificate.definition is not None:
        for image in certificate.definition.hardest:
            if image.picture:  # `certify` in Python gives none
                words = f"{image.name}: {image.error:.3f} at layer {certificate.definition.layer}"
                shown.append((image.name, [image.picture], words))
    if shown:
        section.add_part("worst", pictures(shown))
    section.add_part("layers", *error_curves(results.curves, certificate, results.phase_lengths))
    if certificate is not None and certificate.stitching is not None:
        found = certificate.stitching
        say = {"line": _sentence(found.line()), "num": f"{found.num_images:,}"}
        section.add_part("stitching", *_stitching_charts(certificate), **say)
    if results.complexity is not None:
        lines = " ".join(map(_sentence, results.complexity.lines()))
        section.add_part("rates", *rate_charts(results.complexity), lines=lines)
    if certificate is None:
        section.hint = "raptor evaluate"
        section.hint_reason = "Null models, intervals, costs and run time come with the certificate:"
    else:
        if certificate.shift:
            section.add_part("shift", table(*certificate.shift_table()))
        section.add_part("costs", *(table(head, rows) for head, rows in certificate.tables()))
    if results.distilled is not None:
        scores = results.distilled.validation
        kept = []
        for share, by in (
            (scores.recovery_head, scores.head or "the head of the teacher"),
            (scores.recovery, "a ridge probe fitted to each side"),
        ):
            if share is not None:
                kept.append(f"accuracy kept on the run's validation images, by {by}: {percent(share)}")
        if kept:
            section.body.append(bullet_list(kept))
    if certificate is not None:
        section.body.append(bullet_list([certificate.source(), *certificate.notes]))
    return section


def _verdict(judged: Verdict, certificate: Certificate | None) -> list[str]:
    """Definition 1, how the surrogate was trained, and a row for each token group."""
    body = []
    if certificate is not None and certificate.definition is not None:
        tone = "good" if certificate.definition.holds else "bad"
        body.append(paragraph(f"{certificate.definition.line()}.", f"definition {tone}"))
    body.append(paragraph(_sentence(judged.lines()[0]), "caption"))
    if certificate is not None and certificate.conditioning is not None:
        body.append(paragraph(_sentence(certificate.conditioning.line()), "caption"))
    rows = []
    for name, group in judged.groups.items():
        ahead = "–"
        if group.layers_ahead is not None:
            ahead = f"at {group.layers_ahead} of {judged.num_layers} layers"
        lowest = f"{group.r2_lowest} at layer {group.lowest_layer}"
        rows.append([GROUP_NAMES.get(name, name), str(group.r2_last), lowest, group.compared() or "–", ahead])
    head = ["tokens", "R² at the last layer, 95 % interval", "lowest R²", "null models, last layer", "ahead of all"]
    body.append(table(head, rows))
    return body


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


# Charts ---------------------------------------------------------------------------------------------------------------


def certificate_charts(certificate: Certificate) -> list[Chart]:
    """Every chart of certificate.json."""
    return [
        *error_curves(certificate.curves, certificate, list(certificate.phases)),
        *_stitching_charts(certificate),
    ]


def error_curves(curves: Curves, certificate: Certificate | None, phases: list[int] | None) -> list[Chart]:
    """A chart for each metric over the layers 1..L, with the certificate's intervals and null models."""
    charts = []
    for metric in _METRICS:
        by_group: dict[str, Array] = getattr(curves, metric)
        chart = f"fidelity-{metric.replace('_', '-')}"
        null_names = series_names(chart)
        series: list[Series] = []
        for group, values in by_group.items():
            own = Series(GROUP_NAMES.get(group, group), 1, values, colour=group, when={"tokens": [group, EVERY]})
            series.append(own)
            if certificate is None:
                continue
            # Null models have no intervals: the verdict compares them image by image.
            if metric in certificate.intervals:
                own.lower, own.upper = certificate.intervals[metric][group]
            for name, null in certificate.nulls.items():
                free = Series(null_names.get(name, f"null: {name}"), 1, getattr(null, metric)[group], side="null")
                free.colour = f"null-{name}"
                # With every group only the surrogate's: null models of every group would cover each other.
                free.when = {"tokens": [group]}
                series.append(free)
        charts.append(described(chart, series, phases=phases))
    return charts


def _stitching_charts(certificate: Certificate) -> list[Chart]:
    """The error of the last state when one model finishes the other's, and with a head the agreement."""
    found = certificate.stitching
    if found is None:
        return []
    errors = []
    agreements = []
    for side, name, hand_over in (
        ("teacher", "the surrogate's state, finished by the teacher", found.by_teacher),
        ("surrogate", "the teacher's state, finished by the surrogate", found.by_surrogate),
    ):
        lower, upper = hand_over.interval
        errors.append(Series(name, 0, hand_over.error, lower=lower, upper=upper, colour=f"side-{side}"))
        if hand_over.agreement is not None:
            agreements.append(Series(name, 0, hand_over.agreement, colour=f"side-{side}"))
    more: dict[str, Any] = {
        "phases": list(certificate.phases),
        "source": f"{certificate.surrogate}: {found.num_images:,} images of {certificate.data}",
    }
    charts = [described("stitching", errors, **more), described("stitching-agreement", agreements, **more)]
    return [chart for chart in charts if chart.series]


def rate_charts(complexity: Complexity) -> list[Chart]:
    """Error and agreement against bits: the surrogate beside its teacher with rounded weights."""
    rates = complexity.rates
    if rates is None:
        return []
    charts = []
    for name, measure in (("rate-error", "largest"), ("rate-last", "last"), ("rate-agreement", "agreement")):
        series = []
        for side in ("teacher", "surrogate"):
            points = rates.of(side)
            curve = Series(f"{side}, rounded", colour=f"side-{side}")
            curve.x = [point.bits / 1e6 for point in points]
            curve.y = [getattr(point, measure) for point in points]
            curve.text = [point.precision for point in points]
            series.append(curve)
        # Agreement needs a head, so without one its values are None on both sides.
        if None not in series[0].y:
            source = f"{rates.num_images:,} images of {complexity.data}"
            charts.append(described(name, series, source=source))
    return charts
