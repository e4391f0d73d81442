"""raptor probe: linear probes on a model, or on a surrogate beside its teacher, under one protocol."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raptor.commands.job import Job
from raptor.config import ProbeConfig
from raptor.data import ChosenData, DenseData, ImageData, open_dense
from raptor.data.apart import check_apart
from raptor.data.by_name import DENSE_KINDS, spec_text
from raptor.data.classes import tell_of_new_classes
from raptor.probes import ProbeReport, ProbeResult
from raptor.probes import probe as train_probe
from raptor.progress import Progress
from raptor.provenance import command
from raptor.streaming import Result, folder_of
from raptor.subject import Subject
from raptor.train.stage import Budget


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
        return {key: saved[key] for key in ("task", "results", "recovery", "floors", "caution", "unequal")}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per side."""
        return [
            {"side": side, "model": r.model, "task": r.task, "layer": r.layer, "metric": r.metric, "score": r.score}
            for side, r in self.results.items()
        ]

    def text(self) -> str:
        task = self.report.task
        lines = []
        for side, result in self.results.items():
            unfinished = f" ({result.unfinished})" if result.unfinished else ""
            score = f"{result.metric} of {_named(side, self.report.subject)} {result.score:.4f}"
            lines.append(f"{task}: {score} on {self.report.images}{unfinished}")
        if self.recovery is not None:
            floors = [f"{share:.1%} by {name}" for name, share in self.report.floors.items()]
            beside = f" (without seeing the image: {', '.join(floors)})" if floors else ""
            lines.append(f"recovery {self.recovery:.1%}{beside}")
        if self.report.caution is not None:
            lines.append(self.report.caution)
        if self.report.unequal is not None:
            lines.append(self.report.unequal)
        return "\n".join([*lines, f"written to {self.folder}/probe-{task}.json"])


@command(ProbeConfig)
def probe(config: ProbeConfig) -> Probed:
    """Train linear probes on a frozen model; given a run, on the surrogate and on its teacher alike."""
    job = Job(config)
    task = config.task
    limits: dict[str, Any] = {}
    if config.budget is not None:
        budget = Budget.parse(config.budget)
        limit = {"epochs": "epochs", "steps": "max_steps", "s": "max_seconds"}[budget.unit]
        limits[limit] = max(1, round(budget.amount)) if budget.unit == "steps" else budget.amount
    changes: dict[str, Any] = {}
    if task != "classify":
        changes["size"] = None  # frames are padded to whole patches, so any size will do, and the model keeps its own
    surrogate, teacher = job.open_pair(config.model, **changes)
    chosen = ChosenData.of(folder_of(config.model), vars(config), teacher.classes, teacher.num_classes)
    train_data, val_data = _open_both(chosen, config.size or teacher.preprocess.size, config)
    train = partial(
        train_probe,
        task=task,
        train_data=train_data,
        val_data=val_data,
        lrs=config.lr,
        batch_size=config.batch_size,
        seeds=config.seed,
        layer=config.layer,
        precision=job.precision,
        size=config.size,
        closed_form=config.closed_form,
        init_head=config.init_head,
        num_workers=config.num_workers,
        ranks=job.ranks,
    )
    job.about_models("probe", config.model, surrogate, teacher)
    job.judge(val_data, f"probe-{task}.json")
    results: dict[str, ProbeResult] = {}
    # The teacher first, because its number of steps holds for both.
    for name, vit in job.sides.items():
        with Progress(f"{task} probe of {_named(name, job.subject)}", None, "steps") as bar:
            results[name] = train(vit, progress=bar.update, **limits)
            # As many steps as fitted into the teacher's time: otherwise the faster model would train longer.
            limits["max_steps"] = results["teacher"].num_steps
        job.folder.mkdir(parents=True, exist_ok=True)
        # Saved at once: an interruption of the second side keeps the first.
        job.ranks.first(partial(results[name].save, job.folder / f"probe-{task}-{name}"))
    report = ProbeReport(job.provenance(), chosen.name, task, results, chosen.split, job.subject)
    job.ranks.first(lambda: report.write(job.folder))
    return Probed(report, job.folder)


def _named(side: str, subject: Subject | None) -> str:
    """A side within a sentence."""
    name = side if subject is None else subject.name_of(side)
    return f"the {side}" if name == side else name


def _open_both(
    chosen: ChosenData, size: int, config: ProbeConfig
) -> tuple[ImageData, ImageData] | tuple[DenseData, DenseData]:
    """Training and held-out data of the task."""
    limit, val_images, task = config.train_images, config.num_images, config.task
    # A surrogate has also seen the images of its run, which need not be those that heads are fitted on.
    seen = chosen.trained_on(folder_of(config.model), size)
    if task == "classify":
        train = chosen.training(limit, size)
        judged = chosen.judged(val_images, size, like=train, also=seen)
        tell_of_new_classes(train, judged)
        return train, judged
    train_spec, val_spec = spec_text(chosen.data), spec_text(chosen.val or chosen.data)
    if config.data is None and train_spec.partition(":")[0] not in DENSE_KINDS:
        raise ValueError(f"{train_spec}, the data of the run, has no target per pixel: give --data nyuv2:PATH")
    chosen.check_same("train", "val")
    train_frames = open_dense(train_spec, "train", task, limit=limit, size=size)
    judged_frames = open_dense(val_spec, chosen.judged_split, task, limit=val_images, size=size)
    # Who asks for training images gets them. Held-out frames must not be among those that were trained on.
    if chosen.judged_split not in ("train", "all"):
        check_apart(train_frames, judged_frames)
        if seen is not None:
            check_apart(seen, judged_frames)
    return train_frames, judged_frames
