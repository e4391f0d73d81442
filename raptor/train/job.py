"""One distillation as a value: the models, the data, where it runs and the options that decide it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raptor.data import ImageData
from raptor.data.stream import TrainStream
from raptor.train.recipe import Recipe
from raptor.train.validation import Validator
from raptor.vit.view import ViT


@dataclass(frozen=True)
class Job:
    """What a distillation works with; the options are those of `distill`, resolved."""

    teacher: ViT
    recipe: Recipe
    train_data: ImageData
    val_data: ImageData
    fabric: Any
    precision: str = "fp32"
    stage: str = "all"
    phase: int | None = None
    start: str | None = None
    head_file: str | None = None
    head_images: int | None = None
    seed: int = 0
    num_workers: int = 0
    compile_blocks: bool = False
    graph: bool | None = None
    checkpointing: bool = False
    resume: bool = True
    track: str | None = None

    def stages(self) -> dict[str, float]:
        """The stages to run, each with its share of the budget: the same share alone as beside the other."""
        shares = {"stage1": self.recipe.stage1_share, "stage2": 1 - self.recipe.stage1_share}
        asked = shares if self.stage == "all" else {f"stage{self.stage}": shares[f"stage{self.stage}"]}
        plan = {name: share for name, share in asked.items() if share > 0}
        if not plan:
            raise ValueError(
                f"stage1_share={self.recipe.stage1_share:g} leaves nothing for stage {self.stage}: change one of them"
            )
        return plan

    def graphed(self) -> bool:
        """Whether forward and backward pass run as a CUDA graph: by default on a single GPU."""
        single = self.fabric.device.type == "cuda" and self.fabric.world_size == 1
        if self.graph and not single:
            raise ValueError("a CUDA graph needs a single GPU: leave out --graph")
        return single if self.graph is None else self.graph

    def stream(self) -> TrainStream:
        """This rank's training batches."""
        return TrainStream(
            self.train_data, self.teacher.preprocess, self.recipe.batch_size, seed=self.seed,
            augment=self.recipe.augment, crop_scale=self.recipe.crop_scale, device=self.fabric.device,
            rank=self.fabric.global_rank, world_size=self.fabric.world_size, num_workers=self.num_workers,
        )  # fmt: skip

    def validator(self, folder: Path) -> Validator:
        return Validator(
            self.teacher, self.train_data, self.val_data, self.precision, self.num_workers, self.head_file, folder,
            self.head_images,
        )  # fmt: skip
