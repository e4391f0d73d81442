"""raptor probe: linear probes on a model, or on a surrogate beside its teacher, under one protocol."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import nn

from raptor.data import ChosenData, DenseData, ImageData, open_dense
from raptor.data.apart import check_apart
from raptor.data.by_name import DENSE_KINDS, spec_text
from raptor.data.chosen import tell_of_new_classes
from raptor.devices import join_ranks, pick_device, pick_precision, seeded
from raptor.options import (
    AnySplit,
    HeadClasses,
    Limited,
    OfTeacher,
    OnData,
    OpeningModel,
    Running,
    part,
    with_defaults,
)
from raptor.probes import ProbeReport, ProbeResult
from raptor.probes import probe as train_probe
from raptor.progress import Progress
from raptor.provenance import Provenance, recorded
from raptor.report.results import check_results_of
from raptor.run import result_folder
from raptor.streaming import Result, folder_of
from raptor.subject import Subject
from raptor.vit.pair import open_pair
from raptor.vit.saved import check_folder_of
from raptor.vit.view import ViT


@dataclass
class Probed(Result):
    """Probe results of the teacher and, given a run, of the surrogate beside it."""

    report: ProbeReport
    folder: Path

    @property
    def results(self) -> dict[str, ProbeResult]:
        return self.report.results

    @property
    def recovery(self) -> float | None:
        return self.report.recovery

    def to_dict(self) -> dict[str, Any]:
        saved = self.report.to_dict()
        return {key: saved[key] for key in ("task", "results", "recovery", "caution", "unequal")}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per side."""
        return [
            {"side": side, "model": r.model, "task": r.task, "layer": r.layer, "metric": r.metric, "score": r.score}
            for side, r in self.results.items()
        ]

    def plot(self) -> Any:
        """The score of each side."""
        from raptor.report.style import use_style

        figure, axes = use_style().subplots(figsize=(3.6, 3.0))
        axes.bar(list(self.results), [result.score for result in self.results.values()], width=0.5)
        axes.set_ylabel(next(iter(self.results.values())).metric)
        axes.set_title(f"{self.report.task} probe")
        return figure

    def text(self) -> str:
        task = self.report.task
        lines = []
        for side, result in self.results.items():
            unfinished = f" ({result.unfinished})" if result.unfinished else ""
            score = f"{result.metric} of the {side} {result.score:.4f}"
            lines.append(f"{task}: {score} on {self.report.images}{unfinished}")
        if self.recovery is not None:
            lines.append(f"recovery {self.recovery:.1%}")
        if self.report.caution is not None:
            lines.append(self.report.caution)
        if self.report.unequal is not None:
            lines.append(self.report.unequal)
        return "\n".join([*lines, f"written to {self.folder}/probe-{task}.json"])


class ProbeOptions(OpeningModel, OfTeacher, Running, OnData, AnySplit, HeadClasses, Limited, total=False):
    """The options that `probe` shares with other commands."""


@recorded
def probe(
    model: str | Path | nn.Module | ViT | Result,
    *,
    task: Literal["classify", "segment", "depth"] = "classify",
    lrs: list[float] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    seeds: list[int] = [0],  # noqa: B006
    layer: int | None = None,
    closed_form: Literal["ridge", "logistic"] | None = None,
    init_head: str = "own",
    max_seconds: float | None = None,
    out: str | None = None,
    **given: Unpack[ProbeOptions],
) -> Probed:
    """Train linear probes on a frozen model; given a run, on the surrogate and on its teacher alike.

    Args:
        model: a run folder, or any model name (in Python also a module, an opened model or the result of `distill`).
        task: classify, segment or depth.
        data: labelled images (classify); scenes, ade20k:PATH or nyuv2:PATH (segment, depth).
        lrs: learning rates, all trained in one backbone pass; by default twelve around the task's own.
        epochs: passes over the training images; by default the task's own.
        batch_size: images per step; by default the task's own.
        seeds: several give mean and deviation.
        layer: the state to probe (0..L); by default the last.
        closed_form: ridge or logistic on cached features, for a quick look at classification.
        init_head: where the classifier starts: own (the model's own linear head, where it has one of as many classes),
            random, or the file of a published linear head. Its outputs are matched with the data's classes by name
            where the file holds names, as that of a probe does; else only their number is compared.
        max_seconds: of training for each seed; the steps that fit are counted once, for the teacher, and hold for both.
        out: folder for probe-TASK.json and the heads; by default the run's own.
        size: image size; of frames (segment, depth) the shorter side.
        skip_bad: skip unreadable images instead of stopping (classify).
    """
    started = time.monotonic()
    options = with_defaults(ProbeOptions, given)
    device = pick_device(options["device"])
    precision = pick_precision(options["precision"], device)
    if task not in ("classify", "segment", "depth"):
        raise ValueError(f"unknown task {task!r}: choose from classify, segment, depth")
    if max_seconds is not None and not max_seconds > 0:
        raise ValueError(f"--max_seconds must be more than 0, got {max_seconds:g}")
    opening, size = part(OpeningModel, options), options["size"]
    if task != "classify":
        opening["size"] = None  # frames are padded to whole patches, so any size will do, and the model keeps its own
    ranks = join_ranks(device)
    with seeded():
        surrogate, of_teacher = open_pair(model, **part(OfTeacher, options), device=ranks.device, **opening)
    chosen = ChosenData.of(folder_of(model), options, of_teacher.classes, of_teacher.num_classes)
    train_data, val_data = _open_both(task, chosen, size or of_teacher.preprocess.size, options)
    train = partial(
        train_probe,
        task=task,
        train_data=train_data,
        val_data=val_data,
        lrs=lrs,
        epochs=epochs,
        batch_size=batch_size,
        seeds=seeds,
        layer=layer,
        precision=precision,
        size=size,
        closed_form=closed_form,
        init_head=init_head,
        num_workers=options["num_workers"],
        max_seconds=max_seconds,
        ranks=ranks,
    )
    sides = {"teacher": of_teacher} | ({} if surrogate is None else {"surrogate": surrogate})
    folder = ranks.first(lambda: result_folder(out, folder_of(model), "probe"))
    check_folder_of(folder, folder_of(model), surrogate, of_teacher)
    ranks.first(lambda: check_results_of(folder, surrogate, of_teacher, [f"probe-{task}"]))
    results: dict[str, ProbeResult] = {}
    for name, vit in sides.items():
        bar = Progress(f"{task} probe of the {name}", None, "steps")
        results[name] = train(vit, max_steps=results["teacher"].num_steps if results else None, progress=bar.update)
        bar.finish()
        folder.mkdir(parents=True, exist_ok=True)
        ranks.first(partial(results[name].save, folder / f"probe-{task}-{name}"))
    subject = ranks.first(lambda: Subject.of(of_teacher, val_data, surrogate))
    report = ProbeReport(Provenance.since(started, device), chosen.name, task, results, chosen.split, subject)
    ranks.first(lambda: report.write(folder))
    return Probed(report, folder)


def _open_both(
    task: str, chosen: ChosenData, size: int, options: ProbeOptions
) -> tuple[ImageData, ImageData] | tuple[DenseData, DenseData]:
    """Training and held-out data of the task."""
    limit, val_images = options["limit"], options["val_images"]
    if task == "classify":
        train = chosen.training(limit, size)
        judged = chosen.judged(val_images, size, like=train)
        tell_of_new_classes(train, judged)
        return train, judged
    train_spec, val_spec = spec_text(chosen.data), spec_text(chosen.val or chosen.data)
    if options["data"] is None and train_spec.partition(":")[0] not in DENSE_KINDS:
        raise ValueError(f"{train_spec}, the data of the run, has no target per pixel: give --data nyuv2:PATH")
    chosen.check_same(chosen.data, "train")
    chosen.check_same(chosen.val or chosen.data, chosen.split)
    train_frames = open_dense(train_spec, "train", task, limit=limit, size=size)
    judged_frames = open_dense(val_spec, chosen.judged_split, task, limit=val_images, size=size)
    if chosen.judged_split not in ("train", "all"):
        check_apart(train_frames, judged_frames)
    return train_frames, judged_frames
