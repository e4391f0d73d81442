"""What an experiment leaves in its folder: NAME.json, NAME.md with its table, and figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from records import ExperimentFile

from raptor.provenance import Provenance
from raptor.report.style import save_figure
from raptor.run import write_text
from raptor.streaming import Result, html_table

File = TypeVar("File", bound=ExperimentFile)


@dataclass
class Outcome(Result, Generic[File]):
    """What an experiment found (as in NAME.json), its table to print, and its figures."""

    folder: Path
    result: File
    table: str
    figures: list[Path]
    figure: Any = None

    @property
    def failed(self) -> list[str]:
        """Cells that failed."""
        return self.result.failed

    def table_rows(self) -> list[dict[str, Any]]:
        """The rows of NAME.json, entries inside entries by their dotted names; the printed table where it has none."""
        rows = self.result.to_dict().get("rows")
        return self._printed_rows() if not rows else [_flat(row) for row in rows]

    def _repr_html_(self) -> str:
        return html_table(self._printed_rows())

    def _printed_rows(self) -> list[dict[str, Any]]:
        lines = [line.strip().strip("|").split("|") for line in self.table.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line] for line in lines]
        return [dict(zip(cells[0], row)) for row in cells[2:]]

    def plot(self) -> Any:
        """The figure that was saved."""
        return super().plot() if self.figure is None else self.figure

    def to_dict(self) -> dict[str, Any]:
        return self.result.to_dict()

    def text(self) -> str:
        return "\n".join([self.table, f"written to {self.folder}/{self.result.FILE}"])


def write_outcome(
    result: File, folder: Path, started: float, device: str, table: str, figure: Any = None, stem: str | None = None
) -> Outcome[File]:
    """Write NAME.json, NAME.md and the figure, as `stem` or NAME. A result without provenance gets this machine's."""
    here = Provenance.since(started, device)
    result = replace(
        result,
        experiment=result.name(),
        command=here.command or "",
        seconds=here.seconds,
        device=result.device or here.device or "",
        versions=result.versions or here.versions,
        provenance=here,
    )
    result.write(folder)
    write_text(folder / f"{result.name()}.md", table + "\n")
    figures = [] if figure is None else save_figure(figure, folder / (stem or result.name()))
    return Outcome(folder, result, table, figures, figure)


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]], optional: Sequence[str] = ()) -> str:
    """A table as Markdown: numbers to three digits, None as a dash. `optional` columns need a value in some row."""
    kept = [i for i, name in enumerate(columns) if name not in optional or any(row[i] is not None for row in rows)]
    columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(_shown, row)) + " |" for row in rows)])


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "\\|")


def sum_of(lengths: Sequence[int]) -> str:
    """Phase lengths as the tables show them: `7+3+2`."""
    return "+".join(map(str, lengths))


def data_label(spec: str | Sequence[str]) -> str:
    """The name of the data without its folder, archive parts and ending: `tiny-imagenet-100`."""
    if not isinstance(spec, str):
        return " + ".join(map(data_label, spec))
    kind = spec.partition(":")[0]
    if kind in ("cifar10", "cifar100", "imagenet", "nyuv2", "ade20k"):
        return kind
    last = Path(spec.split(",")[0].rstrip("/")).name
    last = re.sub(r"\.(zip|tar)$", "", last)
    return re.sub(r"[-_](train|val|test|\*|\{).*$", "", last).rstrip("-_*")
