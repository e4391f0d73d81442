"""Figure 11: does training create block recurrence? A trained teacher, an untrained and an overfitted one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from figures import figure_untrained
from stochastic_depth import cell_name
from surrogates import Pair, best_null
from sweep import Cell, Json, read_config, run_cells, table, write_result
from teachers import ScratchConfig, check_shape, measure_teacher, scratch_pair, scratch_teacher, untrained_teacher

from raptor import ViT


@dataclass(kw_only=True)
class Untrained(ScratchConfig):
    """A trained teacher, its untrained start and an overfitted copy: similarity, and how well a surrogate fits each."""

    p: float = 0.3  # stochastic depth of the trained teacher
    seeds: list[int] = field(default_factory=lambda: [0])  # of teacher and surrogate
    # The overfitted teacher sees only these, without augmentation, smoothing or stochastic depth.
    overfit_images: int = 5000
    # Folder of a stochastic-depth sweep; its teacher at p is taken if it is there, else trained here.
    teachers: str = "runs/stochastic-depth"
    out: str = "runs/untrained"


def main(config: Untrained) -> Json:
    check_shape(config, [config.p])
    common = config.options("seeds")
    cells: dict[str, Json] = {}
    for seed in config.seeds:
        for kind in ("trained", "untrained", "overfitted"):
            cells[f"{kind}-s{seed}"] = {**common, "kind": kind, "seed": seed}
    results = run_cells(config, cells, partial(_train, config))
    rows = list(results.values())
    return write_result(config, "untrained", cells, {"rows": rows}, _table(rows), partial(figure_untrained, rows))


def _train(config: Untrained, options: Json) -> Json:
    """Make one teacher and train its surrogate."""
    name = f"{options['kind']}-s{options['seed']}"
    pair = scratch_pair(options, config)
    teacher, folder, seen = _teacher(options, pair, config, Path(config.out) / "teachers" / name)
    measured = measure_teacher(teacher, pair, seen, folder, name, options, config)
    return {"kind": options["kind"], "seed": options["seed"], **measured}


def _teacher(options: Json, pair: Pair, config: Untrained, folder: Path) -> tuple[ViT, Path, Any]:
    """The cell's teacher, its run folder and the images it was trained on."""
    train, held_out = pair
    if options["kind"] == "untrained":
        return untrained_teacher(options, len(train.classes or ()), config), folder, train
    if options["kind"] == "trained":
        swept = Path(options["teachers"]) / "teachers" / cell_name(options["p"], options["seed"])
        if (swept / "summary.json").exists():
            folder = swept
        return scratch_teacher({**options, "drop": options["p"]}, pair, folder, config), folder, train
    few = train.select(train.sample(min(options["overfit_images"], len(train))))
    steps = steps_of(options["teacher_budget"], len(train) // options["teacher_batch"])
    plain = {**options, "drop": 0.0, "augment": "none", "smoothing": 0.0, "teacher_budget": steps}
    return scratch_teacher(plain, (few, held_out), folder, config), folder, few


def steps_of(budget: str, steps_per_epoch: int) -> str:
    """A budget of epochs as steps, so that training on fewer images takes as many steps."""
    if not budget.endswith("epochs"):
        return budget
    return f"{max(1, round(float(budget.removesuffix('epochs')) * steps_per_epoch))}steps"


def _table(rows: Sequence[Json]) -> str:
    columns: dict[str, Cell] = {
        "teacher": "kind",
        "seed": "seed",
        "phases": "raptor/phases",
        "accuracy": "teacher/accuracy",
        "train": "teacher/train_accuracy",
        "similarity": "similarity/off_diagonal",
        "within phases": "similarity/within_phases",
        "within phases, cls": "similarity/means/cls/within_phases",
        "cls R2": "raptor/curves/cls/r2/-1",
        "cls bounded R2": "raptor/curves/cls/bounded_r2/-1",
        "cls correlation": "raptor/curves/cls/pearson/-1",
        "patches R2": "raptor/curves/patches/r2/-1",
        "patches bounded R2": "raptor/curves/patches/bounded_r2/-1",
        "best null, cls R2": lambda row: best_null(row["raptor"], "cls"),
        "best null, patches R2": lambda row: best_null(row["raptor"], "patches"),
    }
    return table(rows, columns, optional=["best null, cls R2", "best null, patches R2"])


if __name__ == "__main__":
    main(read_config(Untrained))
