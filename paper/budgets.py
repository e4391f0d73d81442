"""The default recipe against the paper's at the same short budget, over k."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from figures import figure_budgets
from surrogates import open_teacher
from sweep import Json, SweepConfig, markdown, read_config, run_cells, sum_of, write_result

from raptor import block_parameters, distill, pick_device

_COLUMNS = ("recipe", "k", "phases", "parameters_m", "recovery", "recovery_head", "agreement", "r2_last", "r2_lowest")
_SCORES = ("recovery", "recovery_head", "agreement", "r2_last", "r2_lowest", "probe", "teacher_probe", "r2", "cosine")


@dataclass(kw_only=True)
class Budgets(SweepConfig):
    """Train the default recipe at each k, and the paper's beside it, for the same time; one table."""

    model: str = "scenes"
    """The teacher."""
    weights: str | None = None
    """A local weight file for it."""
    data: list[str] = field(default_factory=lambda: ["scenes"])
    """Labelled images."""
    k: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6])
    """Blocks of the default recipe's runs."""
    paper_k: list[int] = field(default_factory=lambda: [2, 3])
    """Blocks of the paper's recipe's runs."""
    budget: str = "120s"
    """Training of each run."""
    val_images: int | None = 4000
    """Held-out images."""
    seed: int = 0
    """Of every run."""
    out: str = "runs/budgets"


def main(config: Budgets) -> Json:
    common = {name: value for name, value in config.options().items() if name not in ("k", "paper_k")}
    cells = {f"default-k{k}": {**common, "recipe": "default", "k": k} for k in config.k}
    cells |= {f"paper-k{k}": {**common, "recipe": "paper", "k": k} for k in config.paper_k}
    results = run_cells(config, cells, partial(_distil, config))
    rows = list(results.values())
    table = markdown(_COLUMNS, [[row[column] for column in _COLUMNS] for row in rows])
    figure = figure_budgets(rows) if rows else None
    return write_result(config, "budgets", cells, {"rows": rows}, table, figure)


def _distil(config: Budgets, options: Json) -> Json:
    """Distil one surrogate."""
    teacher, pair = open_teacher(options, config)
    done: Any = distill(
        teacher,
        pair,
        k=options["k"],
        recipe=options["recipe"],
        budget=options["budget"],
        seed=options["seed"],
        out=str(Path(config.out) / f"{options['recipe']}-k{options['k']}"),
        device=pick_device(config.device),
    )
    summary = done.summary
    return {
        "recipe": options["recipe"],
        "k": options["k"],
        "phases": sum_of(summary.phases),
        "parameters_m": block_parameters(done.surrogate) / 1e6,
        "teacher_parameters_m": block_parameters(teacher) / 1e6,
        "num_steps": summary.num_steps,
        "seconds": summary.seconds,
        "device": summary.device,
        **{name: getattr(summary.validation, name) for name in _SCORES},
    }


if __name__ == "__main__":
    main(read_config(Budgets))
