"""Table 2: what each ingredient of the training adds, the same total steps a row.

Rows 1 to 4 are stage-1 blocks chained, rows 1 to 5 under the teacher's untouched head; row 6 is row 5 with the head
fitted again, from the teacher's.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from raptor.devices import pick_device
from raptor.experiments.cells import Cell, Sweep, run_sweep
from raptor.experiments.figures import figure_ablation
from raptor.experiments.outcome import Outcome, markdown, write_outcome
from raptor.experiments.small import Machine, Pair, best_teacher, layer_similarity, load_pair, make_raptor
from raptor.fidelity.heads import LinearHead
from raptor.open import open_vit
from raptor.phases import find_phases
from raptor.probes import probe
from raptor.recipes import load_recipe
from raptor.report.style import save_figure
from raptor.run import write_text
from raptor.vit.view import ViT

PLAIN = {"last_phase_weights": None, "stage2_weights": None}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "1-teacher-forcing": (
        "teacher forcing only",
        {"lam": 1.0, "lam_until": float("inf"), "conditioning": "none", "stage1_share": 1.0, **PLAIN},
    ),
    "2-autoregressive": (
        "+ autoregressive, teacher forcing annealed",
        {"conditioning": "none", "stage1_share": 1.0, **PLAIN},
    ),
    "3-depth": ("+ depth scaling", {"stage1_share": 1.0, **PLAIN}),
    "4-weighted": ("+ weighted cls in the last phase", {"stage1_share": 1.0}),
    "5-joint": ("+ joint stage", {"stage1_share": 0.5}),
}
REFIT = "+ probe fitted again"
PAPER = {"1": 3.9, "2": 72.7, "3": 75.2, "4": 76.7, "5": 82.4, "6": 83.0}


def run(
    *,
    data: str,
    model: str | None = None,
    teachers: str = "runs/stochastic-depth",
    weights: str | None = None,
    size: int | None = None,
    k: int = 3,
    base: str = "default",
    budget: str = "1000steps",
    batch_size: int = 256,
    refit_epochs: int = 5,
    seeds: list[int] = [0],  # noqa: B006
    limit: int | None = None,
    val_images: int | None = None,
    out: str = "runs/ablation",
    jobs: int = 1,
    cells: str | None = None,
    max_seconds: float | None = None,
    device: str = "auto",
    num_workers: int = 0,
    compile: bool | None = None,
) -> Outcome:
    """Teacher forcing only; + autoregressive; + depth scaling; + weighted cls; + joint stage; + probe refit (Table 2).

    Args:
        data: labelled images.
        model: the teacher; by default the most accurate one of `teachers`.
        teachers: folder of a stochastic-depth sweep.
        weights: a local weight file for the teacher.
        size: image size.
        k: blocks.
        base: the recipe whose ingredients are added one by one.
        budget: training of each row, both stages together; in steps, so that rows are equal.
        batch_size: images a step.
        refit_epochs: epochs over the training images for the refitted head.
        seeds: of every row.
        limit: use only this many training images.
        val_images: use only this many held-out images.
        out: folder; cells that are already there are not done again.
        jobs: processes that work at the same time.
        cells: only these, separated by commas (such as 5-joint-s0).
        max_seconds: stop cleanly after so long.
        device: auto, cpu or cuda.
        num_workers: processes that decode images, once a job.
        compile: compile the blocks; by default on a GPU only.
    """
    started = time.monotonic()
    if not budget.rstrip().endswith(("steps", "epochs")):
        raise ValueError(f"the rows must have equal steps: give --budget in steps or epochs, not {budget!r}")
    machine = Machine(Path(out), pick_device(device), num_workers, compile)
    common = dict(
        model=model or best_teacher(teachers), weights=weights, size=size, data=data, limit=limit,
        val_images=val_images, k=k, base=base, budget=budget, batch_size=batch_size, refit_epochs=refit_epochs,
    )  # fmt: skip
    plan = tuple(Cell(f"{row}-s{s}", {**common, "row": row, "seed": s}) for s in seeds for row in ROWS)
    sweep = Sweep(Path(out), plan, machine.device)
    results = run_sweep(sweep, partial(one_cell, machine), jobs=jobs, cells=cells, max_seconds=max_seconds)
    rows = list(results.values())
    values: dict[str, Any] = {
        "settings": common,
        "rows": rows,
        "table": summarise(rows),
        "missing": sweep.missing_names(),
        **sweep.made(),
    }
    figures = save_figure(figure_ablation(values["table"], PAPER), Path(out) / "ablation") if rows else []
    return write_outcome("ablation", Path(out), started, machine.device, values, table(values["table"]), figures)


def row_recipe(base: str, row: str) -> dict[str, Any]:
    """The recipe of a row: the base's, with what the row does not have yet taken away."""
    return {**load_recipe(base), **ROWS[row][1]}


def one_cell(machine: Machine, cell: Cell) -> dict[str, Any]:
    """Train one row; the joint row also fits its head again."""
    options = cell.options
    teacher = open_vit(options["model"], weights=options["weights"], size=options["size"], device=machine.device)
    pair = load_pair(
        options["data"], teacher.preprocess, options["limit"], options["val_images"], machine.device,
        machine.num_workers,
    )  # fmt: skip
    phases = find_phases(layer_similarity(teacher, pair[0], machine)["all"], options["k"]).lengths
    folder = machine.folder / "raptors" / cell.name
    recipe = machine.folder / "recipes" / f"{cell.name}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    write_text(recipe, yaml.safe_dump(row_recipe(options["base"], options["row"]), sort_keys=False))
    result = make_raptor(
        teacher, pair, phases, folder, machine, recipe=str(recipe), budget=options["budget"],
        batch_size=options["batch_size"], seed=options["seed"],
    )  # fmt: skip
    if options["row"] == "5-joint":
        result["refit"] = refit(folder, teacher, pair, options, machine)
    return {"row": options["row"], "seed": options["seed"], **result}


def refit(folder: Path, teacher: ViT, pair: Pair, options: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Accuracy of the surrogate in `folder` with its head fitted again, and of the teacher under the same protocol."""
    kept = folder / "head.safetensors"
    start = LinearHead.load(kept) if kept.exists() else "own"
    surrogate = open_vit(folder / "surrogate", device=machine.device)
    scores = {
        name: probe(
            vit,
            "classify",
            *pair,
            epochs=options["refit_epochs"],
            seeds=[options["seed"]],
            init_head=start,
            precision=machine.precision,
        )
        for name, vit in (("surrogate", surrogate), ("teacher", teacher))
    }
    return {
        "accuracy": scores["surrogate"].score,
        "teacher_accuracy": scores["teacher"].score,
        "from_head": scores["surrogate"].settings.init_head != "random",
    }


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line a row of Table 2: means over seeds. The last is the joint row with its head fitted again."""
    lines = []
    for name, (title, _) in ROWS.items():
        found = [row for row in rows if row["row"] == name]
        if found:
            measures = ("accuracy", "teacher_accuracy", "probe", "teacher_probe", "agreement", "r2_last", "r2_lowest")
            means = {m: _mean([row[m] for row in found]) for m in measures}
            lines.append({"number": name[0], "row": title, "num_steps": found[0]["num_steps"], **means})
    joint = [row["refit"] for row in rows if row["row"] == "5-joint"]
    if joint:
        accuracy, of_teacher = (_mean([r[m] for r in joint]) for m in ("accuracy", "teacher_accuracy"))
        last = {**lines[-1], "number": "6", "row": REFIT, "accuracy": accuracy, "teacher_accuracy": of_teacher}
        lines.append(last)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    columns = ("row", "", "accuracy", "teacher", "recovery", "ridge probe", "R2 last", "R2 lowest", "paper (IN-1k)")
    return markdown(
        columns,
        [
            [
                line["number"], line["row"], line["accuracy"], line["teacher_accuracy"],
                _ratio(line["accuracy"], line["teacher_accuracy"]), line["probe"], line["r2_last"], line["r2_lowest"],
                f"{PAPER[line['number']]:.1f} %",
            ]
            for line in lines
        ],
    )  # fmt: skip


def _mean(values: list[Any]) -> float | None:
    return None if None in values else float(sum(values) / len(values))


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
