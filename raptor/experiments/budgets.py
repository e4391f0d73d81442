"""The default recipe against the paper's at the same short budget, over k."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raptor.data import InMemory, open_data
from raptor.devices import pick_device
from raptor.distill import distill
from raptor.open import open_vit
from raptor.provenance import provenance
from raptor.run import read_json, write_text
from raptor.surrogate import block_parameters

COLUMNS = ("recipe", "k", "phases", "parameters_m", "recovery", "recovery_head", "agreement", "r2_last", "r2_lowest")


@dataclass
class BudgetTable:
    """Rows of the comparison, one a run, as budgets.json holds them."""

    rows: list[dict[str, Any]]
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "folder": str(self.folder)}

    def text(self) -> str:
        lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        for row in self.rows:
            cells = [f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in COLUMNS]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)


def run(
    model: str = "scenes",
    *,
    data: str = "scenes",
    weights: str | None = None,
    k: list[int] = [1, 2, 3, 4, 6],  # noqa: B006
    paper_k: list[int] = [2, 3],  # noqa: B006
    budget: str = "120s",
    limit: int | None = None,
    val_images: int = 4000,
    seed: int = 0,
    out: str = "runs/budgets",
    device: str = "auto",
    num_workers: int = 0,
) -> BudgetTable:
    """Train the default recipe at each k, and the paper's beside it, for the same time; one table.

    Args:
        model: the teacher.
        data: labelled images.
        weights: a local weight file for the teacher.
        k: blocks of the default recipe's runs.
        paper_k: blocks of the paper's recipe's runs.
        budget: training time of each run.
        limit: use only this many training images.
        val_images: held-out images.
        seed: of every run.
        out: folder; runs that are already there are not done again.
        device: auto, cpu or cuda.
        num_workers: processes that decode images.
    """
    started = time.monotonic()
    device = pick_device(device)
    teacher = open_vit(model, weights=weights, device=device)
    opened = [
        open_data(data, split, limit=num, size=teacher.preprocess.size)  # type: ignore[arg-type]
        for split, num in (("train", limit), ("val", val_images))
    ]
    train, held_out = (InMemory(part, teacher.preprocess, device, num_workers) for part in opened)
    folder = Path(out)
    rows = []
    for recipe, num in [("default", n) for n in k] + [("paper", n) for n in paper_k]:
        result = folder / f"{recipe}-k{num}.json"
        if not result.exists():
            row = _one(teacher, (train, held_out), recipe, num, budget, seed, folder, device)
            write_text(result, json.dumps(row))
        rows.append(read_json(result))
        print(BudgetTable(rows[-1:], folder).text().splitlines()[-1], flush=True)
    about = {"provenance": provenance(started, device), "teacher": teacher.describe(), "budget": budget, "rows": rows}
    write_text(folder / "budgets.json", json.dumps(about, indent=1) + "\n")
    return BudgetTable(rows, folder)


def _one(
    teacher: Any, data: Any, recipe: str, k: int, budget: str, seed: int, folder: Path, device: str
) -> dict[str, Any]:
    done = distill(
        teacher, data, k=k, recipe=recipe, budget=budget, seed=seed, out=str(folder / f"{recipe}-k{k}"), device=device
    )
    scores = done.summary["validation"]
    kept = ("recovery", "recovery_head", "agreement", "r2_last", "r2_lowest", "probe", "teacher_probe", "r2", "cosine")
    return {
        "recipe": recipe,
        "k": k,
        "phases": "+".join(map(str, done.summary["phases"])),
        "parameters_m": block_parameters(done.surrogate) / 1e6,
        "teacher_parameters_m": block_parameters(teacher) / 1e6,
        "num_steps": done.summary["num_steps"],
        "seconds": done.summary["seconds"],
        "device": done.summary["device"],
        **{name: scores.get(name) for name in kept},
    }
