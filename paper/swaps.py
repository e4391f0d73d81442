"""Block swaps: two blocks of one phase exchanged, and two of different phases. What does each cost?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from cells import Cell, CellOptions, Sweep, SweepOptions, run_sweep
from figures import figure_swaps
from outcome import Outcome, markdown, sum_of, write_outcome
from records import Compared, StochasticDepth, SwapRow, Swaps
from surrogates import (
    CutBy,
    Machine,
    SweptTeachers,
    check_cells,
    cut_phases,
    describe_pair,
    open_teacher,
    with_contents,
)

from raptor.data import ImageData, iterate
from raptor.data.by_name import as_spec
from raptor.data.classes import for_head
from raptor.dynamics.swaps import WITHOUT, compare_pairs, measure_swaps
from raptor.fidelity.heads import Head
from raptor.options import Limited, Trusting, WeightFile, part, with_defaults
from raptor.provenance import recorded
from raptor.train.teacher import evaluate
from raptor.vit.trajectory import swap_blocks
from raptor.vit.view import ViT

_KINDS = ("within", "across", "within_matched", "across_matched")


class SwapsOptions(CutBy, SweptTeachers, WeightFile, Trusting, SweepOptions, Limited, total=False):
    """The options that swaps shares with other experiments."""


@recorded
def run(
    *,
    data: list[str] | str,
    models: list[str] | None = None,
    k: int = 3,
    num_images: int = 512,
    out: str = "runs/swaps",
    **given: Unpack[SwapsOptions],
) -> Outcome[Swaps]:
    """Exchange every pair of blocks of each teacher: accuracy, agreement and angle of the last state, within and across
    phases.

    Args:
        data: labelled images.
        models: the teachers; by default all of the sweep in `teachers`.
        weights: a local weight file for the models.
        k: phases, by max-cut on training images.
        num_images: held-out images for agreement and angle.
        val_images: use only this many held-out images for accuracy.
        out: folder; cells that are already there are not done again.
        cells: only these, separated by commas (such as p0.3-s0).
    """
    started = time.monotonic()
    options = with_defaults(SwapsOptions, given)
    machine = Machine.of(out, options)
    common: dict[str, Any] = dict(
        data=as_spec(data),
        val=as_spec(options["val"]),
        weights=options["weights"],
        k=k,
        num_images=num_images,
        **part(Limited, options),
        tokens=options["tokens"],  # also all: cells without the entry were cut by either
    )
    named = {m.strip("/").replace("/", "_"): (m, None) for m in models} if models else _swept(options["teachers"])
    plan = [Cell(name, {**common, "model": model, "p": p}) for name, (model, p) in named.items()]
    sweep = Sweep(Path(out), with_contents(plan, machine), machine.device)
    check_cells(sweep, machine)
    work, images = partial(_do_cell, machine), partial(describe_pair, common)
    results = run_sweep(sweep, work, images, **part(CellOptions, options))
    rows = [replace(SwapRow.from_dict(result), cell=name) for name, result in results.items()]
    found = Swaps(settings=common, rows=rows, missing=sweep.missing_names(), **sweep.made())
    figure = figure_swaps(rows) if rows else None
    return write_outcome(found, Path(out), started, machine.device, _table(rows), figure)


@torch.no_grad()
def _do_cell(machine: Machine, cell: Cell) -> SwapRow:
    """Swap every pair of blocks of one teacher."""
    options = cell.options
    vit, (train, held_out) = open_teacher(options, machine)
    judged = _of_head(vit, held_out)
    phases = cut_phases(vit, train, options["k"], machine, options["tokens"])
    num = min(options["num_images"], len(held_out))
    batches = iterate(held_out, vit.preprocess, num, device=machine.device, limit=num)
    swaps = measure_swaps(vit, next(iter(batches)).images, phases)
    compared = {group: _compared(swaps.compare(spread.mean)) for group, spread in swaps.angle.items()}
    rest = partial(compare_pairs, swaps.pairs, phases=phases, without=WITHOUT[1])
    turn, stays = swaps.angle["all"], swaps.agreement
    if stays is not None:
        compared["agreement"] = _compared(swaps.compare(stays.mean))
    row = SwapRow(
        p=options["p"],
        phases=list(phases.lengths),
        pairs=swaps.pairs,
        compared=compared,
        angle=turn.mean.tolist(),
        angle_std=None if turn.std is None else turn.std.tolist(),
        finding=swaps.finding(),
        num_images=num,
        matched_std=swaps.matched_std,
        without_first=_compared(rest(values=turn.mean)),
        without_first_agreement=None if stays is None else _compared(rest(values=stays.mean)),
    )
    if judged is None:
        return row
    accuracy = []
    for i, j in swaps.pairs:
        with swap_blocks(vit, i, j):
            accuracy.append(evaluate(vit, judged, machine.precision))
    return replace(
        row,
        accuracy=evaluate(vit, judged, machine.precision),
        swapped_accuracy=accuracy,
        compared_accuracy=_compared(swaps.compare(np.array(accuracy))),
        without_first_accuracy=_compared(rest(values=np.array(accuracy))),
        chance=1 / vit.num_classes,
    )


def _of_head(vit: ViT, data: ImageData) -> ImageData | None:
    """`data` with labels as the head of `vit` numbers its classes; None without a head or without labels."""
    found = for_head(data, vit.num_classes, names=vit.classes)
    if not vit.num_classes or found.labels is None:
        return None
    classes = found.classes or []
    if not Head("own", vit.num_classes, classes=vit.classes).is_of(classes):
        named = f", such as {vit.classes[0]}" if vit.classes else ""
        raise ValueError(
            f"{data.name} has {len(classes)} classes, such as {classes[0]}, which are not the {vit.num_classes} of the "
            f"head of {vit.name}{named}: give --data with images of these, or without labels"
        )
    return found


def _compared(means: dict[str, float]) -> Compared:
    """Means with None where there is no such pair."""
    return Compared(**{name: float(value) if np.isfinite(value) else None for name, value in means.items()})


def _table(rows: Sequence[SwapRow]) -> str:
    lines = [
        [
            row.cell,
            sum_of(row.phases),
            row.accuracy,
            *(row.compared_accuracy.mean(kind) if row.compared_accuracy else None for kind in _KINDS),
            *(row.compared["all"].mean(kind) for kind in _KINDS),
            *(row.without_first_accuracy.mean(kind) if row.without_first_accuracy else None for kind in _KINDS),
            *(row.without_first.mean(kind) if row.without_first else None for kind in _KINDS),
        ]
        for row in rows
    ]
    kinds = ("within", "across", "within, equal distance", "across, equal distance")
    whats = ("accuracy", "turn (rad)", "accuracy without block 1,", "turn without block 1,")
    names = ["accuracy", *(f"{what} {kind}" for what in whats for kind in kinds)]
    return markdown(("teacher", "phases", *names), lines, optional=names)


def _swept(teachers: str) -> dict[str, tuple[str, float | None]]:
    """Name, folder and p of every teacher of a sweep."""
    rows = StochasticDepth.read(teachers).rows
    return {row.cell: (str(Path(teachers) / "teachers" / row.cell / "teacher"), row.p) for row in rows}
