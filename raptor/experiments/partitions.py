"""Figure 3: does it matter where depth is cut? Max-cut against random contiguous partitions, the same budget each."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from raptor.devices import pick_device
from raptor.experiments.cells import Cell, Sweep, run_sweep
from raptor.experiments.figures import figure_partitions
from raptor.experiments.outcome import Outcome, markdown, write_outcome
from raptor.experiments.small import Machine, best_teacher, layer_similarity, load_pair, make_raptor
from raptor.experiments.statistics import z_score
from raptor.open import open_vit
from raptor.phases import Phases, find_phases, num_partitions, sample_partitions
from raptor.report.style import save_figure
from raptor.run import read_json, write_text

MEASURES = ("accuracy", "probe", "r2_last", "bounded_r2_last", "r2_lowest")
DP_SCORES = ("weighted", "mean", "cut")


def run(
    *,
    data: str,
    model: str | None = None,
    teachers: str = "runs/stochastic-depth",
    weights: str | None = None,
    k: list[int] = [2, 3, 4],  # noqa: B006
    num_random: int = 10,
    budget: str = "300steps",
    batch_size: int = 256,
    recipe: str = "default",
    seed: int = 0,
    limit: int | None = None,
    val_images: int | None = None,
    out: str = "runs/partitions",
    jobs: int = 1,
    cells: str | None = None,
    max_seconds: float | None = None,
    device: str = "auto",
    num_workers: int = 0,
    compile: bool | None = None,
) -> Outcome:
    """Raptors of one teacher cut by max-cut, by the dynamic programme and at random, the same budget each (Figure 3).

    Args:
        data: labelled images.
        model: the teacher; by default the most accurate one of `teachers`.
        teachers: folder of a stochastic-depth sweep.
        weights: a local weight file for the teacher.
        k: numbers of blocks.
        num_random: random partitions a k, drawn without replacement among all of minimum length 1 but max-cut's.
        budget: training of a raptor, in the joint autoregressive stage alone.
        batch_size, recipe: of that training.
        seed: of the draws and of every raptor.
        limit: use only this many training images.
        val_images: use only this many held-out images.
        out: folder; cells that are already there are not done again.
        jobs: processes that work at the same time.
        cells: only these, separated by commas (such as k2-7-5).
        max_seconds: stop cleanly after so long.
        device: auto, cpu or cuda.
        num_workers: processes that decode images, once a job.
        compile: compile the blocks; by default on a GPU only.
    """
    started = time.monotonic()
    machine = Machine(Path(out), pick_device(device), num_workers, compile)
    common = dict(
        model=model or best_teacher(teachers), weights=weights, data=data, limit=limit, val_images=val_images,
        budget=budget, batch_size=batch_size, recipe=recipe, seed=seed,
    )  # fmt: skip
    plan = _plan(machine, common, k, num_random)
    wanted = {cell_name(lengths): lengths for ways in plan["partitions"].values() for lengths in _all_of(ways)}
    planned = tuple(Cell(name, {**common, "phases": lengths}) for name, lengths in wanted.items())
    sweep = Sweep(Path(out), planned, machine.device)
    results = run_sweep(sweep, partial(one_cell, machine), jobs=jobs, cells=cells, max_seconds=max_seconds)
    rows = [row for ways in plan["partitions"].values() for row in _rows(ways, results)]
    values = {
        "settings": common, "partitions": plan["partitions"], "similarity": plan["similarity"], "rows": rows,
        "statistics": {str(n): statistics([r for r in rows if r["k"] == n]) for n in k},
        "missing": sweep.missing_names(), **sweep.made(),
    }  # fmt: skip
    figures = save_figure(figure_partitions(values), Path(out) / "partitions") if rows else []
    return write_outcome("partitions", Path(out), started, machine.device, values, table(values), figures)


def cell_name(lengths: list[int]) -> str:
    return "-".join([f"k{len(lengths)}", *map(str, lengths)])


def choose_partitions(matrix: Any, k: int, num_random: int, seed: int) -> dict[str, Any]:
    """Phase lengths by max-cut, by each exact score, and at random (all that there are, where there are fewer)."""
    best = find_phases(matrix, k)
    num = min(num_random, num_partitions(best.num_layers, k) - 1)
    drawn = sample_partitions(best.num_layers, k, num, seed=seed, exclude=[best])
    ways: dict[str, Any] = {"maxcut": list(best.lengths)}
    for score in DP_SCORES:
        ways[f"dp-{score}"] = list(find_phases(matrix, k, "dp", score, min_length=1).lengths)
    return ways | {"random": [list(p.lengths) for p in sorted(drawn, key=lambda p: p.lengths)]}


def one_cell(machine: Machine, cell: Cell) -> dict[str, Any]:
    """Train a raptor with the cell's phases."""
    options = cell.options
    teacher = open_vit(options["model"], weights=options["weights"], device=machine.device)
    pair = load_pair(
        options["data"], teacher.preprocess, options["limit"], options["val_images"], machine.device,
        machine.num_workers,
    )  # fmt: skip
    return make_raptor(
        teacher, pair, options["phases"], machine.folder / "raptors" / cell.name, machine, recipe=options["recipe"],
        budget=options["budget"], batch_size=options["batch_size"], stage1_share=0.0, seed=options["seed"],
    )  # fmt: skip


def statistics(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one k: mean and deviation of the random partitions, and where each chosen one stands among the others."""
    random = [row for row in rows if row["way"] == "random"]
    chosen = [row for row in rows if row["way"] != "random"]
    found: dict[str, Any] = {}
    for row in chosen:
        others = [r for r in random if r["phases"] != row["phases"]]
        scores = {m: [r[m] for r in others if r[m] is not None] for m in MEASURES if row[m] is not None}
        found[row["way"]] = {m: z_score(row[m], values) for m, values in scores.items()}
    return found


def table(values: dict[str, Any]) -> str:
    """A line a k and way of cutting, for accuracy under the teacher's own head and for R2."""
    rows = []
    for k, ways in values["statistics"].items():
        for way, found in ways.items():
            accuracy, r2 = found.get("accuracy", {}), found.get("r2_last", {})
            lengths = "+".join(map(str, values["partitions"][k][way]))
            rows.append([k, way, lengths, *_five(accuracy), *_five(r2)])
    names = [f"{what}{part}" for what in ("accuracy", "R2 last") for part in ("", ", random mean", " sd", ", z")]
    return markdown(("k", "cut by", "phases", *names), rows)


def _five(found: dict[str, Any]) -> list[Any]:
    return [found.get(name) for name in ("value", "mean", "deviation", "z")]


def _plan(machine: Machine, common: dict[str, Any], k: list[int], num_random: int) -> dict[str, Any]:
    """Which partitions are tried, decided once and kept in plan.json."""
    path = machine.folder / "plan.json"
    asked = {"k": k, "num_random": num_random, **{n: common[n] for n in ("model", "weights", "data", "limit", "seed")}}
    if path.exists():
        plan = read_json(path)
        if plan["asked"] != asked:
            raise ValueError(f"{machine.folder} holds another plan: choose another --out")
        return plan
    teacher = open_vit(common["model"], weights=common["weights"], device=machine.device)
    pair = load_pair(
        common["data"], teacher.preprocess, common["limit"], common["val_images"], machine.device, machine.num_workers
    )
    matrix = layer_similarity(teacher, pair[0], machine)["all"]
    partitions = {str(n): choose_partitions(matrix, n, num_random, common["seed"]) for n in k}
    plan = {"asked": asked, "similarity": matrix.round(6).tolist(), "partitions": partitions}
    machine.folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(plan))
    return plan


def _all_of(ways: dict[str, Any]) -> list[list[int]]:
    """Every partition once, the chosen ones first."""
    chosen = [lengths for way, lengths in ways.items() if way != "random"]
    return [list(p.lengths) for p in dict.fromkeys(Phases.from_lengths(n) for n in [*chosen, *ways["random"]])]


def _rows(ways: dict[str, Any], results: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a way and partition that has a result; one partition may stand under several ways."""
    named = [(way, lengths) for way, lengths in ways.items() if way != "random"]
    named += [("random", lengths) for lengths in ways["random"]]
    done = [(way, lengths, results.get(cell_name(lengths))) for way, lengths in named]
    return [
        {"k": len(lengths), "way": way, "phases": lengths, **{m: found[m] for m in MEASURES}}
        for way, lengths, found in done
        if found is not None
    ]
