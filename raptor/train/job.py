"""One distillation: its teacher, its images and its machine, and the two stages that it trains."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from raptor.certificate.heads import Head
from raptor.config import DistillConfig
from raptor.data import ChosenData, ImageData
from raptor.data.apart import check_apart
from raptor.data.by_name import as_spec, recorded_spec
from raptor.data.chosen import default_data
from raptor.data.classes import for_head, labelled_like, tell_of_new_classes
from raptor.data.stream import TrainStream, check_stream, stable_seed
from raptor.devices import ranks_of
from raptor.phases.cut import Phases
from raptor.phases.study import FUNCTION_IMAGES
from raptor.surrogate.surrogate import check_trainable, make_surrogate
from raptor.train.graphs import StepGraphs
from raptor.train.optimizer import parameter_groups
from raptor.train.stage import Budget, Stage
from raptor.train.step import DistillStep, Parts
from raptor.train.validation import Validator, shown_r2
from raptor.vit.view import ViT

NUM_VALIDATIONS = 4  # per stage


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
        self.steps_per_epoch = (config.epoch_images or len(images.train)) / config.batch_size
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
        module = DistillStep(
            self.teacher,
            student,
            phases,
            variance,
            config.stage1_weights,
            config.last_phase_weights,
            config.stage2_weights,
            config.cosine,
            self.compiles,
            config.checkpointing,
            # On a CPU bf16 is slower than fp32.
            half_teacher=self.precision == "bf16" and self.fabric.device.type == "cuda",
            sizes=config.sizes or (),
            head=head,
            head_weight=config.head_weight,
            every_phase=config.hand_over > 0,
        )
        return [DistillStage(self, name, module, stream, validator, student) for name in self.shares]


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


class DistillStage(Stage):
    """`stage1` or `stage2` of a distillation."""

    module: DistillStep

    def __init__(
        self, job: Job, name: str, module: DistillStep, stream: TrainStream, validator: Validator, student: ViT
    ):
        recipe = job.config
        self.name = name
        self.title = f"distil {name}"
        self.module = module
        self.stream = stream
        self.recipe = recipe
        self.validator = validator
        self.student = student
        self.graphs = StepGraphs(module, name, job.precision) if job.graphed() else None
        self.groups = parameter_groups(module.trained_parameters(), recipe.optimizer, recipe.weight_decay)
        self.clip = recipe.clip
        self.lr = recipe.lr
        self.min_lr = recipe.min_lr
        self.warmup = recipe.warmup
        self.batch_size = recipe.batch_size
        self.budget = Budget.parse(recipe.budget)
        self.share = job.shares[name]
        self.steps_per_epoch = job.steps_per_epoch
        self.num_validations = NUM_VALIDATIONS
        self.refines = recipe.start is not None  # then few steps are enough, and nothing is said of them
        if name == "stage2":
            self.before = recipe.stage1_share
        # Stage 1 is averaged only where the recipe ends with it: stage 2 goes on from its last weights.
        if name == "stage2" or recipe.stage1_share == 1:
            self.average_last = recipe.average_last

    def losses(self, wrapped: Any, step: int, num_steps: int, propagate: Callable[[Tensor], None]) -> Tensor:
        """The loss of every trained layer, on the device."""
        # Drawn outside the module and the graph: a replayed graph would repeat its random numbers.
        images = self.stream.batch(step, self.name, self._size(step, num_steps))
        lam = self._lam(step, num_steps)
        lengths = self._lengths(step)
        layer_losses = None
        # A graph holds one sequence of blocks, so a step with a hand-over runs without one.
        if self.graphs is not None and lengths is None:
            layer_losses = self.graphs.run(images, lam, Parts.of(lam))
        if layer_losses is None:
            loss, layer_losses = wrapped(images, self.name, lam, lengths=lengths)
            propagate(loss)
        return layer_losses

    def end(self) -> None:
        if self.graphs is not None:
            self.graphs.release()

    def kind(self, step: int, num_steps: int) -> tuple[Parts, int, bool]:
        hands_over = self._lengths(step) is not None
        return Parts.of(self._lam(step, num_steps)), self._size(step, num_steps), hands_over

    def _lengths(self, step: int) -> list[int] | None:
        """Steps of each phase before it hands over, drawn for a share of the steps of stage 2; None for all steps."""
        if self.name != "stage2" or not self.recipe.hand_over:
            return None
        # From the step, so that all ranks and a resumed run hand over alike.
        drawn = random.Random(stable_seed(self.recipe.seed, "hand over", step))
        if drawn.random() >= self.recipe.hand_over:
            return None
        lengths = []
        for first, last in self.module.spans:
            lengths.append(drawn.randint(1, last - first + 1))
        return lengths

    def _size(self, step: int, num_steps: int) -> int:
        """The image size of a step: one that the stream draws, or the first of two until its share of the run ends."""
        until = self.recipe.first_size_until
        if not until:
            return self.stream.size(step, self.name)
        assert self.recipe.sizes is not None
        place = self.before + self.share * step / num_steps  # in the whole run
        is_late = place >= until
        return self.recipe.sizes[int(is_late)]

    def _lam(self, step: int, num_steps: int) -> float:
        if self.name != "stage1":
            return 0.0
        return teacher_forcing(step, num_steps, self.recipe.lam, self.recipe.lam_until)

    def clip_groups(self) -> list[list[nn.Parameter]]:
        return self.module.clip_groups(self.name)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"variance": self.module.variance}
        for name, value in self.module.shared_blocks.state_dict().items():
            tensors[f"block.{name}"] = value
        return tensors

    def metrics(self, loss_nl: Tensor) -> dict[str, Any]:
        num_layers = self.student.num_layers
        layer_nl = loss_nl[:, :num_layers]
        # Seven digits are what fp32 has; metrics.jsonl would be twice as long with those of the conversion.
        rounded = [float(f"{loss:.7g}") for loss in layer_nl.mean(0).tolist()]
        found: dict[str, Any] = {"loss": float(layer_nl.mean()), "layer_loss": rounded}
        if self.module.has_head_term(self.name):
            found["head_loss"] = float(loss_nl[:, num_layers].mean())
        return found

    def where(self, column: int | None = None) -> str:
        if column is None:
            return f" of {self.name}"
        if column == self.student.num_layers:
            return f" of {self.name}, head term"
        return f" of {self.name}, layer {column + 1}"

    def validate(self) -> tuple[dict[str, Any], str]:
        scores = self.validator.validate(self.student)
        note = f"R2 {shown_r2(scores.r2_last)} (lowest {shown_r2(scores.r2_lowest)})"
        if scores.agreement is not None:
            note += f", agreement {scores.agreement:.1%}"
        return scores.to_dict(), note


def teacher_forcing(step: int, num_steps: int, start: float, until: float) -> float:
    """lambda, the share of teacher forcing: linear from `start` to 0 over the first `until` of the run."""
    length = until * num_steps
    if length <= 0:
        return 0.0
    return start * max(0.0, 1 - step / length)


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
