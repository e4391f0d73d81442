"""Figure 3: does it matter where depth is cut? Max-cut against random contiguous partitions, the same budget each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from estimates import z_score
from figures import figure_partitions
from numpy.typing import ArrayLike
from surrogates import best_teacher, layer_similarity, make_surrogate, open_teacher
from sweep import Cell, Json, SweepConfig, column, read_config, run_cells, table, where, write_result

from raptor import Phases, check_cuts, find_phases, num_partitions, sample_partitions

MEASURES = ("accuracy", "probe", "r2_last", "bounded_r2_last", "r2_lowest")


@dataclass(kw_only=True)
class Partitions(SweepConfig):
    """Surrogates of one teacher cut by max-cut, by the dynamic programme and at random, the same budget each
    (Figure 3)."""

    model: str | None = None  # the teacher; by default the most accurate one of `teachers`
    teachers: str = "runs/stochastic-depth"  # folder of a stochastic-depth sweep
    weights: str | None = None  # a local weight file for the model
    k: list[int] = field(default_factory=lambda: [2, 3, 4])  # numbers of blocks
    tokens: str = "pooled"  # the tokens whose similarity is cut: all, cls, registers, patches, pooled
    # random partitions per k, drawn without replacement from all others with minimum length 1
    num_random: int = 10
    budget: str = "300steps"  # training of a surrogate, only in the joint autoregressive stage
    batch_size: int = 256  # images per step of that training
    recipe: str = "default"  # recipe of that training
    seed: int = 0  # of the draws and of every surrogate
    # further seeds of the max-cut surrogates, so that their place among the random ones has an interval
    maxcut_seeds: list[int] = field(default_factory=list)
    out: str = "runs/partitions"


def main(config: Partitions) -> Json:
    common = config.options("teachers", "k", "num_random", "maxcut_seeds")
    common["model"] = config.model or best_teacher(config.teachers)
    # Which partitions are tried is decided once, and kept as a cell.
    asked = {**common, "k": config.k, "num_random": config.num_random}
    plan = run_cells(replace(config, cells=None), {"plan": asked}, partial(make_plan, config))["plan"]
    trials = _trials(plan["partitions"], config)
    # Two ways may choose the same partition, which is one cell.
    cells: dict[str, Json] = {}
    for _, lengths, seed in trials:
        cells[cell_name(lengths, seed, config)] = {**common, "phases": lengths, "seed": seed}
    results = run_cells(config, cells, partial(_train, config))

    rows: list[Json] = []
    for way, lengths, seed in trials:
        scores = results.get(cell_name(lengths, seed, config))
        if scores is not None:
            kept = {name: scores[name] for name in (*MEASURES, "teacher_accuracy")}
            rows.append({"k": len(lengths), "way": way, "phases": lengths, "seed": seed, **kept})
    of_one_seed = where(rows, seed=config.seed)
    found: Json = {**plan, "rows": rows, "statistics": {}, "maxcut_z": {}}
    for k in config.k:
        found["statistics"][str(k)] = statistics(where(of_one_seed, k=k))
        found["maxcut_z"][str(k)] = maxcut_z(where(rows, k=k))
    draw = partial(figure_partitions, of_one_seed)
    return write_result(config, "partitions", cells, found, _table(found), draw)


def _trials(partitions: Json, config: Partitions) -> list[tuple[str, list[int], int]]:
    """Way of choosing, phase lengths and seed of every surrogate; max-cut's further seeds last."""
    trials = []
    for ways in partitions.values():
        for way, chosen in ways.items():
            for lengths in chosen if way == "random" else [chosen]:
                trials.append((way, lengths, config.seed))
    for seed in config.maxcut_seeds:
        if seed != config.seed:
            for ways in partitions.values():
                trials.append(("maxcut", ways["maxcut"], seed))
    return trials


def cell_name(lengths: Sequence[int], seed: int, config: Partitions) -> str:
    name = "-".join([f"k{len(lengths)}", *map(str, lengths)])
    return name if seed == config.seed else f"{name}-s{seed}"


def make_plan(config: Partitions, options: Json) -> Json:
    """Phase lengths of each number of phases, by way of choosing them, and the similarity that is cut."""
    teacher, pair = open_teacher(options, config)
    check_cuts(teacher, config.k, tokens=config.tokens)
    matrix = layer_similarity(teacher, pair[0], config)[config.tokens]
    partitions = {str(k): choose_partitions(matrix, k, config.num_random, config.seed) for k in config.k}
    return {"partitions": partitions, "similarity": matrix.round(6).tolist()}


def choose_partitions(matrix: ArrayLike, k: int, num_random: int, seed: int) -> Json:
    """Phase lengths by max-cut, by each exact score, and at random (all of them where there are fewer)."""
    best = find_phases(matrix, k)
    ways: Json = {"maxcut": list(best.lengths)}
    for score in ("weighted", "mean", "cut"):
        ways[f"dp-{score}"] = list(find_phases(matrix, k, "dp", score, min_length=1).lengths)
    num = min(num_random, num_partitions(best.num_layers, k) - 1)
    drawn = sample_partitions(best.num_layers, k, num, seed=seed, exclude=[best])
    ways["random"] = sorted(map(list, drawn))
    return ways


def _train(config: Partitions, options: Json) -> Json:
    """Train a surrogate with the phases of the cell."""
    teacher, pair = open_teacher(options, config)
    return make_surrogate(
        teacher,
        pair,
        Phases.from_lengths(options["phases"]),
        Path(config.out) / "raptors" / cell_name(options["phases"], options["seed"], config),
        options,
        config,
        stage1_share=0.0,
    )


def statistics(rows: Sequence[Json]) -> Json:
    """For one k: where each chosen partition stands among the random ones that differ from it."""
    random = where(rows, way="random")
    found: Json = {}
    for row in rows:
        if row["way"] == "random":
            continue
        found[row["way"]] = {}
        for measure in MEASURES:
            sample = []
            for other in random:
                if other["phases"] != row["phases"] and other[measure] is not None:
                    sample.append(other[measure])
            if row[measure] is not None:
                found[row["way"]][measure] = z_score(row[measure], sample)
    return found


def maxcut_z(rows: Sequence[Json]) -> list[float]:
    """z of the accuracy of each seed's max-cut surrogate among the random partitions of one k."""
    scored = [row for row in rows if row["accuracy"] is not None]
    sample = column(where(scored, way="random"), "accuracy")
    found = []
    for row in where(scored, way="maxcut"):
        z = z_score(row["accuracy"], sample)["z"]
        if z is not None:
            found.append(z)
    return found


def _table(found: Json) -> str:
    """A line per k and way of cutting: accuracy under the teacher's own head, and R2."""
    rows = []
    for k, ways in found["statistics"].items():
        for way, scores in ways.items():
            rows.append({"k": k, "way": way, "phases": found["partitions"][k][way], **scores})
    columns: dict[str, Cell] = {"k": "k", "cut by": "way", "phases": "phases"}
    for what, measure in (("accuracy", "accuracy"), ("R2 last", "r2_last")):
        columns[what] = f"{measure}/value"
        columns[f"{what}, random mean"] = f"{measure}/mean"
        columns[f"{what} sd"] = f"{measure}/deviation"
        columns[f"{what}, z"] = f"{measure}/z"
    return table(rows, columns)


if __name__ == "__main__":
    main(read_config(Partitions))
