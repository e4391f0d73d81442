"""One stage of training: how long it is, and what is trained."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raptor.certificate.verdict import MIN_STEPS
from raptor.devices import ONE_PROCESS, Ranks
from raptor.train.optimizer import ParameterGroup

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
_TIMED_RUN = 64  # steps of a small run whose kinds of steps have the shares of the real one
# Steps of each kind when timing: first the untimed ones (compilation, capture, caches, start of the loader), then the
# timed ones.
_NUM_TIMED = {"cuda": (4, 16), "cpu": (1, 2)}
_SLOW_STEP = 2.0  # seconds; so long a step is timed only once


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
        """Called after the last step: let go of what only steps need."""

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


def few_steps(stage: Stage, num_steps: int) -> str:
    """What to say of a stage that is too short to train anything."""
    budget = stage.budget
    needed = math.ceil(budget.amount * MIN_STEPS / num_steps)
    return (
        f"{stage.title}: --budget {budget.amount:g}{budget.unit} gives only {num_steps} steps here, of "
        f"{stage.batch_size} images, so the result will be undertrained; {MIN_STEPS} steps need about "
        f"--budget {needed}{budget.unit}"
    )


# A budget of seconds becomes steps by the time of a few.


def mean_seconds(
    train_step: Callable[[int, int], object],
    kind_of: Callable[[int, int], Hashable],
    device: torch.device,
    ranks: Ranks = ONE_PROCESS,
) -> tuple[float, int]:
    """Mean seconds per step of a whole run: each kind of step is timed and weighted by its share of the run.

    Also returns how many steps were timed.

    Args:
        train_step: trains one step, given its number and the number of all steps.
        kind_of: which kind of step (with teacher forcing or without) that is.
    """
    by_kind: dict[Hashable, list[int]] = {}
    for step in range(_TIMED_RUN):
        by_kind.setdefault(kind_of(step, _TIMED_RUN), []).append(step)
    num_untimed, num_timed = _NUM_TIMED[device.type]
    total = 0.0
    num_steps = 0
    num_all = 0
    # Steps of a kind in their order, because a loader that reads ahead starts again where they do not follow.
    for steps in by_kind.values():
        if len(steps) == 1:
            continue  # a single one does not count
        start = min(num_untimed, len(steps) // 2)
        seconds, num = time_steps(
            lambda i, steps=steps: train_step(steps[i], _TIMED_RUN),  # type: ignore[misc]
            start,
            min(num_timed, len(steps) - start),
            lambda: _clock(device),
            ranks,
        )
        total += len(steps) * seconds
        num_steps += len(steps)
        num_all += num
    return total / num_steps, num_all


def time_steps(
    run: Callable[[int], object],
    num_untimed: int,
    num_timed: int,
    now: Callable[[], float],
    ranks: Ranks = ONE_PROCESS,
) -> tuple[float, int]:
    """Mean seconds per step of this rank, and of how many: one where that is slow already, else `num_timed`.

    Args:
        run: does a step, given its number from 0. The first `num_untimed` start loaders and kernels.
        now: the time when all work is done, in seconds.
        ranks: all of them time as many steps, because a step of a training needs every rank.
    """
    for i in range(num_untimed):
        run(i)
    # The first timed step by itself: where one takes seconds already, sixteen would take longer than some runs.
    began = now()
    run(num_untimed)
    first = now() - began
    # Asked of rank 0 only: ranks that decided by themselves would do different numbers of steps, and wait for ever.
    if num_timed == 1 or ranks.first(lambda: first >= _SLOW_STEP):
        return first, 1
    began = now()
    for i in range(1, num_timed):
        run(num_untimed + i)
    return (first + now() - began) / num_timed, num_timed


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()
