"""raptor evaluate: the certificate of a surrogate, its complexity, and the figure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raptor.certificate.autonomy import check_autonomous, measure_autonomy
from raptor.certificate.certificate import Certificate
from raptor.certificate.complexity import levin_bounds
from raptor.certificate.measure import certify
from raptor.certificate.rate import Complexity, has_matrices, measure_rates
from raptor.certificate.refit import HeadFit, Refitted
from raptor.certificate.shift import CorruptedImages, measure_shift
from raptor.certificate.stitching import stitch
from raptor.certificate.verdict import Training, read_training
from raptor.commands.pair_job import SurrogateJob, open_job, place_of
from raptor.config import EvaluateConfig
from raptor.data import ImageStream
from raptor.data.apart import check_apart
from raptor.progress import Progress
from raptor.provenance import command
from raptor.report.fidelity import certificate_charts, rate_charts
from raptor.report.strips import add_pictures
from raptor.streaming import Result
from raptor.vit.pair import OTHER_TEACHER

_NULL_MODEL_IMAGES = 1000


@dataclass
class Evaluation(Result):
    """A certificate, the complexity of both sides, and where they were written."""

    certificate: Certificate
    complexity: Complexity
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        found = {"certificate": self.certificate.to_dict(), "complexity": self.complexity.to_dict()}
        return {**found, "folder": str(self.folder)}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per token group and layer."""
        groups = self.certificate.curves.groups
        return [{"group": group, **row} for group in groups for row in self.certificate.rows(group)]

    def plot(self) -> Any:
        """The error curves over layers."""
        from raptor.report.figures import drawn

        return drawn("certificate", certificate_charts(self.certificate), self.certificate.source())

    def text(self) -> str:
        from rich.console import Console
        from rich.table import Table

        found = self.certificate
        tables = [found.layer_table(), *found.tables()]
        if found.shift:
            tables.append(found.shift_table())
        # rich takes 80 columns where there is no terminal, and would break the rows of these tables. Names of models
        # and folders may hold square brackets, which rich would read as markup.
        console = Console(width=140, markup=False, highlight=False, soft_wrap=True)
        with console.capture() as capture:
            for line in found.first_lines():
                console.print(line)
            for head, rows in tables:
                table = Table(*head)
                for row in rows:
                    table.add_row(*row)
                console.print(table)
            for line in [*self.complexity.lines(), *found.notes]:
                console.print(f"  {line}")
        return capture.get() + f"written to {self.folder}: certificate.json, complexity.json and figures"


@command(EvaluateConfig)
def evaluate(config: EvaluateConfig) -> Evaluation:
    """Certify a surrogate against its teacher on held-out images."""
    job = open_job(
        config,
        "evaluate",
        Certificate.FILE,
        Complexity.FILE,
        train_images=config.train_images or _NULL_MODEL_IMAGES,
    )
    assert job.fitted is not None
    # Opened here too, so that a wrong name is told before anything is measured.
    autonomous = None
    if config.autonomous is not None:
        autonomous, name_of_autonomous = job.open_beside("autonomous")
        check_autonomous(autonomous, job.surrogate, f"--autonomous {name_of_autonomous}")
    shifted = job.open_sets("shift", job.judged)
    for data in shifted.values():
        if not isinstance(data, CorruptedImages):
            # A set that holds training images would not be unseen.
            check_apart(job.fitted, data)
    head = job.find_head(required=False)
    measuring: dict[str, Any] = {"head": head, "precision": job.precision, "seed": config.seed}
    notes: list[str] = []
    refitted = _refitted_head(job, notes)
    certificate = _certify(job, config, refitted, measuring)
    certificate.notes += notes
    complexity = _measure_complexity(job, config, certificate)
    if autonomous is not None:
        certificate.autonomy = measure_autonomy(
            job.surrogate,
            autonomous,
            job.teacher,
            job.stream(),
            name=name_of_autonomous,
            training=_training_of(config.autonomous),
            **measuring,
        )
    # Last, because each set costs as much as the certificate itself without null models.
    for name, data in shifted.items():
        with Progress(f"shift to {name}", None, "images") as bar:
            batches = job.stream(data, bar.update)
            row = measure_shift(job.surrogate, job.teacher, batches, name=name, refitted=refitted, **measuring)
            certificate.shift.append(row)
    about = job.provenance()
    certificate = replace(certificate, data=job.data.name, bad_images=job.bad_images(), provenance=about)
    complexity = replace(complexity, provenance=about)
    job.write(certificate, certificate_charts, certificate.source())
    job.write(complexity, rate_charts, certificate.source())
    return Evaluation(certificate, complexity, job.folder)


def _certify(
    job: SurrogateJob, config: EvaluateConfig, refitted: Refitted | None, measuring: dict[str, Any]
) -> Certificate:
    """The certificate, with stitching."""
    assert job.fitted is not None
    with Progress("certificate", config.num_images, "images") as bar:
        certificate = certify(
            job.surrogate,
            job.teacher,
            job.stream(progress=bar.update),
            eps=config.eps,
            train_batches=job.stream(job.fitted),
            training=_training_of(config.run),
            split=job.data.split,
            refitted=refitted,
            **measuring,
        )
    certificate.notes.append(f"head: {job.head_source}")
    if certificate.definition is not None:
        # The worst images keep their pictures in the file, so that a page needs no model to show them.
        add_pictures(certificate.definition, job.teacher, job.judged)
    if job.teacher.name.endswith(OTHER_TEACHER):
        # Its blocks never saw such states: what comes out would say nothing of the surrogate.
        certificate.notes.append("no stitching: the surrogate was not made from this teacher")
    elif config.sample_images:
        certificate.stitching = stitch(job.surrogate, job.teacher, _sample(job, config), **measuring)
    return certificate


def _sample(job: SurrogateJob, config: EvaluateConfig) -> ImageStream:
    """The images that stitching, and rate and distortion, are measured on."""
    # Spread over the data, because the first images of a folder are of one class.
    return job.stream(job.judged.select(job.judged.sample(min(config.sample_images, config.num_images))))


def _measure_complexity(job: SurrogateJob, config: EvaluateConfig, certificate: Certificate) -> Complexity:
    bounds = levin_bounds(job.surrogate, job.teacher)
    complexity = Complexity(
        fp32=bounds["fp32"],
        fp16=bounds["fp16"],
        int8=bounds["int8"],
        data=job.data.name,
        split=job.data.split,
        subject=certificate.subject,
    )
    if not has_matrices(job.surrogate) or not has_matrices(job.teacher):
        certificate.notes.append("no rate and distortion: the blocks have no linear layers to round")
    elif config.sample_images:
        batches = _sample(job, config)
        complexity.rates = measure_rates(job.surrogate, job.teacher, batches, head=job.head, precision=job.precision)
    return complexity


def _refitted_head(job: SurrogateJob, notes: list[str]) -> Refitted | None:
    """Norm and head that `raptor head` left in the folder; `notes` says where they are not of the same head."""
    if not (job.folder / HeadFit.FILE).is_file():
        return None
    fit = HeadFit.read(job.folder)
    # The refit began from one head. Beside another one its agreement would say nothing.
    if fit.head != job.head_source:
        notes.append(f"the refitted head is left out: it was fitted from another one, {fit.head}")
        return None
    notes.append(f"refitted head: norm and head fitted to the teacher's outputs in {fit.num_steps:,} steps")
    return Refitted.load(job.folder, job.surrogate)


def _training_of(run: Any) -> Training | None:
    place = place_of(run)
    return None if place is None else read_training(Path(place))
