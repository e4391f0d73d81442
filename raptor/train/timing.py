"""Turns a budget of seconds into steps, by timing a few."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

SMALL_RUN = 64
# Steps of each kind: those that run first, untimed (compilation, capture, caches, the loader's start), and the timed.
NUM_STEPS = {"cuda": (4, 16), "cpu": (1, 2)}


def mean_seconds(
    train_step: Callable[[int, int], object], kind_of: Callable[[int, int], Hashable], device: torch.device
) -> float:
    """Mean seconds a step, over a run in small, in which each kind of step has the share it has in the whole run.

    Args:
        train_step: trains one step, given its number and that of all steps.
        kind_of: which kind of step (with teacher forcing or without) that is.
    """
    kinds = [kind_of(i, SMALL_RUN) for i in range(SMALL_RUN)]
    by_kind = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)}
    by_kind = {kind: steps for kind, steps in by_kind.items() if len(steps) > 1}  # one alone is lost in a whole run
    num_untimed, num_timed = NUM_STEPS[device.type]
    total = 0.0
    for steps in by_kind.values():
        start = min(num_untimed, len(steps) // 2)
        for i in steps[:start]:
            train_step(i, SMALL_RUN)
        timed = steps[start : start + num_timed]
        began = _clock(device)
        for i in timed:
            train_step(i, SMALL_RUN)
        total += len(steps) * (_clock(device) - began) / len(timed)
    return total / sum(map(len, by_kind.values()))


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()
