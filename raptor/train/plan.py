"""Plans: what a run would take, measured on a few of its steps. Nothing is written."""

from __future__ import annotations

import math
import resource
import shutil
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raptor.certificate.verdict import MIN_STEPS
from raptor.devices import ONE_PROCESS, Ranks, is_out_of_memory, ranks_of
from raptor.files import RunError
from raptor.progress import clock, say
from raptor.streaming import Record, Result
from raptor.train.stage import Stage, Training

_GIB = 2**30
_SHOWN_DEVICES = (1, 8)
NUM_DECODED = 64
"""Training images that a plan decodes, of those that the run would keep decoded."""
_TIMED_RUN = 64  # steps of a small run whose kinds of steps have the shares of the real one
# Steps of each kind when timing: first the untimed ones (compilation, capture, caches, start of the loader), then the
# timed ones.
_NUM_TIMED = {"cuda": (4, 16), "cpu": (1, 2)}
_SLOW_STEP = 2.0  # seconds; so long a step is timed only once


@dataclass
class PlannedPart(Record):
    """Steps of one kind: a stage of a training.

    Attributes:
        seconds: per step, measured; it includes reading the images.
        is_timed: whether the budget is in seconds, so that other devices do more steps in the same time.
        num_timed: steps that `seconds` is the mean of; 0 where that is not known.
    """

    name: str
    num_steps: int
    batch_size: int
    seconds: float
    is_timed: bool = False
    num_timed: int = 0


@dataclass
class Estimate(Record):
    """What a run takes on a number of devices like this one.

    Attributes:
        batch: images per step and device; None where the batch does not divide by the number of devices.
        memory_bytes: of each device.
    """

    num_devices: int
    batch: int | None
    images_per_s: float | None
    memory_bytes: float | None
    seconds: float | None
    is_measured: bool


@dataclass
class Plan(Result, Record):
    """What a command would do and take.

    Attributes:
        checked: what was opened and found in order, one line each.
        parts: what it trains. other_seconds: of all else: validation, heads, similarity.
        num_devices: how many were measured on.
        memory_bytes: peak of each device, on a CPU of the process; fixed_bytes: the part that any batch needs.
        written_bytes: what it writes, by name; free_bytes: on the disk of its folder.
        exchanged_bytes: gradients that devices exchange in each step.
    """

    command: str
    model: str
    data: str
    folder: str
    device: str
    checked: list[str]
    parts: list[PlannedPart]
    other_seconds: float
    memory_bytes: float
    fixed_bytes: float
    written_bytes: dict[str, float]
    free_bytes: float
    num_devices: int = 1
    exchanged_bytes: float = 0.0
    notes: list[str] = field(default_factory=list)

    def on(self, num_devices: int) -> Estimate:
        """The estimate for a number of devices: their steps and their share of the batch are divided by it."""
        size = self.parts[0].batch_size
        if size % num_devices:
            return Estimate(num_devices, None, None, None, None, False)
        # What more devices cannot divide, the weights and their moments, is `fixed_bytes` on each of them.
        share = self.num_devices / num_devices
        total = self.other_seconds * share
        all_seconds = 0.0
        num_images = 0
        for part in self.parts:
            seconds = part.num_steps * part.seconds
            all_seconds += seconds
            num_images += part.num_steps * part.batch_size
            total += seconds if part.is_timed else seconds * share
        rate = num_images / (all_seconds * share)
        memory = self.fixed_bytes + max(0.0, self.memory_bytes - self.fixed_bytes) * share
        return Estimate(num_devices, size // num_devices, rate, memory, total, num_devices == self.num_devices)

    def estimates(self) -> list[Estimate]:
        """For one device, for those that were measured on and for eight."""
        return [self.on(num) for num in sorted({*_SHOWN_DEVICES, self.num_devices})]

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "estimates": self.table_rows()}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per number of devices."""
        return [estimate.to_dict() for estimate in self.estimates()]

    def text(self) -> str:
        lines = [f"{self.command}, a dry run: {self.model} on {self.data}; nothing is written", *self.checked]
        for part in self.parts:
            each = f"{part.seconds:.3g} s"
            if part.seconds < 1:
                each = f"{1000 * part.seconds:.3g} ms"
            line = f"{part.name}: {part.num_steps:,} steps of {part.batch_size} images, {each} each"
            if part.num_timed:
                line += f" ({part.num_timed} timed)"
            lines.append(line)
        lines.append(f"{'devices':>16} {'batch each':>10} {'images/s':>9} {'memory':>9}  time")
        for estimate in self.estimates():
            name = str(estimate.num_devices)
            if estimate.is_measured:
                name += " (measured)"
            if estimate.images_per_s is None or estimate.memory_bytes is None or estimate.seconds is None:
                lines.append(f"{name:>16} the batch does not divide by {estimate.num_devices}")
                continue
            rate = f"{estimate.images_per_s:.1f}"
            if estimate.images_per_s >= 10:
                rate = f"{estimate.images_per_s:,.0f}"
            memory = _size(estimate.memory_bytes)
            lines.append(f"{name:>16} {estimate.batch:>10} {rate:>9} {memory:>9}  {clock(estimate.seconds)}")
        written = ", ".join(f"{name} {_size(value)}" for name, value in self.written_bytes.items())
        lines.append(
            f"would write {_size(sum(self.written_bytes.values()))} to {self.folder} ({written}); "
            f"{_size(self.free_bytes)} are free"
        )
        if self.exchanged_bytes:
            lines.append(
                "other numbers of devices: the measured time divided by them, without the "
                f"{_size(self.exchanged_bytes)} of gradients that they exchange in each step"
            )
        return "\n".join([*lines, *self.notes])


def _size(num_bytes: float) -> str:
    for unit, factor in (("GiB", _GIB), ("MiB", 2**20)):
        if num_bytes >= 0.1 * factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def few_steps(stage: Stage, num_steps: int) -> str:
    """What to say of a stage that is too short to train anything."""
    budget = stage.budget
    needed = math.ceil(budget.amount * MIN_STEPS / num_steps)
    return (
        f"{stage.title}: --budget {budget.amount:g}{budget.unit} gives only {num_steps} steps here, of "
        f"{stage.batch_size} images, so the result will be undertrained; {MIN_STEPS} steps need about "
        f"--budget {needed}{budget.unit}"
    )


# What a plan measures.


def plan_stages(stages: Sequence[Stage], fabric: Any) -> list[PlannedPart]:
    """The length of each stage and the time of its steps, from a few that are done and undone."""
    parts = []
    for stage in stages:
        try:
            seconds, num_timed = step_seconds(Training(stage, fabric, {}), fabric)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(
                f"a step of {stage.batch_size} images does not fit into memory: lower --batch_size or use more devices"
            ) from None
        stage.end()
        # Timing the stages of a large batch takes minutes on a CPU.
        say(f"{stage.name}: {seconds:.2g} s a step")
        num_steps = stage.num_steps(lambda seconds=seconds: seconds)  # type: ignore[misc]
        is_timed = stage.budget.unit == "s"
        parts.append(PlannedPart(stage.name, num_steps, stage.batch_size, seconds, is_timed, num_timed))
    return parts


def step_seconds(training: Training, fabric: Any) -> tuple[float, int]:
    """Mean seconds per step over all ranks, from a few steps that are then undone, and how many of them were timed."""
    saved = [weight.detach().clone() for weight in training.weights]
    mean, num_timed = mean_seconds(training.step, training.stage.kind, fabric.device, ranks_of(fabric))
    seconds = torch.tensor(mean, device=fabric.device)
    with torch.no_grad():
        for weight, value in zip(training.weights, saved):
            # In place, because the optimizers hold these very tensors.
            weight.copy_(value)
    training.forget()
    # All ranks turn the same mean into steps; with times of their own they would train different numbers of them.
    return float(fabric.all_reduce(seconds, reduce_op="mean")), num_timed


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
        ranks: all of them time as many steps, because those of a training need every rank.
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


def peak_memory(device: torch.device) -> float:
    """Peak memory of a device since its statistics were reset; on a CPU of the whole process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if sys.platform != "darwin":
        peak *= 1024  # Linux counts in KiB, macOS in bytes
    return peak


def num_bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def free_disk(folder: Path, needed: float) -> float:
    """Bytes that are free where `folder` is or would be; RunError when fewer than `needed`."""
    # The folder may still have to be made, and only what exists has a disk.
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = float(shutil.disk_usage(there).free)
    if free < needed:
        raise RunError(f"{folder} needs {_size(needed)} and has {_size(free)} free: choose another --out")
    return free
