"""Figure 3: does it matter where depth is cut? Max-cut against random contiguous partitions, the same budget each."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from cells import (
    Cell,
    CellOptions,
    DescribedImages,
    Sweep,
    TrainingSweepOptions,
    check_same_images,
    run_sweep,
)
from estimates import correlation, z_score
from figures import figure_partitions
from numpy.typing import ArrayLike
from outcome import Outcome, markdown, sum_of, write_outcome
from records import (
    Correlation,
    PartitionRow,
    Partitions,
    PartitionsPlan,
    PartitionStatistics,
    RaptorScores,
    Ways,
    ZScore,
)
from surrogates import (
    CutBy,
    Machine,
    OneTeacher,
    best_teacher,
    cut_by,
    describe_pair,
    layer_similarity,
    make_raptor,
    open_teacher,
    trained_by,
    with_contents,
)

from raptor.data.by_name import as_spec
from raptor.options import Limited, part, with_defaults
from raptor.phases import Phases, check_cuts, find_phases, num_partitions, sample_partitions
from raptor.provenance import recorded
from raptor.run import RunError, read_json, write_text
from raptor.train.schedule import Budget

MEASURES = ("accuracy", "probe", "r2_last", "bounded_r2_last", "r2_lowest")
_PLAN = "plan.json"
_DP_SCORES = ("weighted", "mean", "cut")


class PartitionsOptions(CutBy, OneTeacher, TrainingSweepOptions, total=False):
    """The options that partitions shares with other experiments."""


@recorded
def run(
    *,
    data: list[str] | str,
    k: list[int] = [2, 3, 4],  # noqa: B006
    num_random: int = 10,
    budget: str = "300steps",
    batch_size: int = 256,
    recipe: str = "default",
    seed: int = 0,
    maxcut_seeds: list[int] = [],  # noqa: B006
    out: str = "runs/partitions",
    **given: Unpack[PartitionsOptions],
) -> Outcome[Partitions]:
    """Raptors of one teacher cut by max-cut, by the dynamic programme and at random, the same budget each (Figure 3).

    Args:
        data: labelled images.
        k: numbers of blocks.
        num_random: random partitions per k, drawn without replacement from all others with minimum length 1.
        budget: training of a raptor, only in the joint autoregressive stage.
        batch_size, recipe: of that training.
        seed: of the draws and of every raptor.
        maxcut_seeds: further seeds of the max-cut raptors, so that their place among the random ones has an interval;
            `seed` itself counts once.
        out: folder; cells that are already there are not done again.
        cells: only these, separated by commas (such as k2-7-5).
    """
    started = time.monotonic()
    options = with_defaults(PartitionsOptions, given)
    machine = Machine.of(out, options)
    common: dict[str, Any] = dict(
        model=options["model"] or best_teacher(options["teachers"]),
        weights=options["weights"],
        data=as_spec(data),
        val=as_spec(options["val"]),
        **part(Limited, options),
        **cut_by(options),
        budget=budget,
        batch_size=batch_size,
        recipe=recipe,
        **trained_by(recipe),
        seed=seed,
    )
    Budget.parse(budget)
    (named,) = with_contents([Cell("plan", common)], machine)
    plan = _read_or_make_plan(machine, named, k, num_random)
    wanted = {_cell_name(lengths): lengths for ways in plan.partitions.values() for lengths in _all_of(ways)}
    again = {
        (s, _cell_name(lengths)): lengths
        for s in maxcut_seeds
        if s != seed
        for lengths in (ways.chosen["maxcut"] for ways in plan.partitions.values())
    }
    planned = tuple(
        [Cell(name, {**common, "phases": lengths}, named.made_of) for name, lengths in wanted.items()]
        + [
            Cell(f"{name}-s{s}", {**common, "phases": lengths, "seed": s}, named.made_of)
            for (s, name), lengths in again.items()
        ]
    )
    sweep = Sweep(Path(out), planned, machine.device)
    work, images = partial(_do_cell, machine), partial(_describe_images, common, plan, machine.folder)
    results = run_sweep(sweep, work, images, **part(CellOptions, options))
    scores = {name: RaptorScores.from_dict(result) for name, result in results.items()}
    rows = [row for ways in plan.partitions.values() for row in _rows(ways, scores, seed)]
    more = [
        _row("maxcut", lengths, scores[f"{name}-s{s}"], s)
        for (s, name), lengths in again.items()
        if f"{name}-s{s}" in scores
    ]
    found = Partitions(
        settings=common,
        partitions=plan.partitions,
        similarity=plan.similarity,
        rows=[*rows, *more],
        statistics={num: statistics([row for row in rows if row.k == num]) for num in k},
        longest_phase={num: longest_phase([row for row in rows if row.k == num]) for num in k},
        maxcut_z={num: maxcut_z([row for row in [*rows, *more] if row.k == num]) for num in k},
        missing=sweep.missing_names(),
        **sweep.made(),
    )
    figure = figure_partitions(rows) if rows else None
    return write_outcome(found, Path(out), started, machine.device, _table(found), figure)


def _cell_name(lengths: Sequence[int]) -> str:
    return "-".join([f"k{len(lengths)}", *map(str, lengths)])


def choose_partitions(matrix: ArrayLike, k: int, num_random: int, seed: int) -> Ways:
    """Phase lengths by max-cut, by each exact score, and at random (all of them where there are fewer)."""
    best = find_phases(matrix, k)
    num = min(num_random, num_partitions(best.num_layers, k) - 1)
    drawn = sample_partitions(best.num_layers, k, num, seed=seed, exclude=[best])
    exact = {f"dp-{score}": find_phases(matrix, k, "dp", score, min_length=1) for score in _DP_SCORES}
    return Ways(
        chosen={way: list(phases.lengths) for way, phases in {"maxcut": best, **exact}.items()},
        random=sorted(list(phases.lengths) for phases in drawn),
    )


def _do_cell(machine: Machine, cell: Cell) -> RaptorScores:
    """Train a raptor with the phases of the cell."""
    options = cell.options
    teacher, pair = open_teacher(options, machine)
    return make_raptor(
        teacher,
        pair,
        Phases.from_lengths(options["phases"]),
        machine.folder / "raptors" / cell.name,
        machine,
        recipe=options["recipe"],
        budget=options["budget"],
        batch_size=options["batch_size"],
        stage1_share=0.0,
        seed=options["seed"],
    )


def statistics(rows: Sequence[PartitionRow]) -> PartitionStatistics:
    """For one k: where each chosen partition stands among the random ones that differ from it."""
    found: PartitionStatistics = {}
    for row in rows:
        if row.way == "random":
            continue
        others = [other for other in rows if other.way == "random" and other.phases != row.phases]
        found[row.way] = {}
        for measure in MEASURES:
            value, sample = row.score(measure), [other.score(measure) for other in others]
            if value is not None:
                known = [score for score in sample if score is not None]
                found[row.way][measure] = z_score(value, known)
    return found


def longest_phase(rows: Sequence[PartitionRow]) -> Correlation:
    """Correlation of accuracy with the length of the longest phase, each partition of one k once."""
    known = {tuple(row.phases): row.accuracy for row in rows if row.accuracy is not None}
    return correlation([float(max(lengths)) for lengths in known], list(known.values()))


def maxcut_z(rows: Sequence[PartitionRow]) -> list[float]:
    """z of the accuracy of each seed's max-cut raptor among the random partitions of one k."""
    sample = [row.accuracy for row in rows if row.way == "random" and row.accuracy is not None]
    found = [z_score(row.accuracy, sample).z for row in rows if row.way == "maxcut" and row.accuracy is not None]
    return [z for z in found if z is not None]


def _table(found: Partitions) -> str:
    """A line per k and way of cutting: accuracy under the teacher's own head, and R2."""
    rows = []
    for k, ways in found.statistics.items():
        for way, scores in ways.items():
            lengths = sum_of(found.partitions[k].chosen[way])
            rows.append([k, way, lengths, *_score_columns(scores, "accuracy"), *_score_columns(scores, "r2_last")])
    names = [f"{what}{part}" for what in ("accuracy", "R2 last") for part in ("", ", random mean", " sd", ", z")]
    return markdown(("k", "cut by", "phases", *names), rows)


def _score_columns(scores: dict[str, ZScore], measure: str) -> list[float | None]:
    if measure not in scores:
        return [None] * 4
    score = scores[measure]
    return [score.value, score.mean, score.deviation, score.z]


def _describe_images(common: dict[str, Any], plan: PartitionsPlan, folder: Path) -> DescribedImages:
    """What the cells remember of their images; those to train on have to be the ones that the plan was made on."""
    found = describe_pair(common)
    check_same_images(folder / _PLAN, plan.images, found)
    return found


def _read_or_make_plan(machine: Machine, named: Cell, k: list[int], num_random: int) -> PartitionsPlan:
    """Which partitions are tried: decided once and kept in plan.json. `named` has what all cells are made with."""
    path, common = machine.folder / _PLAN, named.options
    asked = {"k": k, "num_random": num_random, **{n: common[n] for n in ("model", "weights", "data", "limit", "seed")}}
    asked |= {name: common[name] for name in ("tokens",) if name in common}
    if path.exists():
        try:
            plan = PartitionsPlan.from_dict(read_json(path))
        except (ValueError, KeyError, AttributeError) as error:
            raise RunError(f"{path} cannot be read ({error}): choose another --out") from None
        named.check_contents(plan.made_of, path)
        if plan.asked != asked:
            other = [f"{n}: {plan.asked.get(n)} -> {asked.get(n)}" for n in asked if plan.asked.get(n) != asked[n]]
            raise ValueError(f"{machine.folder} holds another plan ({'; '.join(other)}): choose another --out")
        return plan
    teacher, pair = open_teacher(common, machine)
    tokens = common.get("tokens", "all")
    check_cuts(teacher, k, tokens=tokens)
    matrix = layer_similarity(teacher, pair[0], machine)[tokens]
    partitions = {num: choose_partitions(matrix, num, num_random, common["seed"]) for num in k}
    plan = PartitionsPlan(
        asked=asked,
        similarity=matrix.round(6).tolist(),
        partitions=partitions,
        made_of=named.made_of,
        images={"data": {"train": describe_pair(common)["data"]["train"]}},
    )
    machine.folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(plan.to_dict()))
    return plan


def _all_of(ways: Ways) -> list[list[int]]:
    """Every partition once, the chosen ones first."""
    return [list(lengths) for lengths in dict.fromkeys(map(tuple, [*ways.chosen.values(), *ways.random]))]


def _rows(ways: Ways, scores: dict[str, RaptorScores], seed: int) -> list[PartitionRow]:
    """A row per way and partition that has a result; one partition may stand under several ways."""
    named = [*ways.chosen.items(), *(("random", lengths) for lengths in ways.random)]
    done = [(way, lengths, scores[_cell_name(lengths)]) for way, lengths in named if _cell_name(lengths) in scores]
    return [_row(way, lengths, found, seed) for way, lengths, found in done]


def _row(way: str, lengths: list[int], found: RaptorScores, seed: int) -> PartitionRow:
    return PartitionRow(
        k=len(lengths),
        way=way,
        phases=lengths,
        seed=seed,
        accuracy=found.accuracy,
        teacher_accuracy=found.teacher_accuracy,
        probe=found.probe,
        r2_last=found.r2_last,
        bounded_r2_last=found.bounded_r2_last,
        r2_lowest=found.r2_lowest,
    )
