"""Two-stage distillation: train k tied blocks to reproduce every state of a teacher.

Stage 1 trains every phase on its own from the teacher's state at the phase's start; stage 2 joins them and trains
end to end on the surrogate's own states. The teacher runs in the same step, so nothing is ever stored. Everything
random is a function of (seed, stage, step), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from raptor.data import ImageData, iterate, open_data
from raptor.data.stream import TrainStream
from raptor.devices import pick_device, pick_precision
from raptor.distill.recipe import Recipe, resolve_recipe
from raptor.distill.trainer import Trainer, load_blocks
from raptor.distill.validation import Validator
from raptor.open import open_vit, save_vit
from raptor.phases import Phases, find_phases
from raptor.run import Run, RunError, read_summary
from raptor.similarity import measure_similarity
from raptor.surrogate import make_surrogate, shared_blocks
from raptor.trajectory import Trajectories
from raptor.vit import ViT


@dataclass
class Distilled:
    """What a distillation gives: the surrogate, its teacher, its run folder and the summary written there."""

    surrogate: ViT
    teacher: ViT
    folder: Path
    summary: dict[str, Any]


def distill(
    model: str | Path | nn.Module | ViT,
    data: str | tuple[ImageData, ImageData] = "scenes",
    *,
    k: int | str = 3,
    phases: Sequence[int] | None = None,
    target: str | None = None,
    recipe: str = "default",
    out: str | None = None,
    stage: str = "all",
    phase: int | None = None,
    start: str | None = None,
    budget: str | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    block: str | None = None,
    conditioning: str | None = None,
    copy: str | None = None,
    normalise: str | None = None,
    augment: str | None = None,
    stage1_share: float | None = None,
    weights: str | None = None,
    size: int | None = None,
    head: str | None = None,
    limit: int | None = None,
    phase_images: int = 1024,
    val_images: int = 1024,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    compile: bool | None = None,
    checkpointing: bool = False,
    num_workers: int = 0,
    resume: bool = True,
    track: str | None = None,
    skip_bad: bool = False,
) -> Distilled:
    """Distil a ViT into k weight-tied recurrent blocks.

    Args:
        model: what to distil: timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes, a folder or a module.
        data: images to train on: a folder, zip archives, scenes, cifar10, hf/NAME:split, wds/PATTERN (in Python also a
            pair of opened data, training and held-out).
        k: number of tied blocks, or `auto` for the smallest that passes `target`.
        phases: phase lengths, e.g. 7 3 2, instead of max-cut on the teacher's similarity.
        target: with k=auto, `recovery=.95` or `r2=.6` on held-out images.
        recipe: paper, authors, default, quick, or a YAML file; the options below override it.
        out: run folder; continued when it already holds this run.
        stage: `all`, `1` or `2`.
        phase: train only this phase (1..k) of stage 1, as an independent job; stage 2 picks up all of them.
        start: a surrogate folder or built-in to start from instead of the recipe's initial blocks.
        budget: 120s, 5m, 3000steps or 20epochs, in all; the recipe says how the stages share it.
        batch_size: images a step over all devices together.
        lr: peak learning rate.
        block: `teacher` (a copy of a block of the phase) or `paper`.
        conditioning: `table`, `mlp` (the paper's depth scaling) or `none`.
        copy: which teacher block of a phase is copied: middle, first or last.
        normalise: divide each squared error by the variance of its `layer`, its layer and token `group`, or `none`.
        augment: `crop` (random resized crops and flips) or `none` (centre crops, as the paper).
        stage1_share: share of the budget that stage 1 gets.
        weights: a local weight file for the teacher.
        size: image size.
        head: a linear head file, for accuracy and agreement of a teacher that has none.
        limit: use only this many training images.
        phase_images: images for the similarity that the phases are cut from.
        val_images: held-out images for the validation curve.
        seed: of initialisation, data order and crops.
        device: auto, cpu or cuda.
        precision: auto, fp32 or bf16.
        compile: compile the blocks; by default on a GPU only.
        checkpointing: recompute activations in the backward pass to save memory.
        num_workers: processes that decode images.
        resume: continue a run that was interrupted.
        track: also log to `wandb` or `tensorboard` (extras).
        skip_bad: pass over unreadable images instead of stopping.
    """
    given = dict(
        budget=budget, batch_size=batch_size, lr=lr, block=block, conditioning=conditioning, copy=copy,
        normalise=normalise, augment=augment, stage1_share=stage1_share,
    )  # fmt: skip
    settings = resolve_recipe(recipe, given)
    if stage not in ("all", "1", "2"):
        raise ValueError(f"unknown stage {stage!r}: choose from all, 1, 2")
    device = pick_device(device)
    precision = pick_precision(precision, device)
    teacher = open_vit(model, weights=weights, size=size, device="cpu")
    if isinstance(data, str):
        side = teacher.preprocess.size
        train_data = open_data(data, "train", limit=limit, size=side, skip_bad=skip_bad)
        val_data = open_data(data, "val", limit=val_images, size=side, skip_bad=skip_bad)
    else:
        train_data, val_data = data
    fabric = _fabric(device, precision)
    teacher.to(fabric.device)
    if phases is None:
        matrix = _similarity_matrix(teacher, train_data, phase_images, num_workers, precision)
    else:
        matrix = None
    common = dict(
        teacher=teacher, settings=settings, train_data=train_data, val_data=val_data, fabric=fabric, seed=seed,
        stage=stage, phase=phase, start=start, head=head, precision=precision, num_workers=num_workers,
        compile_blocks=device == "cuda" if compile is None else compile, checkpointing=checkpointing,
        resume=resume, track=track,
    )  # fmt: skip
    name = out or f"runs/{str(model).replace('/', '_') if not isinstance(model, nn.Module | ViT) else teacher.name}"
    config = dict(
        model=str(model) if isinstance(model, str | Path) else teacher.name, weights=weights, data=train_data.name, limit=limit,
        size=teacher.preprocess.size, seed=seed, start=start, recipe=dataclasses.asdict(settings),
        precision=precision, batch_size=settings.batch_size,
    )  # fmt: skip
    if k == "auto":
        return _smallest_k(target, matrix, teacher, Path(name), config, common)
    if target is not None:
        raise ValueError("--target goes with --k auto")
    found = Phases.from_lengths(list(phases)) if phases is not None else find_phases(matrix, int(k), min_length=1)
    if sum(found.lengths) != teacher.num_layers:
        raise ValueError(
            f"phases {list(found.lengths)} do not sum to the {teacher.num_layers} blocks of {teacher.name}"
        )
    folder = Path(out or f"{name}-k{found.k}")
    return _distill_one(found, folder, config, **common)


def _smallest_k(
    target: str | None, matrix: Any, teacher: ViT, root: Path, config: dict[str, Any], common: dict[str, Any]
) -> Distilled:
    """Train k = 1, 2, ... until a trained surrogate passes the target."""
    name, _, value = (target or "").partition("=")
    if name not in ("recovery", "r2") or not value:
        raise ValueError("--k auto needs --target recovery=.95 or r2=.6")
    if matrix is None:
        raise ValueError("--k auto cuts its own phases: leave out --phases")
    result = None
    for num in range(1, teacher.num_layers + 1):
        found = find_phases(matrix, num, min_length=1)
        result = _distill_one(found, root / f"k{num}", config, **common)
        score = result.summary["validation"].get("recovery" if name == "recovery" else "r2_last")
        if score is None:
            raise ValueError("recovery needs a head: data with labels, a teacher with its own, or --head FILE")
        print(f"k={num}  phases {found}  {name} {score:.3f}  (target {float(value):g})")
        if score >= float(value):
            break
    assert result is not None
    return result


def _distill_one(
    found: Phases, folder: Path, config: dict[str, Any], *, teacher: ViT, settings: Recipe, train_data: ImageData,
    val_data: ImageData, fabric: Any, seed: int, stage: str, phase: int | None, start: str | None, head: str | None,
    precision: str, num_workers: int, compile_blocks: bool, checkpointing: bool, resume: bool, track: str | None,
) -> Distilled:  # fmt: skip
    if phase is not None and not 1 <= phase <= found.k:
        raise ValueError(f"phase {phase} is not one of 1..{found.k}")
    if phase is not None and stage == "all":
        stage = "1"
    config = {**config, "phases": list(found.lengths), "stage": stage, "phase": phase}
    run_folder = folder / f"phase-{phase}" if phase is not None else folder
    with Run(run_folder, config, resume=resume, writer=fabric.is_global_zero) as run:
        student = make_surrogate(
            teacher,
            found.lengths,
            block=settings.block,
            conditioning=settings.conditioning,
            copy=settings.copy,
            seed=seed,
        )
        if start is not None:
            _start_from(student, start)
        if stage == "2":
            _load_phases(student, folder)
        done = read_summary(run_folder)
        if done is not None and run.latest() is not None:
            tensors, _ = run.load_checkpoint() or ({}, {})
            load_blocks(student, tensors)
            return Distilled(student, teacher, run_folder, done)
        stream = TrainStream(
            train_data, teacher.preprocess, settings.batch_size, seed=seed, augment=settings.augment,
            crop_scale=settings.crop_scale, device=fabric.device, rank=fabric.global_rank,
            world_size=fabric.world_size, num_workers=num_workers,
        )  # fmt: skip
        validator = Validator(teacher, train_data, val_data, precision, num_workers, head, run_folder)
        trainer = Trainer(fabric, run, teacher, student, found, settings, stream, validator, seed)
        trainer.compile_blocks, trainer.checkpointing, trainer.precision = compile_blocks, checkpointing, precision
        trainer.tracker = _tracker(track, run_folder) if fabric.is_global_zero else None
        summary = trainer.fit(["stage1"] if stage == "1" else ["stage2"] if stage == "2" else None, phase)
        fabric.barrier()
        if fabric.is_global_zero:
            if phase is None:
                save_vit(student, run_folder / "surrogate")
            run.write_summary(summary)
    return Distilled(student, teacher, run_folder, summary)


def _similarity_matrix(vit: ViT, data: ImageData, num_images: int, num_workers: int, precision: str) -> Any:
    batches = iterate(data, vit.preprocess, 64, device=vit.device, num_workers=num_workers, limit=num_images)
    states = (states for states, _, _ in Trajectories(vit, batches, precision))
    return measure_similarity(states, vit.num_layers, vit.groups).matrices["all"]


def _fabric(device: str, precision: str) -> Any:
    from lightning_fabric import Fabric

    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    fabric = Fabric(
        accelerator=device,
        devices=local,
        num_nodes=max(1, world // local),
        strategy="ddp" if world > 1 else "auto",
        precision="bf16-mixed" if precision == "bf16" else "32-true",
    )
    fabric.launch()
    return fabric


def _start_from(student: ViT, start: str) -> None:
    other = open_vit(start)
    if other.phases != student.phases:
        raise ValueError(f"{start} has phases {other.phases}, this run {student.phases}: give --phases to match")
    student.model.shared_blocks.load_state_dict(shared_blocks(other).state_dict())  # type: ignore[union-attr]


def _load_phases(student: ViT, folder: Path) -> None:
    """Take each phase's block from its stage-1 job."""
    blocks = shared_blocks(student)
    for j in range(len(blocks)):
        job = folder / f"phase-{j + 1}"
        if not (job / "checkpoint" / "latest").exists():
            raise RunError(f"stage 2 needs every phase: {job} has no checkpoint; run --phase {j + 1} first")
        name = (job / "checkpoint" / "latest").read_text().strip()
        from safetensors.torch import load_file

        tensors = load_file(job / "checkpoint" / name / "tensors.safetensors")
        own = {n: v for n, v in tensors.items() if n.startswith(f"block.{j}.")}
        blocks[j].load_state_dict({n.removeprefix(f"block.{j}."): v for n, v in own.items()})


def _tracker(track: str | None, folder: Path) -> Any:
    if track is None:
        return None
    if track == "wandb":
        import wandb

        run = wandb.init(project="raptor", dir=str(folder), name=folder.name)
        return lambda values, step: run.log(values, step=step)
    if track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))
        return lambda values, step: [writer.add_scalar(k, v, step) for k, v in values.items()]
    raise ValueError(f"unknown tracker {track!r}: choose from wandb, tensorboard")
