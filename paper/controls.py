"""Is recurrence what works? Students with as many parameters or as little help, trained on the same images.

Every student has k blocks and learns from the same teacher in the same number of steps:

- tied: the surrogate, whose blocks repeat and know their depth by a table.
- autonomous: the same blocks repeat and do not know their depth.
- untied: each block is used once and has to do what a whole phase does.
- paper: the paper's block from scratch, trained by the paper's recipe.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from estimates import spread
from surrogates import cut_phases, images_to_distil, make_surrogate, open_teacher
from sweep import Cell, Json, SweepConfig, column, read_config, run_cells, table, where, write_result
from torch import Tensor, nn

from raptor import Phases, ViT, open_vit

# Name of a student -> its title, and the options of its distillation that differ from the recipe's.
STUDENTS: dict[str, tuple[str, Json]] = {
    "tied": ("tied, with depth rows", {}),
    "autonomous": ("tied, autonomous", {"conditioning": "none"}),
    "untied": ("untied, each block once", {"conditioning": "none"}),
    "paper": ("the paper's block and recipe", {"recipe": "paper", "optimizer": None}),
}
# Score -> its column.
SCORES = {
    "r2_last": "R2 last",
    "r2_ends": "R2 lowest phase end",
    "agreement": "agreement",
    "recovery": "accuracy kept, ridge probe refitted",
    "recovery_head": "accuracy kept, teacher's head",
}


@dataclass(kw_only=True)
class Controls(SweepConfig):
    """Students with the parameters of a surrogate but without its recurrence, its depth rows or its recipe."""

    model: str = "timm/vit_small_patch14_reg4_dinov2"  # the teacher
    weights: str | None = None  # a local weight file for it
    more_data: list[str] | None = None  # further images to distil on, without labels, such as nyuv2:PATH
    size: int | None = None  # image size
    k: int = 3  # blocks of each student
    tokens: str = "pooled"  # the tokens whose similarity is cut: all, cls, registers, patches, pooled
    recipe: str = "long"  # recipe of all students but the paper's
    optimizer: str | None = None  # their optimizer; by default the recipe's
    budget: str = "5000steps"  # training of each student, in steps, so that they are equal
    batch_size: int = 64  # images per step
    seeds: list[int] = field(default_factory=lambda: [0])  # of the distillations
    out: str = "runs/controls"


class Stretch(nn.Module):
    """The blocks of a phase as one block. A student's copy of it keeps only the middle one."""

    def __init__(self, blocks: Sequence[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def own(self) -> None:
        middle = (len(self.blocks) - 1) // 2
        self.blocks = nn.ModuleList([self.blocks[middle]])

    def forward(self, x_btd: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x_btd = block(x_btd, *args, **kwargs)
        return x_btd


def in_stretches(teacher: ViT, phases: Phases) -> ViT:
    """The same teacher, seen as one block per phase: only the states at the ends of phases are left."""
    model = copy.deepcopy(teacher.model)
    path = teacher.blocks_path
    blocks = list(model.get_submodule(path).children())
    stretches = [Stretch(blocks[first - 1 : last]) for first, last in phases.spans]
    model.set_submodule(path, nn.Sequential(*stretches))
    name = f"{teacher.name} by phases"
    return open_vit(model, blocks=path, size=teacher.preprocess.size, name=name, device=teacher.device)


def main(config: Controls) -> Json:
    common = config.options("seeds")
    cells: dict[str, Json] = {}
    for seed in config.seeds:
        for student in STUDENTS:
            cells[f"{student}-s{seed}"] = {**common, "student": student, "seed": seed}
    results = run_cells(config, cells, partial(_train, config))
    rows = summarise(list(results.values()))
    return write_result(config, "controls", cells, {"rows": rows, "cells": results}, _table(rows))


def _train(config: Controls, options: Json) -> Json:
    """Train one student, measure it, and keep its curves at the ends of phases."""
    teacher, pair = open_teacher(options, config)
    phases = cut_phases(teacher, pair[0], options["k"], config, options["tokens"])
    student = options["student"]
    blocks = phases
    if student == "untied":
        teacher = in_stretches(teacher, phases)
        blocks = Phases((1,) * phases.k)
        # To compile a stretch of seven blocks takes minutes, which a student of three calls does not win back.
        config = dataclasses.replace(config, compile=False)
    folder = Path(config.out) / "students" / f"{student}-s{options['seed']}"
    images = images_to_distil(pair, options, teacher.preprocess, config)
    scores = make_surrogate(teacher, images, blocks, folder, options, config, **STUDENTS[student][1])
    # Students are compared at the states that all of them have. The untied one has no others.
    r2 = scores["curves"]["all"]["r2"]
    at_ends = r2 if student == "untied" else [r2[last - 1] for _, last in phases.spans]
    return {"student": student, "seed": options["seed"], **scores, "phases": list(phases), "r2_ends": min(at_ends)}


def summarise(results: Sequence[Json]) -> list[Json]:
    """One row per student: means and deviations over seeds."""
    rows: list[Json] = []
    for student, (title, _) in STUDENTS.items():
        found = where(results, student=student)
        if found:
            row: Json = {"student": student, "title": title, "num_seeds": len(found), "scores": {}}
            for name in ("phases", "parameters", "num_steps"):
                row[name] = found[0][name]
            for name in SCORES:
                row["scores"][name] = spread(column(found, name))
            rows.append(row)
    return rows


def _table(rows: Sequence[Json]) -> str:
    columns: dict[str, Cell] = {"student": "title", "phases": "phases"}
    columns["block parameters (M)"] = lambda row: f"{row['parameters'] / 1e6:.2f}"
    for score, name in SCORES.items():
        columns[name] = f"scores/{score}/mean"
    return table(rows, columns)


if __name__ == "__main__":
    main(read_config(Controls))
