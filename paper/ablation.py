"""Table 2: what each ingredient of the training adds. All rows train for the same number of steps.

Rows 1 to 4 chain the blocks of stage 1. Rows 1 to 5 are judged by the teacher's unchanged head. Row 6 is row 5 with the
head fitted again, starting from the teacher's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml
from estimates import spread
from figures import figure_ablation
from surrogates import Pair, best_teacher, cut_phases, make_surrogate, open_teacher, precision_of
from sweep import Cell, Json, SweepConfig, column, read_config, run_cells, table, where, write_result

from raptor import ViT, load_recipe, open_vit, pick_device, probe

_PLAIN = {"last_phase_weights": None, "stage2_weights": None}
# Name of a row -> its title, and what it takes out of the recipe.
ROWS: dict[str, tuple[str, Json]] = {
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
# Accuracy in the paper, %, by number of the row.
PUBLISHED = {"1": 3.9, "2": 72.7, "3": 75.2, "4": 76.7, "5": 82.4, "6": 83.0}


@dataclass(kw_only=True)
class Ablation(SweepConfig):
    """Teacher forcing only; + autoregressive; + depth scaling; + weighted cls; + joint stage; + probe refit
    (Table 2)."""

    model: str | None = None  # the teacher; by default the most accurate one of `teachers`
    teachers: str = "runs/stochastic-depth"  # folder of a stochastic-depth sweep
    weights: str | None = None  # a local weight file for the model
    size: int | None = None  # image size
    k: int = 3  # blocks
    tokens: str = "pooled"  # the tokens whose similarity is cut: all, cls, registers, patches, pooled
    base: str = "default"  # the recipe whose ingredients are added one by one
    budget: str = "1000steps"  # training of each row, both stages together; in steps, so that rows are equal
    batch_size: int = 256  # images per step
    # Peak learning rate of every row; by default that of the base recipe, which a short budget may need higher.
    lr: float | None = None
    refit_epochs: int = 5  # epochs over the training images for the refitted head
    seeds: list[int] = field(default_factory=lambda: [0])  # of every row
    out: str = "runs/ablation"


def main(config: Ablation) -> Json:
    if not config.budget.endswith(("steps", "epochs")):
        raise ValueError(f"the rows must have equal steps: give --budget in steps or epochs, not {config.budget!r}")
    common = config.options("teachers", "seeds")
    common["model"] = config.model or best_teacher(config.teachers)
    cells: dict[str, Json] = {}
    for seed in config.seeds:
        for row in ROWS:
            cells[f"{row}-s{seed}"] = {**common, "row": row, "seed": seed}
    results = run_cells(config, cells, partial(_train, config))
    rows = list(results.values())
    lines = summarise(rows)
    draw = partial(figure_ablation, lines, PUBLISHED)
    return write_result(config, "ablation", cells, {"rows": rows, "table": lines}, _table(lines), draw)


def row_recipe(base: str, row: str) -> Json:
    """The recipe of a row: the base recipe without the ingredients that the row does not have yet."""
    return {**load_recipe(base), **ROWS[row][1]}


def _train(config: Ablation, options: Json) -> Json:
    """Train one row. The joint row also fits its head again."""
    name = f"{options['row']}-s{options['seed']}"
    teacher, pair = open_teacher(options, config)
    recipe = Path(config.out) / "recipes" / f"{name}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump(row_recipe(options["base"], options["row"]), sort_keys=False))
    folder = Path(config.out) / "raptors" / name
    scores = make_surrogate(
        teacher,
        pair,
        cut_phases(teacher, pair[0], options["k"], config, options["tokens"]),
        folder,
        options,
        config,
        recipe=str(recipe),
    )
    found = {"row": options["row"], "seed": options["seed"], "refit": None, "chance": None, **scores}
    if options["row"] == "5-joint":
        found["refit"] = _refit(folder, teacher, pair, options, config)
    if pair[1].classes:
        found["chance"] = 1 / len(pair[1].classes)
    return found


def _refit(folder: Path, teacher: ViT, pair: Pair, options: Json, config: Ablation) -> Json:
    """Fit the head of the surrogate in `folder` again, and that of the teacher in the same way."""
    # `distill` saves the head that it fits for a teacher without one.
    kept = folder / "head.safetensors"
    settings: Json = {
        "epochs": options["refit_epochs"],
        "seeds": [options["seed"]],
        "init_head": str(kept) if kept.exists() else "own",
        "precision": precision_of(config),
    }
    surrogate = open_vit(folder / "surrogate", trust_hub=config.trust_hub, device=pick_device(config.device))
    fitted = probe(surrogate, "classify", *pair, **settings)
    return {
        "accuracy": fitted.score,
        "teacher_accuracy": probe(teacher, "classify", *pair, **settings).score,
        "from_head": fitted.settings.init_head != "random",
    }


def summarise(rows: Sequence[Json]) -> list[Json]:
    """The rows of Table 2: means over seeds. The last one is the joint row with its head fitted again."""
    lines: list[Json] = []
    for name, (title, _) in ROWS.items():
        found = where(rows, row=name)
        if not found:
            continue
        accuracy = spread(column(found, "accuracy"))
        line = {"number": name[0], "row": title, "num_steps": found[0]["num_steps"], "accuracy": accuracy["mean"]}
        for score in ("teacher_accuracy", "probe", "teacher_probe", "agreement", "r2_last", "r2_lowest"):
            line[score] = spread(column(found, score))["mean"]
        lines.append({**line, "num_seeds": len(found), "deviation": accuracy["deviation"]})
    refits = [row["refit"] for row in rows if row["refit"] is not None]
    if refits:
        accuracy = spread(column(refits, "accuracy"))
        again = {
            "number": "6",
            "row": "+ probe fitted again",
            "accuracy": accuracy["mean"],
            "deviation": accuracy["deviation"],
            "teacher_accuracy": spread(column(refits, "teacher_accuracy"))["mean"],
            "num_seeds": len(refits),
        }
        lines.append({**lines[-1], **again})
    return lines


def _table(lines: Sequence[Json]) -> str:
    columns: dict[str, Cell] = {
        "row": "number",
        "": "row",
        "accuracy": "accuracy",
        "sd over seeds": "deviation",
        "seeds": lambda line: None if line["num_seeds"] == 1 else line["num_seeds"],
        "teacher": "teacher_accuracy",
        "recovery": _recovery,
        "ridge probe": "probe",
        "R2 last": "r2_last",
        "R2 lowest": "r2_lowest",
        "paper (IN-1k)": lambda line: f"{PUBLISHED[line['number']]:.1f} %",
    }
    return table(lines, columns, optional=["sd over seeds", "seeds"])


def _recovery(line: Json) -> float | None:
    if line["accuracy"] is None or not line["teacher_accuracy"]:
        return None
    return float(line["accuracy"] / line["teacher_accuracy"])


if __name__ == "__main__":
    main(read_config(Ablation))
