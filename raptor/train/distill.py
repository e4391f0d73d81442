"""Two-stage distillation: train k tied blocks to reproduce every state of a teacher.

Stage 1 trains each phase separately, from the teacher's state at the start of the phase; stage 2 joins the phases and
trains end to end on the surrogate's own states. The teacher runs in the same step, so no states are stored.

Reads top to bottom: `distill` (the typed surface), setup, one run, fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raptor.certificate.heads import head_outputs
from raptor.certificate.linear_head import head_fingerprint
from raptor.config import DistillConfig
from raptor.data import iterate
from raptor.data.apart import describe_images
from raptor.data.classes import describe_names, head_names
from raptor.data.stream import TrainStream
from raptor.devices import device_name, open_fabric, pick_device, pick_precision, seeded
from raptor.files import RunError, slug
from raptor.phases.cut import Phases, check_phases, find_phases, shortest_phase
from raptor.phases.function import cut_by_function, measure_replacement
from raptor.phases.similarity import measure_similarity
from raptor.phases.study import DEFAULT_TOKENS, check_cuts
from raptor.progress import say
from raptor.provenance import Provenance, command
from raptor.run import Run, StopSignal, check_folder, check_shared
from raptor.subject import Subject
from raptor.surrogate.surrogate import check_parts
from raptor.surrogate.teacher_blocks import adapted_layers
from raptor.train.distilled import (
    Distilled,
    DistillSummary,
    check_run_folder,
    keep_teacher,
    load_blocks,
    read_finished,
    start_from,
)
from raptor.train.job import Job, check_batches, open_images
from raptor.train.loop import Checkpoint, Loop
from raptor.train.losses import groups_at, state_variance
from raptor.train.plan import Plan, estimate, plan_run
from raptor.train.stage import Budget
from raptor.train.stopping import deaths_explained
from raptor.vit.open import open_vit
from raptor.vit.saved import repair_saved, save_vit
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint

_Cut = Callable[[int], Phases]  # k -> where the teacher's depth is cut
_NOT_STRUCTURE = ("dtype", "trust_hub", "pretrained")  # of the options that say how a model is opened
_FEW_DECIDE = 0.5  # share of the variance in 1 % of the coordinates from which on it is said


@command(DistillConfig)
def distill(config: DistillConfig) -> Distilled | Plan:
    """Distil a ViT into k weight-tied recurrent blocks; with `dry_run`, only say what that would take.

    data: in Python also a pair of opened data, training and held-out; a third are labelled images that heads are fitted
    on. Where only `val` has labels, heads are fitted on its own training part.
    """
    _check_options(config)
    target = config.k if isinstance(config.k, str) else None
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    fabric = open_fabric(device, precision)
    teacher = _open_teacher(config)
    # The search for a target begins with one block.
    num_blocks = 3 if config.k is None else 1
    if isinstance(config.k, int):
        num_blocks = config.k
    phases = None
    if config.phases is not None:
        phases = check_phases(teacher, config.phases)
        num_blocks = phases.k
    to_cut = [num_blocks] if phases is None and target is None else []
    check_cuts(teacher, to_cut, config.method, tokens=config.tokens)
    num_classes, own_names = head_outputs(teacher, config.head_file)
    # Before the images are listed, which takes a minute for a million.
    if config.out is not None:
        check_folder(config.out)
    given = None
    if config.classes is not None and num_classes:
        given = head_names(config.classes, num_classes)
    if given is not None and config.head_file is None:
        teacher = replace(teacher, classes=list(given))
    images = open_images(config, teacher.preprocess.size, num_classes, own_names, given)
    for side in config.sizes or ():
        groups_at(teacher, side)
    teacher.to(fabric.device)
    job = Job(config, teacher, images, fabric, precision)
    if config.head_weight and not num_classes and len(images.head.present()) < 2:
        raise ValueError(
            f"--head_weight compares classes, and {teacher.name} has no classifier: give --head_file, or images with "
            "labels, or --head_weight 0"
        )
    made_with = _made_with(job, given)
    folder = _run_folder(job, f"k{num_blocks}")
    if config.dry_run:
        return plan_run(job, phases, num_blocks, folder, made_with)
    if phases is not None:
        return _distill_one(job, phases, folder, made_with)
    cut = _way_to_cut(job)
    if target is not None:
        return _smallest_k(job, target, cut, _run_folder(job, "auto"), made_with)
    return _distill_one(job, cut(num_blocks), folder, made_with)


def _open_teacher(config: DistillConfig) -> ViT:
    """The teacher on the CPU, in fp32; one that no later command could open again is refused."""
    opening = config.opening()
    # Seeded, because an untrained teacher draws its weights. On the CPU: each rank moves it to its own device later.
    with seeded(config.seed):
        teacher = open_vit(config.model, device="cpu", **opening)
    is_from_hub = isinstance(config.model, str) and config.model.startswith("hub/")
    if is_from_hub and config.weights is None:
        # An entry may draw random weights each time.
        again = open_vit(config.model, **opening)
        if fingerprint(again.model) != fingerprint(teacher.model):
            raise ValueError(
                f"{config.model} has other weights each time it is opened: give a weight file with --weights, or an "
                "entry with published weights"
            )
    if teacher.dtype != torch.float32:
        raise ValueError(f"{teacher.name} is opened in {teacher.dtype}: training needs fp32, so open it without dtype")
    if config.adapters:
        adapted_layers(teacher, 1, config.adapters, config.adapted)
    return teacher


def _run_folder(job: Job, suffix: str) -> Path:
    """The run folder: `--out`, or one named by the model."""
    if job.config.out is not None:
        return Path(job.config.out)
    weights = job.config.weights_name()
    name = _model_name(job)
    if weights:
        name += f"-{weights}"
    return Path(f"runs/{slug(name)}-{suffix}")


def _model_name(job: Job) -> str:
    if isinstance(job.config.model, str | Path):
        return str(job.config.model)
    return job.teacher.name


def _made_with(job: Job, classes: Sequence[str] | None) -> dict[str, Any]:
    """What the run is made with, as its config.yaml keeps it; phases and stage are added where they are known.

    Entries after `precision` are left out at their defaults.
    """
    config = job.config
    opening = config.opening()
    made_with: dict[str, Any] = dict(
        model=_model_name(job),
        weights=opening["weights"],
        fingerprint=fingerprint(job.teacher.model),
        data=job.images.data_name,
        limit=config.train_images,
        images=describe_images(job.images.train, job.images.val),
        size=job.teacher.preprocess.size,
        seed=config.seed,
        start=config.start,
        recipe=config.entries(),
        precision=job.precision,
    )
    further = {name: value for name, value in opening.items() if name not in _NOT_STRUCTURE}
    if not opening["pretrained"]:
        further["pretrained"] = False
    further["val"] = job.images.val_name
    if config.split != "val":
        further["split"] = config.split
    if classes is not None:
        further["classes"] = describe_names(classes)
    if config.tokens != "all":
        further["tokens"] = config.tokens
    if config.method != "maxcut":
        further["method"] = config.method
    if config.head_file is not None:
        further["head_file"] = head_fingerprint(config.head_file)
    for name, value in further.items():
        if value is not None:
            made_with.setdefault(name, value)
    return made_with


def _check_options(config: DistillConfig) -> None:
    """Refuse what does not go together."""
    check_parts(config.block, config.adapters, config.adapted)
    if config.train_images is not None:
        check_batches(config, config.train_images)
    Budget.parse(config.budget)
    if config.track is not None and find_spec(config.track) is None:
        raise ValueError(f"{config.track} is not installed: pip install 'raptor-vit[track]'")
    k = config.k
    phases = config.phases
    if config.method == "function" and config.tokens != DEFAULT_TOKENS:
        say(f"--tokens {config.tokens} has no effect: --method function cuts no similarity")
    if config.stage == "2" and config.start is None:
        raise ValueError("--stage 2 goes on from a surrogate: give --start, such as the run folder of --stage 1")
    if isinstance(k, str) and (phases is not None or config.stage == "2"):
        raise ValueError(f"--k {k} cuts its own phases and trains each k whole: leave out --phases and --stage 2")
    if phases is not None and k not in (None, len(phases)):
        raise ValueError(f"--k {k} contradicts the {len(phases)} phases of --phases: leave out one of them")
    if phases is not None and config.tokens != DEFAULT_TOKENS:
        say(f"--tokens {config.tokens} has no effect: --phases says where depth is cut")


# One run, or one per k until a surrogate passes the target.


def _smallest_k(job: Job, target: str, cut: _Cut, root: Path, made_with: dict[str, Any]) -> Distilled:
    """Train k = 1, 2, ... until a trained surrogate passes the target, such as `r2=.6`."""
    name, _, number = target.partition("=")
    value = float(number)
    most = job.teacher.num_layers // shortest_phase(job.config.method)
    for k in range(1, most + 1):
        phases = cut(k)
        result = _distill_one(job, phases, root / f"k{k}", made_with)
        scores = result.summary.validation
        score: float | None = scores.r2_lowest  # of the worst layer: a surrogate stands for every one
        if name == "recovery":
            score = scores.recovery
        if score is None:
            raise ValueError("recovery needs labels, and a teacher that is right on some: else --k r2=.6")
        say(f"k={k}  phases {phases}  {name} {score:.3f}  (target {value:g})")
        if score >= value:
            return result
    raise ValueError(
        f"no k passes {name}={value:g}: at k={k} it is {score:.3f} ({result.folder}); give a larger --budget"
    )


@StopSignal()
def _distill_one(job: Job, phases: Phases, folder: Path, made_with: dict[str, Any]) -> Distilled:
    """One surrogate with these phases, in its run folder: a finished one, or one that is trained (on) here."""
    config = job.config
    check_run_folder(job.teacher, folder)
    check_shared(folder, job.ranks)
    resolved = {**made_with, "phases": list(phases), "stage": config.stage}
    run = Run(folder, resolved)
    with run, deaths_explained(run, job.fabric):
        student = job.student(phases)
        # The checkpoints of a finished run may be deleted to save room: its blocks are then read from its surrogate.
        done = read_finished(DistillSummary, folder)
        saved = run.load_checkpoint()
        if saved is not None:
            load_blocks(student, saved[0])
        elif done is not None:
            start_from(student, str(folder), job.teacher)
        elif config.start is not None:
            start_from(student, config.start, job.teacher)
        if done is not None:
            if saved is not None and job.ranks.is_first:
                with run.writing():
                    repair_saved(student, folder / "surrogate")
            return Distilled(student, job.teacher, folder, done)
        # Only rank 0 has one, and every rank returns it.
        summary = job.fabric.broadcast(_fit(job, run, student, phases, saved))
        if job.ranks.is_first:
            with run.writing():
                # The summary last: a folder that has one is finished.
                keep_teacher(job.teacher, student, folder)
                save_vit(student, folder / "surrogate")
                summary.write(folder)
    return Distilled(student, job.teacher, folder, summary)


@StopSignal()
def _way_to_cut(job: Job) -> _Cut:
    """Cuts depth into k phases by what is measured here on the ranks' images; the same on every rank."""
    vit = job.teacher
    method = job.config.method
    batches = iterate(
        job.images.train,
        vit.preprocess,
        64,
        device=vit.device,
        num_workers=job.config.num_workers,
        limit=job.num_cut_by,
        ranks=job.ranks,
    )
    if method == "function":
        # On rank 0 only: a few images, and every rank must get the same phases to the last bit of a cost.
        costs = job.ranks.first(
            lambda: measure_replacement(vit, batches.whole(), precision=job.precision)["block"].cost
        )
        return partial(cut_by_function, costs)
    measured = measure_similarity(Trajectories(vit, batches, job.precision), vit.num_layers, vit.groups)
    return partial(find_phases, job.ranks.first(lambda: measured.matrices[job.config.tokens]), method=method)


# Fit: the two stages in the loop that teachers train in too.


def _fit(job: Job, run: Run, student: ViT, phases: Phases, saved: Checkpoint | None) -> DistillSummary | None:
    """Train every stage that is not done yet; the summary, on rank 0."""
    started = time.monotonic()
    config = job.config
    teacher = job.teacher
    images = job.images
    stream = job.stream()
    validator = job.validator(run.folder)
    variance = _variance(job, run, stream, saved)
    head = None
    if job.has_head_term:
        head = validator.head
    stages = job.stages(student, phases, variance, head, stream, validator)
    data = [images.train, images.val]
    loop = Loop(run, job.fabric, stages, saved, data, config.track, config.checkpoint_minutes)
    say(estimate(job, stages))
    loop.fit()
    bad_images = loop.bad_images()
    try:
        validation = validator.final(student)
    except torch.OutOfMemoryError as error:
        what = f"the trained surrogate cannot be measured ({error})"
        raise RunError(f"{what}: free memory on the device, then give the same command") from None
    if not job.ranks.is_first:
        return None
    return DistillSummary(
        phases=phases,
        teacher=teacher.facts(),
        surrogate=student.facts(),
        num_steps=loop.state.num_steps,
        seconds=round(loop.state.seconds, 1),
        validation=validation,
        provenance=Provenance.since(started, job.fabric.device),
        device=device_name(job.fabric.device),
        num_processes=job.ranks.size,
        cuda_graph=all(stage.graphs is not None and stage.graphs.enabled for stage in stages),
        image_size=teacher.preprocess.size,
        data=images.train.name,
        val=images.val.name,
        split=config.split,
        num_images=len(images.train),
        bad_images=bad_images,
        train_images=len(images.train),
        subject=Subject.of(teacher, images.val, student),
    ).judged(run.folder, config.batch_size, config.start)


def _variance(job: Job, run: Run, stream: TrainStream, saved: Checkpoint | None) -> Tensor:
    """The divisor of each squared error: measured here, or read from the checkpoint."""
    teacher = job.teacher
    normalise = job.config.normalise
    if saved is None:
        measured = state_variance(teacher, stream, normalise, job.precision, job.ranks)
        if normalise in ("layer", "group"):
            share, layer, group = measured.concentration()
            if share > _FEW_DECIDE:
                say(
                    f"distill: 1 % of the coordinates hold {share:.0%} of the variance of {group} at layer {layer}, so "
                    "the loss is mostly theirs; --normalise coordinate weighs all alike (docs/results/recipe.md)"
                )
        return measured.divisors(normalise)
    # A resumed run keeps its variance: measured on another machine it would differ in the last bit.
    found = saved[0].get("variance")
    shape = [teacher.num_layers, teacher.groups.num_tokens]
    if normalise == "coordinate":
        shape.append(teacher.dim)
    if found is None or list(found.shape) != shape or not found.isfinite().all():
        raise RunError(f"{run.latest()} has no variance of its states, or a damaged one: choose another --out")
    return found
