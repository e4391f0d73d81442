"""Table 1: classification, segmentation and depth of scenes by linear probes, the teacher against k = 2, 3, 4.

Figure 5 is drawn beside it: what is kept, and R2, against k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from estimates import spread
from figures import figure_recovery
from surrogates import Pair, cut_phases, images_to_distil, make_surrogate, open_teacher, precision_of
from sweep import Json, SweepConfig, column, entry, markdown, read_config, run_cells, sum_of, where, write_result

from raptor import ViT, block_parameters, open_dense, open_vit, pick_device, probe

# Task -> its column.
TASKS = {"classify": "accuracy (%)", "segment": "mIoU (%)", "depth": "RMSE (m)"}
# The paper's scores in the order of the tasks, by k.
PUBLISHED = {
    "2": (81.2, 39.6, 0.648),
    "3": (83.0, 43.0, 0.618),
    "4": (83.2, 43.6, 0.607),
    "teacher": (84.5, 47.5, 0.578),
}
_OF_TRAINING = ("more_data", "budget", "batch_size", "recipe", "optimizer", "tokens")


@dataclass(kw_only=True)
class Table1(SweepConfig):
    """Probes of the teacher and of surrogates over k and seeds, as one table with recovery (Table 1)."""

    model: str = "timm/vit_small_patch14_reg4_dinov2"  # the teacher
    weights: str | None = None  # a local weight file for it
    more_data: list[str] | None = None  # further images to distil on, without labels, such as nyuv2:PATH
    segment: str | None = None  # data for segmentation, such as nyuv2:PATH or ade20k:PATH; left out by default
    depth: str | None = None  # data for depth, such as nyuv2:PATH; left out by default
    k: list[int] = field(default_factory=lambda: [2, 3, 4])  # numbers of blocks
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])  # of the distillations; the probes take the same one
    tokens: str = "pooled"  # the tokens whose similarity is cut: all, cls, registers, patches, pooled
    budget: str = "60s"  # training of a surrogate
    batch_size: int | None = None  # images per step of that training; by default the recipe's
    recipe: str = "default"  # recipe of that training
    optimizer: str | None = None  # optimizer of that training; by default the recipe's
    size: int | None = None  # image size for distillation and classification
    segment_size: int | None = None  # shorter side of the frames; by default the data's own
    depth_size: int | None = None  # the same for depth
    # Where the classifier starts: own (the model's own linear head, where it has one), random, or a file.
    init_head: str = "own"
    classify_epochs: int | None = None  # of the probe; by default the task's own
    segment_epochs: int | None = None  # the same for segmentation
    depth_epochs: int | None = None  # the same for depth
    # Decode the images once and keep them on the device; false reads them as they are needed.
    in_memory: bool = True
    out: str = "runs/table1"


def main(config: Table1) -> Json:
    common = config.options("k", "seeds")
    of_teacher = {name: value for name, value in common.items() if name not in _OF_TRAINING}
    cells = {"teacher": {**of_teacher, "k": None, "seed": 0}}
    for seed in config.seeds:
        for k in config.k:
            cells[f"k{k}-s{seed}"] = {**common, "k": k, "seed": seed}
    results = run_cells(config, cells, partial(_probe_cell, config))
    teacher = results.get("teacher")
    raptors = [result for name, result in results.items() if name != "teacher"]
    rows = summarise(teacher, raptors)
    found = write_result(config, "table1", cells, {"rows": rows, "cells": results}, table(rows))
    if teacher is not None and raptors:
        figure_recovery(rows).savefig(Path(config.out) / "figure5.png")
    return found


def _probe_cell(config: Table1, options: Json) -> Json:
    """Probe the teacher, or distil one surrogate and probe it."""
    teacher, pair = open_teacher(options, config)
    if options["k"] is None:
        return {"parameters": block_parameters(teacher), "probes": _probes(teacher, pair, options, config)}
    folder = Path(config.out) / "raptors" / f"k{options['k']}-s{options['seed']}"
    scores = make_surrogate(
        teacher,
        images_to_distil(pair, options, teacher.preprocess, config),
        cut_phases(teacher, pair[0], options["k"], config, options["tokens"]),
        folder,
        options,
        config,
    )
    surrogate = open_vit(folder / "surrogate", trust_hub=config.trust_hub, device=pick_device(config.device))
    probes = _probes(surrogate, pair, options, config)
    return {"k": options["k"], "seed": options["seed"], "probes": probes, **scores}


def _probes(vit: ViT, pair: Pair, options: Json, config: Table1) -> Json:
    """The probes of one model for which data was given."""
    found: Json = {}
    for task in TASKS:
        images = pair
        if task != "classify":
            if options[task] is None:
                continue
            images = _dense_pair(task, options, vit.preprocess.size)
        result = probe(
            vit,
            task,
            *images,
            size=options.get(f"{task}_size"),
            seeds=[options["seed"]],
            epochs=options[f"{task}_epochs"],
            init_head=options["init_head"] if task == "classify" else "own",
            precision=precision_of(config),
            num_workers=config.num_workers,
        )
        first = result.seeds[0]
        found[task] = {
            "score": result.score,
            "metric": result.metric,
            "higher_is_better": result.higher_is_better,
            "floors": result.floors,
            "size": result.size,
            "num_images": result.num_images,
            "at_edge": result.at_edge,
            "seconds": result.seconds,
            "picked": {"lr": first.chosen.value, "epoch": first.chosen.epoch},
            "epochs": {"done": first.epochs[-1], "planned": result.settings.epochs},
            "num_steps": first.num_steps,
        }
    return found


def _dense_pair(task: str, options: Json, size: int) -> Pair:
    """Training and held-out frames of a dense task. The limits of the images hold only for scenes."""
    spec = options[task]
    if spec != "scenes":
        return open_dense(spec, "train", task, size=size), open_dense(spec, "val", task, size=size)
    train = open_dense(spec, "train", task, limit=options["limit"], size=size)
    return train, open_dense(spec, "val", task, limit=options["val_images"], size=size)


def summarise(teacher: Json | None, raptors: Sequence[Json]) -> list[Json]:
    """A row for the teacher and one per k: mean and deviation over seeds of each score, recovery and R2."""
    rows: list[Json] = []
    if teacher is not None:
        scores = _task_scores([teacher], teacher)
        rows.append({"k": "teacher", "num_seeds": 1, "parameters": teacher["parameters"], "scores": scores})
    for k in sorted(set(column(raptors, "k"))):
        of_k = where(raptors, k=k)
        first = of_k[0]
        r2: Json = {}
        for group in first["curves"]:
            r2[group] = {}
            for name in ("r2", "bounded_r2"):
                r2[group][name] = spread(column(of_k, f"curves/{group}/{name}/-1"))
        row = {
            "k": str(k),
            "num_seeds": len(of_k),
            "parameters": first["parameters"],
            "scores": _task_scores(of_k, teacher),
            "phases": first["phases"],
            "r2": r2,
            "r2_lowest": spread(column(of_k, "r2_lowest")),
            "recovery_head": spread(column(of_k, "recovery_head")),
            "recovery_ridge": spread(column(of_k, "recovery")),
        }
        rows.append(row)
    return rows


def _task_scores(models: Sequence[Json], teacher: Json | None) -> Json:
    """Scores by task, over the probes of models with several seeds."""
    found: Json = {}
    for task in models[0]["probes"]:
        of_seeds = column(models, f"probes/{task}")
        recovery = None
        if teacher is not None and task in teacher["probes"]:
            recovery = spread([share_kept(own, teacher["probes"][task]) for own in of_seeds])
        found[task] = {
            **spread(column(of_seeds, "score")),
            "size": of_seeds[0]["size"],
            "at_edge": sum(column(of_seeds, "at_edge")),
            "recovery": recovery,
        }
    return found


def share_kept(own: Json, teacher: Json) -> float | None:
    """Score as a share of the teacher's, for errors the other way round; None where the probes trained differently."""
    top = own["score"]
    bottom = teacher["score"]
    if top is None or bottom is None or own.get("num_steps") != teacher.get("num_steps"):
        return None
    if not teacher["higher_is_better"]:
        top, bottom = bottom, top
    return top / bottom if bottom else None


def table(rows: Sequence[Json]) -> str:
    columns = ["k", "phases", "block parameters (M)"]
    probed = rows[0]["scores"] if rows else {}
    for task, title in TASKS.items():
        if task in probed:
            columns += [title, "recovery", "paper"]
    lines = []
    for row in rows:
        line = [row["k"], sum_of(row.get("phases", [])) or "–", f"{row['parameters'] / 1e6:.2f}"]
        for place, task in enumerate(TASKS):
            if task not in probed:
                continue
            score = row["scores"][task]
            line.append(shown(score, percent=task != "depth"))
            line.append(shown(score["recovery"], percent=True, unit=" %"))
            line.append(f"{PUBLISHED[row['k']][place]:g}" if row["k"] in PUBLISHED else None)
        line.append(shown(row.get("recovery_ridge"), percent=True, unit=" %"))
        line.append(shown(entry(row, "r2/all/r2")))
        lines.append(line)
    return markdown([*columns, "ridge probe, recovery", "R2 last"], lines)


def shown(found: Json | None, percent: bool = False, unit: str = "") -> str | None:
    """`mean ± deviation`; None where there is no mean."""
    if found is None or found["mean"] is None:
        return None
    texts = []
    for value in (found["mean"], found["deviation"]):
        if value is not None:
            texts.append(f"{100 * value:.1f}" if percent else f"{value:.3f}")
    return " ± ".join(texts) + unit


if __name__ == "__main__":
    main(read_config(Table1))
