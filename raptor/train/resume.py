"""Where the blocks of a run come from: its checkpoint, or another surrogate. And the teacher that is kept beside it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from raptor.files import RunError
from raptor.run import ResultFile
from raptor.surrogate.surrogate import shared_blocks, surrogate_spec
from raptor.vit.open import open_vit
from raptor.vit.origin import Opened
from raptor.vit.pair import check_teacher
from raptor.vit.saved import needs_teacher, save_vit, saved_folder
from raptor.vit.view import ViT
from raptor.vit.weights import load_weights

File = TypeVar("File", bound=ResultFile)


def read_finished(kind: type[File], folder: Path) -> File | None:
    """The summary of a finished run; None when the run is not finished."""
    if not (folder / kind.FILE).exists():
        return None
    return kind.read(folder)


def check_run_folder(teacher: ViT, out: Path) -> None:
    """Refuse the teacher's own folder: a surrogate saved there would be opened in the teacher's place."""
    folder = saved_folder(teacher.opened.model or "")
    if folder is not None and out.resolve() in (folder.resolve(), folder.resolve().parent):
        raise RunError(f"{out} holds the teacher itself: choose another --out")


def keep_teacher(teacher: ViT, student: ViT, folder: Path) -> None:
    """Save a teacher that cannot be opened again by its name: built from a name, then changed or never trained."""
    made_from = student.origin.teacher
    assert made_from is not None
    untrained = not teacher.opened.pretrained and not teacher.opened.weights
    changed = teacher.opened.fingerprint != made_from.fingerprint
    if teacher.origin.base is not None and (untrained or changed):
        save_vit(teacher, folder / "teacher")
        kept = Opened(model=str(folder / "teacher"), fingerprint=made_from.fingerprint)
        student.origin = replace(student.origin, teacher=kept)


def load_blocks(student: ViT, tensors: Mapping[str, Tensor]) -> None:
    """Put the blocks of a checkpoint into a surrogate."""
    blocks = {name.removeprefix("block."): value for name, value in tensors.items() if name.startswith("block.")}
    load_weights(shared_blocks(student), blocks, "the run's checkpoint")


def start_from(student: ViT, start: str, teacher: ViT) -> None:
    """Take the blocks of the surrogate that `start` names."""
    module = None
    if needs_teacher(start):
        module = copy.deepcopy(teacher.model)  # so that the teacher stays as it is whatever the folder holds
    other = open_vit(start, teacher=module)
    if other.phases is None:
        raise ValueError(f"{start} is not a surrogate: --start takes the folder of one")
    # The blocks were trained on the states of one teacher.
    check_teacher(other, teacher, str(start))
    theirs = surrogate_spec(other)
    ours = surrogate_spec(student)
    for name in ("phases", "block", "conditioning", "adapters", "adapted"):
        here = getattr(ours, name)
        there = getattr(theirs, name)
        if here != there:
            if name == "phases":
                here = student.phases  # as they are written
                there = other.phases
            raise ValueError(f"{start} has {name} {there}, this run {here}: give the same --{name}")
    # The weights only: moments of another run's optimizer would be of its last, small learning rate.
    shared_blocks(student).load_state_dict(shared_blocks(other).state_dict())
