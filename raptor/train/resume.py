"""A run folder that is there already: its budgets, what it must share with this run, and where blocks start from."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from raptor.data.chosen import as_remembered
from raptor.fidelity.heads import HEAD_OF_FILE
from raptor.fidelity.verdict import stage_of
from raptor.open import check_teacher, is_of_own_module, open_vit, save_vit, saved_folder
from raptor.phases import Phases
from raptor.run import RunError, load_checkpoint, read_config, read_summary
from raptor.surrogate.surrogate import shared_blocks, surrogate_spec
from raptor.train.job import Job
from raptor.train.recipe import Recipe
from raptor.train.schedule import Budget
from raptor.vit.view import ViT
from raptor.vit.weights import load_weights, same_weights


def resolved(job: Job, phases: Phases, folder: Path, config: dict[str, Any]) -> tuple[Job, Path, dict[str, Any]]:
    """The job with the budgets of its run's legs, the run folder, and the whole config."""
    if job.phase is not None and not 1 <= job.phase <= phases.k:
        raise ValueError(f"--phase {job.phase} is not one of 1..{phases.k}")
    config = {**config, "phases": list(phases), "stage": job.stage, "phase": job.phase}
    run_folder = folder if job.phase is None else folder / f"phase-{job.phase}"
    _refuse_own_folder(job.teacher, folder)
    begun = read_config(run_folder) if (run_folder / "config.yaml").exists() else {}
    config["fingerprint"] = _as_written(begun, job.teacher, config["fingerprint"])
    config["images"] = as_remembered(begun.get("images"), config["images"])
    if begun and "head_file" not in begun:
        _check_head(run_folder, job.head_file)
        config.pop("head_file", None)
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


def _check_head(folder: Path, file: str | None) -> None:
    """Raise for a finished run of an earlier version whose scores are of another head than the one in `file`.

    Its config does not say which head was given; its summary has the name of the file.
    """
    scores = (read_summary(folder) or {}).get("validation")  # a damaged one is told of where the run is read
    if not isinstance(scores, dict):
        return
    _, given, name = str(scores.get("head") or "").partition(HEAD_OF_FILE)
    if (given and file and Path(name).resolve() == Path(file).resolve()) or (not given and file is None):
        return
    had = f"--head_file {name}" if given else "no --head_file"
    raise RunError(f"{folder} holds a finished run with {had}, whose scores these are: choose another --out")


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
    if summary is None or num_legs(summary.get("num_steps") or {}) < len(budgets):
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


def num_legs(num_steps: Mapping[str, int]) -> int:
    """How many budgets a run was finished with; `num_steps` is that of its summary."""
    return 1 + sum(stage_of(name) != name for name in num_steps)


def set_aside(folder: Path, name: str) -> None:
    """Move what was measured of the weights before this leg into a folder of its own: it is not about the new ones."""
    found = [path for pattern in ("*.json", "*.html", "figures", "probe-*") for path in sorted(folder.glob(pattern))]
    for path in dict.fromkeys(found):
        (folder / name).mkdir(exist_ok=True)
        shutil.move(path, folder / name / path.name)
    if found:
        print(f"results of the weights before this leg are now in {folder / name}", file=sys.stderr)


def keep_teacher(teacher: ViT, student: ViT, folder: Path) -> None:
    """Save a teacher that cannot be opened again by its name: built from a name, then changed or never trained."""
    opened, made_from = teacher.opened, student.source["teacher"]
    untrained = opened.get("pretrained") is False and not opened.get("weights")
    if teacher.source and (untrained or opened.get("fingerprint") != made_from["fingerprint"]):
        save_vit(teacher, folder / "teacher")
        made_from = {"model": str(folder / "teacher"), "fingerprint": made_from["fingerprint"]}
        student.source["teacher"] = made_from


def load_blocks(student: ViT, tensors: Mapping[str, Tensor]) -> None:
    """Put the blocks of a checkpoint into a surrogate."""
    load_weights(shared_blocks(student), _under(tensors, "block."), "the run's checkpoint")


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def start_from(student: ViT, start: str, teacher: ViT, allow_other_teacher: bool) -> None:
    """Take the blocks of the surrogate that `start` names."""
    # A copy of the module, so that the teacher stays as it is whatever the folder holds.
    other = open_vit(start, teacher=copy.deepcopy(teacher.model) if is_of_own_module(start) else None)
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


def take_phases(student: ViT, teacher: ViT, folder: Path, config: dict[str, Any]) -> None:
    """Take the block of each phase from its finished stage-1 job under `folder`, which must be of `teacher`."""
    for j, block in enumerate(shared_blocks(student)):
        job = folder / f"phase-{j + 1}"
        saved = load_checkpoint(job)
        if saved is None or not _is_finished(job):
            state = "is not finished" if job.exists() else "is missing"
            raise RunError(f"stage 2 needs every phase or a --start: {job} {state}; run --phase {j + 1} first")
        theirs = read_config(job)
        _check_same_model(job, theirs, config)
        known = theirs.get("fingerprint")
        if known is not None and not same_weights(teacher.model, str(known)):
            raise RunError(
                f"{job} was trained on another {teacher.name} (its weights differ): run --phase {j + 1} again"
            )
        prefix = f"block.{j}."
        load_weights(block, _under(saved[0], prefix), f"the checkpoint of {job}")


def _is_finished(folder: Path) -> bool:
    """Whether a run has done all of its legs; while one more runs, the summary of those before is still there."""
    summary = read_summary(folder)
    return summary is not None and num_legs(summary.get("num_steps") or {}) >= len(
        read_config(folder).get("legs") or [1]
    )


def _check_same_model(job: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    here, there = ({**config, **config["recipe"]} for config in (ours, theirs))
    for name in ("model", "weights", "size", "phases", "block", "conditioning", "adapters"):
        if here.get(name) != there.get(name):  # entries of a recipe that came later are left out at their defaults
            raise RunError(
                f"{job} was trained with {name} {there.get(name)}, this run has {here.get(name)}: give the same"
            )
