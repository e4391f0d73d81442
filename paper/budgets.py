"""The default recipe against the paper's at the same short budget, over k."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from cells import Cell, CellOptions, Sweep, SweepOptions, run_sweep
from figures import figure_budgets
from outcome import Outcome, markdown, sum_of, write_outcome
from records import BudgetRow, Budgets
from surrogates import Machine, check_cells, describe_pair, open_teacher, trained_by, with_contents

from raptor.data.by_name import as_spec
from raptor.options import Trusting, WeightFile, part, with_defaults
from raptor.provenance import recorded
from raptor.surrogate.surrogate import block_parameters
from raptor.train import Distilled, distill

_COLUMNS = ("recipe", "k", "phases", "parameters_m", "recovery", "recovery_head", "agreement", "r2_last", "r2_lowest")
_SCORES = ("recovery", "recovery_head", "agreement", "r2_last", "r2_lowest", "probe", "teacher_probe", "r2", "cosine")


class BudgetsOptions(WeightFile, Trusting, SweepOptions, total=False):
    """The options that budgets shares with other experiments."""


@recorded
def run(
    model: str = "scenes",
    *,
    data: list[str] | str = "scenes",
    k: list[int] = [1, 2, 3, 4, 6],  # noqa: B006
    paper_k: list[int] = [2, 3],  # noqa: B006
    budget: str = "120s",
    limit: int | None = None,
    val_images: int = 4000,
    seed: int = 0,
    out: str = "runs/budgets",
    **given: Unpack[BudgetsOptions],
) -> Outcome[Budgets]:
    """Train the default recipe at each k, and the paper's beside it, for the same time; one table.

    Args:
        model: the teacher.
        data: labelled images.
        k: blocks of the default recipe's runs.
        paper_k: blocks of the paper's recipe's runs.
        budget: training time of each run.
        limit: use only this many training images.
        val_images: held-out images.
        seed: of every run.
        out: folder; runs that are already there are not done again.
        jobs: processes that work at the same time; with budgets in seconds they share the machine unevenly.
        cells: only these, separated by commas (such as default-k3).
    """
    started = time.monotonic()
    options = with_defaults(BudgetsOptions, given)
    machine = Machine.of(out, options)
    common: dict[str, Any] = dict(
        model=model,
        weights=options["weights"],
        data=as_spec(data),
        val=as_spec(options["val"]),
        budget=budget,
        limit=limit,
        val_images=val_images,
        seed=seed,
    )
    pairs = [("default", num) for num in k] + [("paper", num) for num in paper_k]
    plan = [
        Cell(f"{recipe}-k{num}", {**common, "recipe": recipe, **trained_by(recipe), "k": num}) for recipe, num in pairs
    ]
    sweep = Sweep(Path(out), with_contents(plan, machine), machine.device)
    check_cells(sweep, machine)
    work, images = partial(_do_cell, machine), partial(describe_pair, common)
    results = run_sweep(sweep, work, images, **part(CellOptions, options))
    rows = [BudgetRow.from_dict(result) for result in results.values()]
    found = Budgets(settings=common, rows=rows, missing=sweep.missing_names(), **sweep.made())
    table = markdown(_COLUMNS, [[getattr(row, column) for column in _COLUMNS] for row in rows])
    figure = figure_budgets(rows) if rows else None
    return write_outcome(found, Path(out), started, machine.device, table, figure)


def _do_cell(machine: Machine, cell: Cell) -> BudgetRow:
    """Distil one surrogate."""
    options = cell.options
    teacher, pair = open_teacher(options, machine)
    done = distill(
        teacher,
        pair,
        k=options["k"],
        recipe=options["recipe"],
        budget=options["budget"],
        seed=options["seed"],
        out=str(machine.folder / cell.name),
        device=machine.device,
    )
    assert isinstance(done, Distilled)
    summary = done.summary
    return BudgetRow(
        recipe=options["recipe"],
        k=options["k"],
        phases=sum_of(summary.phases),
        parameters_m=block_parameters(done.surrogate) / 1e6,
        teacher_parameters_m=block_parameters(teacher) / 1e6,
        num_steps=summary.num_steps,
        seconds=summary.seconds,
        device=summary.device,
        **{name: getattr(summary.validation, name) for name in _SCORES},
    )
