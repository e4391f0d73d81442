"""What the four commands that use recurrence as a tool work with: a surrogate, its teacher, a head and images."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from raptor.certificate.heads import Head, head_batches, head_outputs, resolve_head
from raptor.certificate.verdict import named_images
from raptor.config import OnSurrogate
from raptor.data import ChosenData, ImageData, ImageStream, iterate
from raptor.data.apart import check_apart
from raptor.devices import pick_device, pick_precision, seeded
from raptor.phases.cut import Phases
from raptor.provenance import Provenance
from raptor.run import ResultFile, result_folder
from raptor.streaming import folder_of
from raptor.subject import Subject, check_place
from raptor.vit.on_demand import ReadOut
from raptor.vit.pair import open_pair
from raptor.vit.saved import check_folder_of
from raptor.vit.view import ViT


@dataclass
class ToolFile(ResultFile):
    """What depth.json, watch.json, edit.json and correct.json begin with.

    Attributes:
        head: which head gives the classes.
        findings: what came out, a sentence each.
    """

    subject: Subject
    phases: list[int]
    head: str
    data: str
    split: str
    image_size: int
    num_images: int
    findings: list[str]
    provenance: Provenance

    @property
    def images(self) -> str:
        """The images of the measurement, in words."""
        return named_images(self.num_images, self.split, self.data, self.image_size)


@dataclass
class ToolJob:
    """A surrogate and its teacher, opened and checked.

    Attributes:
        data: the images that the options choose; `images` are those that are judged.
        batch_size: of every stream.
        head: of both models; `head_source` says which one it is.
    """

    config: OnSurrogate
    surrogate: ViT
    teacher: ViT
    data: ChosenData
    images: ImageData
    folder: Path
    precision: str
    batch_size: int
    head: Head
    head_source: str
    subject: Subject
    started: float = field(default_factory=time.monotonic)

    @property
    def phases(self) -> Phases:
        assert self.surrogate.phases is not None
        return Phases.from_lengths(self.surrogate.phases)

    @property
    def device(self) -> torch.device:
        return self.teacher.device

    def stream(self, images: ImageData | None = None, progress: Any = None) -> ImageStream:
        """Batches of `images`, by default of those that are judged."""
        return iterate(
            self.images if images is None else images,
            self.teacher.preprocess,
            self.batch_size,
            device=self.device,
            num_workers=self.config.num_workers,
            progress=progress,
        )

    def read_out(self, vit: ViT) -> ReadOut:
        """Class scores of a state of the surrogate or its teacher."""
        return read_out_of(self.head, vit)

    def training_images(self, num_images: int) -> ImageData:
        """Images that the surrogate may have been trained on, to fit something on."""
        found = self.data.training(num_images, self.teacher.preprocess.size, any_class=True)
        # Where there is a run, its images have been compared; --data and --val of any other model have not.
        if self.data.run is None and self.data.split not in ("train", "all"):
            check_apart(found, self.images)
        return found

    def about(self, findings: list[str]) -> dict[str, Any]:
        """The first entries of the result file."""
        return {
            "subject": self.subject,
            "phases": list(self.phases),
            "head": self.head_source,
            "data": self.data.name,
            "split": self.data.split,
            "image_size": self.teacher.preprocess.size,
            "num_images": len(self.images),
            "findings": findings,
            "provenance": Provenance.since(self.started, self.device),
        }


def read_out_of(head: Head, vit: ViT) -> ReadOut:
    """Class scores of a state: by the model's own head, or by a linear head on its features."""
    if head.linear is None:
        return vit.finish
    linear = head.linear.to(vit.device)
    return lambda x_btd: linear(vit.features(x_btd))


def open_job(config: OnSurrogate, file: str) -> ToolJob:
    """Open and check everything before anything is measured. `file` is the name of the result file."""
    started = time.monotonic()
    device = pick_device(config.device)
    with seeded(config.seed):
        surrogate, teacher = open_pair(config.run, device=device, **config.opening())
    # The result of a distillation stands for its folder.
    source = folder_of(config.run)
    if surrogate is None:
        raise ValueError(f"{teacher.name} is no surrogate: make one with raptor distill")
    folder = result_folder(config.out, source, file.removesuffix(".json"))
    check_folder_of(folder, source, surrogate, teacher)
    # Labels are numbered as the outputs of the head that judges.
    num_classes, names = head_outputs(teacher, config.head_file)
    data = ChosenData.of(source, vars(config), names, num_classes)
    if data.classes is not None and config.head_file is None:
        # --classes names the outputs of the head that judges, which is the file's where there is one.
        teacher = replace(teacher, classes=list(data.classes))
    size = teacher.preprocess.size
    # A surrogate follows its teacher better on images that it was trained on: agreement there would flatter it.
    images = data.judged(config.num_images, size, also=data.trained_on(source, size))
    if len(images) < 2:
        raise ValueError(f"{data.name} has one image, and shares of images are measured: give at least two with --data")
    # Before anything is measured: minutes later a refusal to replace a result would be of little use.
    subject = Subject.of(teacher, images, surrogate)
    check_place(folder, subject, file)
    # Where time is measured: few images on a CPU, whose cache is small, and enough to fill a GPU.
    batch_size = 8
    if device == "cuda":
        batch_size = 256
    job = ToolJob(
        config,
        surrogate,
        teacher,
        data,
        images,
        folder,
        pick_precision(config.precision, device),
        config.batch_size or batch_size,
        head=Head("own", 0),
        head_source="",
        subject=subject,
        started=started,
    )
    # After the images, because a ridge head is fitted on their training part.
    job.head, job.head_source = _find_head(job)
    folder.mkdir(parents=True, exist_ok=True)
    return job


def _find_head(job: ToolJob) -> tuple[Head, str]:
    """The head that gives classes, and which one that is; ValueError where there is none."""
    config = job.config
    train = None
    if config.head_file is None and not job.teacher.num_classes:
        size = job.teacher.preprocess.size
        fitted = job.data.labelled(job.data.training(None, size), job.images, size)
        train = head_batches(
            job.teacher, fitted, job.batch_size, head_images=config.train_images, num_workers=config.num_workers
        )
    head, source = resolve_head(
        job.teacher,
        train,
        file=config.head_file,
        cache=job.folder / "head.safetensors",
        head_images=config.train_images,
        precision=job.precision,
    )
    if head is None:
        raise ValueError(f"{source.removeprefix('no accuracy or agreement: ')}: give --head_file, or labelled images")
    return head, source


def chosen_phases(found: Phases, at: int | None) -> list[int]:
    """The phases (1..k) that `--at` means: one, or all of them."""
    if at is None:
        return list(range(1, found.k + 1))
    if not 1 <= at <= found.k:
        raise ValueError(f"there is no phase {at}: --at takes 1 to {found.k}")
    return [at]
