"""The surrogate against its teacher, in the order of the argument.

Verdict, worst images, curves with null models, stitching, rate and distortion, shift; then costs and tables.
"""

from __future__ import annotations

from raptor.certificate.certificate import Certificate
from raptor.certificate.error_curves import Array, Curves
from raptor.certificate.rate import Complexity
from raptor.certificate.verdict import Verdict
from raptor.report.charts import EVERY, GROUP_NAMES, Chart, Section, Series, described, group_control, percent
from raptor.report.markup import bullet_list, paragraph, part, pictures, table
from raptor.report.results import Results

LEAD = (
    "Run from the same first state, the surrogate must follow its teacher through every layer, not only arrive. "
    "Null models, the dotted curves, show what comes for free."
)
_WORST = "Look for what makes them hard: crowded, cut off, or rare. The number is the image's relative error."
_SHIFT = (
    "Look for a set on which the surrogate leaves its teacher: whether the teacher is right there does not matter. "
    "R² is 0 for the mean of the teacher's states on the set itself."
)
_METRICS = ("r2", "relative", "cosine", "bounded_r2")
_NULL_NAMES = {
    "identity": "null: input repeated",
    "mean": "null: data mean",
    "tied": "null: tied, untrained",
    "linear": "null: linear map per phase",
}


def fidelity(results: Results) -> Section:
    section = Section("fidelity", "Fidelity", "Surrogate against teacher", LEAD)
    certificate = results.certificate
    if results.curves is None:
        section.hint = "raptor distill"
        return section
    section.controls = [group_control(results.curves.groups)]
    section.controls[0].start = "all"
    body = section.body
    if results.verdict is not None:
        body += _verdict(results.verdict, certificate)
    if certificate is not None and certificate.definition is not None:
        shown = []
        for image in certificate.definition.hardest:
            if image.picture:  # `certify` in Python gives none
                words = f"{image.name}: {image.error:.3f} at layer {certificate.definition.layer}"
                shown.append((image.name, [image.picture], words))
        if shown:
            body += [part("Worst images", _WORST), pictures(shown)]
    body.append(
        part("Layer by layer", "Look for the layer where a curve leaves its best value, or meets a null model.")
    )
    body += error_curves(results.curves, certificate, results.phase_lengths)
    if certificate is not None and certificate.stitching is not None:
        found = certificate.stitching
        words = f"{_sentence(found.line())} Measured on {found.num_images:,} images."
        body += [part("Where the error is made", words), *_stitching_charts(certificate)]
    if results.complexity is not None:
        words = " ".join(map(_sentence, results.complexity.lines()))
        body += [part("Rate and distortion", words), *rate_charts(results.complexity)]
    if certificate is None:
        section.hint = "raptor evaluate"
        section.hint_reason = "Null models, intervals, costs and run time come with the certificate:"
    else:
        if certificate.shift:
            body += [part("Other images", _SHIFT), table(*certificate.shift_table())]
        body.append(part("Scores and costs", "Tied blocks save parameters, not time: compare both rows."))
        body += [table(head, rows) for head, rows in certificate.tables()]
    if results.distilled is not None:
        scores = results.distilled.validation
        lines = []
        for share, by in (
            (scores.recovery_head, scores.head or "the head of the teacher"),
            (scores.recovery, "a ridge probe fitted to each side"),
        ):
            if share is not None:
                lines.append(f"accuracy kept on the run's validation images, by {by}: {percent(share)}")
        if lines:
            body.append(bullet_list(lines))
    if certificate is not None:
        body.append(bullet_list([certificate.source(), *certificate.notes]))
    return section


def _verdict(judged: Verdict, certificate: Certificate | None) -> list[str | Chart]:
    """Definition 1, how the surrogate was trained, and a row for each token group."""
    body: list[str | Chart] = [
        part("Verdict", "Look at the upper end of the error, and for null models that the surrogate does not beat.")
    ]
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
                free = Series(_NULL_NAMES.get(name, f"null: {name}"), 1, getattr(null, metric)[group], side="null")
                free.colour = f"null-{name}"
                # With every group only the surrogate's: null models of every group would cover each other.
                free.when = {"tokens": [group]}
                series.append(free)
        charts.append(described(f"fidelity-{metric.replace('_', '-')}", series, phases=phases))
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
        error = Series(name, 0, hand_over.error, colour=f"side-{side}")
        error.lower, error.upper = hand_over.interval
        errors.append(error)
        if hand_over.agreement is not None:
            agreements.append(Series(name, 0, hand_over.agreement, colour=f"side-{side}"))
    phases = list(certificate.phases)
    charts = []
    for chart, series in (("stitching", errors), ("stitching-agreement", agreements)):
        if series:
            source = f"{certificate.surrogate}: {found.num_images:,} images of {certificate.data}"
            charts.append(described(chart, series, phases=phases, source=source))
    return charts


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
