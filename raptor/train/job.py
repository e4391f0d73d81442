"""One distillation: its models, data, device and options, and the stages that it trains in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from raptor.certificate.heads import Head
from raptor.config import Recipe
from raptor.data import ImageData
from raptor.data.stream import TrainStream
from raptor.devices import Ranks, ranks_of
from raptor.phases.cut import Phases
from raptor.surrogate.surrogate import check_trainable, make_surrogate
from raptor.train.schedule import Budget
from raptor.train.step import DistillStep
from raptor.train.validation import Validator
from raptor.vit.view import ViT


@dataclass(frozen=True)
class Job:
    """The models, the data, the device and the options of one distillation; options as in `distill`, resolved.

    head_data: images that heads are fitted on; by default the training images.
    """

    teacher: ViT
    recipe: Recipe
    train_data: ImageData
    val_data: ImageData
    fabric: Any
    head_data: ImageData | None = None
    precision: str = "fp32"
    stage: str = "all"
    start: str | None = None
    allow_other_teacher: bool = False
    split: str = "val"
    head_file: str | None = None
    head_images: int | None = None
    seed: int = 0
    num_workers: int | None = None
    compile_blocks: bool = False
    graph: bool | None = None
    checkpointing: bool = False
    resume: bool = True
    track: str | None = None
    checkpoint_minutes: float = 10.0

    @property
    def ranks(self) -> Ranks:
        return ranks_of(self.fabric)

    def stages(self) -> dict[str, float]:
        """The stages to run, each with its share of the budget. A stage that runs without the other keeps its share."""
        shares = {"stage1": self.recipe.stage1_share, "stage2": 1 - self.recipe.stage1_share}
        asked = shares if self.stage == "all" else {f"stage{self.stage}": shares[f"stage{self.stage}"]}
        plan = {name: share for name, share in asked.items() if share > 0}
        if not plan:
            raise ValueError(
                f"--stage1_share {self.recipe.stage1_share:g} leaves nothing for stage {self.stage}: change one of them"
            )
        budget = Budget.parse(self.recipe.budget)
        if len(plan) > 1 and budget.unit == "steps" and round(budget.amount) < len(plan):
            raise ValueError("one step cannot be shared by two stages: give --budget 2steps or more")
        return plan

    def steps_per_epoch(self) -> float:
        return (self.recipe.epoch_images or len(self.train_data)) / self.recipe.batch_size

    def graphed(self) -> bool:
        """Whether forward and backward pass run as a CUDA graph: by default on a single GPU."""
        single = self.fabric.device.type == "cuda" and self.fabric.world_size == 1
        if self.graph and not single:
            raise ValueError("a CUDA graph needs a single GPU: leave out --graph")
        return single if self.graph is None else self.graph

    def runs_on(self) -> str:
        """How many processes train, and on a GPU whether with CUDA graphs: the end of a sentence."""
        num = self.ranks.size
        text = "" if num == 1 else f" on {num} processes"
        if self.fabric.device.type == "cuda":
            text += ", each step a CUDA graph" if self.graphed() else ", steps without CUDA graphs"
        return text

    def stream(self, num_decoded: int | None = None) -> TrainStream:
        """This rank's training batches; `num_decoded` as in `TrainStream`."""
        return TrainStream(
            self.train_data,
            self.teacher.preprocess,
            self.recipe.batch_size,
            seed=self.seed,
            augment=self.recipe.augment,
            crop_scale=self.recipe.crop_scale,
            mixup=self.recipe.mixup,
            cutmix=self.recipe.cutmix,
            jitter=self.recipe.jitter,
            grey=self.recipe.grey,
            sizes=self.recipe.sizes,
            device=self.fabric.device,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            num_workers=self.num_workers,
            num_decoded=num_decoded,
            ranks=self.ranks,
        )

    def student(self, phases: Phases) -> ViT:
        """A surrogate as training starts from it, unless other weights are loaded into it."""
        student = make_surrogate(
            self.teacher,
            phases,
            block=self.recipe.block,
            conditioning=self.recipe.conditioning,
            copy=self.recipe.copy,
            adapters=self.recipe.adapters,
            adapted=self.recipe.adapted,
            table_start=self.recipe.table_start,
            seed=self.seed,
        )
        check_trainable(student)
        return student

    def has_head_term(self) -> bool:
        return self.recipe.head_weight > 0 and "stage2" in self.stages()

    def step(self, student: ViT, phases: Phases, variance: Tensor, head: Head | None = None) -> DistillStep:
        """One training step; `variance`, (L, T) or (L, T, D), is what squared errors are divided by.

        head: of the head term, where the recipe has one.
        """
        return DistillStep(
            self.teacher,
            student,
            phases,
            variance,
            self.recipe.stage1_weights,
            self.recipe.last_phase_weights,
            self.recipe.stage2_weights,
            self.recipe.cosine,
            self.compile_blocks,
            self.checkpointing,
            half_teacher=self.precision == "bf16" and self.fabric.device.type == "cuda",
            sizes=self.recipe.sizes or (),
            head=head,
            head_weight=self.recipe.head_weight,
        )

    def validator(self, folder: Path) -> Validator:
        return Validator(
            self.teacher,
            self.train_data if self.head_data is None else self.head_data,
            self.val_data,
            self.precision,
            self.num_workers,
            self.head_file,
            folder,
            self.head_images,
            self.ranks,
        )
