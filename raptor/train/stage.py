"""One stage of training: how long it is, what is trained, and one step of it with its optimizers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raptor.train.optimizer import ParameterGroup, make_optimizers, moments, named_parameters

_UNITS = {  # as written: the unit it is kept in, and the factor between them
    "s": ("s", 1.0),
    "m": ("s", 60.0),
    "min": ("s", 60.0),
    "h": ("s", 3600.0),
    "step": ("steps", 1.0),
    "steps": ("steps", 1.0),
    "epoch": ("epochs", 1.0),
    "epochs": ("epochs", 1.0),
}
_MAX_AMOUNT = 1e10  # of any unit


@dataclass(frozen=True)
class Budget:
    """How long a run is: `amount` of `unit`, which is `s`, `steps` or `epochs`."""

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read `120s`, `5m`, `2h`, `3000steps` or `20epochs`."""
        match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-z]+)\s*", str(text).lower())
        if match is not None and match[2] in _UNITS:
            unit, factor = _UNITS[match[2]]
            amount = float(match[1]) * factor
            if 0 < amount <= _MAX_AMOUNT:
                return cls(amount, unit)
        raise ValueError(f"cannot read the budget {text!r}: write 120s, 5m, 2h, 3000steps or 20epochs")

    def num_steps(
        self, steps_per_epoch: float, share: float, step_seconds: Callable[[], float], before: float = 0.0
    ) -> int:
        """Steps in `share` of the budget, after the share `before` that other stages have; at least 1.

        The stages of a budget in steps or epochs have exactly its steps together: the boundaries between them are
        rounded, not their lengths. `step_seconds` times a step, and is called only for a budget of seconds.
        """
        # Seconds become steps once, so that everything else is a function of the step.
        if self.unit == "s":
            return max(1, round(self.amount * share / step_seconds()))
        total = self.amount
        if self.unit == "epochs":
            total *= steps_per_epoch
        total = max(1, round(total))
        boundaries = []
        for place in (before, before + share):
            place = round(place, 9)  # .1 + .9 is 1
            boundary = round(total * place)
            if 0 < place < 1:  # at least one step on each side of a boundary inside the run
                boundary = max(1, min(boundary, total - 1))
            boundaries.append(boundary)
        return max(1, boundaries[1] - boundaries[0])


def learning_rate(step: int, num_steps: int, peak: float, low: float, warmup: float) -> float:
    """Linear warm-up over the first `warmup` of the run to `peak`, then a cosine down to `low` at its last step."""
    num_warm = max(1, round(warmup * num_steps))
    if step < num_warm:
        # Above 0, or the first step would change nothing.
        return peak * (step + 1) / num_warm
    # One step ahead, so that the last step has `low` itself.
    progress = (step - num_warm + 1) / max(1, num_steps - num_warm)
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * progress))


class Stage:
    """What is trained, and how one step of it goes; a base class.

    Attributes:
        name: the stage in metrics.jsonl and in the checkpoint.
        title: description of the progress bar.
        module: one training step as a module. Fabric wraps it; nothing trainable may be called around it.
        groups: what it trains, in its order.
        betas, clip: decay rates of the optimizer's moments, and the gradient norm.
        lr, min_lr, warmup: peak and last learning rate, and the share of the stage that it rises in.
        batch_size: images per step over all ranks.
        budget, share, before, steps_per_epoch: length of the run, the share of it that this stage gets, the share that
            the stages before it get, steps in an epoch.
        num_validations: how many, spread over the stage.
        refines: whether it starts from trained weights, so that few steps are enough.
        average_last: the share of the stage, at its end, over which the weights are averaged; 0 for no average.
    """

    name: str
    title: str
    module: nn.Module
    groups: list[ParameterGroup]
    betas = (0.9, 0.999)
    clip = 1.0
    lr: float
    min_lr = 0.0
    warmup: float
    batch_size: int
    budget: Budget
    share = 1.0
    before = 0.0
    steps_per_epoch: float
    num_validations = 0
    refines = False
    average_last = 0.0

    def losses(self, wrapped: Any, step: int, num_steps: int, propagate: Callable[[Tensor], None]) -> Tensor:
        """Run one step and leave its gradients in the parameters; the losses (N,) to log, on the device.

        Args:
            wrapped: `module` as Fabric wraps it.
            propagate: clears the gradients and runs the backward pass from a loss.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Called after the last step: let go of what only steps need, which would take memory from the next stage."""

    def rate(self, step: int, num_steps: int) -> float:
        return learning_rate(step, num_steps, self.lr, self.min_lr, self.warmup)

    def num_steps(self, step_seconds: Callable[[], float]) -> int:
        """The length of the stage; `step_seconds` times a step, where the budget is in seconds."""
        return self.budget.num_steps(self.steps_per_epoch, self.share, step_seconds, self.before)

    def kind(self, step: int, num_steps: int) -> Hashable:
        """Steps of one kind take the same time."""
        return None

    def clip_groups(self) -> list[list[nn.Parameter]]:
        """The parameters whose gradients are clipped by one norm."""
        return [list(self.module.parameters())]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside the optimizer's state."""
        raise NotImplementedError

    def metrics(self, loss_nl: Tensor) -> dict[str, Any]:
        """The log line's entries for the losses (steps, N) since the last one; `loss` is among them."""
        return {"loss": round(float(loss_nl.mean()), 5)}

    def where(self, column: int | None = None) -> str:
        """The end of an error message: which stage, and which part of it the loss in `column` belongs to."""
        return ""

    def validate(self) -> tuple[dict[str, Any], str]:
        """Scores on held-out images, and a note for the progress bar. Every rank calls it, with its share of them."""
        raise NotImplementedError


class Training:
    """A stage with its module as Fabric wraps it, its optimizers, and the mean of its last weights.

    Args:
        tensors: of the checkpoint that the stage goes on from; empty at its beginning.
    """

    def __init__(self, stage: Stage, fabric: Any, tensors: Mapping[str, Tensor]):
        self.stage = stage
        made = make_optimizers(stage.groups, stage.lr, stage.betas, fused=fabric.device.type == "cuda")
        # The optimizers' own state, by parameter: torch's state_dict numbers parameters, and another order of them
        # would mix their moments.
        self.states = {}
        for optimizer in made:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.states[parameter] = optimizer.state
        self.weights: list[Tensor] = []
        self.means: list[Tensor] = []
        names = []
        for name, parameter in named_parameters(stage.groups):
            names.append(name)
            self.weights.append(parameter)
        self.mean_names = [f"average.{name}" for name in names]
        if tensors:
            for entry, parameter, key, _ in moments(stage.groups):
                value = tensors[entry]
                # AdamW counts steps on the host unless it is fused; a count on the GPU would be waited for.
                if key != "step" or fabric.device.type == "cuda":
                    value = value.to(parameter.device)
                self.states[parameter][parameter][key] = value
            # A checkpoint from before the averaged steps has no mean.
            if self.mean_names[0] in tensors:
                self.means = [tensors[name].to(weight) for name, weight in zip(self.mean_names, self.weights)]
        self.wrapped, *self.optimizers = fabric.setup(stage.module, *made)
        self.backward = fabric.backward

    def step(self, step: int, num_steps: int) -> Tensor:
        """One step of the optimizers; the losses (N,) to log, on the device."""
        # By the step's number: one of torch's schedulers would have to be replayed where a run is resumed.
        lr = self.stage.rate(step, num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        losses = self.stage.losses(self.wrapped, step, num_steps, self._propagate)
        for parameters in self.stage.clip_groups():
            nn.utils.clip_grad_norm_(parameters, self.stage.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self._average(step, num_steps)
        return losses.detach()

    def _propagate(self, loss: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)  # no pass over the gradients to write zeros
        self.backward(loss)

    @torch.no_grad()
    def _average(self, step: int, num_steps: int) -> None:
        """Take the weights into the mean over the last steps of the stage, which the stage ends with."""
        first = num_steps - round(self.stage.average_last * num_steps)
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
        """What a checkpoint holds: the stage's own tensors, the optimizers' state, and the mean if it has begun."""
        saved = dict(self.stage.tensors())
        for entry, parameter, key, shape in moments(self.stage.groups):
            value = self.states[parameter].get(parameter, {}).get(key)
            if value is None:  # a parameter that never had a gradient, which is the same as zeros
                value = torch.zeros(shape, device=parameter.device)
            saved[entry] = value
        return {**saved, **dict(zip(self.mean_names, self.means))}

    def forget(self) -> None:
        """Drop the state of the optimizers and the mean, as before the first step."""
        self.means = []
        for state in self.states.values():
            state.clear()
