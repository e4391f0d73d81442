"""One stage while it trains: the step module, its optimizer, and the forward and backward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from raptor.train.graphs import GraphedStep, NotCapturable
from raptor.train.step import DistillStep, Parts


@dataclass
class Stage:
    """One stage: the step module, bare and as Fabric wraps it, and its optimizer.

    `graphed`: whether the forward and backward pass are captured as a CUDA graph.
    """

    name: str
    module: DistillStep
    wrapped: Any
    optimizer: Any
    precision: str = "fp32"
    graphed: bool = False
    num_steps: int = 0
    graphs: dict[Parts, GraphedStep] = field(default_factory=dict)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return self.module.trained_parameters()

    def moments(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The optimizer's state of each parameter."""
        return getattr(self.optimizer, "optimizer", self.optimizer).state

    def backward(self, images: Tensor, lam: float, propagate: Callable[[Tensor], None]) -> Tensor:
        """Leaves the gradients in the parameters; gives the loss of every trained layer, on the device.

        propagate: runs the backward pass from a loss, where no graph holds it.
        """
        if self.graphed:
            try:
                return self._graph(images, Parts.of(lam))(images, lam)
            except NotCapturable as error:
                self.graphed = False
                self.graphs.clear()
                reason = str(error).splitlines()[0]
                print(f"this model's step runs without a CUDA graph: {reason}", file=sys.stderr)
        loss, layer_losses = self.wrapped(images, self.name, lam)
        self.optimizer.zero_grad(set_to_none=True)
        propagate(loss)
        return layer_losses

    def _graph(self, images: Tensor, parts: Parts) -> GraphedStep:
        """The captured pass of these losses; the one not in use is let go."""
        if parts not in self.graphs:
            self.graphs.clear()
            self.graphs[parts] = GraphedStep(self.module, self.name, images, parts, self.precision)
        return self.graphs[parts]
