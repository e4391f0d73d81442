"""Table 1: classification, segmentation and depth by linear probes, the teacher against k = 2, 3, 4."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from raptor.data import open_dense
from raptor.devices import pick_device
from raptor.experiments.cells import Cell, Sweep, run_sweep
from raptor.experiments.figures import figure_recovery
from raptor.experiments.outcome import Outcome, markdown, write_outcome
from raptor.experiments.small import Machine, layer_similarity, load_pair, make_raptor
from raptor.fidelity.heads import share_kept
from raptor.open import open_vit
from raptor.phases import find_phases
from raptor.probes import probe
from raptor.report.style import save_figure
from raptor.surrogate.surrogate import block_parameters
from raptor.vit.view import ViT

TASKS = ("classify", "segment", "depth")
TITLES = {"classify": "accuracy (%)", "segment": "mIoU (%)", "depth": "RMSE (m)"}
PAPER = {
    "2": (81.2, 39.6, 0.648),
    "3": (83.0, 43.0, 0.618),
    "4": (83.2, 43.6, 0.607),
    "teacher": (84.5, 47.5, 0.578),
}
CURVE_METRICS = ("r2", "bounded_r2")


def run(
    *,
    model: str = "timm/vit_small_patch14_reg4_dinov2",
    weights: str | None = None,
    data: str,
    segment: str | None = None,
    depth: str | None = None,
    k: list[int] = [2, 3, 4],  # noqa: B006
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    budget: str = "60s",
    batch_size: int | None = None,
    recipe: str = "default",
    size: int | None = None,
    segment_size: int | None = None,
    depth_size: int | None = None,
    init_head: str = "own",
    classify_epochs: int | None = None,
    segment_epochs: int | None = None,
    depth_epochs: int | None = None,
    probe_seconds: float | None = None,
    limit: int | None = None,
    val_images: int | None = None,
    in_memory: bool = True,
    out: str = "runs/table1",
    jobs: int = 1,
    cells: str | None = None,
    max_seconds: float | None = None,
    device: str = "auto",
    num_workers: int = 0,
    compile: bool | None = None,
) -> Outcome:
    """Probes of the teacher and of surrogates over k and seeds, as one table with recovery (Table 1).

    Args:
        model: the teacher.
        weights: a local weight file for it.
        data: labelled images, for distillation and classification.
        segment: data for segmentation, such as nyuv2:PATH or ade20k:PATH; left out by default.
        depth: data for depth, such as nyuv2:PATH; left out by default.
        k: numbers of blocks.
        seeds: of the distillations; the probes take the same one.
        budget: training of a surrogate. Budgets in seconds are for one job at a time.
        batch_size, recipe: of that training.
        size: image size for distillation and classification.
        segment_size, depth_size: shorter side of the frames; by default the data's own.
        init_head: where the classifier starts: own (the model's own linear head, where it has one), random, or a file.
        classify_epochs, segment_epochs, depth_epochs: of the probes; by default each task's own.
        probe_seconds: stop each probe's training after so long; its schedule then ends by the clock.
        limit: use only this many training images for distillation and classification.
        val_images: use only this many held-out images there.
        in_memory: decode the images once and keep them on the device; false reads them as they are needed.
        out: folder; cells that are already there are not done again.
        jobs: processes that work at the same time.
        cells: only these, separated by commas (such as teacher or k3-s0).
        max_seconds: stop cleanly after so long.
        device: auto, cpu or cuda.
        num_workers: processes that decode images.
        compile: compile the blocks; by default on a GPU only.
    """
    started = time.monotonic()
    machine = Machine(Path(out), pick_device(device), num_workers, compile)
    common = dict(
        model=model, weights=weights, data=data, segment=segment, depth=depth, budget=budget, batch_size=batch_size,
        recipe=recipe, size=size, segment_size=segment_size, depth_size=depth_size, init_head=init_head,
        classify_epochs=classify_epochs, segment_epochs=segment_epochs, depth_epochs=depth_epochs,
        probe_seconds=probe_seconds, limit=limit, val_images=val_images, in_memory=in_memory,
    )  # fmt: skip
    plan = [Cell("teacher", {**common, "k": None, "seed": 0})]
    plan += [Cell(f"k{n}-s{s}", {**common, "k": n, "seed": s}) for s in seeds for n in k]
    sweep = Sweep(Path(out), tuple(plan), machine.device)
    results = run_sweep(sweep, partial(one_cell, machine), jobs=jobs, cells=cells, max_seconds=max_seconds)
    rows = summarise(results)
    values = {"settings": common, "rows": rows, "cells": results, "missing": sweep.missing_names(), **sweep.made()}
    figures = (
        save_figure(figure_recovery(rows), Path(out) / "figure5") if len(rows) > 1 and rows[0]["k"] == "teacher" else []
    )
    return write_outcome("table1", Path(out), started, machine.device, values, table(rows), figures)


def one_cell(machine: Machine, cell: Cell) -> dict[str, Any]:
    """Probe the teacher, or distil one surrogate and probe it."""
    options = cell.options
    teacher = open_vit(options["model"], weights=options["weights"], size=options["size"], device=machine.device)
    pair = load_pair(
        options["data"], teacher.preprocess, options["limit"], options["val_images"], machine.device,
        machine.num_workers, options["in_memory"],
    )  # fmt: skip
    if options["k"] is None:
        return {"k": None, "parameters": block_parameters(teacher), "probes": probes(teacher, pair, options, machine)}
    phases = find_phases(layer_similarity(teacher, pair[0], machine)["all"], options["k"]).lengths
    folder = machine.folder / "raptors" / cell.name
    result = make_raptor(
        teacher, pair, phases, folder, machine, recipe=options["recipe"], budget=options["budget"],
        batch_size=options["batch_size"], seed=options["seed"], num_workers=machine.num_workers,
    )  # fmt: skip
    surrogate = open_vit(folder / "surrogate", device=machine.device)
    return {"k": options["k"], "seed": options["seed"], **result, "probes": probes(surrogate, pair, options, machine)}


def probes(vit: ViT, pair: Any, options: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """The three probes of one model, as far as there is data for them."""
    found = {}
    for task in TASKS:
        spec, size = options.get(task), options.get(f"{task}_size")
        if task == "classify":
            both = pair
        elif spec is None:
            continue
        else:
            both = _dense(spec, task, options, vit)
        result = probe(
            vit, task, *both, size=size, seeds=[options["seed"]], epochs=options[f"{task}_epochs"],
            init_head=options["init_head"] if task == "classify" else "own", precision=machine.precision,
            max_seconds=options["probe_seconds"], num_workers=machine.num_workers,
        )  # fmt: skip
        kept = ("metric", "higher_is_better", "size", "num_images", "at_edge", "seconds", "chosen", "last")
        picked = {"lr": result.seeds[0].chosen.value, "epoch": result.seeds[0].chosen.epoch}
        found[task] = {"score": result.score, **{name: result.to_dict()[name] for name in kept}, "picked": picked}
        found[task]["epochs"] = {"done": result.seeds[0].epochs[-1], "planned": result.settings.epochs}
    return found


def _dense(spec: str, task: str, options: dict[str, Any], vit: ViT) -> tuple[Any, Any]:
    limits = (options["limit"], options["val_images"]) if spec == "scenes" else (None, None)
    train, held_out = (
        open_dense(spec, split, task, limit=num, size=vit.preprocess.size)  # type: ignore[arg-type]
        for split, num in zip(("train", "val"), limits)
    )
    return train, held_out


def summarise(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for the teacher and one a k: mean and deviation over seeds of each score, recovery, R2."""
    teacher = results.get("teacher")
    rows = [] if teacher is None else [_row("teacher", [teacher], teacher)]
    ks = sorted({result["k"] for result in results.values() if result["k"] is not None})
    return rows + [_row(str(k), [r for r in results.values() if r["k"] == k], teacher) for k in ks]


def _row(k: str, found: list[dict[str, Any]], teacher: dict[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"k": k, "num_seeds": len(found), "parameters": found[0]["parameters"], "scores": {}}
    for task in found[0]["probes"]:
        scores = [f["probes"][task]["score"] for f in found]
        at_edge = sum(f["probes"][task]["at_edge"] for f in found)
        row["scores"][task] = spread(scores) | {"size": found[0]["probes"][task]["size"], "at_edge": at_edge}
        if teacher is not None and task in teacher["probes"]:
            score, higher = (teacher["probes"][task][name] for name in ("score", "higher_is_better"))
            row["scores"][task]["recovery"] = spread([share_kept(s, score, higher) for s in scores])
    if k != "teacher":
        row["phases"] = found[0]["phases"]
        row["r2"] = {
            group: {m: spread([f["curves"][group][m][-1] for f in found]) for m in CURVE_METRICS}
            for group in found[0]["curves"]
        }
        row["r2_lowest"] = spread([f["r2_lowest"] for f in found])
        row["recovery_head"] = spread([f["recovery_head"] for f in found])
        row["recovery_ridge"] = spread([f["recovery"] for f in found])
    return row


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample deviation; None where a value is missing, or for the deviation of one."""
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        return {"mean": None, "deviation": None}
    return {"mean": fmean(known), "deviation": stdev(known) if len(known) > 1 else None}


def table(rows: list[dict[str, Any]]) -> str:
    tasks = [task for task in TASKS if rows and task in rows[0]["scores"]]
    columns = ["k", "phases", "block parameters (M)"]
    for task in tasks:
        columns += [TITLES[task], "recovery", "paper"]
    lines = []
    for row in rows:
        line = [row["k"], "+".join(map(str, row.get("phases", []))) or "–", f"{row['parameters'] / 1e6:.2f}"]
        for task in tasks:
            found = row["scores"][task]
            paper = PAPER.get(row["k"], (None,) * 3)[TASKS.index(task)]
            line += [
                shown(found) if task == "depth" else shown(found, percent=True),
                shown(found.get("recovery", {}), percent=True, unit=" %"),
                paper if paper is None else f"{paper:g}",
            ]
        ridge = shown(row.get("recovery_ridge", {}), percent=True, unit=" %")
        lines.append([*line, ridge, shown(row.get("r2", {}).get("all", {}).get("r2", {}))])
    return markdown([*columns, "ridge probe, recovery", "R2 last"], lines)


def shown(found: dict[str, Any], percent: bool = False, unit: str = "") -> str | None:
    """`mean ± deviation`."""
    if found.get("mean") is None:
        return None
    scale, digits = (100, 1) if percent else (1, 3)
    text = f"{scale * found['mean']:.{digits}f}"
    if found.get("deviation") is not None:
        text += f" ± {scale * found['deviation']:.{digits}f}"
    return text + unit
