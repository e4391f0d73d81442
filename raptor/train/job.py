"""One distillation: its teacher, its images and its machine, and what it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from raptor.certificate.heads import Head
from raptor.config import DistillConfig
from raptor.data import ChosenData, ImageData
from raptor.data.apart import check_apart
from raptor.data.by_name import as_spec, recorded_spec
from raptor.data.chosen import default_data, labelled_like, tell_of_new_classes
from raptor.data.classes import for_head
from raptor.data.stream import TrainStream
from raptor.devices import Ranks, ranks_of
from raptor.phases.cut import Phases
from raptor.phases.study import FUNCTION_IMAGES
from raptor.surrogate.surrogate import check_trainable, make_surrogate
from raptor.train.schedule import Budget
from raptor.train.step import DistillStep
from raptor.train.validation import Validator
from raptor.vit.view import ViT


class HeadNames(NamedTuple):
    """The head's number of classes, their names as the model or a head file states them, and as `--classes` does."""

    num_classes: int
    own: Sequence[str] | None
    given: Sequence[str] | None


class Images(NamedTuple):
    """Images to train on, held-out ones, and those that heads are fitted on; and the names of the first two."""

    train: ImageData
    val: ImageData
    head: ImageData
    data_name: str | list[str]
    val_name: str | list[str] | None


@dataclass(frozen=True)
class Job:
    """What one distillation works with; `config` holds its options and the entries of its recipe."""

    config: DistillConfig
    teacher: ViT
    images: Images
    fabric: Any
    precision: str

    @property
    def ranks(self) -> Ranks:
        return ranks_of(self.fabric)

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled: by default on a GPU."""
        if self.config.compile is None:
            return self.fabric.device.type == "cuda"
        return self.config.compile

    def stages(self) -> dict[str, float]:
        """The stages to run, each with its share of the budget. A stage that runs without the other keeps its share."""
        share = self.config.stage1_share
        # A stage alone keeps its share, so that two runs of one stage each are the run of both.
        plan = {"stage1": share, "stage2": 1 - share}
        if self.config.stage != "all":
            name = f"stage{self.config.stage}"
            plan = {name: plan[name]}
        plan = {name: part for name, part in plan.items() if part > 0}
        if not plan:
            raise ValueError(
                f"--stage1_share {share:g} leaves nothing for stage {self.config.stage}: change one of them"
            )
        budget = Budget.parse(self.config.budget)
        if len(plan) > 1 and budget.unit == "steps" and round(budget.amount) < len(plan):
            raise ValueError("one step cannot be shared by two stages: give --budget 2steps or more")
        return plan

    def steps_per_epoch(self) -> float:
        return (self.config.epoch_images or len(self.images.train)) / self.config.batch_size

    def graphed(self) -> bool:
        """Whether forward and backward pass run as a CUDA graph: on a single GPU."""
        return self.fabric.device.type == "cuda" and self.fabric.world_size == 1

    def stream(self, num_decoded: int | None = None) -> TrainStream:
        """This rank's training batches; `num_decoded` as in `TrainStream`."""
        return TrainStream(
            self.images.train,
            self.teacher.preprocess,
            self.config.batch_size,
            seed=self.config.seed,
            augment=self.config.augment,
            crop_scale=self.config.crop_scale,
            mixup=self.config.mixup,
            cutmix=self.config.cutmix,
            jitter=self.config.jitter,
            grey=self.config.grey,
            sizes=self.config.sizes,
            device=self.fabric.device,
            num_workers=self.config.num_workers,
            num_decoded=num_decoded,
            ranks=self.ranks,
        )

    def student(self, phases: Phases) -> ViT:
        """A surrogate as training starts from it, unless other weights are loaded into it."""
        copied: str | Sequence[int] = self.config.copy
        if copied == "representative":
            copied = phases.representatives or "middle"  # a plan guesses its phases, so that they have none
        student = make_surrogate(
            self.teacher,
            phases,
            block=self.config.block,
            conditioning=self.config.conditioning,
            copy=copied,
            adapters=self.config.adapters,
            adapted=self.config.adapted,
            seed=self.config.seed,
        )
        check_trainable(student)  # a minute of training would change nothing, without an error
        return student

    def num_cut_by(self) -> int:
        """How many training images decide where depth is cut."""
        if self.config.method == "function":  # each of them takes a pass per pair of blocks
            return FUNCTION_IMAGES
        return self.config.num_images

    def has_head_term(self) -> bool:
        return self.config.head_weight > 0 and "stage2" in self.stages()

    def step(self, student: ViT, phases: Phases, variance: Tensor, head: Head | None = None) -> DistillStep:
        """One training step; `variance`, (L, T) or (L, T, D), is what squared errors are divided by.

        head: of the head term, where the recipe has one.
        """
        return DistillStep(
            self.teacher,
            student,
            phases,
            variance,
            self.config.stage1_weights,
            self.config.last_phase_weights,
            self.config.stage2_weights,
            self.config.cosine,
            self.compiles,
            self.config.checkpointing,
            # On a CPU bf16 is slower than fp32.
            half_teacher=self.precision == "bf16" and self.fabric.device.type == "cuda",
            sizes=self.config.sizes or (),
            head=head,
            head_weight=self.config.head_weight,
            every_phase=self.config.hand_over > 0,
        )

    def validator(self, folder: Path) -> Validator:
        return Validator(
            self.teacher,
            self.images.head,
            self.images.val,
            self.precision,
            self.config.num_workers,
            self.config.head_file,
            folder,
            self.ranks,
        )


def open_images(config: DistillConfig, teacher: ViT, names: HeadNames) -> Images:
    """The images that the options name, with their labels numbered as the head's classes."""
    if isinstance(config.data, tuple):
        return _given_images(config.data, config.split, names)
    data = config.data
    if data is None:
        data = default_data(config.model)
    data_name = as_spec(data)
    val_name = as_spec(config.val)
    chosen = ChosenData(data_name, val_name, config.split, names.given, config.skip_bad, names.own, names.num_classes)
    side = teacher.preprocess.size
    train = chosen.training(config.train_images, side)
    val = chosen.judged(config.num_images, side, like=train)
    head = chosen.labelled(train, val, side)
    tell_of_new_classes(head, val)
    return Images(train, val, head, recorded_spec(data_name), recorded_spec(val_name))


def _given_images(data: Sequence[ImageData], split: str, names: HeadNames) -> Images:
    """Images that a program holds: to train on, held out, and perhaps labelled ones for heads."""
    # Labels of all of them as the head numbers its classes, or agreement would compare other classes.
    own = []
    for images in data:
        own.append(for_head(images, names.num_classes, names.given, names.own))
    train = own[0]
    head = own[2] if len(own) > 2 else train
    val = labelled_like(own[1], head)
    if split not in ("train", "all"):
        check_apart(train, val)
    val_name = None
    if val.specs != train.specs:
        val_name = as_spec(val.specs)
    return Images(train, val, head, as_spec(train.specs), val_name)
