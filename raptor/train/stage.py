"""What the training loop needs to know about a stage of training, as one of surrogates or of a teacher."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from torch import Tensor, nn

from raptor.train.optimizer import ParameterGroup
from raptor.train.schedule import Budget, Rates


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
