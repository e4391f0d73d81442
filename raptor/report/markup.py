"""Pieces of HTML. Everything that is not made here is escaped on its way in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from raptor.phases.cut import Phases

_PHASE_COLOURS = 7  # phases beyond that take the colours again, from the first
_DRAWING_WIDTH = 1000
_MAX_STEP = 72  # few blocks are not drawn as wide as the page
_MIN_STEP_WITH_NUMBER = 24  # narrower blocks have no room for their number
# A script element ends at its end tag wherever that stands, and a line separator ends a line of JavaScript.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], numeric: bool = True) -> str:
    """A table; the first column is a heading of its row."""
    heads = ""
    for name in head:
        heads += f'<th scope="col">{escape(str(name))}</th>'
    body = ""
    for first, *rest in rows:
        cells = ""
        for cell in rest:
            cells += f"<td>{escape(str(cell))}</td>"
        body += f'<tr><th scope="row">{escape(str(first))}</th>{cells}</tr>'
    kind = "numbers" if numeric else "words"
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers: (value, what it is, a remark)."""
    boxes = ""
    for value, what, remark in items:
        boxes += (
            f'<div class="card"><div class="value">{escape(value)}</div><div class="what">{escape(what)}</div>'
            f'<div class="remark">{escape(remark)}</div></div>'
        )
    return f'<div class="cards">{boxes}</div>'


def paragraph(text: str, kind: str = "") -> str:
    if not kind:
        return f"<p>{escape(text)}</p>"
    return f'<p class="{kind}">{escape(text)}</p>'


def part(title: str, look_for: str) -> str:
    """The heading of a part of a section, and what to look for in it."""
    return f'<h3 class="part">{escape(title)}</h3>{paragraph(look_for, "caption")}'


def bullet_list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(str(item))}</li>" for item in items) + "</ul>"


def folded(summary: str, lines: list[str]) -> str:
    """A list that opens on a click; nothing where it is empty."""
    if not lines:
        return ""
    return f"<details><summary>{escape(summary)}</summary>{bullet_list(lines)}</details>"


def pictures(shown: Iterable[tuple[str, Sequence[str], str]]) -> str:
    """Small pictures: the name of the image, the PNGs in base64 that stand below each other, the words below them."""
    figures = ""
    for name, pngs, words in shown:
        kind = ""  # the picture itself, then maps of a pixel for each patch
        figures += "<figure>"
        for png in pngs:
            figures += f'<img{kind} src="data:image/png;base64,{escape(png)}" alt="{escape(name)}">'
            kind = ' class="map"'
        figures += f"<figcaption>{escape(words)}</figcaption></figure>"
    return f'<div class="pictures-row">{figures}</div>'


def depth_drawing(num_layers: int, phases: Sequence[int] | None) -> str:
    """The blocks of the model in a row, coloured by phase, and below them the tied blocks with their counts."""
    # In units of the drawing, which is scaled to the width of the page.
    step = min(_DRAWING_WIDTH / num_layers, _MAX_STEP)
    gap = min(4.0, step / 6)
    left = (_DRAWING_WIDTH - num_layers * step) / 2
    cut = None
    # Phases of another model may be in the folder: they would be drawn past the last block.
    if phases and sum(phases) == num_layers:
        cut = Phases.from_lengths(phases)
    drawing = ""
    for layer in range(num_layers):
        colour = "none" if cut is None else cut.phase_of(layer + 1) % _PHASE_COLOURS
        x = left + layer * step + gap / 2
        width = step - gap
        drawing += f'<rect class="phase-{colour}" x="{x:.1f}" y="20" width="{width:.1f}" height="56" rx="5"/>'
        # Forty blocks leave no room for two digits.
        if step > _MIN_STEP_WITH_NUMBER:
            drawing += f'<text x="{x + width / 2:.1f}" y="53">{layer + 1}</text>'
    words = f"{num_layers} blocks"
    height = 96
    if cut is not None:
        words += f" in {cut.k} phases: {cut}"
        height = 212
        for j, (first, last) in enumerate(cut.spans):
            # A bracket under the blocks of a phase, and below it the block that repeats.
            start = left + (first - 1) * step + gap / 2
            end = left + last * step - gap / 2
            middle = (start + end) / 2
            drawing += (
                f'<path class="bracket" d="M{start:.1f} 88 v10 H{end:.1f} v-10 M{middle:.1f} 98 v18"/>'
                f'<rect class="phase-{j % _PHASE_COLOURS}" x="{middle - 30:.1f}" y="120" width="60" height="56" '
                f'rx="12"/>'
                f'<text x="{middle:.1f}" y="154">B{j + 1}</text>'
                f'<text class="count" x="{middle:.1f}" y="200">× {last - first + 1}</text>'
            )
    return f'<svg class="depth" viewBox="0 0 1000 {height}" role="img" aria-label="{escape(words)}">{drawing}</svg>'


def safe_json(value: Any) -> str:
    """JSON that may stand inside a script element: no `<`, `>` or `&`, and no line separators."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, code in _UNSAFE.items():
        text = text.replace(character, code)
    return text
