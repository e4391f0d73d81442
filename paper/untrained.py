"""Figure 11: does training create block recurrence? A trained teacher, an untrained and an overfitted one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from cells import Cell, CellOptions, Sweep, TrainingSweepOptions, run_sweep
from figures import figure_untrained
from outcome import Outcome, markdown, sum_of, write_outcome
from records import Untrained, UntrainedRow
from stochastic_depth import cell_name
from surrogates import (
    CutBy,
    Machine,
    Pair,
    SweptTeachers,
    cut_by,
    describe_pair,
    trained_by,
    with_contents,
)
from teachers import (
    ScratchOptions,
    check_scratch,
    scratch_pair,
    scratch_raptor,
    scratch_teacher,
    teacher_scores,
    untrained_teacher,
)

from raptor.data import ImageData
from raptor.data.by_name import as_spec
from raptor.options import Limited, part, with_defaults
from raptor.provenance import recorded
from raptor.run import read_summary
from raptor.train.schedule import Budget
from raptor.vit.view import ViT

_KINDS = ("trained", "untrained", "overfitted")
_NULL_COLUMNS = ("best null, cls R2", "best null, patches R2")
_COLUMNS = (
    *("teacher", "seed", "phases", "accuracy", "train", "similarity", "within phases", "within phases, cls"),
    *("cls R2", "cls bounded R2", "cls correlation", "patches R2", "patches bounded R2", *_NULL_COLUMNS),
)


class UntrainedOptions(ScratchOptions, CutBy, SweptTeachers, TrainingSweepOptions, total=False):
    """The options that untrained shares with other experiments."""


@recorded
def run(
    *,
    data: list[str] | str,
    p: float = 0.3,
    seeds: list[int] = [0],  # noqa: B006
    overfit_images: int = 5000,
    out: str = "runs/untrained",
    **given: Unpack[UntrainedOptions],
) -> Outcome[Untrained]:
    """A trained teacher, its untrained start and an overfitted copy: similarity, and how well a raptor fits each.

    Args:
        data: labelled images.
        teachers: folder of a stochastic-depth sweep; its teacher at `p` is taken if it is there, else trained here.
        p: stochastic depth of the trained teacher.
        seeds: of teacher and raptor.
        overfit_images: the overfitted teacher sees only these, without augmentation, smoothing or stochastic depth.
        out: folder; cells that are already there are not done again.
        cells: only these, separated by commas (such as untrained-s0).
    """
    started = time.monotonic()
    options = with_defaults(UntrainedOptions, given)
    machine = Machine.of(out, options)
    common: dict[str, Any] = {
        "data": as_spec(data),
        "val": as_spec(options["val"]),
        **part(ScratchOptions, options),
        **cut_by(options),
        **trained_by(options["recipe"]),
        **part(Limited, options),
        "teachers": options["teachers"],
        "overfit_images": overfit_images,
        "p": p,
    }
    check_scratch(common, [p])
    plan = tuple(Cell(f"{kind}-s{s}", {**common, "kind": kind, "seed": s}) for s in seeds for kind in _KINDS)
    sweep = Sweep(Path(out), with_contents(plan, machine), machine.device)
    work, images = partial(_do_cell, machine), partial(describe_pair, common)
    results = run_sweep(sweep, work, images, **part(CellOptions, options))
    rows = [UntrainedRow.from_dict(result) for result in results.values()]
    found = Untrained(settings=common, rows=rows, missing=sweep.missing_names(), **sweep.made())
    figure = figure_untrained(rows) if rows else None
    return write_outcome(found, Path(out), started, machine.device, _table(rows), figure)


def _do_cell(machine: Machine, cell: Cell) -> UntrainedRow:
    """Make one teacher and train its raptor."""
    options = cell.options
    pair = scratch_pair(options, machine)
    teacher, folder, seen = _teacher(options, pair, machine, machine.folder / "teachers" / cell.name)
    similarity, raptor = scratch_raptor(options, teacher, pair, machine.folder / "raptors" / cell.name, machine)
    return UntrainedRow(
        kind=options["kind"],
        seed=options["seed"],
        teacher=teacher_scores(teacher, (seen, pair[1]), folder, machine),
        similarity=similarity,
        raptor=raptor,
    )


def _teacher(options: dict[str, Any], pair: Pair, machine: Machine, folder: Path) -> tuple[ViT, Path, ImageData]:
    """The cell's teacher, its run folder and the images it was trained on."""
    train, held_out = pair
    if options["kind"] == "untrained":
        return untrained_teacher(options, len(train.classes or ()), machine.device), folder, train
    if options["kind"] == "trained":
        swept = Path(options["teachers"]) / "teachers" / cell_name(options["p"], options["seed"])
        folder = swept if read_summary(swept) is not None else folder
        return scratch_teacher({**options, "drop": options["p"]}, pair, folder, machine), folder, train
    few = train.select(train.sample(min(options["overfit_images"], len(train))))
    steps = _in_steps(options["teacher_budget"], len(train) // options["teacher_batch"])
    plain = {**options, "drop": 0.0, "augment": "none", "smoothing": 0.0, "teacher_budget": steps}
    return scratch_teacher(plain, (few, held_out), folder, machine), folder, few


def _in_steps(budget: str, steps_per_epoch: int) -> str:
    """A budget of epochs as steps, so that training on fewer images takes as many steps."""
    parsed = Budget.parse(budget)
    return f"{max(1, round(parsed.amount * steps_per_epoch))}steps" if parsed.unit == "epochs" else budget


def _table(rows: Sequence[UntrainedRow]) -> str:
    return markdown(_COLUMNS, [_table_line(row) for row in rows], optional=_NULL_COLUMNS)


def _table_line(row: UntrainedRow) -> list[str | float | None]:
    cls, patches = row.raptor.curves["cls"], row.raptor.curves["patches"]
    return [
        row.kind,
        row.seed,
        sum_of(row.raptor.phases),
        row.teacher.accuracy,
        row.teacher.train_accuracy,
        row.similarity.off_diagonal,
        row.similarity.within_phases,
        row.similarity.means["cls"].within_phases,
        *(curve[-1] for curve in (cls.r2, cls.bounded_r2, cls.pearson, patches.r2, patches.bounded_r2)),
        *(row.raptor.best_null(group) for group in ("cls", "patches")),
    ]
