"""raptor head: norm and head of a surrogate, refitted to its teacher's outputs without labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from raptor.certificate.follow import follow
from raptor.certificate.refit import HeadFit
from raptor.commands.pair_job import open_job
from raptor.config import HeadConfig
from raptor.data.stream import TrainStream
from raptor.progress import Progress
from raptor.provenance import command
from raptor.streaming import Result
from raptor.train.refit import fit_head
from raptor.train.stage import Budget


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
    # A wrong word is told before a model is opened.
    budget = Budget.parse(config.budget)
    job = open_job(config, "head", HeadFit.FILE, train_images=config.train_images)
    own = job.find_head()
    surrogate = job.surrogate
    teacher = job.teacher
    trained = job.fitted
    ranks = job.ranks
    assert trained is not None and own is not None
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
    with Progress("head", num_steps, "steps") as bar:
        refitted, losses = fit_head(
            surrogate,
            teacher,
            stream,
            own,
            lr=config.lr,
            num_steps=num_steps,
            seconds=budget.amount,
            precision=job.precision,
            progress=bar.update,
            ranks=ranks,
        )
    # One pass, in which both heads read the same states.
    found = follow(surrogate, teacher, job.stream(), own, job.precision, refitted=refitted)

    def finish() -> HeadFit:
        predictions = found.predictions(1000, config.seed)
        # Rounded up, so that a fit of a few steps has a first and a last loss too.
        num_tenth = -(-len(losses) // 10)
        fit = HeadFit(
            head=job.head_source,
            parameters=list(refitted.tensors),
            num_steps=len(losses),
            batch_size=stream.batch_size,
            lr=config.lr,
            num_images=len(trained),
            first_loss=fmean(losses[:num_tenth]),
            last_loss=fmean(losses[-num_tenth:]),
            untouched=predictions["agreement"],
            refitted=predictions["refitted_agreement"],
            num_judged=len(job.judged),
            data=job.data.name,
            split=job.data.split,
            provenance=job.provenance(),
            subject=job.subject,
        )
        # The weights first: a head.json without them would be worse than none.
        refitted.save(job.folder)
        fit.write(job.folder)
        return fit

    return FittedHead(ranks.first(finish), job.folder)
