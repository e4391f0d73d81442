"""What both sides cost, and the certificate's tables: the last parts of the section on fidelity."""

from __future__ import annotations

from collections.abc import Sequence

from raptor.certificate.certificate import Cost
from raptor.certificate.verdict import Estimate, named_images
from raptor.report.charts import GROUP_NAMES, Chart, number, percent
from raptor.report.markup import bullet_list, part, table
from raptor.report.results import Results


def tables(results: Results) -> list[str | Chart]:
    """Predictions, costs, the errors that hold at every layer, and the certificate's notes."""
    certificate = results.certificate
    rows = _prediction_rows(results)
    body: list[str | Chart] = []
    if rows:
        predictions = "predictions"
        if certificate is not None and certificate.predictions:
            predictions += f" by {certificate.head}"
        body.append(table((predictions, "untouched head", "refitted head", "one class for all"), rows))
    if certificate is None:
        return body
    body.append(part("Cost", "Tied blocks save parameters, not time: compare both rows."))
    body.append(table(("costs", "teacher", "surrogate", "ratio"), _cost_rows(certificate.costs)))
    # Absolute errors depend on the scale of the states: they compare surrogates of one teacher only.
    relative = certificate.eps["relative"]
    absolute = certificate.eps["absolute"]
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
        said = certificate.predictions
        floors = certificate.floors
        for name, refitted, floor, label in (
            ("agreement", "refitted_agreement", "agreement", "agreement"),
            ("teacher_accuracy", "", "accuracy", "teacher's accuracy"),
            ("surrogate_accuracy", "refitted_accuracy", "accuracy", "surrogate's accuracy"),
        ):
            if name in said:
                cells = (_with_interval(said[name]), _with_interval(said.get(refitted)), percent(floors.get(floor)))
                rows.append((label, *cells))
        for kept in certificate.kept():
            if kept.teacher is not None:  # agreement is a share already
                shares = (percent(kept.share), percent(kept.refitted_share), percent(kept.floor))
                rows.append((f"share of the teacher's {kept.name} kept", *shares))
    if results.distilled is not None:
        validation = results.distilled.validation
        where = "on the run's validation images"
        if validation.recovery_head is not None:
            label = "accuracy kept by one head for both"
            if certificate is None or validation.head != certificate.head:
                label += f" ({validation.head or 'of the teacher'})"
            rows.append((f"{label}, {where}", percent(validation.recovery_head), "–", "–"))
        if validation.recovery is not None:
            label = f"accuracy kept by a ridge probe fitted to each side, {where}"
            rows.append((label, "–", percent(validation.recovery), "–"))
    return rows


def _with_interval(entry: Estimate | None) -> str:
    if entry is None:
        return "–"
    if entry.lower is None:
        return percent(entry.value)
    return f"{percent(entry.value)} [{percent(entry.lower)}, {percent(entry.upper)}]"


def _cost_rows(costs: dict[str, Cost]) -> Sequence[tuple[str, ...]]:
    teacher = costs["teacher"]
    surrogate = costs["surrogate"]
    # Blocks apart from the whole: embedding and head are shared and would dilute what tying saves.
    compared = {
        "parameters (M)": (teacher.num_parameters / 1e6, surrogate.num_parameters / 1e6),
        "block parameters (M)": (teacher.block_parameters / 1e6, surrogate.block_parameters / 1e6),
        "GFLOPs per image": (teacher.flops / 1e9, surrogate.flops / 1e9),
        "milliseconds per image": (1e3 * teacher.seconds_per_image, 1e3 * surrogate.seconds_per_image),
    }
    rows = []
    for label, (old, new) in compared.items():
        ratio = "–"
        if old:
            ratio = f"{new / old:.2f}"
        rows.append((label, number(old), number(new), ratio))
    return rows
