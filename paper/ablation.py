"""Table 2: what each ingredient of the training adds. All rows train for the same number of steps.

Rows 1 to 4 chain the blocks of stage 1. Rows 1 to 5 are judged by the teacher's unchanged head. Row 6 is row 5 with the
head fitted again, starting from the teacher's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import yaml
from cells import Cell, CellOptions, Sweep, TrainingSweepOptions, run_sweep
from estimates import spread
from figures import figure_ablation
from outcome import Outcome, markdown, write_outcome
from records import Ablation, AblationLine, AblationRow, Refit
from surrogates import (
    CutBy,
    Machine,
    OneTeacher,
    Pair,
    best_teacher,
    check_cells,
    cut_by,
    cut_phases,
    describe_pair,
    make_raptor,
    open_teacher,
    trained_by,
    with_contents,
)

from raptor.data.by_name import as_spec
from raptor.fidelity.heads import LinearHead
from raptor.options import Limited, part, with_defaults
from raptor.probes import probe
from raptor.provenance import recorded
from raptor.recipes import load_recipe
from raptor.run import write_text
from raptor.train.recipe import resolve_recipe
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

_PLAIN = {"last_phase_weights": None, "stage2_weights": None}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "1-teacher-forcing": (
        "teacher forcing only",
        {"lam": 1.0, "lam_until": float("inf"), "conditioning": "none", "stage1_share": 1.0, **_PLAIN},
    ),
    "2-autoregressive": (
        "+ autoregressive, teacher forcing annealed",
        {"conditioning": "none", "stage1_share": 1.0, **_PLAIN},
    ),
    "3-depth": ("+ depth scaling", {"stage1_share": 1.0, **_PLAIN}),
    "4-weighted": ("+ weighted cls in the last phase", {"stage1_share": 1.0}),
    "5-joint": ("+ joint stage", {"stage1_share": 0.5}),
}
_REFIT = "+ probe fitted again"
_PUBLISHED = {"1": 3.9, "2": 72.7, "3": 75.2, "4": 76.7, "5": 82.4, "6": 83.0}


class AblationOptions(CutBy, OneTeacher, TrainingSweepOptions, total=False):
    """The options that ablation shares with other experiments."""


@recorded
def run(
    *,
    data: list[str] | str,
    size: int | None = None,
    k: int = 3,
    base: str = "default",
    budget: str = "1000steps",
    batch_size: int = 256,
    lr: float | None = None,
    refit_epochs: int = 5,
    seeds: list[int] = [0],  # noqa: B006
    out: str = "runs/ablation",
    **given: Unpack[AblationOptions],
) -> Outcome[Ablation]:
    """Teacher forcing only; + autoregressive; + depth scaling; + weighted cls; + joint stage; + probe refit (Table 2).

    Args:
        data: labelled images.
        size: image size.
        k: blocks.
        base: the recipe whose ingredients are added one by one.
        budget: training of each row, both stages together; in steps, so that rows are equal.
        batch_size: images per step.
        lr: peak learning rate of every row; by default that of the base recipe, which a short budget may need higher.
        refit_epochs: epochs over the training images for the refitted head.
        seeds: of every row.
        out: folder; cells that are already there are not done again.
        cells: only these, separated by commas (such as 5-joint-s0).
    """
    started = time.monotonic()
    options = with_defaults(AblationOptions, given)
    if not budget.rstrip().endswith(("steps", "epochs")):
        raise ValueError(f"the rows must have equal steps: give --budget in steps or epochs, not {budget!r}")
    of_rows = {} if lr is None else {"lr": lr}
    resolve_recipe(base, of_rows)
    machine = Machine.of(out, options)
    common: dict[str, Any] = dict(
        model=options["model"] or best_teacher(options["teachers"]),
        weights=options["weights"],
        size=size,
        data=as_spec(data),
        val=as_spec(options["val"]),
        **part(Limited, options),
        **cut_by(options),
        k=k,
        base=base,
        **trained_by(base),
        budget=budget,
        batch_size=batch_size,
        refit_epochs=refit_epochs,
        **of_rows,
    )
    plan = tuple(Cell(f"{row}-s{s}", {**common, "row": row, "seed": s}) for s in seeds for row in ROWS)
    sweep = Sweep(Path(out), with_contents(plan, machine), machine.device)
    check_cells(sweep, machine)
    work, images = partial(_do_cell, machine), partial(describe_pair, common)
    results = run_sweep(sweep, work, images, **part(CellOptions, options))
    rows = [AblationRow.from_dict(result) for result in results.values()]
    lines = _summarise(rows)
    found = Ablation(settings=common, rows=rows, table=lines, missing=sweep.missing_names(), **sweep.made())
    figure = figure_ablation(lines, _PUBLISHED) if rows else None
    return write_outcome(found, Path(out), started, machine.device, _table(lines), figure)


def row_recipe(base: str, row: str) -> dict[str, Any]:
    """The recipe of a row: the base recipe without the ingredients that the row does not have yet."""
    return {**load_recipe(base), **ROWS[row][1]}


def _do_cell(machine: Machine, cell: Cell) -> AblationRow:
    """Train one row. The joint row also fits its head again."""
    options = cell.options
    teacher, pair = open_teacher(options, machine)
    phases = cut_phases(teacher, pair[0], options["k"], machine, options.get("tokens", "all"))
    folder = machine.folder / "raptors" / cell.name
    recipe = machine.folder / "recipes" / f"{cell.name}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    write_text(recipe, yaml.safe_dump(row_recipe(options["base"], options["row"]), sort_keys=False))
    scores = make_raptor(
        teacher,
        pair,
        phases,
        folder,
        machine,
        recipe=str(recipe),
        budget=options["budget"],
        batch_size=options["batch_size"],
        lr=options.get("lr"),
        seed=options["seed"],
    )
    refit = _refit(folder, teacher, pair, options, machine) if options["row"] == "5-joint" else None
    chance = 1 / len(pair[1].classes) if pair[1].classes else None
    return AblationRow(row=options["row"], seed=options["seed"], refit=refit, chance=chance, **vars(scores))


def _refit(folder: Path, teacher: ViT, pair: Pair, options: dict[str, Any], machine: Machine) -> Refit:
    """Fit the head of the surrogate in `folder` again, and that of the teacher in the same way."""
    kept = folder / "head.safetensors"
    start = LinearHead.load(kept) if kept.exists() else "own"
    surrogate = open_vit(folder / "surrogate", trust_hub=machine.trust_hub, device=machine.device)
    fitted, of_teacher = (
        probe(
            vit,
            "classify",
            *pair,
            epochs=options["refit_epochs"],
            seeds=[options["seed"]],
            init_head=start,
            precision=machine.precision,
        )
        for vit in (surrogate, teacher)
    )
    return Refit(
        accuracy=fitted.score,
        teacher_accuracy=of_teacher.score,
        from_head=fitted.settings.init_head != "random",
    )


def _summarise(rows: Sequence[AblationRow]) -> list[AblationLine]:
    """The rows of Table 2: means over seeds. The last one is the joint row with its head fitted again."""
    lines = []
    for name, (title, _) in ROWS.items():
        found = [row for row in rows if row.row == name]
        if found:
            lines.append(_mean_line(name[0], title, found))
    refits = [row.refit for row in rows if row.refit is not None]
    if refits:
        accuracy = spread([refit.accuracy for refit in refits])
        of_teacher = spread([refit.teacher_accuracy for refit in refits])
        last = replace(lines[-1], number="6", row=_REFIT, num_seeds=len(refits), teacher_accuracy=of_teacher.mean)
        lines.append(replace(last, accuracy=accuracy.mean, deviation=accuracy.deviation))
    return lines


def _mean_line(number: str, title: str, rows: Sequence[AblationRow]) -> AblationLine:
    accuracy = spread([row.accuracy for row in rows])
    return AblationLine(
        number=number,
        row=title,
        num_steps=rows[0].num_steps,
        accuracy=accuracy.mean,
        teacher_accuracy=spread([row.teacher_accuracy for row in rows]).mean,
        probe=spread([row.probe for row in rows]).mean,
        teacher_probe=spread([row.teacher_probe for row in rows]).mean,
        agreement=spread([row.agreement for row in rows]).mean,
        r2_last=spread([row.r2_last for row in rows]).mean,
        r2_lowest=spread([row.r2_lowest for row in rows]).mean,
        num_seeds=len(rows),
        deviation=accuracy.deviation,
    )


def _table(lines: Sequence[AblationLine]) -> str:
    seeds = ("sd over seeds", "seeds")
    scores = ("teacher", "recovery", "ridge probe", "R2 last", "R2 lowest", "paper (IN-1k)")
    return markdown(("row", "", "accuracy", *seeds, *scores), [_table_line(line) for line in lines], optional=seeds)


def _table_line(line: AblationLine) -> list[str | float | None]:
    """The number of seeds is left out where it is one, as in most tables; rows of a sweep that goes on may differ."""
    return [
        line.number,
        line.row,
        line.accuracy,
        line.deviation,
        None if line.num_seeds == 1 else str(line.num_seeds),
        line.teacher_accuracy,
        _ratio(line.accuracy, line.teacher_accuracy),
        line.probe,
        line.r2_last,
        line.r2_lowest,
        f"{_PUBLISHED[line.number]:.1f} %",
    ]


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
