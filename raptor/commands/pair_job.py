"""The job of a command about a surrogate: its teacher, the head that judges, and images that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raptor.certificate.heads import Head, head_outputs
from raptor.certificate.shift import CorruptedImages, Corruption
from raptor.commands.job import Job
from raptor.config import OnSurrogate
from raptor.data import ChosenData, ImageData, open_data
from raptor.data.apart import check_apart
from raptor.phases.cut import Phases
from raptor.provenance import Provenance, module_option
from raptor.recurrence.tool import read_out_of
from raptor.streaming import folder_of
from raptor.vit.on_demand import ReadOut
from raptor.vit.pair import open_pair
from raptor.vit.saved import describe_surrogate
from raptor.vit.view import ViT


class SurrogateJob(Job):
    """A job about a surrogate and its teacher.

    Attributes:
        fitted: training images, where the command fits something.
    """

    surrogate: ViT
    fitted: ImageData | None = None

    @property
    def phases(self) -> Phases:
        assert self.surrogate.phases is not None
        return Phases.from_lengths(self.surrogate.phases)

    def find_head(self, required: bool = True) -> Head | None:
        """The head that judges; a ridge head where the teacher has none. ValueError where a required one is missing."""
        training = None
        if self.fits_head:
            size = self.teacher.preprocess.size
            training = self.data.labelled(self.data.training(None, size), self.judged, size)
        self.choose_head(training)
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

    def open_beside(self, option: str) -> tuple[ViT, str]:
        """The other surrogate of the same teacher that an option names, and its name."""
        given = getattr(self.config, option)
        source = folder_of(given)
        if describe_surrogate(source) is None:
            shown = place_of(given) or getattr(source, "name", "model")
            raise ValueError(f"--{option} {shown} is no surrogate: name a run of raptor distill")
        # The teacher is handed over, so that it is opened once and both surrogates are held against it.
        other, _ = open_pair(
            given,
            teacher=self.teacher,
            allow_other_teacher=self.config.allow_other_teacher,
            device=self.device,
            trust_hub=self.config.trust_hub,
        )
        assert other is not None
        # On images that it was trained on it would look better than it is. Those of the job are of another run, or of
        # none.
        seen = replace(self.data, run=None).trained_on(source, self.teacher.preprocess.size)
        if seen is not None and self.data.split not in ("train", "all"):
            check_apart(seen, self.judged, "training images", "name others with --data")
        return other, place_of(given) or other.name

    def open_sets(self, option: str, judged: ImageData, attacks: Sequence[str] = ()) -> dict[str, ImageData]:
        """The sets of images of an option by their names: corruptions of the judged images, or other data.

        Under the name of one of `attacks` stand the judged images, from which it begins.
        """
        asked = getattr(self.config, option) or []
        found: dict[str, ImageData] = {}
        for one in asked if isinstance(asked, list | tuple) else [asked]:
            corruption = Corruption.parse(one) if isinstance(one, str) else None
            if corruption is not None:
                name = str(corruption)
                data: ImageData = CorruptedImages(judged, corruption)
            elif isinstance(one, str) and one in attacks:
                name = one
                data = judged
            else:
                # `own`: the set's validation part, or all of it. Labels play no part, so that any classes will do.
                size = self.teacher.preprocess.size
                data = open_data(one, "own", limit=self.config.num_images, size=size, skip_bad=self.config.skip_bad)
                name = data.name
            if name in found:
                raise ValueError(f"--{option} names two sets {name}: give each once, under a name of its own")
            found[name] = data
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
            "provenance": self.provenance(),
        }


def open_job(config: OnSurrogate, command: str, *files: str, train_images: int | None = 0) -> SurrogateJob:
    """Open and check a surrogate, its teacher and their images before anything is measured.

    files: names of the result files of the command.
    train_images: how many images are fitted on, None for all; 0 where nothing is fitted.
    """
    job = SurrogateJob(config)
    surrogate, teacher = job.open_pair(config.run, config.seed)
    source = folder_of(config.run)
    if surrogate is None:
        name = place_of(source)
        words = name or teacher.opened.model or module_option(Provenance.here().module)
        raise ValueError(f"{name or teacher.name} is no surrogate: make one with raptor distill {words}")
    job.about_models(command, source, surrogate, teacher)
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
        job.teacher = replace(teacher, classes=list(data.classes))
    job.data = data
    job.fitted = fitted
    job.judge(judged, *files)
    # Made now, because a ridge head that is fitted first is kept there.
    job.folder.mkdir(parents=True, exist_ok=True)
    return job


def place_of(given: Any) -> str | None:
    """The name or folder by which a model was given; None for an open one."""
    source = folder_of(given)
    if isinstance(source, str | Path):
        return str(source)
    return None


def chosen_phases(found: Phases, at: int | None) -> list[int]:
    """The phases (1..k) that `--at` means: one, or all of them."""
    if at is None:
        return list(range(1, found.k + 1))
    if not 1 <= at <= found.k:
        raise ValueError(f"there is no phase {at}: --at takes 1 to {found.k}")
    return [at]
