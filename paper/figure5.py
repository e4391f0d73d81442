"""Figure 5: accuracy as a share of the teacher's, and R2, against k; drawn from the results of table1.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from figures import figure_recovery
from sweep import Json, markdown, read_config, save_figure, write_json
from table1 import shown


@dataclass(kw_only=True)
class Figure5:
    """Draw accuracy as a share of the teacher's, and R2, against k from the results of table1.py."""

    table: str = "runs/table1"
    """Folder that holds table1.json; the figure is written there."""


def main(config: Figure5) -> Json:
    folder = Path(config.table)
    if not (folder / "table1.json").exists():
        raise ValueError(f"no {folder / 'table1.json'}: run paper/table1.py --out {folder} first")
    rows = json.loads((folder / "table1.json").read_text())["rows"]
    students = [row for row in rows if row["k"] != "teacher"]
    if not students or len(students) == len(rows):
        raise ValueError(f"{folder} needs the teacher and at least one k: finish paper/table1.py first")
    points, lines = [], []
    for row in students:
        recovery, last = row["scores"]["classify"]["recovery"], row["r2"]["all"]
        points.append({"k": int(row["k"]), "recovery": recovery, **last})
        lines.append([row["k"], shown(recovery, percent=True, unit=" %"), shown(last["r2"]), shown(last["bounded_r2"])])
    table = markdown(["k", "accuracy, share of the teacher's", "R2 last layer", "bounded R2"], lines)
    found = {"experiment": "figure5", "points": points}
    write_json(folder / "figure5.json", found)
    (folder / "figure5.md").write_text(table + "\n")
    save_figure(figure_recovery(rows), folder / "figure5")
    print(table)
    return found


if __name__ == "__main__":
    main(read_config(Figure5))
