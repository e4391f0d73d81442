"""Two-stage distillation: train k tied blocks to reproduce every state of a teacher.

Stage 1 trains each phase separately, from the teacher's state at the start of the phase; stage 2 joins the phases and
trains end to end on the surrogate's own states. The teacher runs in the same step, so no states are stored.

Reads top to bottom: `distill` (the typed surface), setup, fit, validate, result.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, Unpack

import torch
from torch import Tensor, nn

from raptor.data import ChosenData, ImageData, iterate
from raptor.data.by_name import as_spec
from raptor.data.chosen import DEFAULT_DATA, check_apart, describe_images, tell_of_new_classes, tell_of_scenes
from raptor.data.classes import describe_names, for_head, head_names
from raptor.data.stream import Batch, TrainStream, check_stream
from raptor.devices import (
    ONE_PROCESS,
    Ranks,
    device_name,
    is_out_of_memory,
    open_fabric,
    pick_device,
    pick_precision,
    ranks_of,
)
from raptor.fidelity.error_curves import Curves, ErrorCurves
from raptor.fidelity.heads import (
    Head,
    fit_ridge_head,
    head_accuracy,
    head_batches,
    head_outputs,
    prediction_hits,
    resolve_head,
    share_kept,
)
from raptor.fidelity.verdict import Training, Verdict, judge, last_losses, loss_fall, stage_of
from raptor.open import check_teacher, open_vit, repair_saved, save_vit, saved_folder
from raptor.options import Compiling, GivenHead, OpeningModel, Planning, Resuming, Running, part, with_defaults
from raptor.phases import DEFAULT_TOKENS, Phases, check_cuts, check_phases, find_phases
from raptor.progress import clock, track
from raptor.provenance import Provenance, recorded
from raptor.run import (
    Record,
    ResultFile,
    Run,
    RunError,
    StopSignal,
    check_config,
    check_folder,
    check_shared,
    load_checkpoint,
    read_config,
    read_json,
    read_summary,
    slug,
)
from raptor.similarity.cosine import measure_similarity
from raptor.streaming import Result, jsonable
from raptor.surrogate.blocks import adapted_layers
from raptor.surrogate.surrogate import make_surrogate, shared_blocks, surrogate_spec
from raptor.train.graphs import StepGraphs
from raptor.train.loop import (
    Checkpoint,
    Loop,
    ParameterGroup,
    check_cadence,
    check_tracker,
    deaths_explained,
    plan_stages,
    read_finished,
)
from raptor.train.optimizer import is_matrix, num_moments
from raptor.train.plan import NUM_DECODED, Memory, Plan, deliver, free_disk, is_planning, measured_step, num_bytes
from raptor.train.recipe import Recipe, RecipeOptions, resolve_recipe
from raptor.train.schedule import Budget, Rates, teacher_forcing
from raptor.train.step import DistillStep, Parts, groups_at, state_variance
from raptor.vit.trajectory import Trajectories, autocast
from raptor.vit.view import ModelFacts, ViT, replaced_blocks
from raptor.vit.weights import check_weights, fingerprint, load_weights, same_weights

_NUM_VALIDATIONS = 4  # per stage
_VALIDATION_BATCH = 128
_FEW_IMAGES = 16
T = TypeVar("T")


class DistillOptions(RecipeOptions, OpeningModel, GivenHead, Running, Compiling, Resuming, Planning, total=False):
    """The options that decide the recipe, and those that `distill` shares with other commands."""


@recorded
def distill(
    model: str | Path | nn.Module | ViT,
    data: list[str] | str | tuple[ImageData, ...] | None = None,
    *,
    val: list[str] | str | None = None,
    split: str = "val",
    classes: str | None = None,
    k: int | str | None = None,
    phases: Sequence[int] | None = None,
    tokens: str = DEFAULT_TOKENS,
    target: str | None = None,
    recipe: str = "default",
    out: str | None = None,
    stage: Literal["all", "1", "2"] = "all",
    phase: int | None = None,
    start: str | None = None,
    allow_other_teacher: bool = False,
    limit: int | None = None,
    phase_images: int = 1024,
    val_images: int = 1024,
    seed: int = 0,
    graph: bool | None = None,
    checkpointing: bool = False,
    track: Literal["wandb", "tensorboard"] | None = None,
    **given: Unpack[DistillOptions],
) -> Distilled | Plan:
    """Distil a ViT into k weight-tied recurrent blocks; with `dry_run`, only say what that would take.

    Args:
        model: what to distil: timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes, a folder or a module.
        data: images to train on: a folder, zip archives, scenes (the default), cifar10, hf/NAME:split, wds/PATTERN;
            several are joined, with labels where all have the same classes (in Python also a pair of opened data,
            training and held-out; a third are labelled images that heads are fitted on).
        val: other images to judge on, instead of the held-out part of the data. Where only they have labels, heads are
            fitted on their own training part.
        split: which part is judged on: val (held out), or another of the data's own parts, such as test.
        classes: a file with the classes of the teacher's head, one per line; ImageNet's WordNet ids need none.
        k: number of tied blocks (3 unless `phases` are given), or `auto` for the smallest that passes `target`.
        phases: phase lengths, e.g. 7 3 2, instead of max-cut on the teacher's similarity.
        tokens: which similarity is cut: all, cls, registers, patches or pooled (cls + mean patch).
        target: with k=auto, `recovery=.95` (of a ridge probe) or `r2=.6` (at every layer), on held-out images. The
            scores of the k that is chosen are of the same images, so they flatter it a little.
        recipe: default, adamw, quick, long, paper, authors, vitb16, or a YAML file; options such as --lr override its
            entries.
        out: run folder; continued when it already holds this run. A finished one goes on from its weights when --budget
            is larger than before: the steps that are added are a leg with a warm-up of its own.
        stage: `all`, `1` or `2`; a stage that runs without the other keeps its share of the budget.
        phase: train only this phase (1..k) of stage 1, as an independent job; `--stage 2` then picks up all of them.
        start: a surrogate folder or built-in to start from instead of the recipe's initial blocks.
        allow_other_teacher: start from a surrogate of another teacher.
        limit: use only this many training images.
        phase_images: images for the similarity that the phases are cut from.
        val_images: held-out images for the validation curve.
        seed: of initialisation, data order and crops.
        graph: run each step as a CUDA graph; by default on a single GPU.
        checkpointing: recompute activations in the backward pass to save memory.
        track: also log to `wandb` or `tensorboard` (extras).
        head_file: a linear head, for accuracy and agreement of a teacher that has none.
        head_images: training images that ridge probes are fitted on; by default 20 per class, 5,000 at least.
    """
    options = with_defaults(DistillOptions, given)
    settings = resolve_recipe(recipe, part(RecipeOptions, options))
    wanted = _check_options(k, phases, target, stage, phase)
    num_blocks = 3 if k is None else 1 if k == "auto" else int(k)  # auto begins with one
    check_tracker(track)
    check_cadence(options["checkpoint_minutes"])
    device = pick_device(options["device"])
    precision = pick_precision(options["precision"], device)
    fabric = open_fabric(device, precision)
    opening = part(OpeningModel, options)
    teacher = _open_teacher(model, opening, seed)
    if isinstance(model, str) and model.startswith("hub/") and opening["weights"] is None:
        _check_repeatable(model, teacher, opening)
    if teacher.dtype != torch.float32:
        raise ValueError(f"{teacher.name} is opened in {teacher.dtype}: training needs fp32, so leave out --dtype")
    if settings.adapters:
        adapted_layers(teacher, 1, settings.adapters)
    found = None if phases is None else check_phases(teacher, phases)
    check_cuts(teacher, [] if phases is not None or k in (None, "auto") else [num_blocks], tokens=tokens)
    num_classes, own_names = head_outputs(teacher, options["head_file"])
    if out is not None:
        check_folder(out)
    names = None if classes is None or not num_classes else head_names(classes, num_classes)
    if names is not None and options["head_file"] is None:
        teacher = replace(teacher, classes=names)
    if isinstance(data, tuple):
        train_data, val_data, *labelled = (for_head(one, num_classes, names, own_names) for one in data)
        head_data = labelled[0] if labelled else train_data
        if split not in ("train", "all"):
            check_apart(train_data, val_data)
        spec: str | list[str] = as_spec(train_data.specs)
        val = None if val_data.specs == train_data.specs else as_spec(val_data.specs)
    else:
        if data is None:
            tell_of_scenes(model)
        spec, val = as_spec(DEFAULT_DATA if data is None else data), as_spec(val)
        chosen = ChosenData(spec, val, split, names, options["skip_bad"], own_names, num_classes)
        side = teacher.preprocess.size
        train_data = chosen.training(limit, side)
        val_data = chosen.judged(val_images, side, like=train_data)
        head_data = chosen.labelled(train_data, val_data, side)
        tell_of_new_classes(head_data, val_data)
    check_stream(len(train_data), settings.batch_size, settings.augment, settings.crop_scale, sizes=settings.sizes)
    for side in settings.sizes or ():
        groups_at(teacher, side)
    teacher.to(fabric.device)
    job = Job(
        teacher,
        settings,
        train_data,
        val_data,
        fabric,
        head_data,
        precision=precision,
        stage="1" if phase is not None else stage,
        phase=phase,
        start=start,
        allow_other_teacher=allow_other_teacher,
        split=split,
        head_file=options["head_file"],
        head_images=options["head_images"],
        seed=seed,
        num_workers=options["num_workers"],
        compile_blocks=device == "cuda" if options["compile"] is None else options["compile"],
        graph=graph,
        checkpointing=checkpointing,
        resume=options["resume"],
        track=track,
        checkpoint_minutes=options["checkpoint_minutes"],
    )
    job.stages()
    job.graphed()
    if found is None and wanted is None:
        check_cuts(teacher, [num_blocks], tokens=tokens)
    name = str(model) if isinstance(model, str | Path) else teacher.name
    config = _config(job, name, opening, spec, val, limit, names, tokens)
    root = f"runs/{slug(name)}"
    if options["dry_run"] or is_planning():
        num_blocks = num_blocks if found is None else found.k
        folder = Path(out or f"{root}-k{num_blocks}")
        there = _phases_there(folder) if is_planning() or found is None else None  # a sweep's plan cuts roughly
        planned = there or found or _even_phases(teacher, num_blocks)
        return deliver(_plan(job, planned, folder, config, 0 if found else phase_images))
    if found is not None:
        return _distill_one(job, found, Path(out or f"{root}-k{found.k}"), config)
    matrix = _similarity_matrix(job, phase_images, tokens)
    if wanted is not None:
        return _smallest_k(job, *wanted, matrix, Path(out or f"{root}-auto"), config)
    found = find_phases(matrix, num_blocks)
    return _distill_one(job, found, Path(out or f"{root}-k{found.k}"), config)


def _open_teacher(model: str | Path | nn.Module | ViT, opening: OpeningModel, seed: int) -> ViT:
    """The teacher on the CPU; one that is untrained has the same weights on every rank and when it is opened again."""
    if opening["pretrained"]:
        return open_vit(model, device="cpu", **opening)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return open_vit(model, device="cpu", **opening)


def _check_repeatable(name: str, teacher: ViT, opening: OpeningModel) -> None:
    """Raise for a torch.hub entry whose weights are random each time: no later command could open this teacher."""
    if fingerprint(open_vit(name, **opening).model) != fingerprint(teacher.model):
        raise ValueError(
            f"{name} has other weights each time it is opened: give a weight file with --weights, or an entry with "
            "published weights"
        )


def _config(
    job: Job,
    model: str,
    opening: OpeningModel,
    data: str | list[str],
    val: str | list[str] | None,
    limit: int | None,
    names: Sequence[str] | None,
    tokens: str,
) -> dict[str, Any]:
    """What the run is made with, as its config.yaml keeps it; `_resolved` adds what depends on the phases.

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
        recipe=job.recipe.recorded(),
        precision=job.precision,
    )
    structure = {key: value for key, value in opening.items() if key not in ("dtype", "trust_hub", "pretrained")}
    structure |= {} if opening["pretrained"] else {"pretrained": False}
    structure |= {"val": val, "split": None if job.split == "val" else job.split}
    structure |= {"classes": None if names is None else describe_names(names)}
    structure |= {"tokens": None if tokens == "all" else tokens}
    return config | {key: value for key, value in structure.items() if key not in config and value is not None}


def _check_options(
    k: int | str | None, phases: Sequence[int] | None, target: str | None, stage: str, phase: int | None
) -> tuple[str, float] | None:
    """The target of `k="auto"` (its name and value), None for a fixed k; what does not go together is refused."""
    if stage not in ("all", "1", "2"):
        raise ValueError(f"unknown --stage {stage!r}: choose from all, 1, 2")
    if phase is not None and stage == "2":
        raise ValueError("--phase is a job of stage 1: leave out --stage 2")
    if k != "auto":
        if target is not None:
            raise ValueError("--target goes with --k auto")
        if k is not None and not str(k).isdigit():
            raise ValueError(f"cannot read --k {k!r}: write a number of blocks, or auto")
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


# Setup: what a run works with, and where its blocks start.


class Leg(NamedTuple):
    """Training in one go: a stage, or the steps that a larger budget adds to a finished run.

    Attributes:
        name: in metrics.jsonl and in the summary: `stage1`, `stage2`, `stage2-leg2`.
        stage: whose losses are trained: `stage1` or `stage2`.
        budget, share, before: as in `raptor.train.loop.Stage`.
    """

    name: str
    stage: str
    budget: Budget
    share: float
    before: float

    @property
    def goes_on(self) -> bool:
        """Whether it starts from the weights of a finished run."""
        return self.name != self.stage


@dataclass(frozen=True)
class Job:
    """The models, the data, the device and the options of one distillation; options as in `distill`, resolved.

    head_data: images that heads are fitted on; by default the training images.
    budgets: that of each leg of the run in its order; the last is the recipe's.
    """

    teacher: ViT
    recipe: Recipe
    train_data: ImageData
    val_data: ImageData
    fabric: Any
    head_data: ImageData | None = None
    precision: str = "fp32"
    stage: str = "all"
    phase: int | None = None
    start: str | None = None
    allow_other_teacher: bool = False
    split: str = "val"
    head_file: str | None = None
    head_images: int | None = None
    seed: int = 0
    num_workers: int | None = None
    compile_blocks: bool = False
    graph: bool | None = None
    checkpointing: bool = False
    resume: bool = True
    track: str | None = None
    checkpoint_minutes: float = 10.0
    budgets: tuple[str, ...] = ()

    @property
    def ranks(self) -> Ranks:
        return ranks_of(self.fabric)

    def stages(self) -> dict[str, float]:
        """The stages to run, each with its share of the budget. A stage that runs without the other keeps its share."""
        shares = {"stage1": self.recipe.stage1_share, "stage2": 1 - self.recipe.stage1_share}
        asked = shares if self.stage == "all" else {f"stage{self.stage}": shares[f"stage{self.stage}"]}
        plan = {name: share for name, share in asked.items() if share > 0}
        if not plan:
            raise ValueError(
                f"--stage1_share {self.recipe.stage1_share:g} leaves nothing for stage {self.stage}: change one of them"
            )
        budget = Budget.parse(self.recipe.budget)
        if len(plan) > 1 and budget.unit == "steps" and round(budget.amount) < len(plan):
            raise ValueError("one step cannot be shared by two stages: give --budget 2steps or more")
        return plan

    def legs(self) -> list[Leg]:
        """The stages, then what each later budget adds to the last of them."""
        plan = self.stages()
        budgets = [Budget.parse(text) for text in self.budgets or (self.recipe.budget,)]
        shares_before = {"stage1": 0.0, "stage2": self.recipe.stage1_share}
        legs = [Leg(name, name, budgets[0], share, shares_before[name]) for name, share in plan.items()]
        for number, (old, new) in enumerate(pairwise(budgets), start=2):
            added = Budget(new.amount - old.amount, new.unit)
            legs.append(Leg(f"{legs[-1].stage}-leg{number}", legs[-1].stage, added, sum(plan.values()), 0.0))
        return legs

    def open_legs(self) -> list[Leg]:
        """The legs that are not finished when the run starts."""
        return [leg for leg in self.legs() if leg.goes_on][-1:] or self.legs()

    def steps_per_epoch(self) -> float:
        return (self.recipe.epoch_images or len(self.train_data)) / self.recipe.batch_size

    def graphed(self) -> bool:
        """Whether forward and backward pass run as a CUDA graph: by default on a single GPU."""
        single = self.fabric.device.type == "cuda" and self.fabric.world_size == 1
        if self.graph and not single:
            raise ValueError("a CUDA graph needs a single GPU: leave out --graph")
        return single if self.graph is None else self.graph

    def runs_on(self) -> str:
        """How many processes train, and on a GPU whether with CUDA graphs: the end of a sentence."""
        num = self.ranks.size
        text = "" if num == 1 else f" on {num} processes"
        if self.fabric.device.type == "cuda":
            text += ", each step a CUDA graph" if self.graphed() else ", steps without CUDA graphs"
        return text

    def stream(self, num_decoded: int | None = None) -> TrainStream:
        """This rank's training batches; `num_decoded` as in `TrainStream`."""
        return TrainStream(
            self.train_data,
            self.teacher.preprocess,
            self.recipe.batch_size,
            seed=self.seed,
            augment=self.recipe.augment,
            crop_scale=self.recipe.crop_scale,
            mixup=self.recipe.mixup,
            sizes=self.recipe.sizes,
            device=self.fabric.device,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            num_workers=self.num_workers,
            num_decoded=num_decoded,
            ranks=self.ranks,
        )

    def student(self, phases: Phases) -> ViT:
        """A surrogate as training starts from it, unless other weights are loaded into it."""
        return make_surrogate(
            self.teacher,
            phases,
            block=self.recipe.block,
            conditioning=self.recipe.conditioning,
            copy=self.recipe.copy,
            adapters=self.recipe.adapters,
            table_start=self.recipe.table_start,
            seed=self.seed,
        )

    def step(self, student: ViT, phases: Phases, variance_lt: Tensor) -> DistillStep:
        """One training step; `variance_lt` (L, T) is what squared errors are divided by."""
        return DistillStep(
            self.teacher,
            student,
            phases,
            variance_lt,
            self.recipe.stage1_weights,
            self.recipe.last_phase_weights,
            self.recipe.stage2_weights,
            self.recipe.cosine,
            self.compile_blocks,
            self.checkpointing,
            self.phase,
            half_teacher=self.precision == "bf16" and self.fabric.device.type == "cuda",
            sizes=self.recipe.sizes or (),
        )

    def validator(self, folder: Path) -> Validator:
        return Validator(
            self.teacher,
            self.train_data if self.head_data is None else self.head_data,
            self.val_data,
            self.precision,
            self.num_workers,
            self.head_file,
            folder,
            self.head_images,
            self.ranks,
        )


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
    job, run_folder, config = _resolved(job, phases, folder, config)
    budgets = job.budgets
    check_shared(run_folder, job.ranks)
    run = Run(run_folder, config, resume=job.resume, writer=job.fabric.is_global_zero)
    with run, deaths_explained(run, job.fabric):
        student = job.student(phases)
        done, saved = read_finished(DistillSummary, run_folder), run.load_checkpoint()
        if done is not None and _num_legs(done.num_steps) < len(budgets):
            done = None
        if saved is not None:
            _load_blocks(student, saved[0])
        elif done is not None:
            _start_from(student, str(run_folder), job.teacher, job.allow_other_teacher)
        elif job.start is not None:
            _start_from(student, job.start, job.teacher, job.allow_other_teacher)
        elif job.stage == "2":
            _take_phases(student, folder, config)
        if done is not None:
            if saved is not None and job.phase is None and job.fabric.is_global_zero:
                with run.writing():
                    repair_saved(student, run_folder / "surrogate")
            return Distilled(student, job.teacher, run_folder, done)
        summary = job.fabric.broadcast(_fit(job, run, student, phases, saved))
        if job.fabric.is_global_zero:
            with run.writing():
                if len(budgets) > 1:
                    _set_aside(run_folder, f"leg{len(budgets) - 1}")
                if job.phase is None:
                    _keep_teacher(job.teacher, student, run_folder)
                    save_vit(student, run_folder / "surrogate")
                summary.write(run_folder)
    return Distilled(student, job.teacher, run_folder, summary)


def _resolved(job: Job, phases: Phases, folder: Path, config: dict[str, Any]) -> tuple[Job, Path, dict[str, Any]]:
    """The job with the budgets of its run's legs, the run folder, and the whole config."""
    if job.phase is not None and not 1 <= job.phase <= phases.k:
        raise ValueError(f"--phase {job.phase} is not one of 1..{phases.k}")
    config = {**config, "phases": list(phases), "stage": job.stage, "phase": job.phase}
    run_folder = folder if job.phase is None else folder / f"phase-{job.phase}"
    _refuse_own_folder(job.teacher, folder)
    begun = read_config(run_folder) if (run_folder / "config.yaml").exists() else {}
    config["fingerprint"] = _as_written(begun, job.teacher, config["fingerprint"])
    _check_optimizer(run_folder, begun, job.recipe.optimizer)
    budgets = _budgets(run_folder, begun, job.recipe.budget)
    config["recipe"] = {**config["recipe"], "budget": budgets[-1]}
    config |= {"legs": budgets} if len(budgets) > 1 else {}
    return dataclasses.replace(job, budgets=tuple(budgets)), run_folder, config


def _refuse_own_folder(teacher: ViT, out: Path) -> None:
    """A surrogate saved into its teacher's folder would be opened in the teacher's place."""
    folder = saved_folder(str(teacher.opened.get("model") or ""))
    if folder is not None and out.resolve() in (folder.resolve(), folder.resolve().parent):
        raise RunError(f"{out} holds the teacher itself: choose another --out")


def _as_written(begun: Mapping[str, Any], teacher: ViT, fingerprint: str) -> str:
    """The fingerprint in the config of a run that an earlier version began, where it is this teacher's."""
    known = begun.get("fingerprint")
    return str(known) if known and same_weights(teacher.model, str(known)) else fingerprint


def _check_optimizer(folder: Path, begun: Mapping[str, Any], wanted: str) -> None:
    """Raise for a run that another optimizer began; one without the entry, of an earlier version, AdamW did."""
    recipe = _recipe_of(begun)
    began = recipe.get("optimizer", Recipe.optimizer)
    if recipe and began != wanted:
        raise RunError(
            f"{folder} holds a run of {began}, not of {wanted}: add --optimizer {began} to go on with it, or choose "
            "another --out"
        )


def _recipe_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe that a run's config holds; empty where it is no distillation's."""
    recipe = config.get("recipe")
    return recipe if isinstance(recipe, dict) else {}


def _budgets(folder: Path, begun: Mapping[str, Any], wanted: str) -> list[str]:
    """The budgets of the run's legs: those it has, and `wanted` where that is more than a finished run had.

    begun: the config that `folder` holds; empty where it holds none.
    """
    budgets = list(begun.get("legs") or [_recipe_of(begun).get("budget", wanted)])
    old, new = Budget.parse(budgets[-1]), Budget.parse(wanted)
    if new == old:
        return budgets
    summary = read_summary(folder)
    if summary is None and len(budgets) == 1:
        return [wanted]
    if summary is None or _num_legs(summary.get("num_steps") or {}) < len(budgets):
        raise RunError(f"{folder} is on its way to a budget of {budgets[-1]}: give that one, or choose another --out")
    if old.unit != new.unit or new.amount < old.amount:
        raise RunError(
            f"{folder} is finished with a budget of {budgets[-1]}: to go on from its weights give a larger one in the "
            f"same unit, not {wanted}; else choose another --out"
        )
    if not (folder / "checkpoint" / "latest").exists():
        raise RunError(
            f"{folder} has no checkpoint to go on from: add --start {folder} --stage 2 and another --out, or choose "
            f"--budget {budgets[-1]}"
        )
    return [*budgets, wanted]


def _num_legs(num_steps: Mapping[str, int]) -> int:
    """How many budgets a run was finished with; `num_steps` is that of its summary."""
    return 1 + sum(stage_of(name) != name for name in num_steps)


def _set_aside(folder: Path, name: str) -> None:
    """Move what was measured of the weights before this leg into a folder of its own: it is not about the new ones."""
    found = [path for pattern in ("*.json", "*.html", "figures", "probe-*") for path in sorted(folder.glob(pattern))]
    for path in dict.fromkeys(found):
        (folder / name).mkdir(exist_ok=True)
        shutil.move(path, folder / name / path.name)
    if found:
        print(f"results of the weights before this leg are now in {folder / name}", file=sys.stderr)


def _keep_teacher(teacher: ViT, student: ViT, folder: Path) -> None:
    """Save a teacher that cannot be opened again by its name: built from a name, then changed or never trained."""
    opened, made_from = teacher.opened, student.source["teacher"]
    untrained = opened.get("pretrained") is False and not opened.get("weights")
    if teacher.source and (untrained or opened.get("fingerprint") != made_from["fingerprint"]):
        save_vit(teacher, folder / "teacher")
        made_from = {"model": str(folder / "teacher"), "fingerprint": made_from["fingerprint"]}
        student.source["teacher"] = made_from


def _load_blocks(student: ViT, tensors: Mapping[str, Tensor]) -> None:
    """Put the blocks of a checkpoint into a surrogate."""
    load_weights(shared_blocks(student), _under(tensors, "block."), "the run's checkpoint")


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _start_from(student: ViT, start: str, teacher: ViT, allow_other_teacher: bool) -> None:
    """Take the blocks of the surrogate that `start` names."""
    folder = saved_folder(start)
    of_own_module = folder is not None and read_json(folder / "config.json").get("base") is None
    # A copy of the module, so that the teacher stays as it is whatever the folder holds.
    other = open_vit(start, teacher=copy.deepcopy(teacher.model) if of_own_module else None)
    if other.phases is None:
        raise ValueError(f"{start} is not a surrogate: --start takes the folder of one")
    if not allow_other_teacher:
        check_teacher(other, teacher, start)
    theirs, ours = surrogate_spec(other), surrogate_spec(student)
    for name in ("phases", "block", "conditioning", "adapters"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            raise ValueError(f"{start} has {name} {there}, this run {here}: give the same --{name}")
    shared_blocks(student).load_state_dict(shared_blocks(other).state_dict())


def _take_phases(student: ViT, folder: Path, config: dict[str, Any]) -> None:
    """Take the block of each phase from its finished stage-1 job under `folder`."""
    for j, block in enumerate(shared_blocks(student)):
        job = folder / f"phase-{j + 1}"
        saved = load_checkpoint(job)
        if saved is None or read_summary(job) is None:
            state = "is not finished" if job.exists() else "is missing"
            raise RunError(f"stage 2 needs every phase or a --start: {job} {state}; run --phase {j + 1} first")
        _check_same_model(job, read_config(job), config)
        prefix = f"block.{j}."
        load_weights(block, _under(saved[0], prefix), f"the checkpoint of {job}")


def _check_same_model(job: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    here, there = ({**config, **config["recipe"]} for config in (ours, theirs))
    for name in ("model", "weights", "size", "phases", "block", "conditioning", "adapters"):
        if here.get(name) != there.get(name):  # entries of a recipe that came later are left out at their defaults
            raise RunError(
                f"{job} was trained with {name} {there.get(name)}, this run has {here.get(name)}: give the same"
            )


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
        variance_lt = _saved_variance(job, run, saved[0])
    else:
        variance_lt = state_variance(job.teacher, stream, job.recipe.normalise, job.precision, job.ranks)
    module = job.step(student, phases, variance_lt)
    measured = Measured(validator, student, job.teacher, phases, job.phase)
    loop = Loop(run, job.fabric, saved, [job.train_data, job.val_data], job.track, job.checkpoint_minutes)
    stages = [DistillStage(job, leg, module, stream, measured) for leg in job.legs()]
    loop.check(stages)
    if job.fabric.is_global_zero:
        print(_estimate(job, validator), file=sys.stderr)
    loop.fit(stages)
    bad_images = loop.bad_images()
    try:
        validation = measured.final()
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
    ).judged(run.folder, job)


def _estimate(job: Job, validator: Validator) -> str:
    """How long the run takes, from the time of one forward pass: a step is about four of them."""
    seconds, legs = _image_seconds(job, validator) / job.ranks.size, job.open_legs()
    budget, share = legs[0].budget, sum(leg.share for leg in legs)
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
    num = (2 * _NUM_VALIDATIONS * len(job.open_legs()) + 2) * validator.val.num_images  # and once more at the end
    return num + (2 * (validator.train.num_images + validator.val.num_images) if validator.labelled else 0)


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
    job, run_folder, config = _resolved(job, phases, folder, config)
    check_folder(run_folder)
    check_config(run_folder, config, job.resume)
    memory, student, stream = Memory(job.fabric.device), job.student(phases), job.stream(NUM_DECODED)
    validator = job.validator(run_folder)
    ones_lt = torch.ones(job.teacher.num_layers, job.teacher.groups.num_tokens, device=job.fabric.device)
    module = job.step(student, phases, ones_lt)
    measured = Measured(validator, student, job.teacher, phases, job.phase)
    stages = [DistillStage(job, leg, module, stream, measured) for leg in job.open_legs()]
    trained = num_bytes([parameter for _, parameter in module.trained_parameters()])
    moments = sum(num_moments(group.optimizer) * num_bytes([p for _, p in group.named]) for group in stages[0].groups)
    fixed = memory.peak() + trained + moments  # and a gradient of each weight
    parts = measured_step(lambda: plan_stages(stages, job.fabric), job.recipe.batch_size)
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
        folder=str(run_folder),
        device=device_name(job.fabric.device),
        checked=_checked(job, phases, validator),
        parts=parts,
        other_seconds=_image_seconds(job, validator) * num_measured / job.ranks.size,
        memory_bytes=max(job.ranks.gather(memory.peak())),
        fixed_bytes=fixed,
        written_bytes=written,
        free_bytes=free_disk(run_folder, sum(written.values())),
        num_devices=job.ranks.size,
        exchanged_bytes=trained,
        notes=_plan_notes(job, run_folder),
    )


def _plan_notes(job: Job, run_folder: Path) -> list[str]:
    """What of the run is there already, and what the measured steps do not show."""
    notes = ["the first steps also compile the blocks, about a minute"] if job.compile_blocks else []
    if job.graphed():
        notes.append("each measured step is a CUDA graph; several devices run it without, so small batches take longer")
    done = read_finished(DistillSummary, run_folder)
    if done is not None and _num_legs(done.num_steps) == len(job.budgets):
        return [*notes, f"{run_folder} holds this run, finished: the command gives it back at once"]
    there = (run_folder / "checkpoint" / "latest").exists()
    return [*notes, *([f"{run_folder} holds a part of this run: it goes on from its last checkpoint"] if there else [])]


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


def _saved_variance(job: Job, run: Run, tensors: Mapping[str, Tensor]) -> Tensor:
    found = tensors.get("variance")
    shape = (job.teacher.num_layers, job.teacher.groups.num_tokens)
    if found is None or tuple(found.shape) != shape or not found.isfinite().all():
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
    """`stage1` or `stage2` of a distillation, or a later leg of it; see `raptor.train.loop.Stage`."""

    betas = (0.9, 0.999)

    def __init__(self, job: Job, leg: Leg, module: DistillStep, stream: TrainStream, measured: Measured):
        recipe = job.recipe
        self.leg, self.name, self.title = leg, leg.name, f"distil {leg.name}"
        self.budget, self.share, self.before = leg.budget, leg.share, leg.before
        self.module, self.stream, self.measured, self.recipe = module, stream, measured, recipe
        self.graphs = StepGraphs(module, leg.stage, job.precision, job.graphed())
        self.groups = _parameter_groups(module.trained_parameters(), recipe)
        self.clip, self.rates = recipe.clip, Rates(recipe.lr, recipe.min_lr, recipe.warmup)
        self.batch_size = recipe.batch_size
        self.steps_per_epoch = job.steps_per_epoch()
        self.num_validations = _NUM_VALIDATIONS
        self.refines = job.start is not None or leg.goes_on

    def losses(self, wrapped: Any, step: int, num_steps: int, propagate: Callable[[Tensor], None]) -> Tensor:
        """The loss of every trained layer, on the device."""
        images, lam = self.stream.batch(step, stage=self.name), self._lam(step, num_steps)
        layer_losses = self.graphs.run(images, lam)
        if layer_losses is None:
            loss, layer_losses = wrapped(images, self.leg.stage, lam)
            propagate(loss)
        return layer_losses

    def kind(self, step: int, num_steps: int) -> tuple[Parts, int]:
        return Parts.of(self._lam(step, num_steps)), self.stream.size(step, self.name)

    def _lam(self, step: int, num_steps: int) -> float:
        """The share of teacher forcing at a step."""
        if self.leg.stage != "stage1":
            return 0.0
        step = num_steps if self.leg.goes_on else step  # a leg keeps what the stage ended with
        return teacher_forcing(step, num_steps, self.recipe.lam, self.recipe.lam_until)

    def clip_groups(self) -> list[list[nn.Parameter]]:
        return self.module.clip_groups(self.leg.stage)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {f"block.{n}": v for n, v in self.module.shared_blocks.state_dict().items()}
        return tensors | {"variance": self.module.variance_lt}

    def metrics(self, loss_nl: Tensor) -> dict[str, Any]:
        return {
            "loss": float(loss_nl.mean()),
            "layer_loss": [float(f"{v:.7g}") for v in loss_nl.mean(0).tolist()],
        }

    def where(self, column: int | None = None) -> str:
        return f" of {self.name}" + ("" if column is None else f", layer {self.measured.layers[column]}")

    def validate(self) -> tuple[dict[str, Any], str]:
        scores = self.measured.validate()
        note = f"R2 {_shown(scores.r2_last)} (lowest {_shown(scores.r2_lowest)})"
        if scores.agreement is not None:
            note += f", agreement {scores.agreement:.1%}"
        return scores.to_dict(), note


# Validate: how close the surrogate is to its teacher on held-out images.


@dataclass
class Scores(Record):
    """Scores of a surrogate on held-out images; None where there is no head or there are no labels.

    Attributes:
        r2, cosine: per layer, over all tokens.
        r2_last, r2_lowest: R2 of the last layer and of the worst one.
        curves: token group -> metric -> value per layer.
        agreement: share of images on which both predict the same class.
        teacher_accuracy, accuracy, recovery_head: of the head described in `head`, and surrogate / teacher.
        teacher_probe, probe, recovery: the same with a ridge probe that is fitted to each side's features.
    """

    r2: list[float | None]
    r2_last: float
    r2_lowest: float
    cosine: list[float | None]
    curves: dict[str, dict[str, list[float | None]]]
    num_images: int
    agreement: float | None = None
    teacher_accuracy: float | None = None
    accuracy: float | None = None
    recovery_head: float | None = None
    head: str | None = None
    teacher_probe: float | None = None
    probe: float | None = None
    recovery: float | None = None

    @classmethod
    def from_dict(cls, saved: Any, where: str = "") -> Self:
        if isinstance(saved, dict):  # JSON has null for NaN
            saved = saved | {name: math.nan for name in ("r2_last", "r2_lowest") if saved.get(name, 0) is None}
        return super().from_dict(saved, where)


class Validator:
    """Measures surrogates of one teacher on held-out images.

    Args:
        head_data: images that ridge heads are fitted on, where they have labels.
        head_file: a linear head, for a teacher that has none.
        folder: where a ridge head fitted for the run is kept.
        head_images: training images a ridge head is fitted on; see `head_batches`.
        ranks: the processes that share the images. All of them call `validate` and `final`.
    """

    def __init__(
        self,
        teacher: ViT,
        head_data: ImageData,
        val_data: ImageData,
        precision: str = "fp32",
        num_workers: int | None = None,
        head_file: str | None = None,
        folder: Path | None = None,
        head_images: int | None = None,
        ranks: Ranks = ONE_PROCESS,
    ):
        self.teacher, self.precision, self.ranks = teacher, precision, ranks
        size = min(_VALIDATION_BATCH, len(val_data))
        self.val = iterate(
            val_data, teacher.preprocess, size, device=teacher.device, num_workers=num_workers, ranks=ranks
        )
        self.head_images = head_images
        self.train = head_batches(
            teacher, head_data, _VALIDATION_BATCH, head_images=head_images, num_workers=num_workers, ranks=ranks
        )
        self.has_truth = val_data.labels is not None
        self.labelled = self.has_truth and len(head_data.present()) > 1  # of one class every probe is right
        self.classes = val_data.classes or []
        self.head_file, self.folder = head_file, folder
        self._head: tuple[Head | None, str] | None = None
        self._teacher_ridge: float | None = None

    @property
    def head(self) -> Head | None:
        """The head for accuracy and agreement, resolved once."""
        if self._head is None:
            cache = None if self.folder is None else self.folder / "head.safetensors"
            self._head = resolve_head(
                self.teacher,
                self.train,
                file=self.head_file,
                cache=cache,
                head_images=self.head_images,
                precision=self.precision,
            )
        return self._head[0]

    @torch.no_grad()
    def validate(self, student: ViT) -> Scores:
        """R2 per layer, cosine, agreement with the teacher's prediction and, with labels, accuracy of both."""
        if self._head is None:  # a head is fitted on batches that are known to fit
            self._in_memory(lambda: self._measure(student, islice(self.val, 1), None, False))
        head = self.head
        with_labels = self.has_truth and head is not None and head.is_of(self.classes)
        curves, hits = self._in_memory(
            lambda: self._measure(student, track(self.val, "validation", quiet=True), head, with_labels)
        )
        curves.reduce(self.ranks)
        counts = self.ranks.sum(hits).tolist() if head is not None else []
        scores = self.ranks.first(lambda: _curve_scores(curves.result()))
        if head is not None:
            scores.agreement, *both = (count / scores.num_images for count in counts)
            if with_labels:
                scores.teacher_accuracy, scores.accuracy = both
                scores.recovery_head = share_kept(scores.accuracy, scores.teacher_accuracy)
        return scores

    def _measure(
        self, student: ViT, batches: Iterable[Batch], head: Head | None, with_labels: bool
    ) -> tuple[ErrorCurves, Tensor]:
        """Curves, and the counts of agreement and, with labels, accuracy of both, over this rank's batches."""
        curves = ErrorCurves(self.teacher.num_layers, self.teacher.groups)
        hits = torch.zeros((), dtype=torch.int64)
        for batch in batches:
            with autocast(self.precision, self.teacher.device):
                states, output = self.teacher.record(batch.images)
                own_states, own_output = student.record(batch.images)
                if head is not None:
                    chosen = head.logits(self.teacher, states[-1], output).argmax(-1)
                    own = head.logits(student, own_states[-1], own_output).argmax(-1)
                    hits = hits + prediction_hits(chosen, own, batch.labels if with_labels else None).sum(0)
            curves.update(states, own_states, batch.places)
        return curves, hits

    def _in_memory(self, measure: Callable[[], T]) -> T:
        """What `measure` gives; while any rank has no memory for it, all halve their batches and try again."""
        while True:
            found: list[T] = []
            try:
                found.append(measure())
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            if all(self.ranks.gather(bool(found))):
                return found[0]
            found.clear()
            self._halve_batches()

    def _halve_batches(self) -> None:
        size = self.val.batch_size
        if self.teacher.device.type == "cuda":
            torch.cuda.empty_cache()
        if size == 1:
            raise torch.OutOfMemoryError("no memory for a batch of 1")
        self.val.batch_size = self.train.batch_size = size // 2
        if self.ranks.is_first:
            print(f"validation: no memory for batches of {size}; {size // 2} from here on", file=sys.stderr, flush=True)

    @torch.no_grad()
    def final(self, student: ViT) -> Scores:
        """`validate`, and with labels the recovery under a ridge probe refitted on each side's own features."""
        scores = self.validate(student)
        scores.head = self._head[1] if self._head else None
        if self.labelled:
            if self._teacher_ridge is None:
                is_ridge = self.head is not None and self.head.source == "ridge"  # the same probe, already fitted
                self._teacher_ridge = scores.teacher_accuracy if is_ridge else None
            if self._teacher_ridge is None:
                self._teacher_ridge = self._ridge_accuracy(self.teacher)
            scores.teacher_probe = self._teacher_ridge
            scores.probe = self._ridge_accuracy(student)
            scores.recovery = share_kept(scores.probe, self._teacher_ridge)
        return scores

    def _ridge_accuracy(self, vit: ViT) -> float:
        """Held-out accuracy of a ridge probe on the features of `vit`."""
        fitted = fit_ridge_head(vit, self.train, len(self.classes), self.precision)
        assert fitted is not None
        return head_accuracy(vit, fitted[0], self.val, self.precision)


def _curve_scores(result: Curves) -> Scores:
    r2 = result.r2["all"]
    return Scores(
        r2=jsonable(r2),
        r2_last=float(r2[-1]),
        r2_lowest=float(r2.min()),
        cosine=jsonable(result.cosine["all"]),
        curves=result.to_dict(),
        num_images=result.num_images,
    )


@dataclass(frozen=True)
class Measured:
    """What a run measures: its surrogate or, when only one phase is trained, that phase among the teacher's blocks."""

    validator: Validator
    student: ViT
    teacher: ViT
    phases: Phases
    phase: int | None = None

    @property
    def layers(self) -> range:
        """The layers that are trained: all, or those of the one phase."""
        first, last = (1, self.phases.num_layers) if self.phase is None else self.phases.spans[self.phase - 1]
        return range(first, last + 1)

    def validate(self) -> Scores:
        with self._other_layers_of_teacher():
            return self.validator.validate(self.student)

    def final(self) -> Scores:
        with self._other_layers_of_teacher():
            return self.validator.final(self.student)

    def _other_layers_of_teacher(self) -> AbstractContextManager[None]:
        others = set(range(1, self.phases.num_layers + 1)) - set(self.layers)
        return replaced_blocks(self.student, {layer: self.teacher.blocks[layer - 1] for layer in others})


# Result.


@dataclass
class DistillSummary(ResultFile):
    """`summary.json` of a distillation.

    Attributes:
        phases: on disk their lengths.
        num_steps: per stage, and per leg that a larger budget added (`stage2-leg2`).
        seconds: of training, without validation and checkpoints.
        data, num_images: what was trained on, and how many images; val, split: what was judged on.
        bad_images: names of the unreadable images that were skipped.
        num_processes, cuda_graph: how many processes trained it, and whether each step was a CUDA graph.
    """

    FILE: ClassVar[str] = "summary.json"

    phases: Phases
    teacher: ModelFacts
    surrogate: ModelFacts
    num_steps: dict[str, int]
    seconds: float
    validation: Scores
    provenance: Provenance = field(default_factory=Provenance)
    device: str = ""
    image_size: int | None = None
    data: str = "the data"
    val: str = "the data"
    split: str = "val"
    num_images: int | None = None
    bad_images: list[str] = field(default_factory=list)
    train_images: int | None = None
    verdict: Verdict | None = None
    num_processes: int = 1
    cuda_graph: bool = False

    def judged(self, folder: Path, job: Job) -> Self:
        """With the verdict on the validation curves."""
        fall = loss_fall(last_losses(folder / "metrics.jsonl", self.num_steps))
        training = Training(self.num_steps, job.recipe.batch_size, self.train_images, job.start, fall)
        curves = Curves.from_dict(self.validation.curves, num_images=self.validation.num_images)
        return dataclasses.replace(self, verdict=judge(curves, {}, training=training))

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "phases": list(self.phases)}

    @classmethod
    def from_dict(cls, saved: Any, where: str = "") -> Self:
        return super().from_dict({**saved, "phases": {"lengths": saved.get("phases")}}, where)


def _shown(r2: float) -> str:
    """An R2 as text; states that do not vary over the held-out images have none."""
    return f"{r2:.3f}" if math.isfinite(r2) else "undefined (the states do not vary)"


@dataclass
class Distilled(Result):
    """What a distillation gives: the surrogate, its teacher, its run folder and the summary written there."""

    surrogate: ViT
    teacher: ViT
    folder: Path
    summary: DistillSummary

    def to_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder), **self.summary.to_dict()}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per layer: its phase, R2 and cosine on held-out images."""
        scores, phases = self.summary.validation, self.summary.phases
        return [
            {"layer": layer, "phase": phases.phase_of(layer) + 1, "r2": r2, "cosine": cosine}
            for layer, (r2, cosine) in enumerate(zip(scores.r2, scores.cosine), start=1)
        ]

    def plot(self) -> Any:
        """R2 and cosine over layers, with the phases."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(4.6, 3.0), layout="constrained")
        rows = self.table_rows()
        for name in ("r2", "cosine"):
            axes.plot([row["layer"] for row in rows], [row[name] for row in rows], marker="o", label=name)
        for boundary in self.summary.phases.boundaries:
            axes.axvline(boundary + 0.5, color="grey", linewidth=0.8, linestyle=":")
        axes.set_xlabel("layer")
        axes.set_title(self.surrogate.name)
        axes.legend()
        return figure

    def text(self) -> str:
        """Phases, scores on held-out images and the folder, in a few lines."""
        scores, verdict = self.summary.validation, self.summary.verdict
        lines = [
            *([] if verdict is None else verdict.lines()),
            f"{self.surrogate.name}: phases {' '.join(map(str, self.summary.phases))}",
            f"R2 of the last layer {_shown(scores.r2_last)}, lowest {_shown(scores.r2_lowest)}",
        ]
        for label, score, of_teacher in (
            ("agreement with the teacher", scores.agreement, None),
            ("accuracy", scores.accuracy, scores.teacher_accuracy),
            ("accuracy of a ridge probe", scores.probe, scores.teacher_probe),
            ("recovery of the ridge probe", scores.recovery, None),
        ):
            if score is not None:
                beside = "" if of_teacher is None else f" (teacher {of_teacher:.1%})"
                lines.append(f"{label} {score:.1%}{beside}")
        bad = self.summary.bad_images
        lines += [f"{len(bad)} unreadable images were skipped: see bad_images in summary.json"] if bad else []
        return "\n".join([*lines, f"run folder {self.folder}"])
