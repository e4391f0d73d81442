"""Plans: what a run would take, measured on a few of its steps, and the line that a distillation begins with."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raptor.devices import device_name, is_out_of_memory, ranks_of
from raptor.files import RunError
from raptor.phases.cut import Phases
from raptor.phases.study import check_cuts
from raptor.progress import clock, say
from raptor.run import check_config, check_folder, read_config
from raptor.streaming import Record, Result
from raptor.train.distilled import DistillSummary, check_run_folder, read_finished
from raptor.train.job import Job
from raptor.train.loop import Training
from raptor.train.optimizer import moments, named_parameters
from raptor.train.stage import Stage
from raptor.train.step import NUM_VALIDATIONS, DistillStage
from raptor.train.validation import Validator
from raptor.vit.trajectory import autocast
from raptor.vit.weights import check_weights

NUM_DECODED = 64
"""Training images that a plan decodes, of those that the run would keep decoded."""
_FEW_IMAGES = 16  # a CPU is as fast on few images as on many
_PASSES_PER_STEP = 4  # forward passes that take as long as a step


@dataclass
class PlannedPart(Record):
    """A stage of a training.

    Attributes:
        seconds: per step, measured; it includes reading the images.
        num_timed: steps that `seconds` is the mean of.
        is_timed: whether the budget is in seconds, so that more devices do more steps in the same time.
    """

    name: str
    num_steps: int
    batch_size: int
    seconds: float
    num_timed: int
    is_timed: bool = False


@dataclass
class Estimate(Record):
    """What a run takes on a number of devices, each like the measured ones.

    Attributes:
        batch: images per step and device; None where the batch does not divide by the number, as all after it.
        memory_bytes: of each device.
    """

    num_devices: int
    is_measured: bool
    batch: int | None = None
    images_per_s: float | None = None
    memory_bytes: float | None = None
    seconds: float | None = None


@dataclass
class Plan(Result, Record):
    """What a command would do and take, measured on `num_devices`.

    Attributes:
        checked: what was opened and found in order, one line each.
        parts: what it trains. other_seconds: of all else: validation, heads, similarity.
        num_devices: how many share each batch.
        memory_bytes: peak of each device, on a CPU of the process. fixed_bytes: what of it any batch needs.
        written_bytes: what it writes, by name; free_bytes: on the disk of its folder.
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
    notes: list[str] = field(default_factory=list)

    def on(self, num_devices: int) -> Estimate:
        """The estimate for a number of devices, which share the batch and the time of its steps."""
        found = Estimate(num_devices, is_measured=num_devices == self.num_devices)
        size = self.parts[0].batch_size
        if size % num_devices:
            return found
        share = self.num_devices / num_devices
        measured = sum(part.num_steps * part.seconds for part in self.parts)
        num_images = sum(part.num_steps * part.batch_size for part in self.parts)
        found.batch = size // num_devices
        found.images_per_s = num_images / (measured * share)
        # Weights, gradients and moments lie on each device, however many there are.
        found.memory_bytes = self.fixed_bytes + max(0.0, self.memory_bytes - self.fixed_bytes) * share
        found.seconds = self.other_seconds * share
        for part in self.parts:
            seconds = part.num_steps * part.seconds
            found.seconds += seconds if part.is_timed else seconds * share
        return found

    def estimates(self) -> list[Estimate]:
        """For one device, for those that were measured on and for eight."""
        return [self.on(num) for num in sorted({1, self.num_devices, 8})]

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
            steps = f"{part.num_steps:,} steps of {part.batch_size} images"
            lines.append(f"{part.name}: {steps}, {each} each ({part.num_timed} timed)")
        lines += [_shown(estimate) for estimate in self.estimates()]
        written = ", ".join(f"{name} {_size(value)}" for name, value in self.written_bytes.items())
        lines.append(
            f"would write {_size(sum(self.written_bytes.values()))} to {self.folder} ({written}); "
            f"{_size(self.free_bytes)} are free"
        )
        return "\n".join([*lines, *self.notes])


def _shown(estimate: Estimate) -> str:
    """What one number of devices takes, in a line."""
    devices = "on 1 device"
    if estimate.num_devices > 1:
        devices = f"on {estimate.num_devices} devices"
    if estimate.images_per_s is None or estimate.memory_bytes is None or estimate.seconds is None:
        return f"{devices}: the batch does not divide by {estimate.num_devices}"
    rate = f"{estimate.images_per_s:.1f}"
    if estimate.images_per_s >= 10:
        rate = f"{estimate.images_per_s:,.0f}"
    source = "computed, without the time to exchange gradients"
    if estimate.is_measured:
        source = "measured"
    memory = _size(estimate.memory_bytes)
    return f"{devices}: {clock(estimate.seconds)}, {rate} images/s, {memory} of memory each ({source})"


def _size(num_bytes: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= 0.1 * factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


class Measured(NamedTuple):
    """What a few steps of each stage showed: the stages, memory as in `Plan`, and the bytes of one checkpoint."""

    parts: list[PlannedPart]
    memory_bytes: float
    fixed_bytes: float
    checkpoint_bytes: float


def measure_stages(stages: Sequence[Stage], fabric: Any) -> Measured:
    """The length of each stage and the time of its steps, from a few that are done and undone."""
    if fabric.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(fabric.device)
    before = peak_memory(fabric.device)
    parts = []
    for stage in stages:
        # The steps of a large batch take minutes on a CPU.
        say(f"{stage.name}: timing a few steps of {stage.batch_size} images")
        try:
            seconds, num_timed = Training(stage, fabric, {}).seconds()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(
                f"a step of {stage.batch_size} images does not fit into memory: lower --batch_size or use more devices"
            ) from None
        stage.end()
        say(f"{stage.name}: {seconds:.2g} s a step")
        num_steps = stage.num_steps(lambda seconds=seconds: seconds)  # type: ignore[misc]
        is_timed = stage.budget.unit == "s"
        parts.append(PlannedPart(stage.name, num_steps, stage.batch_size, seconds, num_timed, is_timed))
    # All stages train the same weights.
    checkpoint = num_bytes(parameter for _, parameter in named_parameters(stages[0].groups))
    checkpoint += num_bytes(parameter for _, parameter, key, _ in moments(stages[0].groups) if key != "step")
    memory = max(ranks_of(fabric).gather(peak_memory(fabric.device)))
    # Gradients are as large as the weights in a checkpoint, which also holds the optimizer's moments.
    return Measured(parts, memory, before + checkpoint, checkpoint)


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


# Of a distillation.


def plan_run(job: Job, phases: Phases | None, num_blocks: int, folder: Path, made_with: dict[str, Any]) -> Plan:
    """What the run takes, from a few steps that are done and undone. Nothing is written.

    phases: as given; None where the run would cut `num_blocks` of them from its images.
    """
    teacher = job.teacher
    config = job.config
    num_similarity = 0
    if phases is None:
        num_similarity = job.num_cut_by
        if config.method == "function":
            # Each image is passed through half of the blocks for every pair of blocks.
            num_similarity *= teacher.num_layers**2 // 2
        phases = _likely_phases(job, num_blocks, folder)
    check_run_folder(teacher, folder)
    check_folder(folder)
    check_config(folder, {**made_with, "phases": list(phases), "stage": config.stage})
    student = job.student(phases)
    validator = job.validator(folder)
    head = None
    # A ridge head would have to be fitted first; its term takes no time beside the blocks.
    if job.has_head_term and (config.head_file is not None or teacher.num_classes):
        head = validator.head
    # In place of the variance, which decides no time and would take a pass over some images.
    ones_lt = torch.ones(teacher.num_layers, teacher.groups.num_tokens, device=job.fabric.device)
    stages = job.stages(student, phases, ones_lt, head, job.stream(NUM_DECODED), validator)
    check_weights(teacher.model.state_dict(), teacher.name)
    # A step of a large batch takes minutes on a CPU, and the estimate needs none.
    say(estimate(job, stages))
    labels = "no labels, so no accuracy"
    head_used = "none"
    if validator.labelled:
        labels = f"labels of {len(validator.classes)} classes"
        head_used = "a ridge probe"
    if teacher.num_classes:
        head_used = "the model's own"
    if config.head_file:
        head_used = "given"
    shape = f"{teacher.num_layers} blocks, width {teacher.dim}, {teacher.groups.num_tokens} tokens"
    num_train = len(job.images.train)
    num_val = len(job.images.val)
    num_measured = _num_measured(job, validator) + num_similarity
    measured = measure_stages(stages, job.fabric)
    # Two checkpoints are kept, and the third is written before the oldest goes.
    written = {
        "three checkpoints": 3 * measured.checkpoint_bytes,
        "surrogate": num_bytes(student.model.state_dict().values()),
    }
    return Plan(
        command="distill",
        model=teacher.name,
        data=job.images.train.name,
        folder=str(folder),
        device=device_name(job.fabric.device),
        checked=[
            f"weights fit and are finite: {shape} at {teacher.preprocess.size} px, k = {phases.k}",
            f"{num_train:,} images to train on, {num_val:,} held out, {labels}; head: {head_used}",
        ],
        parts=measured.parts,
        other_seconds=_image_seconds(job, validator) * num_measured / job.ranks.size,
        memory_bytes=measured.memory_bytes,
        fixed_bytes=measured.fixed_bytes,
        written_bytes=written,
        free_bytes=free_disk(folder, sum(written.values())),
        num_devices=job.ranks.size,
        notes=_notes(job, folder),
    )


def estimate(job: Job, stages: Sequence[DistillStage]) -> str:
    """How long the run takes, from the time of one forward pass."""
    validator = stages[0].validator
    seconds = _image_seconds(job, validator) / job.ranks.size
    budget = stages[0].budget
    training = budget.amount * sum(stage.share for stage in stages)
    if budget.unit == "epochs":
        training *= stages[0].steps_per_epoch
    if budget.unit != "s":
        training *= _PASSES_PER_STEP * seconds * job.config.batch_size
    measuring = _num_measured(job, validator) * seconds
    text = f"distill: about {clock(training)} training + {clock(measuring)} measuring"
    if job.ranks.size > 1:
        text += f" on {job.ranks.size} processes"
    if job.graphed():
        text += ", each step a CUDA graph"
    elif job.fabric.device.type == "cuda":
        text += ", steps without CUDA graphs"
    if job.compiles:
        text += "; the first steps compile the blocks, about a minute"
    return text


def _likely_phases(job: Job, k: int, folder: Path) -> Phases:
    """The phases of a run that `folder` holds, else k of equal length: where a run cuts changes little of its time."""
    if (folder / "config.yaml").exists():
        saved = read_config(folder).get("phases")
        if saved:
            return Phases.from_lengths(saved)
    check_cuts(job.teacher, [k])
    short, num_long = divmod(job.teacher.num_layers, k)
    return Phases((short + 1,) * num_long + (short,) * (k - num_long))


def _image_seconds(job: Job, validator: Validator) -> float:
    """Seconds of a forward pass per image."""
    images = next(iter(validator.val.whole())).images
    if job.fabric.device.type != "cuda":
        images = images[:_FEW_IMAGES]
    with torch.no_grad(), autocast(job.precision, job.teacher.device):
        job.teacher(images)  # the first call chooses kernels
        began = time.monotonic()
        float(job.teacher(images).float().sum())  # waits for the device
        return (time.monotonic() - began) / len(images)


def _num_measured(job: Job, validator: Validator) -> int:
    """Images that teacher or surrogate see in all validations and for the ridge probes."""
    num_validations = NUM_VALIDATIONS * len(job.shares) + 1  # and once more at the end
    num = 2 * num_validations * validator.val.num_images
    if validator.labelled:
        num += 2 * (validator.train.num_images + validator.val.num_images)
    return num


def _notes(job: Job, folder: Path) -> list[str]:
    """What of the run is there already, and what the measured steps do not show."""
    notes = []
    if job.compiles:
        notes.append("the first steps also compile the blocks, about a minute")
    if job.graphed():
        notes.append("each measured step is a CUDA graph; several devices run it without, so small batches take longer")
    if read_finished(DistillSummary, folder) is not None:
        notes.append(f"{folder} holds this run, finished: the command gives it back at once")
    elif (folder / "checkpoint" / "latest").exists():
        notes.append(f"{folder} holds a part of this run: it goes on from its last checkpoint")
    return notes
