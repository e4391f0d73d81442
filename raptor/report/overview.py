"""The model at a glance: the verdict in words, what the model is, and how depth is cut."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from raptor.certificate.definition import Definition
from raptor.certificate.verdict import NULL_WORDS, Verdict, images_of
from raptor.phases.cut import within_and_across
from raptor.phases.study import ModelPhases
from raptor.report.charts import Section, finite_values, number, percent
from raptor.report.markup import cards, depth_drawing, paragraph
from raptor.report.results import Results

COUNTS = ("no", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")
_NEAR_END = 0.9  # cosine with the last state from which a direction counts as found
_BUILT_IN = "scenes"
_EXAMPLE = (
    "An example: the built-in model on built-in images. The model is small and comes with Raptor, which also draws the "
    "images."
)


def overview(results: Results) -> Section:
    section = Section.named("glance")
    if results.subject is not None:
        _, about = results.subject
        if (about.teacher or about.model) == _BUILT_IN and about.data in (None, _BUILT_IN):
            section.body.append(paragraph(_EXAMPLE, "example"))
    if results.verdict is None:
        section.body.append(paragraph(_verdict(results), "verdict"))
    else:
        definition = None
        if results.certificate is not None:
            definition = results.certificate.definition
        # The fault or the praise comes first and in its colour: the numbers alone read as a success.
        tone, words = judgement(results.verdict, definition)
        text = f"<strong>{escape(words)}</strong> {escape(_surrogate_verdict(results))}"
        section.body.append(f'<p class="verdict {tone}">{text}</p>')
    num_layers = sum(results.phase_lengths or [])
    if results.facts:
        num_layers = results.facts.num_layers
    if num_layers:
        lengths = results.phase_lengths
        note = (
            "Above, the model's blocks, coloured by phase. Below, what a surrogate would be: one tied block per phase."
        )
        if not lengths or sum(lengths) != num_layers:
            note = f"The {num_layers} blocks of the model, from input (left) to output (right)."
        elif results.certificate or results.distilled:
            note = "Above, the teacher's blocks by phase. Below, the surrogate: each block repeats, weights tied."
        section.body.append(depth_drawing(num_layers, lengths))
        section.body.append(paragraph(note, "drawing-note"))
    section.body.append(cards(_cards(results)))
    return section


# The verdict ----------------------------------------------------------------------------------------------------------


def judgement(judged: Verdict, definition: Definition | None) -> tuple[str, str]:
    """`bad`, `poor`, `good` or `open`, and the reason in words: the worst fault first."""
    group = next(iter(judged.groups.values()))
    faults = []
    tone = "poor"
    if definition is not None and definition.is_given and not definition.holds:
        tone = "bad"
        faults.append(f"Definition 1 fails for ε = {definition.eps:g} at layer {definition.layer}")
    if group.no_better_than_mean:
        tone = "bad"
        faults.append("The surrogate does not follow its teacher: it is no better than the mean of the images")
    elif group.worse or group.alike:
        nulls = [NULL_WORDS.get(name, name) for name in (*group.worse, *group.alike)]
        faults.append(f"The surrogate is no better than {' and '.join(nulls)}")
    if judged.undertrained:
        faults.append(f"The surrogate is undertrained: {'; '.join(judged.undertrained)}")
    if faults:
        return tone, f"{'. '.join(faults)}."
    if definition is None:
        return "open", "Not certified yet."
    if definition.is_given:
        return "good", f"Definition 1 holds for ε = {definition.eps:g}."
    return "good", "The surrogate follows its teacher at every layer, closer than every null model at the last."


def _verdict(results: Results) -> str:
    """One sentence with its numbers, from the strongest evidence that is there."""
    if results.distilled:
        return _surrogate_verdict(results)
    if results.phases and results.phases.models:
        return _phases_verdict(results.phases.models[0], results.phase_lengths)
    if results.dynamics is None:
        return f"This run holds {', '.join(results.files())}."
    direction = results.dynamics.teacher.direction
    norm = direction.norm["all"].mean
    first = int((direction.gamma["all"].mean >= _NEAR_END).argmax())  # the last state is at a cosine of 1 with itself
    return (
        f"From layer 0 to layer {len(norm) - 1} the norm of a token goes from {number(norm[0])} to {number(norm[-1])}, "
        f"and its direction comes within a cosine of .9 of its final one at layer {first}."
    )


def _scores(results: Results) -> tuple[Mapping[str, float | None], Mapping[str, float], str]:
    """`agreement`, `teacher_accuracy` and `surrogate_accuracy` as far as they are known, their floors, and the split.

    Of the certificate, else of the run's validation. They are never mixed: their images may differ.
    """
    certificate = results.certificate
    if certificate is not None:
        values = {name: prediction.value for name, prediction in certificate.predictions.items()}
        return values, certificate.floors, certificate.split
    if results.distilled is None:
        return {}, {}, "val"
    found = results.distilled.validation
    values = {
        "agreement": found.agreement,
        "teacher_accuracy": found.teacher_accuracy,
        "surrogate_accuracy": found.accuracy,
    }
    return values, {}, results.distilled.split


def _surrogate_verdict(results: Results) -> str:
    lengths = results.phase_lengths or []
    name = results.facts.name if results.facts else "the model"
    blocks = "One tied block stands in"
    if len(lengths) != 1:
        count = str(len(lengths))
        if len(lengths) < len(COUNTS):
            count = COUNTS[len(lengths)]
        blocks = f"{count} tied blocks ({' | '.join(map(str, lengths))}) stand in"
    parts = []
    if results.curves is not None:
        r2 = finite_values(results.curves.r2["all"])
        relative = finite_values(results.curves.relative["all"])
        if r2 and min(r2) == r2[-1]:
            parts.append(f"R² {r2[-1]:z.2f} at the last layer, its lowest")
        elif r2 and f"{min(r2):z.2f}" == f"{r2[-1]:z.2f}":  # the same number twice would read as a mistake
            parts.append(f"R² at least {min(r2):z.2f} at every layer")
        elif r2:
            parts.append(f"R² {r2[-1]:z.2f} at the last layer and at least {min(r2):z.2f} at every other")
        if relative:
            parts.append(f"relative error at most {max(relative):.2f} at any layer")
    scores, floors, split = _scores(results)
    agreement = scores.get("agreement")
    if agreement is not None:
        same = f"the same prediction on {percent(agreement)} of {images_of(split)}"
        # A share says little without what one class for all images would get.
        if "agreement" in floors:
            same += f" (one class for all: {percent(floors['agreement'])})"
        parts.append(same)
    if results.certificate is not None:
        teacher = results.certificate.costs["teacher"]
        surrogate = results.certificate.costs["surrogate"]
        # Of the blocks only: embedding and head are shared and would dilute what tying saves.
        parameters = surrogate.block_parameters / teacher.block_parameters
        flops = surrogate.flops / teacher.flops
        parts.append(f"{parameters:.2f} times the block parameters and {flops:.2f} times the FLOPs")
    return f"{blocks} for the {sum(lengths)} blocks of {name}: {'; '.join(parts)}."


def _phases_verdict(entry: ModelPhases, lengths: list[int] | None) -> str:
    blocks = f"The {entry.model.num_layers} blocks of {entry.model.name}"
    if not lengths:
        return f"{blocks} were compared with each other; no cut was asked for."
    within, across = within_and_across(entry.similarity[entry.tokens], lengths)
    cut = f"{len(lengths)} phases ({' | '.join(map(str, lengths))})"
    means = (
        f"mean cosine similarity {number(within)} between layers of one phase, {number(across)} between layers of "
        "different phases."
    )
    if entry.structure:
        return f"{blocks} fall into no phases: {entry.structure}. Cut into {cut} anyway: {means}"
    if entry.is_gradual:
        return f"{blocks} change gradually. Cut into {cut}: {means}"
    return f"{blocks} fall into {cut}: {means}"


# Drawing and cards ----------------------------------------------------------------------------------------------------


def _cards(results: Results) -> list[tuple[str, str, str]]:
    items: list[tuple[str, str, str]] = []
    facts = results.facts
    distilled = results.distilled
    if facts:
        counts = [f"{where.stop - where.start} {name}" for name, where in facts.groups.present()]
        items.append((number(facts.groups.num_tokens), "tokens", f"{', '.join(counts)} at {facts.image_size} px"))
        items.append((number(facts.num_layers), "blocks", f"of width {facts.dim}"))
        items.append((f"{facts.num_parameters / 1e6:.2f} M", "parameters", "teacher" if distilled else ""))
    if distilled:
        items.append((f"{distilled.surrogate.num_parameters / 1e6:.2f} M", "parameters", "surrogate"))
    if results.curves is not None:
        r2 = finite_values(results.curves.r2["all"])
        if r2:
            items.append((f"{r2[-1]:z.3f}", "R², last layer", f"lowest {min(r2):z.3f}"))
    elif results.dynamics:
        items.append((number(results.dynamics.num_images), "images", "measured along depth"))
    scores, floors, _ = _scores(results)
    of_teacher = scores.get("teacher_accuracy")
    own = scores.get("surrogate_accuracy")
    # A teacher that is never right leaves no share to keep.
    if of_teacher and own is not None:
        kept = f"{percent(own)} of {percent(of_teacher)}"
        if "accuracy" in floors:
            kept += f"; one class for all keeps {percent(floors['accuracy'] / of_teacher)}"
        items.append((percent(own / of_teacher), "accuracy kept", kept))
    return items
