"""Figure 4: does stochastic depth make a ViT more block-recurrent?

Teachers are trained from scratch with p = 0 .. .9, the whole block dropped per sample with the same p at every depth;
a k = 3 surrogate of each is trained in the autoregressive stage only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from estimates import correlation, partial_correlation
from figures import figure_stochastic_depth
from surrogates import best_null
from sweep import Cell, Json, column, read_config, run_cells, table, write_result
from teachers import ScratchConfig, check_shape, measure_teacher, scratch_pair, scratch_teacher

# What the claims follow along p.
MEASURES = {
    "similarity": "similarity/off_diagonal",
    "within_phases": "similarity/within_phases",
    "bounded_r2": "raptor/bounded_r2_last",
    "r2": "raptor/r2_last",
}


@dataclass(kw_only=True)
class StochasticDepth(ScratchConfig):
    """Teachers with stochastic depth and a surrogate of each: similarity, R2 and accuracy against p (Figure 4)."""

    # drop probabilities
    p: list[float] = field(default_factory=lambda: [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    seeds: list[int] = field(default_factory=lambda: [0])  # of teacher and surrogate, at every p
    more_seeds: list[int] = field(default_factory=lambda: [1])  # further seeds, done last
    more_p: list[float] = field(default_factory=lambda: [0.0, 0.3, 0.6, 0.9])  # at which p the further seeds are done
    out: str = "runs/stochastic-depth"


def main(config: StochasticDepth) -> Json:
    check_shape(config, [*config.p, *config.more_p])
    common = config.options("p", "seeds", "more_seeds", "more_p")
    cells: dict[str, Json] = {}
    for seeds, drops in ((config.seeds, config.p), (config.more_seeds, config.more_p)):
        for seed in seeds:
            for p in drops:
                cells[cell_name(p, seed)] = {**common, "drop": p, "seed": seed}
    results = run_cells(config, cells, partial(_train, config))
    rows = [{"cell": name, **result} for name, result in results.items()]
    of_rows = statistics(rows)
    found = {"rows": rows, "statistics": of_rows}
    draw = partial(figure_stochastic_depth, rows, of_rows)
    return write_result(config, "stochastic-depth", cells, found, _table(rows), draw)


def cell_name(p: float, seed: int) -> str:
    return f"p{p:g}-s{seed}"


def _train(config: StochasticDepth, options: Json) -> Json:
    """Train one teacher and its surrogate."""
    name = cell_name(options["drop"], options["seed"])
    pair = scratch_pair(options, config)
    folder = Path(config.out) / "teachers" / name
    teacher = scratch_teacher(options, pair, folder, config)
    measured = measure_teacher(teacher, pair, pair[0], folder, name, options, config)
    return {"p": options["drop"], "seed": options["seed"], **measured}


def statistics(rows: Sequence[Json]) -> Json:
    """Correlations with p, that of similarity with the last layer's R2, and the same given p."""
    found: Json = {"trends": {}, "correlations": {}, "given_p": {}}
    if len(rows) < 3:
        return found
    rows = sorted(rows, key=lambda row: (row["p"], row["seed"]))
    p = column(rows, "p")
    for name, path in MEASURES.items():
        found["trends"][name] = correlation(p, column(rows, path))
    gaps = np.subtract(column(rows, "teacher/accuracy"), column(rows, "raptor/accuracy"))
    found["trends"]["gap"] = correlation(p, gaps.tolist())
    similarity = column(rows, MEASURES["similarity"])
    r2 = column(rows, MEASURES["bounded_r2"])
    found["correlations"]["similarity/bounded_r2"] = correlation(similarity, r2)
    found["given_p"]["similarity/bounded_r2"] = partial_correlation(similarity, r2, p)
    return found


def _table(rows: Sequence[Json]) -> str:
    columns: dict[str, Cell] = {
        "p": lambda row: f"{row['p']:g}",
        "seed": "seed",
        "phases": "raptor/phases",
        "similarity": "similarity/off_diagonal",
        "within phases": "similarity/within_phases",
        "teacher": "teacher/accuracy",
        "train": "teacher/train_accuracy",
        "raptor": "raptor/accuracy",
        "raptor, probe": "raptor/probe",
        "R2 last": "raptor/r2_last",
        "bounded R2 last": "raptor/bounded_r2_last",
        "bounded cls": "raptor/curves/cls/bounded_r2/-1",
        "bounded patches": "raptor/curves/patches/bounded_r2/-1",
        "best null, R2 last": lambda row: best_null(row["raptor"]),
    }
    return table(sorted(rows, key=lambda row: (row["seed"], row["p"])), columns, optional=["best null, R2 last"])


if __name__ == "__main__":
    main(read_config(StochasticDepth))
