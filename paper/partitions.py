"""Figure 3: does it matter where depth is cut? Max-cut against random contiguous partitions, the same budget each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from estimates import correlation, z_score
from figures import figure_partitions
from numpy.typing import ArrayLike
from surrogates import best_teacher, layer_similarity, make_surrogate, open_teacher
from sweep import Json, SweepConfig, markdown, read_config, run_cells, sum_of, write_json, write_result

from raptor import Phases, check_cuts, find_phases, num_partitions, sample_partitions

MEASURES = ("accuracy", "probe", "r2_last", "bounded_r2_last", "r2_lowest")
_DP_SCORES = ("weighted", "mean", "cut")


@dataclass(kw_only=True)
class Partitions(SweepConfig):
    """Surrogates of one teacher cut by max-cut, by the dynamic programme and at random, the same budget each
    (Figure 3)."""

    model: str | None = None
    """The teacher; by default the most accurate one of `teachers`."""
    teachers: str = "runs/stochastic-depth"
    """Folder of a stochastic-depth sweep."""
    weights: str | None = None
    """A local weight file for the model."""
    k: list[int] = field(default_factory=lambda: [2, 3, 4])
    """Numbers of blocks."""
    tokens: str = "pooled"
    """The tokens whose similarity is cut: all, cls, registers, patches, pooled."""
    num_random: int = 10
    """Random partitions per k, drawn without replacement from all others with minimum length 1."""
    budget: str = "300steps"
    """Training of a surrogate, only in the joint autoregressive stage."""
    batch_size: int = 256
    """Images per step of that training."""
    recipe: str = "default"
    """Recipe of that training."""
    seed: int = 0
    """Of the draws and of every surrogate."""
    maxcut_seeds: list[int] = field(default_factory=list)
    """Further seeds of the max-cut surrogates, so that their place among the random ones has an interval."""
    out: str = "runs/partitions"


def main(config: Partitions) -> Json:
    model = config.model or best_teacher(config.teachers)
    without = ("teachers", "k", "num_random", "maxcut_seeds")
    common = {name: value for name, value in config.options().items() if name not in without} | {"model": model}
    plan = _read_or_make_plan(config, common)
    cells: dict[str, Json] = {}
    for ways in plan["partitions"].values():
        for lengths in [*_chosen(ways).values(), *ways["random"]]:
            cells[cell_name(lengths)] = {**common, "phases": lengths}
    again = [seed for seed in config.maxcut_seeds if seed != config.seed]
    for seed in again:
        for ways in plan["partitions"].values():
            lengths = ways["maxcut"]
            cells[f"{cell_name(lengths)}-s{seed}"] = {**common, "phases": lengths, "seed": seed}
    results = run_cells(config, cells, partial(_train, config))
    rows, more = [], []
    for ways in plan["partitions"].values():
        named = [*_chosen(ways).items(), *(("random", lengths) for lengths in ways["random"])]
        rows += [_row(way, lengths, results, config.seed) for way, lengths in named if cell_name(lengths) in results]
    for seed in again:
        for ways in plan["partitions"].values():
            if f"{cell_name(ways['maxcut'])}-s{seed}" in results:
                more.append(_row("maxcut", ways["maxcut"], results, seed, f"-s{seed}"))
    of_k = {str(k): [row for row in rows if row["k"] == k] for k in config.k}
    found = {
        "partitions": plan["partitions"],
        "similarity": plan["similarity"],
        "rows": [*rows, *more],
        "statistics": {k: statistics(own) for k, own in of_k.items()},
        "longest_phase": {k: longest_phase(own) for k, own in of_k.items()},
        "maxcut_z": {k: maxcut_z([*own, *(row for row in more if str(row["k"]) == k)]) for k, own in of_k.items()},
    }
    figure = figure_partitions(rows) if rows else None
    return write_result(config, "partitions", cells, found, _table(found), figure)


def cell_name(lengths: Sequence[int]) -> str:
    return "-".join([f"k{len(lengths)}", *map(str, lengths)])


def _chosen(ways: Json) -> dict[str, list[int]]:
    """The partitions that were not drawn at random, by the way of choosing them."""
    return {way: lengths for way, lengths in ways.items() if way != "random"}


def choose_partitions(matrix: ArrayLike, k: int, num_random: int, seed: int) -> Json:
    """Phase lengths by max-cut, by each exact score, and at random (all of them where there are fewer)."""
    best = find_phases(matrix, k)
    num = min(num_random, num_partitions(best.num_layers, k) - 1)
    drawn = sample_partitions(best.num_layers, k, num, seed=seed, exclude=[best])
    exact = {f"dp-{score}": find_phases(matrix, k, "dp", score, min_length=1) for score in _DP_SCORES}
    ways = {way: list(phases.lengths) for way, phases in {"maxcut": best, **exact}.items()}
    return {**ways, "random": sorted(list(phases.lengths) for phases in drawn)}


def _read_or_make_plan(config: Partitions, common: Json) -> Json:
    """Which partitions are tried: decided once and kept in plan.json."""
    path = Path(config.out) / "plan.json"
    names = ("model", "weights", "data", "limit", "seed", "tokens")
    asked = {"k": config.k, "num_random": config.num_random, **{name: common[name] for name in names}}
    if path.exists():
        plan: Json = json.loads(path.read_text())
        if plan["asked"] != asked:
            raise ValueError(f"{config.out} holds another plan: choose another --out")
        return plan
    teacher, pair = open_teacher(common, config)
    check_cuts(teacher, config.k, tokens=config.tokens)
    matrix = layer_similarity(teacher, pair[0], config)[config.tokens]
    partitions = {str(k): choose_partitions(matrix, k, config.num_random, config.seed) for k in config.k}
    plan = {"asked": asked, "similarity": matrix.round(6).tolist(), "partitions": partitions}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, plan)
    return plan


def _train(config: Partitions, options: Json) -> Json:
    """Train a surrogate with the phases of the cell."""
    teacher, pair = open_teacher(options, config)
    name = cell_name(options["phases"])
    if options["seed"] != config.seed:
        name += f"-s{options['seed']}"
    return make_surrogate(
        teacher,
        pair,
        Phases.from_lengths(options["phases"]),
        Path(config.out) / "raptors" / name,
        config,
        recipe=options["recipe"],
        budget=options["budget"],
        batch_size=options["batch_size"],
        stage1_share=0.0,
        seed=options["seed"],
    )


def _row(way: str, lengths: list[int], results: dict[str, Json], seed: int, suffix: str = "") -> Json:
    scores = results[cell_name(lengths) + suffix]
    kept = {name: scores[name] for name in (*MEASURES, "teacher_accuracy")}
    return {"k": len(lengths), "way": way, "phases": lengths, "seed": seed, **kept}


def statistics(rows: Sequence[Json]) -> Json:
    """For one k: where each chosen partition stands among the random ones that differ from it."""
    found: Json = {}
    for row in rows:
        if row["way"] == "random":
            continue
        others = [other for other in rows if other["way"] == "random" and other["phases"] != row["phases"]]
        found[row["way"]] = {}
        for measure in MEASURES:
            sample = [other[measure] for other in others if other[measure] is not None]
            if row[measure] is not None:
                found[row["way"]][measure] = z_score(row[measure], sample)
    return found


def longest_phase(rows: Sequence[Json]) -> Json:
    """Correlation of accuracy with the length of the longest phase, each partition of one k once."""
    known = {tuple(row["phases"]): row["accuracy"] for row in rows if row["accuracy"] is not None}
    return correlation([float(max(lengths)) for lengths in known], list(known.values()))


def maxcut_z(rows: Sequence[Json]) -> list[float]:
    """z of the accuracy of each seed's max-cut surrogate among the random partitions of one k."""
    sample = [row["accuracy"] for row in rows if row["way"] == "random" and row["accuracy"] is not None]
    chosen = [row["accuracy"] for row in rows if row["way"] == "maxcut" and row["accuracy"] is not None]
    found = [z_score(accuracy, sample)["z"] for accuracy in chosen]
    return [z for z in found if z is not None]


def _table(found: Json) -> str:
    """A line per k and way of cutting: accuracy under the teacher's own head, and R2."""
    rows = []
    for k, ways in found["statistics"].items():
        for way, scores in ways.items():
            row = [k, way, sum_of(found["partitions"][k][way])]
            for measure in ("accuracy", "r2_last"):
                score = scores.get(measure, {})
                row += [score.get(name) for name in ("value", "mean", "deviation", "z")]
            rows.append(row)
    names = [f"{what}{part}" for what in ("accuracy", "R2 last") for part in ("", ", random mean", " sd", ", z")]
    return markdown(["k", "cut by", "phases", *names], rows)


if __name__ == "__main__":
    main(read_config(Partitions))
