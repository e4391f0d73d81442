"""The model at a glance: what it is, how depth is cut, and the verdict in one sentence."""

from __future__ import annotations

from typing import Any

from raptor.phases import within_and_across
from raptor.report.charts import Section, finite_values, number, percent
from raptor.report.markup import cards, depth_drawing, paragraph
from raptor.report.results import Results

COUNTS = ("no", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")


def glance(results: Results) -> Section:
    facts = results.facts
    html = paragraph(verdict(results), "verdict")
    num_layers = facts.get("num_layers") or sum(results.phase_lengths or [])
    if num_layers:
        html += depth_drawing(int(num_layers), results.phase_lengths)
        html += paragraph(_reading(results, int(num_layers)), "drawing-note")
    return Section("glance", "Glance", "At a glance", html=html + cards(_cards(results, facts)))


def verdict(results: Results) -> str:
    """One sentence with its numbers, from the strongest evidence that is there."""
    if results.get("certificate") or (results.get("summary") or {}).get("validation"):
        return _surrogate_verdict(results)
    if (results.get("phases") or {}).get("models"):
        return _phases_verdict(results)
    if results.get("dynamics"):
        return _dynamics_verdict(results)
    tasks = [name for name in results.files if name.startswith("probe-")]
    return f"This run holds {', '.join(tasks or results.files)}."


def fidelity_numbers(results: Results) -> dict[str, Any]:
    """R2, relative eps, agreement, recovery and costs, from the certificate, else from the run's summary."""
    certificate, summary = results.get("certificate") or {}, results.get("summary") or {}
    validation = summary.get("validation") or {}
    curves = (certificate.get("curves") or validation.get("curves") or {}).get("all") or {}
    r2 = finite_values(curves.get("r2") or validation.get("r2") or [])
    predictions = certificate.get("predictions") or {}
    teacher = (predictions.get("teacher_accuracy") or {}).get("value")
    student = (predictions.get("surrogate_accuracy") or {}).get("value")
    relative = finite_values(curves.get("relative") or [])
    costs = certificate.get("costs") or {}
    return {
        "r2_last": r2[-1] if r2 else None,
        "r2_lowest": min(r2) if r2 else None,
        "relative": max(relative) if relative else None,
        "agreement": (predictions.get("agreement") or {}).get("value", validation.get("agreement")),
        "recovery": student / teacher if teacher and student is not None else validation.get("recovery_head"),
        "teacher_accuracy": teacher if teacher is not None else validation.get("teacher_accuracy"),
        "surrogate_accuracy": student if student is not None else validation.get("accuracy"),
        "costs": costs if costs.get("teacher") and costs.get("surrogate") else None,
    }


def _surrogate_verdict(results: Results) -> str:
    lengths, found = results.phase_lengths or [], fidelity_numbers(results)
    k, name = len(lengths), results.facts.get("name", "the model")
    count = COUNTS[k] if k < len(COUNTS) else str(k)
    blocks = "One tied block" if k == 1 else f"{count} tied blocks ({' | '.join(map(str, lengths))})"
    verb = "stands in" if k == 1 else "stand in"
    parts = [f"{blocks} {verb} for the {sum(lengths)} blocks of {name}"]
    if found["r2_last"] is not None:
        lowest = found["r2_lowest"]
        where = "layer, its lowest" if lowest == found["r2_last"] else f"layer and at least {lowest:.2f} at every other"
        parts.append(f"R² {found['r2_last']:.2f} at the last {where}")
    if found["relative"] is not None:
        parts.append(f"relative error at most {found['relative']:.2f} at any layer")
    if found["agreement"] is not None:
        parts.append(f"the same prediction on {percent(found['agreement'])} of held-out images")
    if found["costs"]:
        teacher, surrogate = found["costs"]["teacher"], found["costs"]["surrogate"]
        ratio = teacher["block_parameters"] / max(surrogate["block_parameters"], 1)
        flops = surrogate["flops"] / max(teacher["flops"], 1)
        parts.append(f"{ratio:.1f} times fewer block parameters for {flops:.2f} times the FLOPs")
    return f"{parts[0]}: {'; '.join(parts[1:])}." if len(parts) > 1 else f"{parts[0]}."


def _phases_verdict(results: Results) -> str:
    entry = (results.get("phases") or {})["models"][0]
    lengths = results.phase_lengths
    name, num = entry["model"]["name"], entry["model"]["num_layers"]
    if not lengths:
        return f"The {num} blocks of {name} were compared with each other; no cut was asked for."
    k = str(len(lengths))
    within = (entry.get("within") or {}).get(k) or within_and_across(entry["similarity"][entry["tokens"]], lengths)
    return (
        f"The {num} blocks of {name} fall into {k} phases ({' | '.join(map(str, lengths))}): mean cosine similarity "
        f"{number(within[0])} between layers of one phase, {number(within[1])} between layers of different phases."
    )


def _dynamics_verdict(results: Results) -> str:
    teacher = (results.get("dynamics") or {})["teacher"]
    direction = teacher.get("direction")
    if not direction:
        return f"Depth measured as a dynamical system: {', '.join(teacher)}."
    norm, gamma = direction["norm"]["all"]["mean"], direction["gamma"]["all"]["mean"]
    first = next((layer for layer, g in enumerate(gamma) if g is not None and g >= 0.9), len(gamma) - 1)
    return (
        f"From layer 0 to layer {len(norm) - 1} the norm of a token goes from {number(norm[0])} to {number(norm[-1])}, "
        f"and its direction comes within a cosine of .9 of its final one at layer {first}."
    )


def _reading(results: Results, num_layers: int) -> str:
    lengths = results.phase_lengths
    if not lengths or sum(lengths) != num_layers:
        return f"The {num_layers} blocks of the model, from input (left) to output (right)."
    if results.get("certificate") or results.get("summary"):
        return "Above, the teacher's blocks, coloured by phase. Below, the surrogate: each block repeats, weights tied."
    return "Above, the model's blocks, coloured by phase. Below, what a surrogate would be: one tied block a phase."


def _cards(results: Results, facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    items: list[tuple[str, str, str]] = []
    if facts:
        groups = {name: n for name, n in facts["groups"].items() if n}
        tokens = ", ".join(f"{n} {name}" for name, n in groups.items())
        items.append((number(sum(groups.values())), "tokens", f"{tokens} at {facts['image_size']} px"))
        items.append((number(facts["num_layers"]), "blocks", f"of width {facts['dim']}"))
        items.append((f"{facts['num_parameters'] / 1e6:.2f} M", "parameters", "teacher"))
    surrogate = (results.get("summary") or {}).get("surrogate")
    if surrogate:
        items.append((f"{surrogate['num_parameters'] / 1e6:.2f} M", "parameters", "surrogate"))
    found = fidelity_numbers(results)
    if found["r2_last"] is not None:
        items.append((f"{found['r2_last']:.3f}", "R², last layer", f"lowest {found['r2_lowest']:.3f}"))
    if found["recovery"] is not None:
        scores = f"{percent(found['surrogate_accuracy'])} of {percent(found['teacher_accuracy'])}"
        items.append((percent(found["recovery"]), "accuracy kept", scores))
    if not found["r2_last"] and results.get("dynamics"):
        items.append((number((results.get("dynamics") or {}).get("num_images")), "images", "measured along depth"))
    return items
