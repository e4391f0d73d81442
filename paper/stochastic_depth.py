"""Figure 4: does stochastic depth make a ViT more block-recurrent?

Teachers are trained from scratch with p = 0 .. .9, the whole block dropped per sample with the same p at every depth;
a k = 3 raptor of each is trained in the autoregressive stage only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from cells import Cell, CellOptions, Sweep, TrainingSweepOptions, run_sweep
from estimates import correlation, partial_correlation, trend
from figures import figure_stochastic_depth
from outcome import Outcome, markdown, sum_of, write_outcome
from records import StochasticDepth, StochasticDepthRow, SweepStatistics
from surrogates import CutBy, Machine, cut_by, describe_pair, trained_by, with_contents
from teachers import (
    ScratchOptions,
    check_scratch,
    scratch_pair,
    scratch_raptor,
    scratch_teacher,
    teacher_scores,
)

from raptor.data.by_name import as_spec
from raptor.options import Limited, part, with_defaults
from raptor.provenance import recorded

_NULL_COLUMN = "best null, R2 last"
_COLUMNS = (
    *("p", "seed", "phases", "similarity", "within phases", "teacher", "train", "raptor", "raptor, probe"),
    *("R2 last", "bounded R2 last", "bounded cls", "bounded patches", _NULL_COLUMN),
)
_MEASURES: dict[str, Callable[[StochasticDepthRow], float | None]] = {
    "similarity": lambda row: row.similarity.off_diagonal,
    "within_phases": lambda row: row.similarity.within_phases,
    "bounded_r2": lambda row: row.raptor.bounded_r2_last,
    "r2": lambda row: row.raptor.r2_last,
    "bounded_r2_cls": lambda row: row.raptor.curves["cls"].bounded_r2[-1],
    "bounded_r2_patches": lambda row: row.raptor.curves["patches"].bounded_r2[-1],
    "teacher": lambda row: row.teacher.accuracy,
    "raptor": lambda row: row.raptor.accuracy,
    "gap": lambda row: row.teacher.accuracy - _accuracy(row),
    "recovery": lambda row: _accuracy(row) / max(row.teacher.accuracy, 1e-9),
}


class StochasticDepthOptions(ScratchOptions, CutBy, TrainingSweepOptions, total=False):
    """The options that stochastic-depth shares with other experiments."""


@recorded
def run(
    *,
    data: list[str] | str,
    p: list[float] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],  # noqa: B006
    seeds: list[int] = [0],  # noqa: B006
    more_seeds: list[int] = [1],  # noqa: B006
    more_p: list[float] = [0.0, 0.3, 0.6, 0.9],  # noqa: B006
    out: str = "runs/stochastic-depth",
    **given: Unpack[StochasticDepthOptions],
) -> Outcome[StochasticDepth]:
    """Train teachers with stochastic depth and a raptor of each; similarity, R2 and accuracy against p (Figure 4).

    Args:
        data: labelled images.
        p: drop probabilities.
        seeds: of teacher and raptor, at every p.
        more_seeds, more_p: further seeds at these p, done last.
        out: folder; cells that are already there are not done again.
        jobs: processes that work at the same time. With budgets in seconds they share the machine unevenly.
        cells: only these, separated by commas (such as p0.3-s0).
    """
    started = time.monotonic()
    options = with_defaults(StochasticDepthOptions, given)
    machine = Machine.of(out, options)
    common: dict[str, Any] = {
        "data": as_spec(data),
        "val": as_spec(options["val"]),
        **part(ScratchOptions, options),
        **cut_by(options),
        **trained_by(options["recipe"]),
        **part(Limited, options),
    }
    check_scratch(common, [*p, *more_p])
    pairs = [(q, seed) for seed in seeds for q in p] + [(q, seed) for seed in more_seeds for q in more_p]
    plan = {cell_name(q, seed): Cell(cell_name(q, seed), {**common, "drop": q, "seed": seed}) for q, seed in pairs}
    sweep = Sweep(Path(out), with_contents(plan.values(), machine), machine.device)
    work, images = partial(_do_cell, machine), partial(describe_pair, common)
    results = run_sweep(sweep, work, images, **part(CellOptions, options))
    rows = [replace(StochasticDepthRow.from_dict(result), cell=name) for name, result in results.items()]
    found = StochasticDepth(
        settings=common, rows=rows, statistics=statistics(rows), missing=sweep.missing_names(), **sweep.made()
    )
    figure = figure_stochastic_depth(found) if rows else None
    return write_outcome(found, Path(out), started, machine.device, _table(rows), figure)


def cell_name(p: float, seed: int) -> str:
    return f"p{p:g}-s{seed}"


def _do_cell(machine: Machine, cell: Cell) -> StochasticDepthRow:
    """Train one teacher and its raptor."""
    options = cell.options
    pair = scratch_pair(options, machine)
    folder = machine.folder / "teachers" / cell.name
    teacher = scratch_teacher(options, pair, folder, machine)
    similarity, raptor = scratch_raptor(options, teacher, pair, machine.folder / "raptors" / cell.name, machine)
    return StochasticDepthRow(
        p=options["drop"],
        seed=options["seed"],
        teacher=teacher_scores(teacher, pair, folder, machine),
        similarity=similarity,
        raptor=raptor,
    )


def _accuracy(row: StochasticDepthRow) -> float:
    assert row.raptor.accuracy is not None, "the teachers of a sweep have a classifier"
    return row.raptor.accuracy


def statistics(rows: Sequence[StochasticDepthRow]) -> SweepStatistics:
    """Trends against p, the correlation of similarity with the last layer's R2, and the same given p."""
    if len(rows) < 3:
        return SweepStatistics()
    rows = sorted(rows, key=lambda row: (row.p, row.seed))
    p = [row.p for row in rows]
    columns = {name: [measure(row) for row in rows] for name, measure in _MEASURES.items()}
    pairs = [(x, y) for x in ("similarity", "within_phases") for y in ("bounded_r2", "r2")]
    known = {f"{x}/{y}": _known(columns[x], columns[y], p) for x, y in pairs}
    return SweepStatistics(
        trends={name: trend(*_known(p, columns[name], p)[:2]) for name in _MEASURES},
        correlations={name: correlation(x, y) for name, (x, y, _) in known.items()},
        given_p={name: partial_correlation(x, y, given) for name, (x, y, given) in known.items()},
    )


def _known(
    x: Sequence[float | None], y: Sequence[float | None], p: Sequence[float]
) -> tuple[list[float], list[float], list[float]]:
    """The rows in which all values are finite: a raptor that diverged has no R2."""
    rows = [(a, b, c) for a, b, c in zip(x, y, p) if a is not None and b is not None]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _table(rows: Sequence[StochasticDepthRow]) -> str:
    ordered = sorted(rows, key=lambda row: (row.seed, row.p))
    return markdown(_COLUMNS, [_table_line(row) for row in ordered], optional=[_NULL_COLUMN])


def _table_line(row: StochasticDepthRow) -> list[str | float | None]:
    return [
        f"{row.p:g}",
        row.seed,
        sum_of(row.raptor.phases),
        row.similarity.off_diagonal,
        row.similarity.within_phases,
        row.teacher.accuracy,
        row.teacher.train_accuracy,
        row.raptor.accuracy,
        row.raptor.probe,
        *(_MEASURES[name](row) for name in ("r2", "bounded_r2", "bounded_r2_cls", "bounded_r2_patches")),
        row.raptor.best_null(),
    ]
