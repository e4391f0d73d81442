"""Figure 3: does it matter where depth is cut? Max-cut against random contiguous partitions, the same budget each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from estimates import z_score
from figures import figure_partitions
from numpy.typing import ArrayLike
from surrogates import best_teacher, layer_similarity, make_surrogate, open_teacher
from sweep import (
    Json,
    SweepConfig,
    column,
    markdown,
    read_config,
    run_cells,
    sum_of,
    where,
    write_json,
    write_result,
)

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
    plan = _read_or_make_plan(config, common)
    # Two ways may choose the same partition, which is one cell.
    cells: dict[str, Json] = {}
    for ways in plan["partitions"].values():
        for _, lengths in _by_way(ways):
            cells[cell_name(lengths)] = {**common, "phases": lengths}
    again = [seed for seed in config.maxcut_seeds if seed != config.seed]
    for seed in again:
        for ways in plan["partitions"].values():
            lengths = ways["maxcut"]
            cells[f"{cell_name(lengths)}-s{seed}"] = {**common, "phases": lengths, "seed": seed}
    results = run_cells(config, cells, partial(_train, config))

    rows = []
    for ways in plan["partitions"].values():
        for way, lengths in _by_way(ways):
            if cell_name(lengths) in results:
                rows.append(_row(way, lengths, config.seed, results[cell_name(lengths)]))
    of_other_seeds = []
    for seed in again:
        for ways in plan["partitions"].values():
            lengths = ways["maxcut"]
            name = f"{cell_name(lengths)}-s{seed}"
            if name in results:
                of_other_seeds.append(_row("maxcut", lengths, seed, results[name]))

    found: Json = {"partitions": plan["partitions"], "similarity": plan["similarity"]}
    found |= {"rows": [*rows, *of_other_seeds], "statistics": {}, "maxcut_z": {}}
    for k in config.k:
        own = where(rows, k=k)
        found["statistics"][str(k)] = statistics(own)
        found["maxcut_z"][str(k)] = maxcut_z(own + where(of_other_seeds, k=k))
    return write_result(config, "partitions", cells, found, _table(found), partial(figure_partitions, rows))


def cell_name(lengths: Sequence[int]) -> str:
    return "-".join([f"k{len(lengths)}", *map(str, lengths)])


def _by_way(ways: Json) -> list[tuple[str, list[int]]]:
    """Each partition with the way of choosing it; the random ones last."""
    found = []
    for way, chosen in ways.items():
        for lengths in chosen if way == "random" else [chosen]:
            found.append((way, lengths))
    return found


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


def _read_or_make_plan(config: Partitions, common: Json) -> Json:
    """Which partitions are tried: decided once and kept in plan.json."""
    path = Path(config.out) / "plan.json"
    asked = {"k": config.k, "num_random": config.num_random}
    for name in ("model", "weights", "data", "limit", "seed", "tokens"):
        asked[name] = common[name]
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


def _row(way: str, lengths: list[int], seed: int, scores: Json) -> Json:
    kept = {name: scores[name] for name in (*MEASURES, "teacher_accuracy")}
    return {"k": len(lengths), "way": way, "phases": lengths, "seed": seed, **kept}


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
    columns = ["k", "cut by", "phases"]
    for what in ("accuracy", "R2 last"):
        columns += [what, f"{what}, random mean", f"{what} sd", f"{what}, z"]
    rows = []
    for k, ways in found["statistics"].items():
        for way, scores in ways.items():
            row = [k, way, sum_of(found["partitions"][k][way])]
            for measure in ("accuracy", "r2_last"):
                score = scores.get(measure, {})
                row += [score.get("value"), score.get("mean"), score.get("deviation"), score.get("z")]
            rows.append(row)
    return markdown(columns, rows)


if __name__ == "__main__":
    main(read_config(Partitions))
