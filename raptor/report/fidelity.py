"""The surrogate against its teacher, in the order of the argument.

Verdict, worst images, curves with null models, stitching, rate and distortion, shift; then costs and tables.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from raptor.certificate.autonomy import MEASURES, Autonomy
from raptor.certificate.certificate import Certificate
from raptor.certificate.error_curves import Array, Curves
from raptor.certificate.rate import Complexity
from raptor.certificate.shift import SHIFT_COLUMNS
from raptor.certificate.verdict import NULL_WORDS, GroupVerdict, Verdict
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
)
from raptor.report.costs import tables
from raptor.report.markup import paragraph, part, table
from raptor.report.results import Results
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
        part("Verdict", "Look at the upper end of the error, and for null models that the surrogate does not beat.")
    ]
    if results.certificate is not None and results.certificate.definition is not None:
        definition = results.certificate.definition
        tone = "good" if definition.holds else "bad"
        body.append(paragraph(f"{definition.line()}.", f"definition {tone}"))
    body.append(paragraph(_sentence(judged.lines()[0]), "caption"))
    if results.certificate is not None:
        if results.certificate.conditioning is not None:
            body.append(paragraph(_sentence(results.certificate.conditioning.line()), "caption"))
        if results.certificate.autonomy is not None:
            body.append(_autonomy_table(results.certificate.autonomy))
    body.append(_verdict_table(judged))
    return body


def _verdict_table(judged: Verdict) -> str:
    """A row per token group; null models that were not measured have no column."""
    head = ["tokens", "R² at the last layer, 95 % interval", "lowest R²"]
    has_nulls = any(_compared(group) for group in judged.groups.values())
    if has_nulls:
        head += ["null models, last layer", "ahead of all of them"]
    rows = []
    for name, group in judged.groups.items():
        row = [GROUP_NAMES.get(name, name), str(group.r2_last), f"{group.r2_lowest} at layer {group.lowest_layer}"]
        if has_nulls:
            row.append(_compared(group))
            ahead = "–"
            if group.layers_ahead is not None:
                ahead = f"at {group.layers_ahead} of {judged.num_layers} layers"
            row.append(ahead)
        rows.append(row)
    return table(head, rows)


def _compared(group: GroupVerdict) -> str:
    """Which null models the surrogate beats at the last layer, in a few words; empty where none was measured."""
    num = len(group.better) + len(group.alike) + len(group.worse)
    parts = []
    if num and len(group.better) == num:
        parts.append(f"better than all {num}")
    for words, names in (("no different from", group.alike), ("worse than", group.worse)):
        if names:
            parts.append(f"{words} {' and '.join(NULL_WORDS.get(name, name) for name in names)}")
    # The run's own validation compares with the mean only.
    if not num and group.no_better_than_mean:
        parts.append("no better than the mean of the images")
    return "; ".join(parts)


def _autonomy_table(autonomy: Autonomy) -> str:
    """What an autonomous surrogate loses, measure by measure."""
    trained = "how it was trained is not known"
    if autonomy.training is not None:
        trained = str(autonomy.training)
    other = f"autonomous ({autonomy.surrogate}; {trained})"
    head = ("the price of non-autonomy", "this surrogate", other, "loss, 95 % interval")
    rows = []
    for name, price in autonomy.prices.items():
        rows.append((MEASURES[name], number(price.own), number(price.autonomous), str(price.loss)))
    return table(head, rows)


def worst_images(results: Results) -> list[str | Chart]:
    """The images that the surrogate follows least, with their pictures."""
    if results.certificate is None or results.certificate.definition is None:
        return []
    definition = results.certificate.definition
    look_for = "Look for what makes them hard: crowded, cut off, or rare. The number is the image's relative error."
    pictures = ""
    for image in definition.hardest:
        if image.picture:  # `certify` in Python gives none
            # A file's name is a stranger's text.
            name = escape(image.name)
            pictures += (
                f'<figure><img src="data:image/png;base64,{escape(image.picture)}" alt="{name}">'
                f"<figcaption>{name}<br>{image.error:.3f} at layer {definition.layer}</figcaption></figure>"
            )
    if not pictures:
        return []
    return [part("Worst images", look_for), f'<div class="worst">{pictures}</div>']


# Curves ---------------------------------------------------------------------------------------------------------------


def curves(results: Results) -> list[str | Chart]:
    assert results.curves is not None
    body: list[str | Chart] = [
        part("Layer by layer", "Look for the layer where a curve leaves its best value, or meets a null model.")
    ]
    for metric in _METRICS:
        body.append(error_curve(metric, results.curves, results.certificate, results.phase_lengths))
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
        # Null models have no intervals: the verdict compares them image by image.
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
        # Null models of every group would cover each other.
        chart.series = [series for series in chart.series if series.side != "null" or "all" in series.when["tokens"]]
        panels.append(chart)
    which = data_title(certificate.data, certificate.split)
    images = f"{certificate.curves.num_images:,} images of {which} at {certificate.image_size} px"
    judged = certificate.judged
    training = []
    if judged.undertrained:
        training.append("undertrained")
    if judged.training is not None:
        training.append(str(judged.training))
    lines = [f"{certificate.surrogate}: {images}", _bound(certificate), ": ".join(training)]
    return Figure([panels], "\n".join(filter(None, lines)), size=(4.0, 4.2))


def _bound(certificate: Certificate) -> str:
    """The relative error that holds at every layer: of all tokens, and of each token group where it is larger."""
    relative = certificate.eps["relative"]
    whole = relative["all"].value
    if whole is None:
        return ""
    # A group whose number reads the same is not worth a bracket.
    larger = []
    for group, eps in relative.items():
        if eps.value is not None and round(eps.value, 3) > round(whole, 3):
            larger.append(f"{group} {eps.value:.3f}")
    of_groups = ""
    if larger:
        of_groups = f" over all tokens ({', '.join(larger)})"
    return f"relative error at most {whole:.3f}{of_groups} at every layer"


# Stitching ------------------------------------------------------------------------------------------------------------


def stitching(results: Results) -> list[str | Chart]:
    """Each model's states finished by the other one."""
    certificate = results.certificate
    if certificate is None or certificate.stitching is None:
        return []
    look_for = f"{_sentence(certificate.stitching.line())} Measured on {certificate.stitching.num_images:,} images."
    return [part("Where the error is made", look_for), *stitching_charts(certificate)]


def stitching_charts(certificate: Certificate) -> list[Chart]:
    """The error of the last state and, with a head, the agreement."""
    found = certificate.stitching
    assert found is not None
    layers = list(range(certificate.curves.num_layers + 1))
    errors = []
    agreements = []
    for side, name, hand_over in (
        ("teacher", "the surrogate's state, finished by the teacher", found.by_teacher),
        ("surrogate", "the teacher's state, finished by the surrogate", found.by_surrogate),
    ):
        error = Series(name, layers, hand_over.error, colour=f"side-{side}")
        error.lower, error.upper = hand_over.interval
        errors.append(error)
        if hand_over.agreement is not None:
            agreements.append(Series(name, layers, hand_over.agreement, colour=f"side-{side}"))
    phases = list(certificate.phases)
    charts = [described("stitching", errors, phases=phases)]
    if agreements:
        charts.append(described("stitching-agreement", agreements, phases=phases))
    return charts


def figure_stitching(certificate: Certificate) -> Figure | None:
    """On paper: the same charts side by side; None without stitching."""
    if certificate.stitching is None:
        return None
    source = f"{certificate.stitching.num_images:,} images of {data_title(certificate.data, certificate.split)}"
    return Figure([stitching_charts(certificate)], certificate.surrogate, source=source)


# Rate and distortion --------------------------------------------------------------------------------------------------


def rate_distortion(results: Results) -> list[str | Chart]:
    """Error and agreement against bits: the surrogate beside its teacher with rounded weights."""
    complexity = results.complexity
    if complexity is None:
        return []
    words = " ".join(map(_sentence, complexity.lines()))
    if complexity.rates is not None:
        words += f" Measured on {complexity.rates.num_images:,} images; lines join the precisions of one model."
    return [part("Rate and distortion", words), *rate_charts(complexity)]


def rate_charts(complexity: Complexity) -> list[Chart]:
    """The errors and, with a head, the agreement against bits; empty where they were not measured."""
    rates = complexity.rates
    if rates is None:
        return []
    charts = []
    for name, measure in (("rate-error", "largest"), ("rate-last", "last"), ("rate-agreement", "agreement")):
        series = []
        for side in ("teacher", "surrogate"):
            megabits = []
            values = []
            text = []
            for point in rates.of(side):
                megabits.append(point.bits / 1e6)
                values.append(getattr(point, measure))
                text.append(point.precision)
            series.append(Series(f"{side}, rounded", megabits, values, colour=f"side-{side}", text=text))
        # Agreement needs a head, so without one its values are None on both sides.
        if None not in series[0].y:
            charts.append(described(name, series))
    return charts


def figure_rates(complexity: Complexity) -> Figure | None:
    """On paper: the same charts side by side; None where they were not measured."""
    if complexity.rates is None:
        return None
    source = f"{complexity.rates.num_images:,} images of {data_title(complexity.data, complexity.split)}"
    return Figure([rate_charts(complexity)], source=source)


# Shift ----------------------------------------------------------------------------------------------------------------


def shift(results: Results) -> list[str | Chart]:
    """A row per further set of images."""
    certificate = results.certificate
    if certificate is None or not certificate.shift:
        return []
    look_for = (
        "Look for a set on which the surrogate leaves its teacher: whether the teacher is right there does not matter. "
        "R² is 0 for the mean of the teacher's states on the set itself."
    )
    rows = []  # the certificate's own images first: what the others are read against
    for images in certificate.sets():
        rows.append(images.cells())
    return [part("Other images", look_for), table(SHIFT_COLUMNS, rows)]


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


# In the order of the page.
PARTS: tuple[Part, ...] = (verdict, worst_images, curves, stitching, rate_distortion, shift, tables)
