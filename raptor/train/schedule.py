"""Budgets and schedules. Schedules are fractions of a run, so that a shorter budget scales them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

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
        return max(1, _boundary(total, before + share) - _boundary(total, before))


def _boundary(total: int, share: float) -> int:
    """Steps in the first `share` of `total`: at least one on each side of a boundary inside the run."""
    share = round(share, 9)  # .1 + .9 is 1
    if share <= 0:
        return 0
    if share >= 1:
        return total
    return max(1, min(round(total * share), total - 1))


@dataclass(frozen=True)
class Rates:
    """The learning rate over a run: warm-up over the first `warmup` of it to `peak`, then a cosine to `low`."""

    peak: float
    low: float
    warmup: float

    def at(self, step: int, num_steps: int) -> float:
        return learning_rate(step, num_steps, self.peak, self.low, self.warmup)


def learning_rate(step: int, num_steps: int, peak: float, low: float, warmup: float) -> float:
    """Linear warm-up over the first `warmup` of the run to `peak`, then a cosine down to `low` at its last step."""
    num_warm = max(1, round(warmup * num_steps))
    if step < num_warm:
        # Above 0, or the first step would change nothing.
        return peak * (step + 1) / num_warm
    # One step ahead, so that the last step has `low` itself.
    progress = (step - num_warm + 1) / max(1, num_steps - num_warm)
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * progress))


def teacher_forcing(step: int, num_steps: int, start: float, until: float) -> float:
    """lambda: linear from `start` to 0 over the first `until` of the run."""
    length = until * num_steps
    if length <= 0:
        return 0.0
    return start * max(0.0, 1 - step / length)
