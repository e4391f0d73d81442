"""Where a surrogate's blocks start from: another surrogate, or the phases trained as independent jobs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from raptor.open import open_vit, saved_folder
from raptor.run import RunError, load_checkpoint, read_config, read_json, read_summary
from raptor.surrogate.surrogate import shared_blocks, surrogate_spec
from raptor.vit.view import ViT


def start_from(student: ViT, start: str, teacher: ViT) -> None:
    """Take the blocks of the surrogate that `start` names."""
    folder = saved_folder(start)
    of_own_module = folder is not None and read_json(folder / "config.json").get("base") is None
    # A copy of that module, so that the teacher stays as it is whatever the folder holds.
    other = open_vit(start, teacher=copy.deepcopy(teacher.model) if of_own_module else None)
    if other.phases is None:
        raise ValueError(f"{start} is not a surrogate: --start takes the folder of one")
    theirs, ours = surrogate_spec(other), surrogate_spec(student)
    for name in ("phases", "block", "conditioning"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            raise ValueError(f"{start} has {name} {there}, this run {here}: give the same --{name}")
    shared_blocks(student).load_state_dict(shared_blocks(other).state_dict())


def take_phases(student: ViT, folder: Path, config: dict[str, Any]) -> None:
    """Take each phase's block from its finished stage-1 job under `folder`."""
    for j, block in enumerate(shared_blocks(student)):
        job = folder / f"phase-{j + 1}"
        saved = load_checkpoint(job)
        if saved is None or read_summary(job) is None:
            state = "is not finished" if job.exists() else "is missing"
            raise RunError(f"stage 2 needs every phase or a --start: {job} {state}; run --phase {j + 1} first")
        _same_model(job, read_config(job), config)
        prefix = f"block.{j}."
        block.load_state_dict({n.removeprefix(prefix): v for n, v in saved[0].items() if n.startswith(prefix)})


def _same_model(job: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    here, there = ({**config, **config["recipe"]} for config in (ours, theirs))
    for name in ("model", "weights", "size", "phases", "block", "conditioning"):
        if here[name] != there[name]:
            raise RunError(f"{job} was trained with {name} {there[name]}, this run has {here[name]}: give the same")
