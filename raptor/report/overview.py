"""The model at a glance: what it is, how depth is cut, and the verdict in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from raptor.dynamics.measure import DynamicsFile
from raptor.fidelity.certificate import Cost
from raptor.fidelity.verdict import images_of
from raptor.phases import ModelPhases, within_and_across
from raptor.report.charts import Section, finite_values, number, percent
from raptor.report.markup import bullet_list, cards, depth_drawing, paragraph
from raptor.report.results import Results

COUNTS = ("no", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")


def overview(results: Results) -> Section:
    html = paragraph(_verdict(results), "verdict")
    judged = results.verdict
    if judged is not None:
        html += bullet_list(judged.lines())
    num_layers = results.facts.num_layers if results.facts else sum(results.phase_lengths or [])
    if num_layers:
        html += depth_drawing(num_layers, results.phase_lengths)
        html += paragraph(_drawing_note(results, num_layers), "drawing-note")
    return Section("glance", "Glance", "At a glance", html=html + cards(_cards(results)))


def _verdict(results: Results) -> str:
    """One sentence with its numbers, from the strongest evidence that is there."""
    if results.certificate or results.distilled:
        return _surrogate_verdict(results)
    if results.phases and results.phases.models:
        return _phases_verdict(results.phases.models[0], results.phase_lengths)
    if results.dynamics:
        return _dynamics_verdict(results.dynamics)
    tasks = [f"probe-{task}" for task in results.probes]
    return f"This run holds {', '.join(tasks or results.provenance())}."


@dataclass
class _Fidelity:
    """The numbers of the surrogate; None where they are not known."""

    r2_last: float | None
    r2_lowest: float | None
    relative: float | None
    agreement: float | None
    recovery: float | None
    teacher_accuracy: float | None
    surrogate_accuracy: float | None
    costs: dict[str, Cost] | None
    split: str


def _fidelity(results: Results) -> _Fidelity:
    """From the certificate, else from the run's summary: only where both are of the same images and teacher."""
    certificate, summary = results.certificate, results.distilled
    validation = None if summary is None else summary.validation
    curves = results.curves
    r2 = finite_values([] if curves is None else curves.r2["all"])
    relative = finite_values([] if curves is None else curves.relative["all"])
    predictions = certificate.predictions if certificate else {}
    agreement, teacher, student = (
        predictions[name].value if name in predictions else None
        for name in ("agreement", "teacher_accuracy", "surrogate_accuracy")
    )
    recovery = student / teacher if teacher and student is not None else None
    if validation is not None and not results.unlike_run:
        agreement = agreement if "agreement" in predictions else validation.agreement
        recovery = validation.recovery_head if recovery is None else recovery
        teacher = validation.teacher_accuracy if teacher is None else teacher
        student = validation.accuracy if student is None else student
    return _Fidelity(
        r2_last=r2[-1] if r2 else None,
        r2_lowest=min(r2) if r2 else None,
        relative=max(relative) if relative else None,
        agreement=agreement,
        recovery=recovery,
        teacher_accuracy=teacher,
        surrogate_accuracy=student,
        costs=certificate.costs if certificate and certificate.costs.keys() >= {"teacher", "surrogate"} else None,
        split=certificate.split if "agreement" in predictions and certificate else summary.split if summary else "val",
    )


def _surrogate_verdict(results: Results) -> str:
    lengths, found = results.phase_lengths or [], _fidelity(results)
    k, name = len(lengths), results.facts.name if results.facts else "the model"
    count = COUNTS[k] if k < len(COUNTS) else str(k)
    blocks = "One tied block" if k == 1 else f"{count} tied blocks ({' | '.join(map(str, lengths))})"
    verb = "stands in" if k == 1 else "stand in"
    measured = f", measured {', '.join(results.unlike_run)}" if results.unlike_run else ""
    parts = [f"{blocks} {verb} for the {sum(lengths)} blocks of {name}{measured}"]
    if found.r2_last is not None:
        rest = f"layer and at least {found.r2_lowest:.2f} at every other"
        where = "layer, its lowest" if found.r2_lowest == found.r2_last else rest
        parts.append(f"R² {found.r2_last:.2f} at the last {where}")
    if found.relative is not None:
        parts.append(f"relative error at most {found.relative:.2f} at any layer")
    if found.agreement is not None:
        parts.append(f"the same prediction on {percent(found.agreement)} of {images_of(found.split)}")
    if found.costs:
        teacher, surrogate = found.costs["teacher"], found.costs["surrogate"]
        ratio = teacher.block_parameters / max(surrogate.block_parameters, 1)
        flops = surrogate.flops / max(teacher.flops, 1)
        few, many = f"{ratio:.1f} times fewer", f"{1 / ratio:.1f} times as many"
        size = few if ratio > 1.05 else many if ratio < 0.95 else "as many"
        parts.append(f"{size} block parameters for {flops:.2f} times the FLOPs")
    return f"{parts[0]}: {'; '.join(parts[1:])}." if len(parts) > 1 else f"{parts[0]}."


def _phases_verdict(entry: ModelPhases, lengths: list[int] | None) -> str:
    name, num = entry.model.name, entry.model.num_layers
    if not lengths:
        return f"The {num} blocks of {name} were compared with each other; no cut was asked for."
    k = len(lengths)
    found = entry.phases.get(k)
    is_found = found is not None and list(found) == lengths and k in entry.within
    within, across = entry.within[k] if is_found else within_and_across(entry.similarity[entry.tokens], lengths)
    cut = f"{k} phases ({' | '.join(map(str, lengths))})"
    means = (
        f"mean cosine similarity {number(within)} between layers of one phase, {number(across)} between layers of "
        "different phases."
    )
    if entry.structure:
        return f"The {num} blocks of {name} fall into no phases: {entry.structure}. Cut into {cut} anyway: {means}"
    if entry.is_gradual:
        return f"The {num} blocks of {name} change gradually. Cut into {cut}: {means}"
    return f"The {num} blocks of {name} fall into {cut}: {means}"


def _dynamics_verdict(dynamics: DynamicsFile) -> str:
    direction = dynamics.teacher.direction
    norm, gamma = direction.norm["all"].mean, direction.gamma["all"].mean
    first = next((layer for layer, g in enumerate(gamma) if g >= 0.9), len(gamma) - 1)
    return (
        f"From layer 0 to layer {len(norm) - 1} the norm of a token goes from {number(norm[0])} to {number(norm[-1])}, "
        f"and its direction comes within a cosine of .9 of its final one at layer {first}."
    )


def _drawing_note(results: Results, num_layers: int) -> str:
    lengths = results.phase_lengths
    if not lengths or sum(lengths) != num_layers:
        return f"The {num_layers} blocks of the model, from input (left) to output (right)."
    if results.certificate or results.summary:
        return "Above, the teacher's blocks, coloured by phase. Below, the surrogate: each block repeats, weights tied."
    return "Above, the model's blocks, coloured by phase. Below, what a surrogate would be: one tied block per phase."


def _cards(results: Results) -> list[tuple[str, str, str]]:
    items: list[tuple[str, str, str]] = []
    facts = results.facts
    if facts:
        tokens = ", ".join(f"{where.stop - where.start} {name}" for name, where in facts.groups.present())
        items.append((number(facts.groups.num_tokens), "tokens", f"{tokens} at {facts.image_size} px"))
        items.append((number(facts.num_layers), "blocks", f"of width {facts.dim}"))
        items.append((f"{facts.num_parameters / 1e6:.2f} M", "parameters", "teacher" if results.distilled else ""))
    if results.distilled:
        items.append((f"{results.distilled.surrogate.num_parameters / 1e6:.2f} M", "parameters", "surrogate"))
    found = _fidelity(results)
    if found.r2_last is not None:
        lowest = f"lowest {found.r2_lowest:.3f}"
        items.append((f"{found.r2_last:.3f}", "R², last layer", ", ".join([lowest, *results.unlike_run])))
    if found.recovery is not None:
        scores = f"{percent(found.surrogate_accuracy)} of {percent(found.teacher_accuracy)}"
        items.append((percent(found.recovery), "accuracy kept", ", ".join([scores, *results.unlike_run])))
    if not found.r2_last and results.dynamics:
        items.append((number(results.dynamics.num_images), "images", "measured along depth"))
    return items
