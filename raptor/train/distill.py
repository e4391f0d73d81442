"""Two-stage distillation: train k tied blocks to reproduce every state of a teacher.

Stage 1 trains each phase separately, from the teacher's state at the start of the phase; stage 2 joins the phases and
trains end to end on the surrogate's own states. The teacher runs in the same step, so no states are stored.

Reads top to bottom: `distill` (the typed surface), setup, one run, fit, plan.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raptor.certificate.heads import Head, head_outputs, num_features
from raptor.certificate.linear_head import LinearHead, head_fingerprint
from raptor.config import DistillConfig, Recipe
from raptor.data import ChosenData, iterate
from raptor.data.apart import check_apart, describe_images
from raptor.data.by_name import as_spec
from raptor.data.chosen import (
    DEFAULT_DATA,
    labelled_like,
    tell_of_new_classes,
    tell_of_scenes,
)
from raptor.data.classes import describe_names, for_head, head_names
from raptor.data.stream import TrainStream, check_changes, check_stream
from raptor.devices import device_name, open_fabric, pick_device, pick_precision, seeded
from raptor.files import RunError, slug
from raptor.phases.cut import Phases, check_phases, find_phases
from raptor.phases.similarity import measure_similarity
from raptor.phases.study import DEFAULT_TOKENS, check_cuts
from raptor.progress import clock
from raptor.provenance import Provenance, command
from raptor.run import Run, StopSignal, check_config, check_folder, check_shared, read_config
from raptor.subject import Subject
from raptor.surrogate.surrogate import check_parts
from raptor.surrogate.teacher_blocks import adapted_layers
from raptor.train.distilled import Distilled, DistillSummary
from raptor.train.graphs import StepGraphs
from raptor.train.host import check_tracker, deaths_explained
from raptor.train.job import Job
from raptor.train.loop import Checkpoint, Loop, plan_stage
from raptor.train.losses import groups_at, state_variance
from raptor.train.optimizer import ParameterGroup, is_matrix, num_moments
from raptor.train.plan import NUM_DECODED, Memory, Plan, free_disk, measured_step, num_bytes
from raptor.train.resume import check_run_folder, keep_teacher, load_blocks, read_finished, start_from
from raptor.train.schedule import Budget, Rates, teacher_forcing
from raptor.train.step import DistillStep, Parts
from raptor.train.validation import Validator, shown_r2
from raptor.vit.open import open_vit
from raptor.vit.saved import repair_saved, save_vit
from raptor.vit.trajectory import Trajectories, autocast
from raptor.vit.view import ViT
from raptor.vit.weights import check_weights, fingerprint

_NUM_VALIDATIONS = 4  # per stage
_HIGHEST_TARGETS = {"recovery": 2.0, "r2": 1.0}
_FEW_IMAGES = 16
_FEW_DECIDE = 0.5  # share of the variance in 1 % of the coordinates from which on it is said


@command(DistillConfig)
def distill(config: DistillConfig) -> Distilled | Plan:
    """Distil a ViT into k weight-tied recurrent blocks; with `dry_run`, only say what that would take.

    data: in Python also a pair of opened data, training and held-out; a third are labelled images that heads are fitted
    on. Where only `val` has labels, heads are fitted on its own training part.
    """
    check_parts(config.block, config.conditioning, config.adapters, config.table_start, config.adapted)
    Budget.parse(config.budget)
    wanted = _check_options(config)
    model, data, k, phases, tokens = config.model, config.data, config.k, config.phases, config.tokens
    if phases is not None and tokens != DEFAULT_TOKENS:
        print(f"--tokens {tokens} has no effect: --phases says where depth is cut", file=sys.stderr)
    num_blocks = 3 if k is None else 1 if k == "auto" else int(k)  # auto begins with one
    check_tracker(config.track)
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    fabric = open_fabric(device, precision)
    opening = config.opening()
    with seeded(config.seed):
        teacher = open_vit(model, device="cpu", **opening)
    if isinstance(model, str) and model.startswith("hub/") and opening["weights"] is None:
        _check_repeatable(model, teacher, opening)
    if teacher.dtype != torch.float32:
        raise ValueError(f"{teacher.name} is opened in {teacher.dtype}: training needs fp32, so leave out --dtype")
    if config.adapters:
        adapted_layers(teacher, 1, config.adapters, config.adapted)
    found = None if phases is None else check_phases(teacher, phases)
    check_cuts(teacher, [] if phases is not None or k in (None, "auto") else [num_blocks], tokens=tokens)
    num_classes, own_names = head_outputs(teacher, config.head_file)
    if config.out is not None:
        check_folder(config.out)
    names = None if config.classes is None or not num_classes else head_names(config.classes, num_classes)
    if names is not None and config.head_file is None:
        teacher = replace(teacher, classes=names)
    if isinstance(data, tuple):
        train_data, val_data, *labelled = (for_head(one, num_classes, names, own_names) for one in data)
        val_data = labelled_like(val_data, labelled[0] if labelled else train_data)
        head_data = labelled[0] if labelled else train_data
        if config.split not in ("train", "all"):
            check_apart(train_data, val_data)
        spec: str | list[str] = as_spec(train_data.specs)
        val: str | list[str] | None = None if val_data.specs == train_data.specs else as_spec(val_data.specs)
    else:
        if data is None:
            tell_of_scenes(model)
        spec, val = as_spec(DEFAULT_DATA if data is None else data), as_spec(config.val)
        chosen = ChosenData(spec, val, config.split, names, config.skip_bad, own_names, num_classes)
        side = teacher.preprocess.size
        train_data = chosen.training(config.limit, side)
        val_data = chosen.judged(config.val_images, side, like=train_data)
        head_data = chosen.labelled(train_data, val_data, side)
        tell_of_new_classes(head_data, val_data)
    check_stream(len(train_data), config.batch_size, config.augment, config.crop_scale, sizes=config.sizes)
    check_changes(config.batch_size, config.augment, config.mixup, config.cutmix, config.jitter, config.grey)
    for side in config.sizes or ():
        groups_at(teacher, side)
    teacher.to(fabric.device)
    job = Job(
        teacher,
        config,
        train_data,
        val_data,
        fabric,
        head_data,
        precision=precision,
        stage=config.stage,
        start=config.start,
        allow_other_teacher=config.allow_other_teacher,
        split=config.split,
        head_file=config.head_file,
        head_images=config.head_images,
        seed=config.seed,
        num_workers=config.num_workers,
        compile_blocks=device == "cuda" if config.compile is None else config.compile,
        graph=config.graph,
        checkpointing=config.checkpointing,
        resume=config.resume,
        track=config.track,
        checkpoint_minutes=config.checkpoint_minutes,
    )
    job.stages()
    job.graphed()
    if config.head_weight and not num_classes and len(head_data.present()) < 2:
        raise ValueError(
            f"--head_weight compares classes, and {teacher.name} has no classifier: give --head_file, or images with "
            "labels, or --head_weight 0"
        )
    if found is None and wanted is None:
        check_cuts(teacher, [num_blocks], tokens=tokens)
    name = str(model) if isinstance(model, str | Path) else teacher.name
    made_with = _made_with(job, name, opening, spec, val, config.limit, names, tokens)
    root, out, phase_images = f"runs/{slug(name)}", config.out, config.phase_images
    if config.dry_run:
        num_blocks = num_blocks if found is None else found.k
        folder = Path(out or f"{root}-k{num_blocks}")
        planned = found or _phases_there(folder) or _even_phases(teacher, num_blocks)
        return _plan(job, planned, folder, made_with, 0 if found else phase_images)
    if found is not None:
        return _distill_one(job, found, Path(out or f"{root}-k{found.k}"), made_with)
    matrix = _similarity_matrix(job, phase_images, tokens)
    if wanted is not None:
        return _smallest_k(job, *wanted, matrix, Path(out or f"{root}-auto"), made_with)
    found = find_phases(matrix, num_blocks)
    return _distill_one(job, found, Path(out or f"{root}-k{found.k}"), made_with)


def _check_repeatable(name: str, teacher: ViT, opening: dict[str, Any]) -> None:
    """Raise for a torch.hub entry whose weights are random each time: no later command could open this teacher."""
    if fingerprint(open_vit(name, **opening).model) != fingerprint(teacher.model):
        raise ValueError(
            f"{name} has other weights each time it is opened: give a weight file with --weights, or an entry with "
            "published weights"
        )


def _made_with(
    job: Job,
    model: str,
    opening: dict[str, Any],
    data: str | list[str],
    val: str | list[str] | None,
    limit: int | None,
    names: Sequence[str] | None,
    tokens: str,
) -> dict[str, Any]:
    """What the run is made with, as its config.yaml keeps it; `resolved` adds what depends on the phases.

    Entries after `precision` are left out at their defaults.
    """
    config: dict[str, Any] = dict(
        model=model,
        weights=opening["weights"],
        fingerprint=fingerprint(job.teacher.model),
        data=data,
        limit=limit,
        images=describe_images(job.train_data, job.val_data),
        size=job.teacher.preprocess.size,
        seed=job.seed,
        start=job.start,
        recipe=job.recipe.entries(),
        precision=job.precision,
    )
    structure = {key: value for key, value in opening.items() if key not in ("dtype", "trust_hub", "pretrained")}
    structure |= {} if opening["pretrained"] else {"pretrained": False}
    structure |= {"val": val, "split": None if job.split == "val" else job.split}
    structure |= {"classes": None if names is None else describe_names(names)}
    structure |= {"tokens": None if tokens == "all" else tokens}
    structure |= {"head_file": None if job.head_file is None else head_fingerprint(job.head_file)}
    return config | {key: value for key, value in structure.items() if key not in config and value is not None}


def _check_options(config: DistillConfig) -> tuple[str, float] | None:
    """The target of `k="auto"` (its name and value), None for a fixed k; what does not go together is refused."""
    k, phases, target, stage = config.k, config.phases, config.target, config.stage
    if stage == "2" and config.start is None:
        raise ValueError("--stage 2 goes on from a surrogate: give --start, such as the run folder of --stage 1")
    if k != "auto":
        if target is not None:
            raise ValueError("--target goes with --k auto")
        if k is not None and not str(k).isdigit():
            raise ValueError(f"cannot read --k {k!r}: write a number of blocks, or auto")
        if k is not None and phases is not None and int(k) != len(phases):
            raise ValueError(f"--k {k} contradicts the {len(phases)} phases of --phases: leave out one of them")
        return None
    if phases is not None or stage == "2":
        raise ValueError("--k auto cuts its own phases and trains each k whole: leave out --phases and --stage 2")
    name, _, value = (target or "").partition("=")
    try:
        # No surrogate passes NaN, or 95 for .95; a recovery may be a little above 1.
        if name in _HIGHEST_TARGETS and -math.inf < float(value) <= _HIGHEST_TARGETS[name]:
            return name, float(value)
    except ValueError:
        pass
    raise ValueError("--k auto needs --target recovery=.95 or r2=.6; r2 is at most 1, recovery at most 2")


# One run, or one per k until a surrogate passes the target.


def _smallest_k(job: Job, name: str, value: float, matrix: Any, root: Path, config: dict[str, Any]) -> Distilled:
    """Train k = 1, 2, ... until a trained surrogate passes the target."""
    for k in range(1, job.teacher.num_layers + 1):
        phases = find_phases(matrix, k)
        result = _distill_one(job, phases, root / f"k{k}", config)
        scores = result.summary.validation
        score = scores.recovery if name == "recovery" else scores.r2_lowest  # a surrogate stands for every layer
        if score is None:
            raise ValueError("recovery needs labels, and a teacher that is right on some: else --target r2=.6")
        if job.fabric.is_global_zero:
            print(f"k={k}  phases {phases}  {name} {score:.3f}  (target {value:g})", file=sys.stderr)
        if score >= value:
            return result
    raise ValueError(
        f"no k passes {name}={value:g}: at k={k} it is {score:.3f} ({result.folder}); give a larger --budget"
    )


@StopSignal()
def _distill_one(job: Job, phases: Phases, folder: Path, config: dict[str, Any]) -> Distilled:
    """One surrogate with these phases, in its run folder: a finished one, or one that is trained (on) here."""
    config = {**config, "phases": list(phases), "stage": job.stage}
    check_run_folder(job.teacher, folder)
    check_shared(folder, job.ranks)
    run = Run(folder, config, resume=job.resume, writer=job.fabric.is_global_zero)
    with run, deaths_explained(run, job.fabric):
        student = job.student(phases)
        done, saved = read_finished(DistillSummary, folder), run.load_checkpoint()
        if saved is not None:
            load_blocks(student, saved[0])
        elif done is not None:
            start_from(student, str(folder), job.teacher, job.allow_other_teacher)
        elif job.start is not None:
            start_from(student, job.start, job.teacher, job.allow_other_teacher)
        if done is not None:
            if saved is not None and job.fabric.is_global_zero:
                with run.writing():
                    repair_saved(student, folder / "surrogate")
            return Distilled(student, job.teacher, folder, done)
        summary = job.fabric.broadcast(_fit(job, run, student, phases, saved))
        if job.fabric.is_global_zero:
            with run.writing():
                keep_teacher(job.teacher, student, folder)
                save_vit(student, folder / "surrogate")
                summary.write(folder)
    return Distilled(student, job.teacher, folder, summary)


@StopSignal()
def _similarity_matrix(job: Job, num_images: int, tokens: str) -> Any:
    """The similarity that phases are cut from, over all ranks' images; the same on every rank."""
    vit, ranks = job.teacher, job.ranks
    batches = iterate(
        job.train_data,
        vit.preprocess,
        64,
        device=vit.device,
        num_workers=job.num_workers,
        limit=num_images,
        ranks=ranks,
    )
    measured = measure_similarity(Trajectories(vit, batches, job.precision), vit.num_layers, vit.groups)
    return ranks.first(lambda: measured.matrices[tokens])


# Fit: the two stages in the loop that teachers train in too.


def _fit(job: Job, run: Run, student: ViT, phases: Phases, saved: Checkpoint | None) -> DistillSummary | None:
    """Train every stage that is not done yet; the summary, on rank 0."""
    started = time.monotonic()
    stream, validator = job.stream(), job.validator(run.folder)
    if saved is not None:
        variance = _saved_variance(job, run, saved[0])
    else:
        measured_variance = state_variance(job.teacher, stream, job.recipe.normalise, job.precision, job.ranks)
        variance = measured_variance.divisors(job.recipe.normalise)
        if job.fabric.is_global_zero and job.recipe.normalise in ("layer", "group"):
            _tell_of_large_coordinates(*measured_variance.concentration())
    module = job.step(student, phases, variance, validator.head if job.has_head_term() else None)
    loop = Loop(run, job.fabric, saved, [job.train_data, job.val_data], job.track, job.checkpoint_minutes)
    stages = [DistillStage(job, name, module, stream, validator, student) for name in job.stages()]
    loop.check(stages)
    if job.fabric.is_global_zero:
        print(_estimate(job, validator), file=sys.stderr)
    loop.fit(stages)
    bad_images = loop.bad_images()
    try:
        validation = validator.final(student)
    except torch.OutOfMemoryError as error:
        what = f"the trained surrogate cannot be measured ({error})"
        raise RunError(f"{what}: free memory on the device, then give the same command") from None
    if not job.fabric.is_global_zero:
        return None
    return DistillSummary(
        phases=phases,
        teacher=job.teacher.facts(),
        surrogate=student.facts(),
        num_steps=loop.state.num_steps,
        seconds=round(loop.state.seconds, 1),
        validation=validation,
        provenance=Provenance.since(started, job.fabric.device),
        device=device_name(job.fabric.device),
        num_processes=job.ranks.size,
        cuda_graph=job.graphed(),
        image_size=job.teacher.preprocess.size,
        data=job.train_data.name,
        val=job.val_data.name,
        split=job.split,
        num_images=len(job.train_data),
        bad_images=bad_images,
        train_images=len(job.train_data),
        subject=Subject.of(job.teacher, job.val_data, student),
    ).judged(run.folder, job.recipe.batch_size, job.start)


def _estimate(job: Job, validator: Validator) -> str:
    """How long the run takes, from the time of one forward pass: a step is about four of them."""
    seconds = _image_seconds(job, validator) / job.ranks.size
    budget, share = Budget.parse(job.recipe.budget), sum(job.stages().values())
    per_unit = 1.0 if budget.unit == "s" else 4 * seconds * job.recipe.batch_size
    training = budget.amount * share * per_unit * (job.steps_per_epoch() if budget.unit == "epochs" else 1)
    measured = _num_measured(job, validator) * seconds
    text = f"distill: about {clock(training)} training + {clock(measured)} measuring{job.runs_on()}"
    return text + ("; the first steps compile the blocks, about a minute" if job.compile_blocks else "")


def _image_seconds(job: Job, validator: Validator) -> float:
    """Seconds of a forward pass per image. A CPU is as fast on few images as on many."""
    images = next(iter(validator.val.whole())).images[: None if job.teacher.device.type == "cuda" else _FEW_IMAGES]
    with torch.no_grad(), autocast(job.precision, job.teacher.device):
        job.teacher(images)
        began = time.monotonic()
        float(job.teacher(images).float().sum())  # waits for the device
        return (time.monotonic() - began) / len(images)


def _num_measured(job: Job, validator: Validator) -> int:
    """Images that teacher or surrogate see in all validations and for the ridge probes."""
    num = (2 * _NUM_VALIDATIONS * len(job.stages()) + 2) * validator.val.num_images  # and once more at the end
    return num + (2 * (validator.train.num_images + validator.val.num_images) if validator.labelled else 0)


def _tell_of_large_coordinates(share: float, layer: int, group: str) -> None:
    """Say so where the loss would hardly see most coordinates."""
    if share > _FEW_DECIDE:
        print(
            f"distill: 1 % of the coordinates hold {share:.0%} of the variance of {group} at layer {layer}, so the "
            "loss is mostly theirs; --normalise coordinate weighs all alike (docs/results/recipe.md)",
            file=sys.stderr,
        )


def _saved_variance(job: Job, run: Run, tensors: Mapping[str, Tensor]) -> Tensor:
    found = tensors.get("variance")
    shape = [job.teacher.num_layers, job.teacher.groups.num_tokens]
    if job.recipe.normalise == "coordinate":
        shape.append(job.teacher.dim)
    if found is None or list(found.shape) != shape or not found.isfinite().all():
        raise RunError(f"{run.latest()} has no variance of its states, or a damaged one: choose another --out")
    return found


def _parameter_groups(named: list[tuple[str, nn.Parameter]], recipe: Recipe) -> list[ParameterGroup]:
    """What is trained; with Muon the weights of linear layers, which it takes, are a group of their own."""
    if recipe.optimizer == "adamw":
        return [ParameterGroup(named, recipe.weight_decay)]
    matrices = [(name, p) for name, p in named if is_matrix(name, p)]
    others = [(name, p) for name, p in named if not is_matrix(name, p)]
    return [ParameterGroup(matrices, recipe.weight_decay, "muon"), ParameterGroup(others, recipe.weight_decay)]


class DistillStage:
    """`stage1` or `stage2` of a distillation; see `raptor.train.stage.Stage`."""

    betas = (0.9, 0.999)

    def __init__(
        self, job: Job, name: str, module: DistillStep, stream: TrainStream, validator: Validator, student: ViT
    ):
        recipe = job.recipe
        self.name, self.title = name, f"distil {name}"
        self.budget, self.share = Budget.parse(recipe.budget), job.stages()[name]
        self.before = recipe.stage1_share if name == "stage2" else 0.0
        self.module, self.stream, self.recipe = module, stream, recipe
        self.validator, self.student = validator, student
        self.num_layers = student.num_layers
        self.graphs = StepGraphs(module, name, job.precision, job.graphed())
        self.groups = _parameter_groups(module.trained_parameters(), recipe)
        self.clip, self.rates = recipe.clip, Rates(recipe.lr, recipe.min_lr, recipe.warmup)
        self.batch_size = recipe.batch_size
        self.steps_per_epoch = job.steps_per_epoch()
        self.num_validations = _NUM_VALIDATIONS
        self.refines = job.start is not None
        # Stage 1 is averaged only where the recipe ends with it: stage 2 goes on from its last weights.
        is_last = name == "stage2" or recipe.stage1_share == 1
        self.average_last = recipe.average_last if is_last else 0.0

    def losses(self, wrapped: Any, step: int, num_steps: int, propagate: Callable[[Tensor], None]) -> Tensor:
        """The loss of every trained layer, on the device."""
        images = self.stream.batch(step, self.name, self._size(step, num_steps))
        lam = self._lam(step, num_steps)
        layer_losses = self.graphs.run(images, lam) if self.graphs.enabled else None
        if layer_losses is None:
            loss, layer_losses = wrapped(images, self.name, lam)
            propagate(loss)
        return layer_losses

    def kind(self, step: int, num_steps: int) -> tuple[Parts, int]:
        return Parts.of(self._lam(step, num_steps)), self._size(step, num_steps)

    def _size(self, step: int, num_steps: int) -> int:
        """The image size of a step: one that the stream draws, or the first of two until its share of the run ends."""
        until = self.recipe.first_size_until
        if not until:
            return self.stream.size(step, self.name)
        assert self.recipe.sizes is not None
        first, second = self.recipe.sizes
        return first if self.before + self.share * step / num_steps < until else second

    def _lam(self, step: int, num_steps: int) -> float:
        """The share of teacher forcing at a step."""
        if self.name != "stage1":
            return 0.0
        return teacher_forcing(step, num_steps, self.recipe.lam, self.recipe.lam_until)

    def clip_groups(self) -> list[list[nn.Parameter]]:
        return self.module.clip_groups(self.name)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {f"block.{n}": v for n, v in self.module.shared_blocks.state_dict().items()}
        return tensors | {"variance": self.module.variance}

    def metrics(self, loss_nl: Tensor) -> dict[str, Any]:
        layer_nl = loss_nl[:, : self.num_layers]
        found = {
            "loss": float(layer_nl.mean()),
            "layer_loss": [float(f"{v:.7g}") for v in layer_nl.mean(0).tolist()],
        }
        if self.module.has_head_term(self.name):
            found["head_loss"] = float(loss_nl[:, self.num_layers].mean())
        return found

    def where(self, column: int | None = None) -> str:
        if column is None:
            return f" of {self.name}"
        if column == self.num_layers:
            return f" of {self.name}, head term"
        return f" of {self.name}, layer {column + 1}"

    def validate(self) -> tuple[dict[str, Any], str]:
        scores = self.validator.validate(self.student)
        note = f"R2 {shown_r2(scores.r2_last)} (lowest {shown_r2(scores.r2_lowest)})"
        if scores.agreement is not None:
            note += f", agreement {scores.agreement:.1%}"
        return scores.to_dict(), note


# Plan: the same steps, a few of them, and what the run would write.


def _even_phases(teacher: ViT, k: int) -> Phases:
    """Phases of equal length, for a plan: where the run cuts changes little of what it takes."""
    check_cuts(teacher, [k])
    short, num_long = divmod(teacher.num_layers, k)
    return Phases(tuple(short + (i < num_long) for i in range(k)))


def _phases_there(folder: Path) -> Phases | None:
    """The phases of a run that `folder` holds already."""
    saved = read_config(folder).get("phases") if (folder / "config.yaml").exists() else None
    return Phases.from_lengths(saved) if saved else None


def _plan(job: Job, phases: Phases, folder: Path, config: dict[str, Any], num_similarity: int) -> Plan:
    """What the run takes, from a few steps that are done and undone.

    num_similarity: images that its phases are cut from.
    """
    config = {**config, "phases": list(phases), "stage": job.stage}
    check_run_folder(job.teacher, folder)
    check_folder(folder)
    check_config(folder, config, job.resume)
    memory, student, stream = Memory(job.fabric.device), job.student(phases), job.stream(NUM_DECODED)
    validator = job.validator(folder)
    ones_lt = torch.ones(job.teacher.num_layers, job.teacher.groups.num_tokens, device=job.fabric.device)
    module = job.step(student, phases, ones_lt, _planned_head(job, validator) if job.has_head_term() else None)
    stages = [DistillStage(job, name, module, stream, validator, student) for name in job.stages()]
    trained = num_bytes([parameter for _, parameter in module.trained_parameters()])
    moments = sum(num_moments(group.optimizer) * num_bytes([p for _, p in group.named]) for group in stages[0].groups)
    fixed = memory.peak() + trained + moments  # and a gradient of each weight
    parts = measured_step(lambda: [plan_stage(stage, job.fabric) for stage in stages], job.recipe.batch_size)
    num_measured = _num_measured(job, validator) + num_similarity
    num_lines = sum(part.num_steps for part in parts) / 20
    written = {
        "three checkpoints": 3 * (trained + moments),
        "surrogate": num_bytes(student.model),
        "metrics": num_lines * (200.0 + 14 * job.teacher.num_layers),
    }
    return Plan(
        command="distill",
        model=job.teacher.name,
        data=job.train_data.name,
        folder=str(folder),
        device=device_name(job.fabric.device),
        checked=_checked(job, phases, validator),
        parts=parts,
        other_seconds=_image_seconds(job, validator) * num_measured / job.ranks.size,
        memory_bytes=max(job.ranks.gather(memory.peak())),
        fixed_bytes=fixed,
        written_bytes=written,
        free_bytes=free_disk(folder, sum(written.values())),
        num_devices=job.ranks.size,
        exchanged_bytes=trained,
        notes=_plan_notes(job, folder),
    )


def _planned_head(job: Job, validator: Validator) -> Head | None:
    """The head of the head term; in place of a ridge head that the run would fit, one as large."""
    if job.head_file is not None or job.teacher.num_classes:
        return validator.head
    assert job.head_data is not None
    num_classes = len(job.head_data.classes or ())
    weight_cf = torch.zeros(num_classes, num_features(job.teacher))
    return Head("ridge", num_classes, LinearHead(weight_cf, torch.zeros(num_classes)))


def _plan_notes(job: Job, folder: Path) -> list[str]:
    """What of the run is there already, and what the measured steps do not show."""
    notes = ["the first steps also compile the blocks, about a minute"] if job.compile_blocks else []
    if job.graphed():
        notes.append("each measured step is a CUDA graph; several devices run it without, so small batches take longer")
    if read_finished(DistillSummary, folder) is not None:
        return [*notes, f"{folder} holds this run, finished: the command gives it back at once"]
    if (folder / "checkpoint" / "latest").exists():
        notes.append(f"{folder} holds a part of this run: it goes on from its last checkpoint")
    return notes


def _checked(job: Job, phases: Phases, validator: Validator) -> list[str]:
    """What was opened: weights, images, labels and head."""
    teacher, train, val = job.teacher, job.train_data, job.val_data
    check_weights(teacher.model.state_dict(), teacher.name)
    shape = f"{teacher.num_layers} blocks, width {teacher.dim}, {teacher.groups.num_tokens} tokens"
    labels = f"labels of {len(validator.classes)} classes" if validator.labelled else "no labels, so no accuracy"
    head = "a ridge probe" if validator.labelled else "none"
    head = "given" if job.head_file else "the model's own" if teacher.num_classes else head
    return [
        f"weights fit and are finite: {shape} at {teacher.preprocess.size} px, k = {phases.k}",
        f"{len(train):,} images to train on, {len(val):,} held out, {labels}; head: {head}",
    ]
