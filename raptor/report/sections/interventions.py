"""Interventions: blocks swapped, repeated, run on past the end.

What was measured differs from one intervention to the next, so this section goes by shape: a matrix becomes a heatmap,
lists of equal length become curves, rows become a table, single numbers another.
"""

from __future__ import annotations

from typing import Any

from raptor.report.charts import Chart, Section, finite_values, number
from raptor.report.markup import bullet_list, escape, table
from raptor.report.results import Results

LEAD = "If depth is recurrence, blocks of one phase may change places, and a tied block may run on. Break it and see."
AXES = ("layers", "layer", "steps", "counts", "repetitions", "times", "pairs", "extra", "distance", "num_steps")
CAPTIONS = {
    "swaps": "Look for squares: swaps within a phase should cost little, across phases a lot.",
    "repetition": "Look for how far a block can be repeated before the states leave the path.",
    "extrapolation": "Look for states that settle when the last block runs on.",
}


def interventions(results: Results) -> Section:
    section = Section("interventions", "Interventions", LEAD)
    measured = results.get("interventions")
    if not measured:
        section.hint = f"raptor dynamics {results.folder} --data DATA --out {results.folder} --interventions true"
        return section
    if measured.get("findings"):
        section.html = bullet_list(measured["findings"])
    for side in ("teacher", "surrogate"):
        for name, entry in (measured.get(side) or {}).items():
            charts, html = _shown(side, str(name), entry, results.phase_lengths)
            section.charts += charts
            section.after += html
    return section


def _shown(side: str, name: str, entry: Any, phases: list[int] | None) -> tuple[list[Chart], str]:
    """Charts and tables of one intervention."""
    title, caption = f"{_words(name).capitalize()}, {side}", CAPTIONS.get(name, "")
    if _rows(entry):
        return [], _row_table(title, entry)
    if not isinstance(entry, dict):
        entry = {name: entry}
    charts = [
        _matrix_chart(f"{name}-{side}-{key}", _title(title, key, name), caption, key, value)
        for key, value in entry.items()
        if _matrix(value)
    ]
    curves = _curves(f"{name}-{side}", title, caption, entry, phases)
    html = "".join(_row_table(_title(title, key, name), value) for key, value in entry.items() if _rows(value))
    numbers = [(_words(key), number(value)) for key, value in entry.items() if _is_number(value)]
    if numbers:
        html += table((title, "value"), numbers)
    return charts + ([curves] if curves else []), html


def _matrix_chart(id: str, title: str, caption: str, key: str, matrix: list[list[Any]]) -> Chart:
    values = finite_values([v for row in matrix for v in row])
    return Chart(
        id=_slug(id), kind="heatmap", title=title, caption=caption, series=[{"name": title, "z": matrix, "cuts": {}}],
        alt=f"{title}: {len(matrix)} by {len(matrix[0])} values from {number(min(values, default=None))} to "
        f"{number(max(values, default=None))}.",
        x={"label": "block"}, y={"label": "block"}, extra={"unit": _words(key)},
    )  # fmt: skip


def _curves(id: str, title: str, caption: str, entry: dict[str, Any], phases: list[int] | None) -> Chart | None:
    lists = {key: value for key, value in entry.items() if _numbers(value)}
    axis = next((key for key in AXES if key in lists), None)
    length = len(lists[axis]) if axis else max((len(v) for v in lists.values()), default=0)
    ys = {key: value for key, value in lists.items() if key != axis and len(value) == length}
    if length < 2 or not ys:
        return None
    x = lists[axis] if axis else list(range(1, length + 1))
    by_depth = axis in ("layers", "layer")
    series = [
        {"name": _words(key), "x": x, "y": value, "colour": f"palette-{i}"}
        for i, (key, value) in enumerate(ys.items())
    ]
    ends = "; ".join(f"{s['name']} from {number(s['y'][0])} to {number(s['y'][-1])}" for s in series)
    return Chart(
        id=_slug(id), kind="lines", title=title, caption=caption, alt=f"{title}: {ends}.", series=series,
        x={"label": _words(axis or "index"), "integer": True}, y={"label": _words(next(iter(ys))) if len(ys) == 1 else ""},
        phases=phases if by_depth else None,
    )  # fmt: skip


def _row_table(title: str, rows: list[dict[str, Any]]) -> str:
    head = list(dict.fromkeys(key for row in rows for key in row))
    head = [key for key in head if all(_is_plain(row.get(key)) for row in rows)]
    cells = [[_cell(row.get(key)) for key in head] for row in rows[:200]]
    return f"<h4>{escape(title)}</h4>" + table([_words(key) for key in head], cells) if head else ""


def _title(title: str, key: str, name: str) -> str:
    return title if key == name else f"{title}: {_words(key)}"


def _words(name: str) -> str:
    return str(name).replace("_", " ")


def _slug(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str | bool) or _numbers(value)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(number(v) for v in value)
    return number(value) if value is None or _is_number(value) else str(value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(v is None or _is_number(v) for v in value)


def _matrix(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(_numbers(r) and len(r) == len(value[0]) for r in value)


def _rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)
