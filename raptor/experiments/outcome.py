"""What an experiment leaves: NAME.json with where it came from, NAME.md, and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raptor.run import write_text
from raptor.streaming import jsonable


@dataclass
class Outcome:
    """What an experiment leaves: NAME.json in its folder, a table to print, and figures."""

    name: str
    folder: Path
    values: dict[str, Any]
    table: str
    figures: list[Path]

    @property
    def failed(self) -> list[str]:
        """Cells that failed."""
        return self.values.get("failed", [])

    def to_dict(self) -> dict[str, Any]:
        return self.values

    def text(self) -> str:
        return "\n".join([self.table, f"written to {self.folder}/{self.name}.json"])


def write_outcome(
    name: str, folder: Path, started: float, device: str, values: dict[str, Any], table: str, figures: list[Path]
) -> Outcome:
    """Write NAME.json and NAME.md, and give the outcome."""
    from raptor.provenance import provenance

    values = jsonable({**provenance(started, device), "experiment": name, **values})
    write_text(folder / f"{name}.json", json.dumps(values, allow_nan=False) + "\n")
    write_text(folder / f"{name}.md", table + "\n")
    return Outcome(name, folder, values, table, figures)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]], optional: Sequence[str] = ()) -> str:
    """A table as Markdown: numbers to three digits, None as a dash. `optional` columns need a value in some row."""
    kept = [i for i, name in enumerate(columns) if name not in optional or any(row[i] is not None for row in rows)]
    columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(_shown, row)) + " |" for row in rows)])


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def data_label(spec: str) -> str:
    """The data's own name, without its folder, archive parts and ending: `tiny-imagenet-100`."""
    kind = spec.partition(":")[0]
    if kind in ("cifar10", "cifar100", "imagenet", "nyuv2", "ade20k"):
        return kind
    last = Path(spec.split(",")[0].rstrip("/")).name
    last = re.sub(r"\.(zip|tar)$", "", last)
    return re.sub(r"[-_](train|val|test|\*|\{).*$", "", last).rstrip("-_*")
