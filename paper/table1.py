"""Table 1: classification, segmentation and depth of scenes by linear probes, the teacher against k = 2, 3, 4."""

from __future__ import annotations

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
    run_sweep,
)
from estimates import spread
from figures import figure_recovery
from outcome import Outcome, markdown, sum_of, write_outcome
from records import (
    GroupCurves,
    LastR2,
    MeanOverSeeds,
    ProbedRaptor,
    ProbedTeacher,
    ProbeScores,
    Table1,
    Table1Row,
    TaskScore,
)
from surrogates import (
    CutBy,
    Machine,
    Pair,
    check_cells,
    cut_by,
    cut_phases,
    describe_pair,
    images_to_distil,
    make_raptor,
    open_teacher,
    trained_by,
    with_contents,
)

from raptor.data import open_dense
from raptor.data.apart import describe_images
from raptor.data.by_name import as_spec
from raptor.data.dense import DENSE_TASKS
from raptor.fidelity.heads import share_kept
from raptor.options import Limited, Trusting, WeightFile, part, with_defaults
from raptor.probes import probe
from raptor.provenance import recorded
from raptor.surrogate.surrogate import block_parameters
from raptor.train.recipe import resolve_recipe
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

_TASKS = ("classify", "segment", "depth")
_OF_TRAINING = (
    "more_data",
    "budget",
    "batch_size",
    "recipe",
    "optimizer",
    "tokens",
)  # no options of the teacher's cell
_TITLES = {"classify": "accuracy (%)", "segment": "mIoU (%)", "depth": "RMSE (m)"}
_PUBLISHED = {
    "2": (81.2, 39.6, 0.648),
    "3": (83.0, 43.0, 0.618),
    "4": (83.2, 43.6, 0.607),
    "teacher": (84.5, 47.5, 0.578),
}


class Table1Options(CutBy, WeightFile, Trusting, TrainingSweepOptions, total=False):
    """The options that table1 shares with other experiments."""


@recorded
def run(
    *,
    model: str = "timm/vit_small_patch14_reg4_dinov2",
    data: list[str] | str,
    more_data: list[str] | None = None,
    segment: str | None = None,
    depth: str | None = None,
    k: list[int] = [2, 3, 4],  # noqa: B006
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    budget: str = "60s",
    batch_size: int | None = None,
    recipe: str = "default",
    optimizer: str | None = None,
    size: int | None = None,
    segment_size: int | None = None,
    depth_size: int | None = None,
    init_head: str = "own",
    classify_epochs: int | None = None,
    segment_epochs: int | None = None,
    depth_epochs: int | None = None,
    probe_seconds: float | None = None,
    in_memory: bool = True,
    out: str = "runs/table1",
    **given: Unpack[Table1Options],
) -> Outcome[Table1]:
    """Probes of the teacher and of surrogates over k and seeds, as one table with recovery (Table 1).

    Args:
        model: the teacher.
        weights: a local weight file for it.
        data: labelled images, for distillation and classification.
        more_data: further images to distil on, without labels, such as nyuv2:PATH.
        segment: data for segmentation, such as nyuv2:PATH or ade20k:PATH; left out by default.
        depth: data for depth, such as nyuv2:PATH; left out by default.
        k: numbers of blocks.
        seeds: of the distillations; the probes take the same one.
        budget: training of a surrogate. Budgets in seconds are for one job at a time.
        batch_size, recipe, optimizer: of that training.
        size: image size for distillation and classification.
        segment_size, depth_size: shorter side of the frames; by default the data's own.
        init_head: where the classifier starts: own (the model's own linear head, where it has one), random, or a file.
        classify_epochs, segment_epochs, depth_epochs: of the probes; by default each task's own.
        probe_seconds: train each probe only for the steps that fit into this time. Recovery is left out if the teacher
            was trained for another number of steps; epochs give equal numbers.
        limit: use only this many training images for distillation and classification.
        val_images: use only this many held-out images there.
        in_memory: decode the images once and keep them on the device; false reads them as they are needed.
        out: folder; cells that are already there are not done again.
        cells: only these, separated by commas (such as teacher or k3-s0).
    """
    started = time.monotonic()
    options = with_defaults(Table1Options, given)
    settings = resolve_recipe(recipe, {"batch_size": batch_size, "optimizer": optimizer})
    machine = Machine.of(out, options)
    common: dict[str, Any] = dict(
        model=model,
        weights=options["weights"],
        data=as_spec(data),
        val=as_spec(options["val"]),
        **({} if more_data is None else {"more_data": more_data}),
        segment=segment,
        depth=depth,
        budget=budget,
        batch_size=batch_size,
        recipe=recipe,
        **trained_by(recipe, optimizer),
        size=size,
        segment_size=segment_size,
        depth_size=depth_size,
        init_head=init_head,
        classify_epochs=classify_epochs,
        segment_epochs=segment_epochs,
        depth_epochs=depth_epochs,
        probe_seconds=probe_seconds,
        **part(Limited, options),
        **cut_by(options),
        in_memory=in_memory,
    )
    plan = [Cell("teacher", {**{o: common[o] for o in common if o not in _OF_TRAINING}, "k": None, "seed": 0})]
    plan += [Cell(f"k{n}-s{s}", {**common, "k": n, "seed": s}) for s in seeds for n in k]
    sweep = Sweep(Path(out), with_contents(plan, machine), machine.device)
    check_cells(sweep, machine)
    work, images = partial(_do_cell, machine), partial(_describe_images, common)
    results = run_sweep(sweep, work, images, **part(CellOptions, options))
    teacher = ProbedTeacher.from_dict(results["teacher"]) if "teacher" in results else None
    raptors = {name: ProbedRaptor.from_dict(result) for name, result in results.items() if name != "teacher"}
    rows = summarise(teacher, list(raptors.values()))
    found = Table1(
        settings={**common, "batch_size": settings.batch_size},
        rows=rows,
        cells={**({} if teacher is None else {"teacher": teacher}), **raptors},
        missing=sweep.missing_names(),
        **sweep.made(),
    )
    complete = teacher is not None and raptors
    figure = figure_recovery(rows) if complete else None
    return write_outcome(found, Path(out), started, machine.device, table(rows), figure, "figure5")


def _do_cell(machine: Machine, cell: Cell) -> ProbedTeacher | ProbedRaptor:
    """Probe the teacher, or distil one surrogate and probe it."""
    options = cell.options
    teacher, pair = open_teacher(options, machine)
    if options["k"] is None:
        return ProbedTeacher(parameters=block_parameters(teacher), probes=_probes(teacher, pair, options, machine))
    folder = machine.folder / "raptors" / cell.name
    scores = make_raptor(
        teacher,
        images_to_distil(pair, options, teacher.preprocess, machine),
        cut_phases(teacher, pair[0], options["k"], machine, options.get("tokens", "all")),
        folder,
        machine,
        recipe=options["recipe"],
        budget=options["budget"],
        batch_size=options["batch_size"],
        optimizer=options.get("optimizer", "adamw"),
        seed=options["seed"],
        num_workers=machine.num_workers,
    )
    surrogate = open_vit(folder / "surrogate", trust_hub=machine.trust_hub, device=machine.device)
    probes = _probes(surrogate, pair, options, machine)
    return ProbedRaptor(k=options["k"], seed=options["seed"], probes=probes, **vars(scores))


def _probes(vit: ViT, pair: Pair, options: dict[str, Any], machine: Machine) -> dict[str, ProbeScores]:
    """The probes of one model for which data was given."""
    wanted = [task for task in _TASKS if task == "classify" or options[task] is not None]
    return {task: _probe(vit, task, pair, options, machine) for task in wanted}


def _probe(vit: ViT, task: str, pair: Pair, options: dict[str, Any], machine: Machine) -> ProbeScores:
    result = probe(
        vit,
        task,
        *(pair if task == "classify" else _dense_pair(task, options, vit.preprocess.size)),
        size=options.get(f"{task}_size"),
        seeds=[options["seed"]],
        epochs=options[f"{task}_epochs"],
        init_head=options["init_head"] if task == "classify" else "own",
        precision=machine.precision,
        max_seconds=options["probe_seconds"],
        num_workers=machine.num_workers,
    )
    first = result.seeds[0]
    kept = {
        "score": result.score,
        "picked": {"lr": first.chosen.value, "epoch": first.chosen.epoch},
        "epochs": {"done": first.epochs[-1], "planned": result.settings.epochs},
        "num_steps": first.num_steps,
    }
    return ProbeScores.from_dict({**result.to_dict(), **kept})


def _describe_images(options: dict[str, Any]) -> DescribedImages:
    """What the cells remember of their images, and of the frames of dense tasks."""
    dense = {task: describe_images(*_dense_pair(task, options)) for task in DENSE_TASKS if options[task] is not None}
    return describe_pair(options) | dense


def _dense_pair(task: str, options: dict[str, Any], size: int | None = None) -> tuple[Any, Any]:
    """Training and held-out frames of a dense task. The limits of the images hold only for scenes."""
    spec = options[task]
    limits = (options["limit"], options["val_images"]) if spec == "scenes" else (None, None)
    train, held_out = (
        open_dense(spec, split, task, limit=num, size=size)  # type: ignore[arg-type]
        for split, num in zip(("train", "val"), limits)
    )
    return train, held_out


def summarise(teacher: ProbedTeacher | None, raptors: Sequence[ProbedRaptor]) -> list[Table1Row]:
    """A row for the teacher and one per k: mean and deviation over seeds of each score, recovery and R2."""
    rows = []
    if teacher is not None:
        scores = _task_scores([teacher.probes], teacher)
        rows.append(Table1Row(k="teacher", num_seeds=1, parameters=teacher.parameters, scores=scores))
    ks = sorted({raptor.k for raptor in raptors})
    return rows + [_raptor_row([raptor for raptor in raptors if raptor.k == k], teacher) for k in ks]


def _raptor_row(raptors: Sequence[ProbedRaptor], teacher: ProbedTeacher | None) -> Table1Row:
    first = raptors[0]
    return Table1Row(
        k=str(first.k),
        num_seeds=len(raptors),
        parameters=first.parameters,
        scores=_task_scores([raptor.probes for raptor in raptors], teacher),
        phases=first.phases,
        r2={group: _last_r2([raptor.curves[group] for raptor in raptors]) for group in first.curves},
        r2_lowest=spread([raptor.r2_lowest for raptor in raptors]),
        recovery_head=spread([raptor.recovery_head for raptor in raptors]),
        recovery_ridge=spread([raptor.recovery for raptor in raptors]),
    )


def _last_r2(curves: Sequence[GroupCurves]) -> LastR2:
    return LastR2(r2=spread([c.r2[-1] for c in curves]), bounded_r2=spread([c.bounded_r2[-1] for c in curves]))


def _task_scores(probes: Sequence[dict[str, ProbeScores]], teacher: ProbedTeacher | None) -> dict[str, TaskScore]:
    """Scores by task, over the probes of several seeds."""
    found = {}
    for task in probes[0]:
        of_seeds = [by_task[task] for by_task in probes]
        scores = [probe.score for probe in of_seeds]
        recovery = None
        if teacher is not None and task in teacher.probes:
            own = teacher.probes[task]
            recovery = spread([_recovery(probe, own) for probe in of_seeds])
        found[task] = TaskScore(
            **vars(spread(scores)),
            size=probes[0][task].size,
            at_edge=sum(by_task[task].at_edge for by_task in probes),
            recovery=recovery,
        )
    return found


def _recovery(probe: ProbeScores, teacher: ProbeScores) -> float | None:
    if teacher.score is None or probe.num_steps != teacher.num_steps:
        return None
    return share_kept(probe.score, teacher.score, teacher.higher_is_better)


def table(rows: Sequence[Table1Row]) -> str:
    tasks = [task for task in _TASKS if rows and task in rows[0].scores]
    columns = ["k", "phases", "block parameters (M)"]
    for task in tasks:
        columns += [_TITLES[task], "recovery", "paper"]
    return markdown([*columns, "ridge probe, recovery", "R2 last"], [_table_line(row, tasks) for row in rows])


def _table_line(row: Table1Row, tasks: Sequence[str]) -> list[str | None]:
    line: list[str | None] = [row.k, sum_of(row.phases) or "–", f"{row.parameters / 1e6:.2f}"]
    for task in tasks:
        score = row.scores[task]
        paper = _PUBLISHED[row.k][_TASKS.index(task)] if row.k in _PUBLISHED else None
        line += [
            shown(score, percent=task != "depth"),
            shown(score.recovery, percent=True, unit=" %"),
            None if paper is None else f"{paper:g}",
        ]
    r2 = row.r2["all"].r2 if "all" in row.r2 else None
    return [*line, shown(row.recovery_ridge, percent=True, unit=" %"), shown(r2)]


def shown(found: MeanOverSeeds | None, percent: bool = False, unit: str = "") -> str | None:
    """`mean ± deviation`; None where there is no mean."""
    if found is None or found.mean is None:
        return None
    scale, digits = (100, 1) if percent else (1, 3)
    text = f"{scale * found.mean:.{digits}f}"
    if found.deviation is not None:
        text += f" ± {scale * found.deviation:.{digits}f}"
    return text + unit
