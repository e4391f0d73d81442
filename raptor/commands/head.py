"""raptor head: norm and head of a surrogate, refitted to its teacher's outputs without labels."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from raptor.certificate.follow import follow
from raptor.certificate.heads import Head, head_outputs, resolve_head
from raptor.certificate.refit import HeadFit
from raptor.commands.evaluate import open_both, ridge_batches
from raptor.config import HeadConfig
from raptor.data import ChosenData, ImageData, iterate
from raptor.data.stream import TrainStream
from raptor.devices import Ranks, join_ranks, pick_device, pick_precision
from raptor.progress import Progress
from raptor.provenance import Provenance, command
from raptor.run import result_folder
from raptor.streaming import Result, folder_of
from raptor.subject import Subject, check_place
from raptor.train.refit import fit_head
from raptor.train.stage import Budget
from raptor.vit.saved import check_folder_of
from raptor.vit.view import ViT


@dataclass
class FittedHead(Result):
    """What was fitted, and the folder where the weights and head.json are."""

    fit: HeadFit
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        return {**self.fit.to_dict(), "folder": str(self.folder)}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per head."""
        rows = []
        for name, found in (("untouched", self.fit.untouched), ("refitted", self.fit.refitted)):
            rows.append({"head": name, "agreement": found.value, "lower": found.lower, "upper": found.upper})
        return rows

    def text(self) -> str:
        more = "raptor evaluate shows both heads from now on"
        return f"{self.fit.line()}\nwritten to {self.folder}: head.json and the weights; {more}"


@command(HeadConfig)
def head(config: HeadConfig) -> FittedHead:
    """Refit the norm and head of a surrogate to its teacher's outputs, without labels."""
    started = time.monotonic()
    # A wrong word is told before a model is opened.
    budget = Budget.parse(config.budget)
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    ranks = join_ranks(device)
    surrogate, teacher = open_both(config, ranks.device)
    folder = ranks.first(lambda: result_folder(config.out, folder_of(config.run), "head"))
    check_folder_of(folder, folder_of(config.run), surrogate, teacher)
    num_classes, names = head_outputs(teacher, config.head_file)
    size = teacher.preprocess.size
    chosen = ChosenData.of(folder_of(config.run), vars(config), names, num_classes)
    # Outputs of the teacher are fitted and not labels, so images of any class will do.
    trained = chosen.training(config.train_images, size, any_class=True)
    judged = chosen.judged(config.num_images, size, like=trained)
    subject = ranks.first(lambda: Subject.of(teacher, judged, surrogate))
    ranks.first(lambda: check_place(folder, subject, HeadFit.FILE))
    # Made now, because a ridge head that is fitted first is kept there.
    folder.mkdir(parents=True, exist_ok=True)
    own, source = _own_head(config, teacher, chosen, judged, folder, precision, ranks)
    stream = TrainStream(
        trained,
        teacher.preprocess,
        # A set that is smaller than a batch would have no step in an epoch.
        min(config.batch_size, len(trained)),
        seed=config.seed,
        device=ranks.device,
        num_workers=config.num_workers,
        ranks=ranks,
    )
    # How many steps fit into seconds is not known beforehand.
    num_steps = None
    if budget.unit != "s":
        num_steps = budget.num_steps(stream.steps_per_epoch, 1.0, float)
    bar = Progress("head", num_steps, "steps")
    refitted, losses = fit_head(
        surrogate,
        teacher,
        stream,
        own,
        lr=config.lr,
        num_steps=num_steps,
        seconds=budget.amount,
        precision=precision,
        progress=bar.update,
        ranks=ranks,
    )
    bar.finish()
    judging = iterate(
        judged,
        teacher.preprocess,
        config.batch_size,
        device=ranks.device,
        num_workers=config.num_workers,
        ranks=ranks,
    )
    # One pass, in which both heads read the same states.
    found = follow(surrogate, teacher, judging, own, precision, refitted=refitted)

    def finish() -> HeadFit:
        predictions = found.predictions(1000, config.seed)
        # Rounded up, so that a fit of a few steps has a first and a last loss too.
        num_tenth = -(-len(losses) // 10)
        fit = HeadFit(
            head=source,
            parameters=list(refitted.tensors),
            num_steps=len(losses),
            batch_size=stream.batch_size,
            lr=config.lr,
            num_images=len(trained),
            first_loss=fmean(losses[:num_tenth]),
            last_loss=fmean(losses[-num_tenth:]),
            untouched=predictions["agreement"],
            refitted=predictions["refitted_agreement"],
            num_judged=len(judged),
            data=chosen.name,
            split=chosen.split,
            provenance=Provenance.since(started, ranks.device),
            subject=subject,
        )
        # The weights first: a head.json without them would be worse than none.
        refitted.save(folder)
        fit.write(folder)
        return fit

    return FittedHead(ranks.first(finish), folder)


def _own_head(
    config: HeadConfig,
    teacher: ViT,
    chosen: ChosenData,
    judged: ImageData,
    folder: Path,
    precision: str,
    ranks: Ranks,
) -> tuple[Head, str]:
    """The teacher's head, and which one it is; ValueError where it has none and there are no labels to fit one."""
    train = None
    if config.head_file is None and not teacher.num_classes:
        train = ridge_batches(config, teacher, chosen, judged, ranks)
    found, source = resolve_head(
        teacher,
        train,
        file=config.head_file,
        cache=folder / "head.safetensors",
        head_images=config.train_images,
        precision=precision,
    )
    if found is None:
        raise ValueError(f"{source}: give --head_file, or --data with labels")
    return found, source
