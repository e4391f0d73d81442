"""What a command works with: models, images, a head and the folder of its results, opened and checked beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from raptor.data import ChosenData, ImageData, ImageStream, iterate
from raptor.devices import Ranks, join_ranks, pick_device, pick_precision, seeded
from raptor.provenance import Provenance
from raptor.run import ResultFile, result_folder
from raptor.streaming import folder_of
from raptor.subject import Subject, check_place
from raptor.vit.pair import Pair, open_pair, open_studied
from raptor.vit.saved import check_folder_of
from raptor.vit.view import ViT

if TYPE_CHECKING:
    from raptor.certificate.heads import Head
    from raptor.report.charts import Chart


class Job:
    """One call of a command about a model. It is filled in three steps: `Job`, `about_models`, `judge`.

    Attributes:
        config: the options of the command.
        source: the model or run that was named: a name, a folder or an open model.
        teacher: the model; the teacher where there is a `surrogate` beside it.
        folder: where the results go.
        data: the images that the options choose; `judged` are those that are measured.
        subject: of the results.
        head: for accuracy and agreement; `head_source` says which one it is, or why there is none.
    """

    source: Any
    teacher: ViT
    surrogate: ViT | None
    folder: Path
    data: ChosenData
    judged: ImageData
    subject: Subject

    def __init__(self, config: Any) -> None:
        self.started = time.monotonic()
        self.config = config
        device = pick_device(config.device)
        self.precision = pick_precision(config.precision, device)
        self.ranks = join_ranks(device) if config.IN_PARALLEL else Ranks(device=torch.device(device))
        # Without a number time is measured: a CPU with its small cache wants few images, a GPU many.
        self.batch_size = config.batch_size or (256 if device == "cuda" else 8)
        self.head: Head | None = None
        self.head_source = ""
        self._streams: list[ImageStream] = []

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def sides(self) -> dict[str, ViT]:
        """The teacher and, where there is one, the surrogate."""
        found = {"teacher": self.teacher}
        if self.surrogate is not None:
            found["surrogate"] = self.surrogate
        return found

    def open_pair(self, source: Any, seed: int = 0, **changes: Any) -> Pair:
        """A surrogate and its teacher, or a single model, opened as the options say except for `changes`."""
        # An untrained model gets the same weights on every rank and in every run.
        with seeded(seed):
            return open_pair(source, device=self.device, **{**self.config.opening(), **changes})

    def open_studied(self, source: Any) -> ViT:
        """The only model of a command that looks at one: of a run its surrogate."""
        with seeded():
            return open_studied(source, device=self.device, **self.config.opening())

    def about_models(
        self, command: str, source: Any, surrogate: ViT | None, teacher: ViT, folder: Path | None = None
    ) -> None:
        """The models that the results are about, and with them the folder: by default that of the run."""
        # The result of a distillation stands for its folder.
        self.source = folder_of(source)
        self.surrogate = surrogate
        self.teacher = teacher
        if folder is None:
            names = (self.config.out, self.source, command, self.config.weights_name())
            folder = self.ranks.first(lambda: result_folder(*names))
        self.folder = folder
        check_folder_of(folder, self.source, surrogate, teacher)

    def judge(self, images: ImageData, *files: str) -> None:
        """The images that are measured, and with them the subject of `files`, which may not replace another's."""
        self.judged = images
        self.subject = self.ranks.first(lambda: Subject.of(self.teacher, images, self.surrogate))
        # An hour later a refusal to replace a result would be of little use.
        self.ranks.first(lambda: check_place(self.folder, self.subject, *files))

    def stream(
        self,
        images: ImageData | None = None,
        progress: Any = None,
        *,
        batch_size: int | None = None,
        limit: int | None = None,
        ranks: Ranks | None = None,
    ) -> ImageStream:
        """Batches of `images`, by default of those that are judged, which all ranks share."""
        stream = iterate(
            self.judged if images is None else images,
            self.teacher.preprocess,
            batch_size or self.batch_size,
            device=self.device,
            num_workers=self.config.num_workers,
            limit=limit,
            progress=progress,
            ranks=ranks or self.ranks,
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

    @property
    def fits_head(self) -> bool:
        """Whether the head that judges has to be fitted."""
        return self.config.head_file is None and not self.teacher.num_classes

    def choose_head(self, training: ImageData | None) -> Head | None:
        """The head that judges: that of a file, the model's own, or a ridge head fitted on `training`."""
        # Most commands need no head.
        from raptor.certificate.heads import head_batches, resolve_head

        config = self.config
        batches = None
        if training is not None:
            batches = head_batches(
                self.teacher,
                training,
                self.batch_size,
                head_images=config.train_images,
                num_workers=config.num_workers,
                ranks=self.ranks,
            )
            self._streams.append(batches)
        self.head, self.head_source = resolve_head(
            self.teacher,
            batches,
            file=config.head_file,
            cache=self.folder / "head.safetensors",
            head_images=config.train_images,
            precision=self.precision,
        )
        return self.head

    def provenance(self) -> Provenance:
        return Provenance.since(self.started, self.device)

    def write(self, file: ResultFile, charts: Callable[[Any], Iterable[Chart]], source: str) -> list[str]:
        """Write a result file and its figures; returns their names.

        charts: gives the charts of the file. source: the models and images of the figures.
        """
        from raptor.report.figures import save_figures

        def save() -> list[str]:
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write(self.folder)
            return save_figures(charts(file), self.folder / "figures", source)

        return self.ranks.first(save)
