"""raptor evaluate: the certificate of a surrogate, its complexity, and the figure."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from raptor.certificate.autonomy import Autonomy, check_autonomous, measure_autonomy
from raptor.certificate.certificate import Certificate
from raptor.certificate.complexity import levin_bounds
from raptor.certificate.heads import Head, head_batches, head_outputs, resolve_head
from raptor.certificate.measure import certify
from raptor.certificate.rate import Complexity, has_matrices, measure_rates
from raptor.certificate.refit import HeadFit, Refitted
from raptor.certificate.shift import CorruptedImages, Corruption, measure_shift
from raptor.certificate.stitching import stitch
from raptor.certificate.verdict import Training, read_training
from raptor.config import EvaluateConfig, HeadConfig
from raptor.data import ChosenData, ImageData, ImageStream, iterate, open_data
from raptor.data.apart import check_apart
from raptor.devices import Ranks, join_ranks, pick_device, pick_precision
from raptor.progress import Progress
from raptor.provenance import Provenance, command, module_option
from raptor.report.strips import add_pictures
from raptor.run import result_folder
from raptor.streaming import Result, folder_of
from raptor.subject import Subject, check_place
from raptor.vit.pair import OTHER_TEACHER, open_pair
from raptor.vit.saved import check_folder_of, describe_surrogate
from raptor.vit.view import ViT

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
        from raptor.report.fidelity import certificate_charts
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
    started = time.monotonic()
    job = _open_job(config)
    head = job.resolve_head()
    notes: list[str] = []
    refitted = job.refitted_head(notes)
    certificate = _certify(job, head, refitted)
    certificate.notes += notes
    complexity = _measure_complexity(job, head, certificate)
    if config.autonomous is not None:
        certificate.autonomy = _measure_autonomy(job, head)
    # Last, because each set costs as much as the certificate itself without null models.
    for name, data in job.images.shifted.items():
        bar = Progress(f"shift to {name}", None, "images")
        row = measure_shift(
            job.surrogate,
            job.teacher,
            job.stream(data, bar.update),
            name=name,
            refitted=refitted,
            **job.measuring(head),
        )
        certificate.shift.append(row)
        bar.finish()
    about = Provenance.since(started, job.ranks.device)
    found = Evaluation(
        replace(certificate, data=job.images.chosen.name, bad_images=job.bad_images(), provenance=about),
        replace(complexity, provenance=about),
        job.folder,
    )
    job.ranks.first(lambda: _write(found))
    return found


@dataclass
class _Images:
    """The images that are judged, the training images that null models are fitted on, and other sets by their names."""

    chosen: ChosenData
    judged: ImageData
    fitted: ImageData
    shifted: dict[str, ImageData]


@dataclass
class _Job:
    """What is measured, and with what."""

    config: EvaluateConfig
    surrogate: ViT
    teacher: ViT
    autonomous: ViT | None
    images: _Images
    ranks: Ranks
    precision: str
    folder: Path
    streams: list[ImageStream] = field(default_factory=list)
    head_source: str = ""

    def stream(self, data: ImageData, progress: Any = None) -> ImageStream:
        """Batches of `data`, whose bad images are remembered."""
        config = self.config
        stream = iterate(
            data,
            self.teacher.preprocess,
            config.batch_size,
            device=self.ranks.device,
            num_workers=config.num_workers,
            progress=progress,
            ranks=self.ranks,
        )
        # A stream knows its bad images only after it was read.
        self.streams.append(stream)
        return stream

    def sample(self) -> ImageStream:
        """The images that stitching, and rate and distortion, are measured on."""
        judged = self.images.judged
        # Spread over the data, because the first images of a folder are of one class.
        return self.stream(judged.select(judged.sample(min(self.config.sample_images, self.config.num_images))))

    def measuring(self, head: Head | None) -> dict[str, Any]:
        """The arguments that most measurements share."""
        return {"head": head, "precision": self.precision, "seed": self.config.seed}

    def resolve_head(self) -> Head | None:
        """The head that judges, and in `head_source` which one that is."""
        train = None
        if self.config.head_file is None and not self.teacher.num_classes:
            train = ridge_batches(self.config, self.teacher, self.images.chosen, self.images.judged, self.ranks)
            self.streams.append(train)
        head, self.head_source = resolve_head(
            self.teacher,
            train,
            file=self.config.head_file,
            cache=self.folder / "head.safetensors",
            head_images=self.config.train_images,
            precision=self.precision,
        )
        return head

    def refitted_head(self, notes: list[str]) -> Refitted | None:
        """Norm and head that `raptor head` left in the folder; `notes` says where they are not of the same head."""
        if not (self.folder / HeadFit.FILE).is_file():
            return None
        fit = HeadFit.read(self.folder)
        # The refit began from one head. Beside another one its agreement would say nothing.
        if fit.head != self.head_source:
            notes.append(f"the refitted head is left out: it was fitted from another one, {fit.head}")
            return None
        notes.append(f"refitted head: norm and head fitted to the teacher's outputs in {fit.num_steps:,} steps")
        return Refitted.load(self.folder, self.surrogate)

    def bad_images(self) -> list[str]:
        """Names of the images that could not be read, of all streams."""
        bad: set[str] = set()
        for stream in self.streams:
            bad.update(stream.bad_images())
        return sorted(bad)


def _open_job(config: EvaluateConfig) -> _Job:
    """Open and check everything before anything is measured."""
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    ranks = join_ranks(device)
    surrogate, teacher = open_both(config, ranks.device)
    autonomous = None
    if config.autonomous is not None:
        autonomous = _open_autonomous(config, surrogate, teacher)
    folder = ranks.first(lambda: result_folder(config.out, folder_of(config.run), "evaluate"))
    check_folder_of(folder, folder_of(config.run), surrogate, teacher)
    images = _choose_images(config, teacher)
    # --classes names the outputs of the head that judges, which is the file's where there is one.
    if images.chosen.classes is not None and config.head_file is None:
        teacher = replace(teacher, classes=list(images.chosen.classes))
    subject = ranks.first(lambda: Subject.of(teacher, images.judged, surrogate))
    # Before anything is measured: an hour later a refusal to replace a result would be of little use.
    ranks.first(lambda: check_place(folder, subject, Certificate.FILE, Complexity.FILE))
    # Made now, because a ridge head that is fitted first is kept there.
    folder.mkdir(parents=True, exist_ok=True)
    return _Job(config, surrogate, teacher, autonomous, images, ranks, precision, folder)


def ridge_batches(
    config: EvaluateConfig | HeadConfig, teacher: ViT, chosen: ChosenData, judged: ImageData, ranks: Ranks
) -> ImageStream:
    """The labelled training images that a ridge head is fitted on."""
    size = teacher.preprocess.size
    return head_batches(
        teacher,
        chosen.labelled(chosen.training(None, size), judged, size),
        config.batch_size,
        head_images=config.train_images,
        num_workers=config.num_workers,
        ranks=ranks,
    )


def _certify(job: _Job, head: Head | None, refitted: Refitted | None) -> Certificate:
    """The certificate, with stitching."""
    config = job.config
    bar = Progress("certificate", config.num_images, "images")
    certificate = certify(
        job.surrogate,
        job.teacher,
        job.stream(job.images.judged, bar.update),
        eps=config.eps,
        train_batches=job.stream(job.images.fitted),
        training=_training_of(config.run),
        split=job.images.chosen.split,
        refitted=refitted,
        **job.measuring(head),
    )
    bar.finish()  # skipped images leave it below its total
    certificate.notes.append(f"head: {job.head_source}")
    if certificate.definition is not None:
        # The worst images keep their pictures in the file, so that a page needs no model to show them.
        add_pictures(certificate.definition, job.teacher, job.images.judged)
    if job.teacher.name.endswith(OTHER_TEACHER):
        # Its blocks never saw such states: what comes out would say nothing of the surrogate.
        certificate.notes.append("no stitching: the surrogate was not made from this teacher")
    elif config.sample_images:
        certificate.stitching = stitch(job.surrogate, job.teacher, job.sample(), **job.measuring(head))
    return certificate


def _measure_complexity(job: _Job, head: Head | None, certificate: Certificate) -> Complexity:
    bounds = levin_bounds(job.surrogate, job.teacher)
    complexity = Complexity(
        fp32=bounds["fp32"],
        fp16=bounds["fp16"],
        int8=bounds["int8"],
        data=job.images.chosen.name,
        split=job.images.chosen.split,
        subject=certificate.subject,
    )
    if not has_matrices(job.surrogate) or not has_matrices(job.teacher):
        certificate.notes.append("no rate and distortion: the blocks have no linear layers to round")
    elif job.config.sample_images:
        complexity.rates = measure_rates(job.surrogate, job.teacher, job.sample(), head=head, precision=job.precision)
    return complexity


def _measure_autonomy(job: _Job, head: Head | None) -> Autonomy:
    assert job.autonomous is not None
    run = job.config.autonomous
    return measure_autonomy(
        job.surrogate,
        job.autonomous,
        job.teacher,
        job.stream(job.images.judged),
        name=str(_source(run) or job.autonomous.name),
        training=_training_of(run),
        **job.measuring(head),
    )


def _training_of(run: Any) -> Training | None:
    source = _source(run)
    return None if source is None else read_training(Path(source))


def _source(run: Any) -> str | Path | None:
    """Where a surrogate was opened from; None for an opened one."""
    source = folder_of(run)
    return source if isinstance(source, str | Path) else None


def open_both(config: EvaluateConfig | HeadConfig, device: torch.device) -> tuple[ViT, ViT]:
    """The surrogate that a config names, and its teacher."""
    run = config.run
    surrogate, model = open_pair(run, device=device, **config.opening())
    if surrogate is not None:
        return surrogate, model
    source = _source(run)
    words = source or model.opened.model or module_option(Provenance.here().module)
    raise ValueError(f"{source or model.name} is no surrogate: make one with raptor distill {words}")


def _open_autonomous(config: EvaluateConfig, surrogate: ViT, teacher: ViT) -> ViT:
    """The autonomous surrogate, made from the same teacher."""
    run = config.autonomous
    assert run is not None
    name = f"--autonomous {_source(run) or getattr(run, 'name', 'model')}"
    if describe_surrogate(folder_of(run)) is None:
        raise ValueError(f"{name} is no surrogate: name a run of raptor distill")
    # The teacher is handed over, so that it is opened once and both surrogates are held against it.
    other, _ = open_pair(
        run,
        teacher=teacher,
        allow_other_teacher=config.allow_other_teacher,
        device=teacher.device,
        trust_hub=config.trust_hub,
    )
    assert other is not None
    check_autonomous(other, surrogate, name)
    return other


def _choose_images(config: EvaluateConfig, teacher: ViT) -> _Images:
    # Labels are numbered as the outputs of the head that judges, which may be that of a file.
    num_classes, names = head_outputs(teacher, config.head_file)
    size = teacher.preprocess.size
    chosen = ChosenData.of(folder_of(config.run), vars(config), names, num_classes)
    # Of any class: null models and the search for copies need images, not labels.
    fitted = chosen.training(config.train_images or _NULL_MODEL_IMAGES, size, any_class=True)
    seen = chosen.trained_on(folder_of(config.run), size)
    like: ImageData = fitted
    other: ImageData | None = seen
    has_own_head = config.head_file is None and chosen.classes is None
    if has_own_head and seen is not None and 0 < len(seen.classes or ()) == teacher.num_classes:
        # The run's classes are those of the head, so that they give the labels their numbers.
        like = seen
        other = fitted
    # Shift sets are opened here too, so that a wrong name is told before anything is measured.
    judged = chosen.judged(config.num_images, size, like=like, also=other)
    return _Images(chosen, judged, fitted, _shifted_sets(config, judged, fitted, size))


def _shifted_sets(config: EvaluateConfig, judged: ImageData, fitted: ImageData, size: int) -> dict[str, ImageData]:
    """The sets of --shift by their names: the judged images corrupted, and other data without the training images."""
    asked = config.shift or []
    if not isinstance(asked, list | tuple):
        asked = [asked]
    found: dict[str, ImageData] = {}
    for one in asked:
        corruption = Corruption.parse(one) if isinstance(one, str) else None
        if corruption is not None:
            found[str(corruption)] = CorruptedImages(judged, corruption)
            continue
        # `own`: the set's validation part, or all of it. Its labels play no part, so that any classes will do.
        data = open_data(one, "own", limit=config.num_images, size=size, skip_bad=config.skip_bad)
        # A set that holds training images would not be unseen.
        check_apart(fitted, data)
        found[data.name] = data
    return found


def _write(found: Evaluation) -> None:
    from raptor.report.fidelity import certificate_charts, rate_charts
    from raptor.report.figures import save_figures

    found.certificate.write(found.folder)
    found.complexity.write(found.folder)
    figures = found.folder / "figures"
    save_figures(certificate_charts(found.certificate), figures, found.certificate.source())
    save_figures(rate_charts(found.complexity), figures, found.certificate.source())
