"""A surrogate with the teacher it was made from, which is found again and compared by its weights."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from raptor.files import RunError
from raptor.streaming import Result, folder_of
from raptor.vit.builders import check_recorded
from raptor.vit.calls import copied
from raptor.vit.names import ASSETS
from raptor.vit.open import DTYPES, Source, open_vit, refuse_options
from raptor.vit.origin import Arguments, Opened
from raptor.vit.saved import Saved, describe_surrogate, find_teacher_files, saved_folder
from raptor.vit.stated import check_size
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint

OTHER_TEACHER = " (another teacher)"
"""The end of the name of a teacher from which the surrogate was not made."""


class OtherTeacher(RunError):
    """The surrogate was not made from this model."""


class Pair(NamedTuple):
    """A surrogate and its teacher, or None and a model that is not a surrogate."""

    surrogate: ViT | None
    teacher: ViT


def open_pair(
    source: Source | Result,
    *,
    teacher: Source | None = None,
    allow_other_teacher: bool = False,
    size: int | None = None,
    pretrained: bool = True,
    layer_scale: float | None = None,
    dtype: str = "fp32",
    trust_hub: bool = False,
    device: str | torch.device | None = None,
    **of_teacher: Any,
) -> Pair:
    """A surrogate and its teacher, or None and the model if `source` is not a surrogate.

    The surrogate names its teacher, unless `teacher` is given. `of_teacher` are options of the teacher: `weights`,
    `name`, `blocks`, `norm`, `cls`, `registers` and `head_classes` (as in `open_vit`). A module of your own is opened
    with the options that were given when the surrogate was made, unless others are given now; its weight file is loaded
    into a copy of the module, unless the module has these weights already. `pretrained=False` opens a plain model with
    random weights.

    A teacher with other weights is refused, unless `allow_other_teacher`; its name then says so in every result. The
    result of a distillation stands for its run folder and its teacher.
    """
    if isinstance(source, Result):
        held = getattr(source, "teacher", None)
        if teacher is None and isinstance(held, ViT):
            teacher = held
        source = folder_of(source)
    assert not isinstance(source, Result)
    running: Arguments = dict(device=device, dtype=dtype, trust_hub=trust_hub)
    of_source: Arguments = dict(size=size, pretrained=pretrained, layer_scale=layer_scale, **running)
    of_teacher = {name: value for name, value in of_teacher.items() if value is not None}
    saved = describe_surrogate(source)
    if saved is None:
        if teacher is not None:
            named = source if isinstance(source, str | Path) else "this model"
            raise ValueError(
                f"{named} is not a surrogate and has no teacher: name a run, or leave out --teacher and --module"
            )
        return Pair(None, open_vit(source, **of_source, **of_teacher))
    made_from = saved.teacher or Opened()
    shown = str(source)
    folder = None
    if isinstance(source, ViT):
        shown = saved.name
    else:
        folder = saved_folder(shown)
        assert folder is not None
        made_from = find_teacher_files(folder, made_from)
    if isinstance(teacher, str | Path) and Path(teacher).expanduser().is_file() and made_from.model is not None:
        # A file does not say which model its weights are of and how images are prepared; the surrogate does.
        of_teacher.setdefault("weights", str(teacher))
        teacher = None
    # Both must see the same pixels, so the surrogate's size holds for its teacher.
    teacher_size = size or saved.preprocess.size
    if isinstance(teacher, ViT):
        refused = dict(of_teacher)
        if size != teacher.preprocess.size:
            refused["size"] = size
        if dtype != "fp32" and DTYPES.get(dtype) != teacher.dtype:
            refused["dtype"] = dtype
        refuse_options("a teacher that is already opened", **refused)
        if not isinstance(source, ViT):
            of_source["size"] = teacher.preprocess.size
    elif teacher is not None:
        if isinstance(teacher, nn.Module) and saved.base is None:
            takes_file = not allow_other_teacher and "weights" not in of_teacher
            of_teacher = _module_options(teacher, saved, made_from, shown, takes_file) | of_teacher
        if isinstance(teacher, nn.Module) and "weights" in of_teacher:
            # Loading a weight file would change the module in the user's hands.
            teacher = copied(teacher, type(teacher).__name__)
        teacher = open_vit(teacher, size=teacher_size, **running, **of_teacher)
    elif saved.base is not None or saved.only_blocks:
        # On one device, or their states could not be compared.
        if device is None and isinstance(source, ViT):
            running["device"] = source.device
        teacher = _open_recorded(source, folder, made_from, of_teacher | {"size": teacher_size}, **running)
    # A surrogate of a module of one's own is built from that module, and one of blocks alone from all else.
    surrogate = open_vit(source, teacher=teacher if saved.needs_teacher else None, **of_source)
    if teacher is None:  # only a surrogate that is opened already can do without the module
        teacher = _open_recorded(source, folder, made_from, of_teacher, **running)
    check_teacher(surrogate, teacher, shown, allow_other_teacher)
    if teacher.classes is None and teacher.num_classes == surrogate.num_classes:  # the run was told their names
        teacher = replace(teacher, classes=surrogate.classes)
    return Pair(surrogate, teacher)


def open_studied(
    source: Source | Result, *, teacher: Source | None = None, allow_other_teacher: bool = False, **opening: Any
) -> ViT:
    """The model of a command that looks at a single one: of a run its surrogate.

    A surrogate needs its teacher here only if it was made from a module of the user's own, or if a teacher is given,
    with which it is then compared. `opening` holds other arguments of `open_pair`.
    """
    if teacher is None:
        return open_vit(source, **opening)
    pair = open_pair(source, teacher=teacher, allow_other_teacher=allow_other_teacher, **opening)
    return pair.surrogate or pair.teacher


def _module_options(module: nn.Module, saved: Saved, made_from: Opened, shown: str, takes_file: bool) -> Arguments:
    """The options with which a module of the user's own was opened when the surrogate was made.

    takes_file: whether its weight file is among them, unless the module has these weights already.
    """
    options = dict(**saved.structure.given(), head_classes=saved.num_classes, preprocess=saved.preprocess)
    file = made_from.weights
    if takes_file and file and made_from.fingerprint != fingerprint(module):
        made_with = f"{file}, which {shown} was made with,"
        if _is_gone(file):
            raise RunError(f"{made_with} is not there: give its new place with --weights")
        print(f"{made_with} is loaded into a copy of the module", file=sys.stderr)
        options["weights"] = file
    return options


def _open_recorded(
    source: Source,
    folder: Path | None,
    made_from: Opened,
    given: Arguments,
    device: torch.device | str | None,
    dtype: str,
    trust_hub: bool,
) -> ViT:
    """The teacher that a surrogate names, as it was opened when the surrogate was made except for what is given now."""
    name = made_from.model
    if not name:
        raise ValueError(
            f"{source} does not say what its teacher was opened as: name it with --teacher or --module (in Python also "
            "the module itself)"
        )
    # The name of the teacher is from a file, which may be a stranger's.
    check_recorded(name, made_from.kwargs, f"{source}: its config.json", trust_hub)
    check_size(made_from.size)
    of_teacher = saved_folder(name)
    if folder is not None and of_teacher is not None:
        if folder.parent == ASSETS != of_teacher.parent:  # a folder of the built-in teacher's name is here
            of_teacher = ASSETS / name
            name = str(of_teacher)
        if folder.resolve() == of_teacher.resolve():
            raise RunError(f"{source} names itself as its teacher: name the model it was made from with --teacher")
    for path in (name, given.get("weights", made_from.weights)):
        if path and _is_gone(path):
            raise RunError(f"{path}, which {source} was made from, is not there: give its new place with --teacher")
    options: Arguments = dict(
        weights=made_from.weights,
        size=made_from.size,
        pretrained=made_from.pretrained,
        layer_scale=made_from.layer_scale,
        num_classes=made_from.num_classes,
        preprocess=made_from.preprocess,
        name=made_from.name,
        dtype=made_from.dtype if dtype == "fp32" else dtype,
        **vars(made_from.structure),
    )
    return open_vit(name, device=device, trust_hub=trust_hub, **made_from.kwargs | options | given)


def _is_gone(path: str) -> bool:
    """Whether `path` is a file or folder that does not exist, and not the name of a model."""
    is_name = saved_folder(path) is not None or path.split("/")[0] in ("timm", "hf", "hub")
    return not is_name and not Path(path).expanduser().exists()


def check_teacher(surrogate: ViT, teacher: ViT, shown: str, allow: bool = False) -> None:
    """Raise OtherTeacher unless `teacher` has the weights from which `surrogate` was made, if these are recorded.

    shown: the surrogate in messages. allow: mark the teacher's name instead of raising.
    """
    made_from = surrogate.origin.teacher or Opened()
    # Names and paths are no proof: a file may have been overwritten since. Weights are.
    known = made_from.fingerprint
    if known is None or known == teacher.opened.fingerprint or known == fingerprint(teacher.model):
        return
    if not allow:
        raise OtherTeacher(
            f"{shown} was not made from {teacher.name} as it is now (its weights differ): name its teacher with "
            "--teacher, --module or --weights, or compare them all the same with --allow_other_teacher"
        )
    teacher.name = teacher.name.removesuffix(OTHER_TEACHER) + OTHER_TEACHER
