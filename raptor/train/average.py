"""The mean of the trained weights over the last steps of a stage, which the stage ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

_PREFIX = "average."  # of its tensors in a checkpoint


class WeightAverage:
    """A running mean of weights: their sum after each step, divided by the number of steps, without keeping the sum.

    Args:
        named: name and value of each weight.
        share: how much of the stage, at its end, the mean is taken over; 0 for no mean.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], share: float):
        self.names = [name for name, _ in named]
        self.weights: list[Tensor] = [weight for _, weight in named]
        self.share = share
        self.means: list[Tensor] = []

    @torch.no_grad()
    def add(self, step: int, num_steps: int) -> None:
        """Take in the weights after a step. After the last step of the stage the weights become the mean."""
        num_averaged = round(self.share * num_steps)
        first = num_steps - num_averaged
        if step < first:
            return
        # By the step's number, so that a checkpoint needs no count. The lists are one kernel on a GPU, not hundreds.
        if step == first or not self.means:
            self.means = [weight.detach().clone() for weight in self.weights]
        else:
            torch._foreach_lerp_(self.means, self.weights, 1 / (step - first + 1))
        if step == num_steps - 1:
            torch._foreach_copy_(self.weights, self.means)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it: nothing before the first step that counts."""
        return {_PREFIX + name: mean for name, mean in zip(self.names, self.means)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        # A checkpoint from before the averaged steps has no mean.
        if _PREFIX + self.names[0] in tensors:
            self.means = [tensors[_PREFIX + name].to(weight) for name, weight in zip(self.names, self.weights)]

    def forget(self) -> None:
        """Drop the mean, as before the first step."""
        self.means = []
