"""Two-stage distillation: train k tied blocks to reproduce every state of a teacher.

Stage 1 trains every phase on its own from the teacher's state at the phase's start; stage 2 joins them and trains
end to end on the surrogate's own states. The teacher runs in the same step, so nothing is ever stored. Everything
random is a function of (seed, stage, step), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raptor.data import ImageData, iterate, open_data
from raptor.devices import pick_device, pick_precision
from raptor.fidelity.heads import fingerprint
from raptor.open import open_vit, save_vit
from raptor.phases import Phases, find_phases
from raptor.run import Run, read_summary, slug
from raptor.similarity.cosine import measure_similarity
from raptor.surrogate.surrogate import make_surrogate
from raptor.train.distilled import Distilled
from raptor.train.job import Job
from raptor.train.loop import Trainer
from raptor.train.recipe import resolve_recipe
from raptor.train.resume import load_blocks
from raptor.train.start import start_from, take_phases
from raptor.train.track import check_tracker
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT


def distill(
    model: str | Path | nn.Module | ViT,
    data: str | tuple[ImageData, ImageData] = "scenes",
    *,
    k: int | str | None = None,
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
    blocks: str | None = None,
    norm: str | None = None,
    cls: int | None = None,
    registers: int | None = None,
    head_file: str | None = None,
    limit: int | None = None,
    phase_images: int = 1024,
    val_images: int = 1024,
    head_images: int | None = None,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    compile: bool | None = None,
    graph: bool | None = None,
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
        k: number of tied blocks (3 unless `phases` are given), or `auto` for the smallest that passes `target`.
        phases: phase lengths, e.g. 7 3 2, instead of max-cut on the teacher's similarity.
        target: with k=auto, `recovery=.95` (of a ridge probe) or `r2=.6` (at every layer), on held-out images. The
            scores of the k that is chosen are of the same images, so they flatter it a little.
        recipe: paper, authors, default, quick, or a YAML file; the options below override it.
        out: run folder; continued when it already holds this run.
        stage: `all`, `1` or `2`; one stage alone keeps its share of the budget.
        phase: train only this phase (1..k) of stage 1, as an independent job; `--stage 2` then picks up all of them.
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
        blocks: dotted path of the block list, for a model whose structure cannot be guessed.
        norm: dotted path of the final norm, likewise.
        cls: number of cls tokens (0 or 1), likewise.
        registers: number of register tokens, likewise.
        head_file: a linear head, for accuracy and agreement of a teacher that has none.
        limit: use only this many training images.
        phase_images: images for the similarity that the phases are cut from.
        val_images: held-out images for the validation curve.
        head_images: training images that ridge probes are fitted on; by default 20 a class, 5,000 at least.
        seed: of initialisation, data order and crops.
        device: auto, cpu or cuda.
        precision: auto, fp32 or bf16.
        compile: compile the blocks; by default on a GPU only.
        graph: run each step as a CUDA graph; by default on a single GPU.
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
    wanted = _check_options(k, phases, target, stage, phase)
    check_tracker(track)
    device = pick_device(device)
    precision = pick_precision(precision, device)
    structure = {"blocks": blocks, "norm": norm, "cls": cls, "registers": registers}
    teacher = open_vit(model, weights=weights, size=size, device="cpu", **structure)  # type: ignore[arg-type]
    if phases is not None and sum(phases) != teacher.num_layers:
        raise ValueError(f"phases {list(phases)} do not sum to the {teacher.num_layers} blocks of {teacher.name}")
    if isinstance(data, str):
        side = teacher.preprocess.size
        train_data = open_data(data, "train", limit=limit, size=side, skip_bad=skip_bad)
        val_data = open_data(data, "val", limit=val_images, size=side, skip_bad=skip_bad)
    else:
        train_data, val_data = data
    fabric = _fabric(device, precision)
    teacher.to(fabric.device)
    job = Job(
        teacher, settings, train_data, val_data, fabric, precision=precision,
        stage="1" if phase is not None else stage, phase=phase, start=start,
        head_file=head_file, head_images=head_images, seed=seed,
        num_workers=num_workers, compile_blocks=device == "cuda" if compile is None else compile,
        graph=graph, checkpointing=checkpointing, resume=resume, track=track,
    )  # fmt: skip
    job.stages()
    job.graphed()
    name = str(model) if isinstance(model, str | Path) else teacher.name
    config = dict(
        model=name, weights=weights, fingerprint=fingerprint(teacher),
        data=data if isinstance(data, str) else train_data.name, limit=limit,
        size=teacher.preprocess.size, seed=seed, start=start, recipe=dataclasses.asdict(settings), precision=precision,
        **{key: value for key, value in structure.items() if value is not None},
    )  # fmt: skip
    root = f"runs/{slug(name)}"
    if phases is not None:
        found = Phases.from_lengths(list(phases))
        return _distill_one(job, found, Path(out or f"{root}-k{found.k}"), config)
    matrix = None
    if fabric.is_global_zero:
        matrix = _similarity_matrix(teacher, train_data, phase_images, num_workers, precision)
    matrix = fabric.broadcast(matrix)  # measured once, so that every rank cuts at the same places
    if wanted is not None:
        return _smallest_k(job, *wanted, matrix, Path(out or f"{root}-auto"), config)
    found = find_phases(matrix, 3 if k is None else int(k))
    return _distill_one(job, found, Path(out or f"{root}-k{found.k}"), config)


def _check_options(
    k: int | str | None, phases: Sequence[int] | None, target: str | None, stage: str, phase: int | None
) -> tuple[str, float] | None:
    """The target of `k="auto"` (its name and value), None for a fixed k; what does not go together is refused."""
    if stage not in ("all", "1", "2"):
        raise ValueError(f"unknown stage {stage!r}: choose from all, 1, 2")
    if phase is not None and stage == "2":
        raise ValueError("--phase is a job of stage 1: leave out --stage 2")
    if k != "auto":
        if target is not None:
            raise ValueError("--target goes with --k auto")
        if k is not None and not str(k).isdigit():
            raise ValueError(f"cannot read k={k!r}: write a number of blocks, or auto")
        if k is not None and phases is not None and int(k) != len(phases):
            raise ValueError(f"--k {k} contradicts the {len(phases)} phases of --phases: leave out one of them")
        return None
    if phases is not None or phase is not None or stage == "2":
        raise ValueError(
            "--k auto cuts its own phases and trains each k whole: leave out --phases, --phase and --stage 2"
        )
    name, _, value = (target or "").partition("=")
    try:
        if name in ("recovery", "r2"):
            return name, float(value)
    except ValueError:
        pass
    raise ValueError("--k auto needs --target recovery=.95 or r2=.6")


def _smallest_k(job: Job, name: str, value: float, matrix: Any, root: Path, config: dict[str, Any]) -> Distilled:
    """Train k = 1, 2, ... until a trained surrogate passes the target."""
    key = {"recovery": "recovery", "r2": "r2_lowest"}[name]  # a surrogate stands for every layer
    for k in range(1, job.teacher.num_layers + 1):
        phases = find_phases(matrix, k)
        result = _distill_one(job, phases, root / f"k{k}", config)
        score = result.summary["validation"].get(key)
        if score is None:
            raise ValueError("recovery needs labels, and a teacher that is right on some: else --target r2=.6")
        if job.fabric.is_global_zero:
            print(f"k={k}  phases {phases}  {name} {score:.3f}  (target {value:g})", file=sys.stderr)
        if score >= value:
            return result
    raise ValueError(
        f"no k passes {name}={value:g}: at k={k} it is {score:.3f} ({result.folder}); give a larger --budget"
    )


def _distill_one(job: Job, phases: Phases, folder: Path, config: dict[str, Any]) -> Distilled:
    if job.phase is not None and not 1 <= job.phase <= phases.k:
        raise ValueError(f"phase {job.phase} is not one of 1..{phases.k}")
    config = {**config, "phases": list(phases.lengths), "stage": job.stage, "phase": job.phase}
    run_folder = folder if job.phase is None else folder / f"phase-{job.phase}"
    with Run(run_folder, config, resume=job.resume, writer=job.fabric.is_global_zero) as run:
        student = make_surrogate(
            job.teacher,
            phases.lengths,
            block=job.recipe.block,
            conditioning=job.recipe.conditioning,
            copy=job.recipe.copy,
            seed=job.seed,
        )
        done, saved = read_summary(run_folder), run.load_checkpoint()
        if done is not None and saved is not None:
            load_blocks(student, saved[0])
            return Distilled(student, job.teacher, run_folder, done)
        if done is not None:
            start_from(student, str(run_folder), job.teacher)
            return Distilled(student, job.teacher, run_folder, done)
        if saved is None and job.start is not None:
            start_from(student, job.start, job.teacher)
        elif saved is None and job.stage == "2":
            take_phases(student, folder, config)
        summary = job.fabric.broadcast(Trainer(job, run, student, phases).fit())
        if job.fabric.is_global_zero:
            if job.phase is None:
                with run.writing():
                    save_vit(student, run_folder / "surrogate")
            run.write_summary(summary)
    return Distilled(student, job.teacher, run_folder, summary)


def _similarity_matrix(vit: ViT, data: ImageData, num_images: int, num_workers: int, precision: str) -> Any:
    batches = iterate(data, vit.preprocess, 64, device=vit.device, num_workers=num_workers, limit=num_images)
    states = (states for states, _, _ in Trajectories(vit, batches, precision))
    return measure_similarity(states, vit.num_layers, vit.groups).matrices["all"]


def _fabric(device: str, precision: str) -> Any:
    from lightning_fabric import Fabric

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its notices about precision are not news
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
    if world > 1:
        atexit.unregister(_leave_group)
        atexit.register(_leave_group)
    return fabric


def _leave_group() -> None:
    """Ranks leave together: one that ends while another still waits for it would abort."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
