"""Figure 5: accuracy as a share of the teacher's, and R2, against k; drawn from the results of table1."""

from __future__ import annotations

import time
from pathlib import Path

from figures import figure_recovery
from outcome import Outcome, markdown, write_outcome
from records import Figure5, Figure5Point, MeanOverSeeds, Table1, Table1Row
from table1 import shown

from raptor.provenance import recorded


@recorded
def run(*, table: str = "runs/table1", out: str | None = None) -> Outcome[Figure5]:
    """Draw accuracy as a share of the teacher's, and R2, against k from the results of `paper/table1.py`.

    Args:
        table: folder that holds table1.json.
        out: folder for the figure; by default the same.
    """
    started = time.monotonic()
    rows = Table1.read(table).rows
    students = [row for row in rows if row.k != "teacher"]
    if not students or len(students) == len(rows):
        raise ValueError(f"{table} needs the teacher and at least one k: finish paper/table1.py first")
    folder = Path(out or table)
    folder.mkdir(parents=True, exist_ok=True)
    figure = figure_recovery(rows)
    points = [_point(row) for row in students]
    lines = [[p.k, shown(p.recovery, percent=True, unit=" %"), shown(p.r2), shown(p.bounded_r2)] for p in points]
    text = markdown(("k", "accuracy, share of the teacher's", "R2 last layer", "bounded R2"), lines)
    return write_outcome(Figure5(points=points), folder, started, "cpu", text, figure)


def _point(row: Table1Row) -> Figure5Point:
    recovery = row.scores["classify"].recovery or MeanOverSeeds()
    return Figure5Point(k=int(row.k), recovery=recovery, **vars(row.r2["all"]))
