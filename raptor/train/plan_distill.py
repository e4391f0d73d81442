"""What a distillation would take: `--dry_run`, and the line that a run begins with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from raptor.certificate.heads import Head, num_features
from raptor.certificate.linear_head import LinearHead
from raptor.devices import device_name
from raptor.phases.cut import Phases
from raptor.phases.study import check_cuts
from raptor.progress import clock, say
from raptor.run import check_config, check_folder, read_config
from raptor.train.distilled import DistillSummary, check_run_folder, read_finished
from raptor.train.job import Job
from raptor.train.loop import LOG_EVERY
from raptor.train.optimizer import moments
from raptor.train.plan import NUM_DECODED, Plan, free_disk, num_bytes, peak_memory, plan_stages
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
    device = job.fabric.device
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
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    student = job.student(phases)
    stream = job.stream(NUM_DECODED)
    validator = job.validator(folder)
    head = None
    if job.has_head_term and (config.head_file is not None or teacher.num_classes):
        head = validator.head
    elif job.has_head_term:
        # As large as the ridge head that the run would fit.
        num_classes = len(job.images.head.classes or ())
        weight_cf = torch.zeros(num_classes, num_features(teacher))
        head = Head("ridge", num_classes, LinearHead(weight_cf, torch.zeros(num_classes)))
    # In place of the variance, which decides no time and would take a pass over some images.
    ones_lt = torch.ones(teacher.num_layers, teacher.groups.num_tokens, device=device)
    stages = job.stages(student, phases, ones_lt, head, stream, validator)
    trained = num_bytes(parameter for _, parameter in stages[0].module.trained_parameters())
    kept = 0.0  # of the optimizer
    for _, parameter, key, _ in moments(stages[0].groups):
        if key != "step":
            kept += num_bytes([parameter])
    say(estimate(job, stages))
    parts = plan_stages(stages, job.fabric)
    # A line of metrics.jsonl has some 200 bytes and about 14 for the loss of each layer.
    num_lines = sum(part.num_steps for part in parts) / LOG_EVERY
    # Two are kept, and the third is written before the oldest goes.
    written = {
        "three checkpoints": 3 * (trained + kept),
        "surrogate": num_bytes(student.model.state_dict().values()),
        "metrics": num_lines * (200.0 + 14 * teacher.num_layers),
    }
    num_measured = _num_measured(job, validator) + num_similarity
    check_weights(teacher.model.state_dict(), teacher.name)
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
    return Plan(
        command="distill",
        model=teacher.name,
        data=job.images.train.name,
        folder=str(folder),
        device=device_name(device),
        checked=[
            f"weights fit and are finite: {shape} at {teacher.preprocess.size} px, k = {phases.k}",
            f"{num_train:,} images to train on, {num_val:,} held out, {labels}; head: {head_used}",
        ],
        parts=parts,
        other_seconds=_image_seconds(job, validator) * num_measured / job.ranks.size,
        memory_bytes=max(job.ranks.gather(peak_memory(device))),
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
