"""Figure 4: does stochastic depth make a ViT more block-recurrent?

Teachers are trained from scratch with p = 0 .. .9, the whole block dropped per sample with the same p at every depth;
a k = 3 surrogate of each is trained in the autoregressive stage only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from estimates import correlation, partial_correlation, trend
from figures import figure_stochastic_depth
from surrogates import best_null
from sweep import Json, markdown, read_config, run_cells, sum_of, write_result
from teachers import (
    ScratchConfig,
    check_shape,
    scratch_pair,
    scratch_surrogate,
    scratch_teacher,
    similarity_of,
    teacher_scores,
)

MEASURES: dict[str, Callable[[Json], float | None]] = {
    "similarity": lambda row: row["similarity"]["off_diagonal"],
    "within_phases": lambda row: row["similarity"]["within_phases"],
    "bounded_r2": lambda row: row["raptor"]["bounded_r2_last"],
    "r2": lambda row: row["raptor"]["r2_last"],
    "bounded_r2_cls": lambda row: row["raptor"]["curves"]["cls"]["bounded_r2"][-1],
    "bounded_r2_patches": lambda row: row["raptor"]["curves"]["patches"]["bounded_r2"][-1],
    "teacher": lambda row: row["teacher"]["accuracy"],
    "raptor": lambda row: row["raptor"]["accuracy"],
    "gap": lambda row: row["teacher"]["accuracy"] - row["raptor"]["accuracy"],
    "recovery": lambda row: row["raptor"]["accuracy"] / max(row["teacher"]["accuracy"], 1e-9),
}


@dataclass(kw_only=True)
class StochasticDepth(ScratchConfig):
    """Teachers with stochastic depth and a surrogate of each: similarity, R2 and accuracy against p (Figure 4)."""

    p: list[float] = field(default_factory=lambda: [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    """Drop probabilities."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Of teacher and surrogate, at every p."""
    more_seeds: list[int] = field(default_factory=lambda: [1])
    """Further seeds, done last."""
    more_p: list[float] = field(default_factory=lambda: [0.0, 0.3, 0.6, 0.9])
    """At which p the further seeds are done."""
    out: str = "runs/stochastic-depth"


def main(config: StochasticDepth) -> Json:
    check_shape(config, [*config.p, *config.more_p])
    pairs = [(p, seed) for seed in config.seeds for p in config.p]
    pairs += [(p, seed) for seed in config.more_seeds for p in config.more_p]
    common = {k: v for k, v in config.options().items() if k not in ("p", "seeds", "more_seeds", "more_p")}
    cells = {cell_name(p, seed): {**common, "drop": p, "seed": seed} for p, seed in pairs}
    results = run_cells(config, cells, partial(_train, config))
    rows = [{"cell": name, **result} for name, result in results.items()]
    of_rows = statistics(rows)
    found = {"rows": rows, "statistics": of_rows}
    figure = figure_stochastic_depth(rows, of_rows) if rows else None
    return write_result(config, "stochastic-depth", cells, found, _table(rows), figure)


def cell_name(p: float, seed: int) -> str:
    return f"p{p:g}-s{seed}"


def _train(config: StochasticDepth, options: Json) -> Json:
    """Train one teacher and its surrogate."""
    name = cell_name(options["drop"], options["seed"])
    pair = scratch_pair(options, config)
    folder = Path(config.out) / "teachers" / name
    teacher = scratch_teacher(options, pair, folder, config)
    similarity = similarity_of(teacher, pair[0], options, config)
    surrogate = scratch_surrogate(options, teacher, pair, similarity, Path(config.out) / "raptors" / name, config)
    return {
        "p": options["drop"],
        "seed": options["seed"],
        "teacher": teacher_scores(teacher, pair, folder, config),
        "similarity": similarity,
        "raptor": surrogate,
    }


def statistics(rows: Sequence[Json]) -> Json:
    """Trends against p, the correlation of similarity with the last layer's R2, and the same given p."""
    if len(rows) < 3:
        return {"trends": {}, "correlations": {}, "given_p": {}}
    rows = sorted(rows, key=lambda row: (row["p"], row["seed"]))
    columns: dict[str, list[float | None]] = {"p": [row["p"] for row in rows]}
    columns |= {name: [measure(row) for row in rows] for name, measure in MEASURES.items()}
    trends = {}
    for name in MEASURES:
        p, values = _known(columns["p"], columns[name])
        trends[name] = trend(p, values)
    correlations, given_p = {}, {}
    for x in ("similarity", "within_phases"):
        for y in ("bounded_r2", "r2"):
            of_x, of_y, p = _known(columns[x], columns[y], columns["p"])
            correlations[f"{x}/{y}"] = correlation(of_x, of_y)
            given_p[f"{x}/{y}"] = partial_correlation(of_x, of_y, p)
    return {"trends": trends, "correlations": correlations, "given_p": given_p}


def _known(*columns: Sequence[float | None]) -> list[list[float]]:
    """The columns without the rows in which a value is None: a surrogate that diverged has no R2."""
    kept = [[v for v in row if v is not None] for row in zip(*columns, strict=True) if None not in row]
    return [[row[i] for row in kept] for i in range(len(columns))]


def _table(rows: Sequence[Json]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: (row["seed"], row["p"])):
        teacher, raptor = row["teacher"], row["raptor"]
        line = [f"{row['p']:g}", row["seed"], sum_of(raptor["phases"])]
        line += [MEASURES["similarity"](row), MEASURES["within_phases"](row)]
        line += [teacher["accuracy"], teacher["train_accuracy"], raptor["accuracy"], raptor["probe"]]
        line += [MEASURES[name](row) for name in ("r2", "bounded_r2", "bounded_r2_cls", "bounded_r2_patches")]
        lines.append([*line, best_null(raptor)])
    columns = ["p", "seed", "phases", "similarity", "within phases", "teacher", "train", "raptor", "raptor, probe"]
    columns += ["R2 last", "bounded R2 last", "bounded cls", "bounded patches", "best null, R2 last"]
    return markdown(columns, lines, optional=columns[-1:])


if __name__ == "__main__":
    main(read_config(StochasticDepth))
