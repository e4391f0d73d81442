"""Block swaps: two blocks of one phase exchanged, and two of different phases. What does each cost?"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raptor.data import iterate
from raptor.devices import pick_device
from raptor.dynamics.interventions import measure_swaps
from raptor.experiments.cells import Cell, Sweep, run_sweep
from raptor.experiments.figures import figure_swaps
from raptor.experiments.outcome import Outcome, markdown, write_outcome
from raptor.experiments.small import Machine, layer_similarity, load_pair, sweep_results
from raptor.open import open_vit
from raptor.phases import find_phases
from raptor.report.style import save_figure
from raptor.train.teacher import evaluate
from raptor.vit.trajectory import swap_blocks

KINDS = ("within", "across", "within_matched", "across_matched")


def run(
    *,
    data: str,
    models: list[str] | None = None,
    teachers: str = "runs/stochastic-depth",
    weights: str | None = None,
    k: int = 3,
    num_images: int = 512,
    limit: int | None = None,
    val_images: int | None = None,
    out: str = "runs/swaps",
    jobs: int = 1,
    cells: str | None = None,
    max_seconds: float | None = None,
    device: str = "auto",
    num_workers: int = 0,
) -> Outcome:
    """Exchange every pair of blocks of each teacher: accuracy, agreement and turn of the last state, within phases and
    across them.

    Args:
        data: labelled images.
        models: the teachers; by default all of the sweep in `teachers`.
        teachers: folder of a stochastic-depth sweep.
        weights: a local weight file for the models.
        k: phases, by max-cut on training images.
        num_images: held-out images for agreement and turn.
        limit: use only this many training images.
        val_images: use only this many held-out images for accuracy.
        out: folder; cells that are already there are not done again.
        jobs: processes that work at the same time.
        cells: only these, separated by commas (such as p0.3-s0).
        max_seconds: stop cleanly after so long.
        device: auto, cpu or cuda.
        num_workers: processes that decode images, once a job.
    """
    started = time.monotonic()
    machine = Machine(Path(out), pick_device(device), num_workers)
    common = dict(data=data, weights=weights, k=k, num_images=num_images, limit=limit, val_images=val_images)
    named = {m.strip("/").replace("/", "_"): (m, None) for m in models} if models else _swept(teachers)
    plan = [Cell(name, {**common, "model": model, "p": p}) for name, (model, p) in named.items()]
    sweep = Sweep(Path(out), tuple(plan), machine.device)
    results = run_sweep(sweep, partial(one_cell, machine), jobs=jobs, cells=cells, max_seconds=max_seconds)
    rows = [{"cell": name, **result} for name, result in results.items()]
    values = {"settings": common, "rows": rows, "missing": sweep.missing_names(), **sweep.made()}
    figures = save_figure(figure_swaps(rows), Path(out) / "swaps") if rows else []
    return write_outcome("swaps", Path(out), started, machine.device, values, table(rows), figures)


@torch.no_grad()
def one_cell(machine: Machine, cell: Cell) -> dict[str, Any]:
    """Swap every pair of blocks of one teacher."""
    options = cell.options
    vit = open_vit(options["model"], weights=options["weights"], device=machine.device)
    pair = load_pair(
        options["data"], vit.preprocess, options["limit"], options["val_images"], machine.device, machine.num_workers
    )
    train, held_out = pair
    phases = find_phases(layer_similarity(vit, train, machine)["all"], options["k"]).lengths
    num = min(options["num_images"], len(held_out))
    batches = iterate(held_out, vit.preprocess, num, device=machine.device, limit=num)
    swaps = measure_swaps(vit, next(iter(batches)).images, phases)
    compared = {group: _known(swaps.compare(spread.mean)) for group, spread in swaps.angle.items()}
    if swaps.agreement is not None:
        compared["agreement"] = _known(swaps.compare(swaps.agreement.mean))
    result = {
        "p": options["p"], "phases": list(phases), "pairs": swaps.pairs, "compared": compared,
        "angle": swaps.angle["all"].mean.tolist(), "finding": swaps.finding(),
    }  # fmt: skip
    if vit.num_classes != len(train.classes or ()):
        return result
    clean = evaluate(vit, held_out, machine.precision)
    accuracy = []
    for i, j in swaps.pairs:
        with swap_blocks(vit, i, j):
            accuracy.append(evaluate(vit, held_out, machine.precision))
    kept = _known(swaps.compare(np.array(accuracy)))
    chance = 1 / max(1, vit.num_classes)
    return result | {"accuracy": clean, "swapped_accuracy": accuracy, "compared_accuracy": kept, "chance": chance}


def _known(means: dict[str, float]) -> dict[str, float | None]:
    """Means with None where there is no such pair."""
    return {name: float(value) if np.isfinite(value) else None for name, value in means.items()}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            row["cell"], "+".join(map(str, row["phases"])), row.get("accuracy"),
            *(row.get("compared_accuracy", {}).get(kind) for kind in KINDS),
            *(row["compared"]["all"][kind] for kind in KINDS),
        ]
        for row in rows
    ]  # fmt: skip
    kinds = ("within", "across", "within, equal distance", "across, equal distance")
    names = [f"{what} {kind}" for what in ("accuracy", "turn (rad)") for kind in kinds]
    return markdown(("teacher", "phases", "accuracy", *names), lines)


def _swept(teachers: str) -> dict[str, tuple[str, float | None]]:
    """Name, folder and p of every teacher of a sweep."""
    rows = sweep_results(teachers, "stochastic-depth")["rows"]
    return {row["cell"]: (str(Path(teachers) / "teachers" / row["cell"] / "teacher"), row["p"]) for row in rows}
