"""What the training loop needs to know about a stage of training, and the two stages of a distillation."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from torch import Tensor, nn

from raptor.config import Recipe
from raptor.data.stream import TrainStream, stable_seed
from raptor.train.graphs import StepGraphs
from raptor.train.job import Job
from raptor.train.losses import Parts
from raptor.train.optimizer import ParameterGroup, is_matrix
from raptor.train.schedule import Budget, Rates, teacher_forcing
from raptor.train.step import DistillStep
from raptor.train.validation import Validator, shown_r2
from raptor.vit.view import ViT

NUM_VALIDATIONS = 4  # per stage


class Stage(Protocol):
    """What the loop needs to know about one stage of training.

    Attributes:
        name: the stage in metrics.jsonl and in the checkpoint.
        title: description of the progress bar.
        module: one training step as a module. Fabric wraps it; nothing trainable may be called around it.
        groups: what it trains, in its order.
        betas, clip, rates: of the optimizer: decay rates of the moments, gradient norm, learning rate.
        batch_size: images per step over all ranks.
        budget, share, before, steps_per_epoch: length of the run, the share of it that this stage gets, the share that
            the stages before it get, steps in an epoch.
        num_validations: how many, spread over the stage.
        refines: whether it starts from trained weights, so that few steps are enough.
        average_last: the share of the stage, at its end, over which the weights are averaged; 0 for no average.
    """

    name: str
    title: str
    groups: list[ParameterGroup]
    betas: tuple[float, float]
    clip: float
    rates: Rates
    batch_size: int
    budget: Budget
    share: float
    before: float
    steps_per_epoch: float
    num_validations: int
    refines: bool
    average_last: float

    @property
    def module(self) -> nn.Module: ...

    def losses(self, wrapped: Any, step: int, num_steps: int, propagate: Callable[[Tensor], None]) -> Tensor:
        """Run one step and leave its gradients in the parameters; the losses (N,) to log, on the device.

        Args:
            wrapped: `module` as Fabric wraps it.
            propagate: clears the gradients and runs the backward pass from a loss.
        """

    def kind(self, step: int, num_steps: int) -> Hashable:
        """Steps of one kind take the same time."""

    def clip_groups(self) -> list[list[nn.Parameter]]:
        """The parameters whose gradients are clipped by one norm."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside the optimizer's state."""

    def metrics(self, loss_nl: Tensor) -> dict[str, Any]:
        """The log line's entries for the losses (steps, N) since the last one; `loss` is among them."""

    def where(self, column: int | None = None) -> str:
        """The end of an error message: which stage, and which part of it the loss in `column` belongs to."""

    def validate(self) -> tuple[dict[str, Any], str]:
        """Scores on held-out images, and a note for the progress bar. Every rank calls it, with its share of them."""


class DistillStage:
    """`stage1` or `stage2` of a distillation; see `Stage`."""

    betas = (0.9, 0.999)

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
        self.num_layers = student.num_layers
        self.graphs = StepGraphs(module, name, job.precision, job.graphed())
        self.groups = parameter_groups(module.trained_parameters(), recipe)
        self.clip = recipe.clip
        self.rates = Rates(recipe.lr, recipe.min_lr, recipe.warmup)
        self.batch_size = recipe.batch_size
        self.budget = Budget.parse(recipe.budget)
        self.share = job.stages()[name]
        self.before = 0.0
        if name == "stage2":
            self.before = recipe.stage1_share
        self.steps_per_epoch = job.steps_per_epoch()
        self.num_validations = NUM_VALIDATIONS
        self.refines = recipe.start is not None  # then few steps are enough, and nothing is said of them
        # Stage 1 is averaged only where the recipe ends with it: stage 2 goes on from its last weights.
        self.average_last = 0.0
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
        if lengths is None:
            layer_losses = self.graphs.run(images, lam)
        if layer_losses is None:
            loss, layer_losses = wrapped(images, self.name, lam, lengths=lengths)
            propagate(loss)
        return layer_losses

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
        """The share of teacher forcing at a step."""
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
        layer_nl = loss_nl[:, : self.num_layers]
        # Seven digits are what fp32 has; metrics.jsonl would be twice as long with those of the conversion.
        rounded = [float(f"{loss:.7g}") for loss in layer_nl.mean(0).tolist()]
        found: dict[str, Any] = {"loss": float(layer_nl.mean()), "layer_loss": rounded}
        if self.module.has_head_term(self.name):
            found["head_loss"] = float(loss_nl[:, self.num_layers].mean())
        return found

    def where(self, column: int | None = None) -> str:
        if column is None:
            return f" of {self.name}"
        if column == self.num_layers:
            return f" of {self.name}, head term"
        return f" of {self.name}, layer {column + 1}"

    def validate(self) -> tuple[dict[str, Any], str]:
        scores = self.validator.validate(self.student)
        note = f"R2 {shown_r2(scores.r2_last)} (lowest {shown_r2(scores.r2_lowest)})"
        if scores.agreement is not None:
            note += f", agreement {scores.agreement:.1%}"
        return scores.to_dict(), note


def parameter_groups(named: list[tuple[str, nn.Parameter]], recipe: Recipe) -> list[ParameterGroup]:
    """What is trained; with Muon the weights of linear layers, which it takes, are a group of their own."""
    if recipe.optimizer == "adamw":
        return [ParameterGroup(named, recipe.weight_decay)]
    matrices = []
    others = []
    for name, parameter in named:
        if is_matrix(name, parameter):
            matrices.append((name, parameter))
        else:
            others.append((name, parameter))
    return [ParameterGroup(matrices, recipe.weight_decay, "muon"), ParameterGroup(others, recipe.weight_decay)]
