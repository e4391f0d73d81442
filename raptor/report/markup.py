"""Pieces of HTML. Everything that is not made here is escaped on its way in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from raptor.phases import Phases

_PHASE_COLOURS = 7  # phases beyond that take the colours again, from the first


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], numeric: bool = True) -> str:
    """A table; the first column is a heading of its row."""
    heads = "".join(f'<th scope="col">{escape(str(h))}</th>' for h in head)
    body = "".join(
        f'<tr><th scope="row">{escape(str(first))}</th>'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    kind = "numbers" if numeric else "words"
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers: (value, what it is, a remark)."""
    boxes = "".join(
        f'<div class="card"><div class="value">{escape(value)}</div><div class="what">{escape(what)}</div>'
        f'<div class="remark">{escape(remark)}</div></div>'
        for value, what, remark in items
    )
    return f'<div class="cards">{boxes}</div>'


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullet_list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(str(item))}</li>" for item in items) + "</ul>"


def command(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def depth_drawing(num_layers: int, phases: Sequence[int] | None) -> str:
    """The blocks of the model in a row, coloured by phase, and below them the tied blocks with their counts."""
    cut = Phases.from_lengths(phases) if phases and sum(phases) == num_layers else None
    step = min(1000 / num_layers, 72)
    left, gap = (1000 - num_layers * step) / 2, min(4.0, step / 6)
    parts = []
    for layer in range(num_layers):
        x = left + layer * step + gap / 2
        fill = "phase-none" if cut is None else f"phase-{cut.phase_of(layer + 1) % _PHASE_COLOURS}"
        parts.append(f'<rect class="{fill}" x="{x:.1f}" y="20" width="{step - gap:.1f}" height="56" rx="5"/>')
        if step > 24:
            parts.append(f'<text x="{x + (step - gap) / 2:.1f}" y="53">{layer + 1}</text>')
    for j, (first, last) in enumerate(cut.spans if cut else []):
        start_x, end_x = left + (first - 1) * step + gap / 2, left + last * step - gap / 2
        middle, fill = (start_x + end_x) / 2, f"phase-{j % _PHASE_COLOURS}"
        parts.append(
            f'<path class="bracket" d="M{start_x:.1f} 88 v10 H{end_x:.1f} v-10 M{middle:.1f} 98 v18"/>'
            f'<rect class="{fill}" x="{middle - 30:.1f}" y="120" width="60" height="56" rx="12"/>'
            f'<text x="{middle:.1f}" y="154">B{j + 1}</text>'
            f'<text class="count" x="{middle:.1f}" y="200">× {last - first + 1}</text>'
        )
    height = 212 if cut else 96
    words = f"{num_layers} blocks" + (f" in {cut.k} phases: {cut}" if cut else "")
    return (
        f'<svg class="depth" viewBox="0 0 1000 {height}" role="img" aria-label="{escape(words)}">{"".join(parts)}</svg>'
    )


def safe_json(value: Any) -> str:
    """JSON that may stand inside a script element: no `<`, `>` or `&`, and no line separators."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    replaced = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
    for character, code in replaced.items():
        text = text.replace(character, code)
    return text
