"""One distillation: its teacher, its images and its machine. It makes the surrogate and the stages to train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from raptor.certificate.heads import Head
from raptor.config import DistillConfig
from raptor.data import ChosenData, ImageData
from raptor.data.apart import check_apart
from raptor.data.by_name import as_spec, recorded_spec
from raptor.data.chosen import default_data
from raptor.data.classes import for_head, labelled_like, tell_of_new_classes
from raptor.data.stream import TrainStream, check_stream
from raptor.devices import ranks_of
from raptor.phases.cut import Phases
from raptor.phases.study import FUNCTION_IMAGES
from raptor.surrogate.surrogate import check_trainable, make_surrogate
from raptor.train.graphs import StepGraphs
from raptor.train.losses import HeadTerm, Targets
from raptor.train.stage import Budget
from raptor.train.step import DistillStage, DistillStep
from raptor.train.validation import Validator
from raptor.vit.view import ViT


class Images(NamedTuple):
    """Images to train on, held-out ones, and those that heads are fitted on; and the names of the first two."""

    train: ImageData
    val: ImageData
    head: ImageData
    data_name: str | list[str]
    val_name: str | list[str] | None


class Job:
    """What one distillation works with.

    Attributes:
        config: its options and the entries of its recipe.
        shares: the stages to run, each with its share of the budget.
        compiles: whether blocks are compiled: by default on a GPU.
        num_cut_by: how many training images decide where depth is cut.
    """

    def __init__(self, config: DistillConfig, teacher: ViT, images: Images, fabric: Any, precision: str):
        self.config = config
        self.teacher = teacher
        self.images = images
        self.fabric = fabric
        self.precision = precision
        self.ranks = ranks_of(fabric)
        self.shares = stage_shares(config)
        self.has_head_term = config.head_weight > 0 and "stage2" in self.shares
        self.compiles = fabric.device.type == "cuda"
        if config.compile is not None:
            self.compiles = config.compile
        self.num_cut_by = config.num_images
        if config.method == "function":  # each of them takes a pass per pair of blocks
            self.num_cut_by = FUNCTION_IMAGES

    def graphed(self) -> bool:
        """Whether forward and backward pass run as a CUDA graph: on a single GPU."""
        return self.fabric.device.type == "cuda" and self.ranks.size == 1

    def stream(self, num_decoded: int | None = None) -> TrainStream:
        """This rank's training batches; `num_decoded` as in `TrainStream`."""
        config = self.config
        return TrainStream(
            self.images.train,
            self.teacher.preprocess,
            config.batch_size,
            seed=config.seed,
            augment=config.augment,
            crop_scale=config.crop_scale,
            mixup=config.mixup,
            cutmix=config.cutmix,
            jitter=config.jitter,
            grey=config.grey,
            sizes=config.sizes,
            device=self.fabric.device,
            num_workers=config.num_workers,
            num_decoded=num_decoded,
            ranks=self.ranks,
        )

    def validator(self, folder: Path) -> Validator:
        config = self.config
        images = self.images
        return Validator(
            self.teacher,
            images.head,
            images.val,
            self.precision,
            config.num_workers,
            config.head_file,
            folder,
            self.ranks,
        )

    def student(self, phases: Phases) -> ViT:
        """A surrogate as training starts from it, unless other weights are loaded into it."""
        config = self.config
        copied: str | Sequence[int] = config.copy
        if copied == "representative":
            copied = phases.representatives or "middle"  # a plan guesses its phases, so that they have none
        student = make_surrogate(
            self.teacher,
            phases,
            block=config.block,
            conditioning=config.conditioning,
            copy=copied,
            adapters=config.adapters,
            adapted=config.adapted,
            seed=config.seed,
        )
        check_trainable(student)  # a minute of training would change nothing, without an error
        return student

    def stages(
        self,
        student: ViT,
        phases: Phases,
        variance: Tensor,
        head: Head | None,
        stream: TrainStream,
        validator: Validator,
    ) -> list[DistillStage]:
        """The stages to train.

        Args:
            variance: (L, T) or (L, T, D), what squared errors are divided by.
            head: of the head term, where the recipe has one.
        """
        config = self.config
        targets = Targets.of(
            self.teacher,
            phases,
            variance,
            stage1_weights=config.stage1_weights,
            last_phase_weights=config.last_phase_weights,
            stage2_weights=config.stage2_weights,
            cosine=config.cosine,
            sizes=config.sizes or (),
        )
        head_term = None
        if head is not None:
            head_term = HeadTerm(head, config.head_weight, every_phase=config.hand_over > 0)
        on_gpu = self.fabric.device.type == "cuda"
        module = DistillStep(
            self.teacher,
            student,
            targets,
            head_term,
            compile_blocks=self.compiles,
            checkpointing=config.checkpointing,
            half_teacher=self.precision == "bf16" and on_gpu,  # on a CPU bf16 is slower than fp32
        )
        stages = []
        for name, share in self.shares.items():
            graphs = None
            if self.graphed():
                graphs = StepGraphs(module, name, self.precision)
            stages.append(DistillStage(config, name, share, module, stream, validator, graphs))
        return stages


def stage_shares(config: DistillConfig) -> dict[str, float]:
    """The stages to run, each with its share of the budget. A stage that runs without the other keeps its share, so
    that two runs of one stage each are the run of both."""
    shares = {"stage1": config.stage1_share, "stage2": 1 - config.stage1_share}
    if config.stage != "all":
        name = f"stage{config.stage}"
        shares = {name: shares[name]}
    shares = {name: share for name, share in shares.items() if share > 0}
    if not shares:
        share = config.stage1_share
        raise ValueError(f"--stage1_share {share:g} leaves nothing for stage {config.stage}: change one of them")
    budget = Budget.parse(config.budget)
    if len(shares) > 1 and budget.unit == "steps" and round(budget.amount) < len(shares):
        raise ValueError("one step cannot be shared by two stages: give --budget 2steps or more")
    return shares


def check_batches(config: DistillConfig, num_images: int) -> None:
    """Raise where batches as the options want them cannot be made of so many training images."""
    check_stream(
        num_images,
        config.batch_size,
        config.augment,
        config.crop_scale,
        config.sizes,
        mixes=config.mixup > 0 or config.cutmix > 0,
        recolours=config.jitter > 0 or config.grey > 0,
    )


def open_images(
    config: DistillConfig, side: int, num_classes: int, own_names: Sequence[str] | None, given: Sequence[str] | None
) -> Images:
    """The images that the options name, with their labels numbered as the head's classes.

    Args:
        side: of the images, in pixels.
        num_classes, own_names: of the head, as the model or a head file states them.
        given: the names of the classes that `--classes` states.
    """
    data = config.data
    if isinstance(data, tuple):
        # Labels of all of them as the head numbers its classes, or agreement would compare other classes.
        own = [for_head(images, num_classes, given, own_names) for images in data]
        train = own[0]
        check_batches(config, len(train))
        head = own[2] if len(own) > 2 else train
        val = labelled_like(own[1], head)
        if config.split not in ("train", "all"):
            check_apart(train, val)
        val_spec = None
        if val.specs != train.specs:
            val_spec = as_spec(val.specs)
        return Images(train, val, head, as_spec(train.specs), val_spec)
    data_name = as_spec(default_data(config.model) if data is None else data)
    val_name = as_spec(config.val)
    chosen = ChosenData(data_name, val_name, config.split, given, config.skip_bad, own_names, num_classes)
    train = chosen.training(config.train_images, side)
    # Before the held-out images are compared with them, which decodes some of both.
    check_batches(config, len(train))
    val = chosen.judged(config.num_images, side, like=train)
    head = chosen.labelled(train, val, side)
    tell_of_new_classes(head, val)
    return Images(train, val, head, recorded_spec(data_name), recorded_spec(val_name))
