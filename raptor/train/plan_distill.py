"""What a distillation would take: `--dry_run`, and the line that a run begins with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from raptor.phases.cut import Phases
from raptor.phases.study import check_cuts
from raptor.progress import clock, say
from raptor.run import check_config, check_folder, read_config
from raptor.train.distilled import DistillSummary, check_run_folder, read_finished
from raptor.train.job import Job
from raptor.train.plan import NUM_DECODED, Plan, make_plan, num_bytes
from raptor.train.step import NUM_VALIDATIONS, DistillStage
from raptor.train.validation import Validator
from raptor.vit.trajectory import autocast
from raptor.vit.weights import check_weights

_FEW_IMAGES = 16  # a CPU is as fast on few images as on many
_PASSES_PER_STEP = 4  # forward passes that take as long as a step


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
    return make_plan(
        "distill",
        teacher.name,
        job.images.train.name,
        folder,
        stages,
        job.fabric,
        checked=[
            f"weights fit and are finite: {shape} at {teacher.preprocess.size} px, k = {phases.k}",
            f"{num_train:,} images to train on, {num_val:,} held out, {labels}; head: {head_used}",
        ],
        other_seconds=lambda _: _image_seconds(job, validator) * num_measured / job.ranks.size,
        saved={"surrogate": num_bytes(student.model.state_dict().values())},
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
