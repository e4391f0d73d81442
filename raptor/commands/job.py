"""What commands about a surrogate open: both models, the images they are judged on, and the head that judges."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from raptor.certificate.heads import Head, head_batches, head_outputs, resolve_head
from raptor.config import OnSurrogate
from raptor.data import ChosenData, ImageData, ImageStream, iterate
from raptor.data.apart import check_apart
from raptor.devices import Ranks, join_ranks, pick_device, pick_precision, seeded
from raptor.phases.cut import Phases
from raptor.provenance import Provenance, module_option
from raptor.recurrence.tool import read_out_of
from raptor.run import result_folder
from raptor.streaming import folder_of
from raptor.subject import Subject, check_place
from raptor.vit.on_demand import ReadOut
from raptor.vit.pair import open_pair
from raptor.vit.saved import check_folder_of
from raptor.vit.view import ViT


@dataclass
class Job:
    """A surrogate and its teacher, opened and checked.

    Attributes:
        data: the images that the options choose; `judged` are those that both models are judged on.
        fitted: training images, where the command fits something.
        batch_size: of every stream.
        head: of both models; `head_source` says which one it is, or why there is none.
    """

    config: OnSurrogate
    surrogate: ViT
    teacher: ViT
    data: ChosenData
    judged: ImageData
    fitted: ImageData | None
    folder: Path
    precision: str
    batch_size: int
    ranks: Ranks
    subject: Subject
    started: float
    head: Head | None = None
    head_source: str = ""
    _streams: list[ImageStream] = field(default_factory=list)

    @property
    def phases(self) -> Phases:
        assert self.surrogate.phases is not None
        return Phases.from_lengths(self.surrogate.phases)

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def stream(self, images: ImageData | None = None, progress: Any = None) -> ImageStream:
        """Batches of `images`, by default of those that are judged."""
        stream = iterate(
            self.judged if images is None else images,
            self.teacher.preprocess,
            self.batch_size,
            device=self.device,
            num_workers=self.config.num_workers,
            progress=progress,
            ranks=self.ranks,
        )
        # A stream knows its bad images only after it was read.
        self._streams.append(stream)
        return stream

    def bad_images(self) -> list[str]:
        """Names of the images that could not be read, of all streams."""
        bad: set[str] = set()
        for stream in self._streams:
            bad.update(stream.bad_images())
        return sorted(bad)

    def find_head(self, required: bool = True) -> Head | None:
        """The head that judges; a ridge head where the teacher has none. ValueError where a required one is missing."""
        config = self.config
        train = None
        if config.head_file is None and not self.teacher.num_classes:
            size = self.teacher.preprocess.size
            train = head_batches(
                self.teacher,
                self.data.labelled(self.data.training(None, size), self.judged, size),
                self.batch_size,
                head_images=config.train_images,
                num_workers=config.num_workers,
                ranks=self.ranks,
            )
            self._streams.append(train)
        self.head, self.head_source = resolve_head(
            self.teacher,
            train,
            file=config.head_file,
            cache=self.folder / "head.safetensors",
            head_images=config.train_images,
            precision=self.precision,
        )
        if required and self.head is None:
            reason = self.head_source.removeprefix("no accuracy or agreement: ")
            raise ValueError(f"{reason}: give --head_file, or --data with labels")
        return self.head

    def read_out(self, vit: ViT) -> ReadOut:
        """Class scores of a state of the surrogate or its teacher."""
        assert self.head is not None
        return read_out_of(self.head, vit)

    def training_images(self, num_images: int) -> ImageData:
        """Images that the surrogate may have been trained on, to fit something on."""
        found = self.data.training(num_images, self.teacher.preprocess.size, any_class=True)
        # Where there is a run, its images have been compared; --data and --val of any other model have not.
        if self.data.run is None and self.data.split not in ("train", "all"):
            check_apart(found, self.judged)
        return found

    def about(self, findings: list[str]) -> dict[str, Any]:
        """The first entries of a tool's result file."""
        return {
            "subject": self.subject,
            "phases": list(self.phases),
            "head": self.head_source,
            "data": self.data.name,
            "split": self.data.split,
            "image_size": self.teacher.preprocess.size,
            "num_images": len(self.judged),
            "findings": findings,
            "provenance": Provenance.since(self.started, self.device),
        }


def open_job(
    config: OnSurrogate, name: str, *files: str, train_images: int | None = 0, in_parallel: bool = True
) -> Job:
    """Open and check everything before anything is measured.

    name: of the command; `files` are the names of its result files.
    train_images: how many images are fitted on, None for all; 0 where nothing is fitted.
    in_parallel: whether the processes that torchrun started share the images.
    """
    started = time.monotonic()
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    ranks = join_ranks(device) if in_parallel else Ranks(device=torch.device(device))
    surrogate, teacher = open_both(config, ranks.device)
    # The result of a distillation stands for its folder.
    source = folder_of(config.run)
    folder = ranks.first(lambda: result_folder(config.out, source, name))
    check_folder_of(folder, source, surrogate, teacher)
    # Labels are numbered as the outputs of the head that judges, which may be that of a file.
    num_classes, names = head_outputs(teacher, config.head_file)
    data = ChosenData.of(source, vars(config), names, num_classes)
    size = teacher.preprocess.size
    # A surrogate follows its teacher better on images that it was trained on: agreement there would flatter it.
    seen = data.trained_on(source, size)
    fitted = None
    if train_images != 0:
        # Of any class: outputs and states are fitted, not labels.
        fitted = data.training(train_images, size, any_class=True)
    like = fitted
    other = seen
    has_own_head = config.head_file is None and data.classes is None
    if fitted is not None and has_own_head and seen is not None and 0 < len(seen.classes or ()) == teacher.num_classes:
        # The run's images have as many classes as the head, so their order of classes numbers the labels.
        like = seen
        other = fitted
    judged = data.judged(config.num_images, size, like=like, also=other)
    if data.classes is not None and config.head_file is None:
        # --classes names the outputs of the head that judges, which is the file's where there is one.
        teacher = replace(teacher, classes=list(data.classes))
    subject = ranks.first(lambda: Subject.of(teacher, judged, surrogate))
    # An hour later a refusal to replace a result would be of little use.
    ranks.first(lambda: check_place(folder, subject, *files))
    # Made now, because a ridge head that is fitted first is kept there.
    folder.mkdir(parents=True, exist_ok=True)
    # `depth` measures time: a CPU with its small cache wants few images, a GPU many.
    batch_size = config.batch_size
    if batch_size is None:
        batch_size = 256 if device == "cuda" else 8
    return Job(config, surrogate, teacher, data, judged, fitted, folder, precision, batch_size, ranks, subject, started)


def open_both(config: OnSurrogate, device: torch.device) -> tuple[ViT, ViT]:
    """The surrogate that a config names, and its teacher."""
    with seeded(config.seed):
        surrogate, model = open_pair(config.run, device=device, **config.opening())
    if surrogate is None:
        source = folder_of(config.run)
        source = source if isinstance(source, str | Path) else None
        words = source or model.opened.model or module_option(Provenance.here().module)
        raise ValueError(f"{source or model.name} is no surrogate: make one with raptor distill {words}")
    return surrogate, model


def chosen_phases(found: Phases, at: int | None) -> list[int]:
    """The phases (1..k) that `--at` means: one, or all of them."""
    if at is None:
        return list(range(1, found.k + 1))
    if not 1 <= at <= found.k:
        raise ValueError(f"there is no phase {at}: --at takes 1 to {found.k}")
    return [at]
