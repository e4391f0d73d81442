"""A surrogate with the teacher it was made from, which is found again and compared by its weights."""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from raptor.data.preprocess import Preprocess
from raptor.files import RunError
from raptor.streaming import Result, folder_of
from raptor.vit.builders import check_recorded
from raptor.vit.names import ASSETS
from raptor.vit.open import DTYPES, Source, given_options, open_vit, refuse_options
from raptor.vit.saved import Saved, describe_surrogate, find_teacher_files, is_built_in, saved_folder
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint

OTHER_TEACHER = " (another teacher)"
"""The end of the name of a teacher from which the surrogate was not made."""

_RECORDED_OPTIONS = {
    *("model", "weights", "size", "pretrained", "num_classes", "preprocess", "blocks", "norm", "head", "cls"),
    *("registers", "head_classes", "dtype", "layer_scale"),
}
"""Options of `open_vit` in the config.json of a surrogate; other entries are arguments of the teacher's constructor."""


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
    device: str | torch.device | None = None,
    weights: str | None = None,
    pretrained: bool = True,
    layer_scale: float | None = None,
    size: int | None = None,
    blocks: str | None = None,
    norm: str | None = None,
    cls: int | None = None,
    registers: int | None = None,
    head_classes: int | None = None,
    dtype: str = "fp32",
    trust_hub: bool = False,
    name: str | None = None,
) -> Pair:
    """A surrogate and its teacher, or None and the model if `source` is not a surrogate.

    The surrogate names its teacher, unless `teacher` is given. `weights`, `blocks`, `norm`, `cls` and `registers` are
    options of the teacher (as in `open_vit`). A module of your own is opened with the options that were given when the
    surrogate was made, unless others are given now; its weight file is loaded into a copy of the module, unless the
    module has these weights already. `pretrained=False` opens a plain model with random weights.

    A teacher with other weights is refused, unless `allow_other_teacher`; its name then says so in every result. The
    result of a distillation stands for its run folder and its teacher.
    """
    if isinstance(source, Result):
        held = getattr(source, "teacher", None)
        if teacher is None and isinstance(held, ViT):
            teacher = held
        source = folder_of(source)
    assert not isinstance(source, Result)
    both: dict[str, Any] = dict(device=device, dtype=dtype, trust_hub=trust_hub)
    of_source: dict[str, Any] = dict(size=size, pretrained=pretrained, layer_scale=layer_scale, **both)
    structure = dict(blocks=blocks, norm=norm, cls=cls, registers=registers, head_classes=head_classes)
    of_teacher = given_options(weights=weights, name=name, **structure)
    saved = describe_surrogate(source)
    if saved is None:
        if teacher is not None:
            shown = source if isinstance(source, str | Path) else "this model"
            raise ValueError(
                f"{shown} is not a surrogate and has no teacher: name a run, or leave out --teacher and --module"
            )
        return Pair(None, open_vit(source, **of_source, **of_teacher))
    if isinstance(teacher, ViT):
        other_size = None if size == teacher.preprocess.size else size
        other_dtype = None if dtype == "fp32" or DTYPES.get(dtype) == teacher.dtype else dtype
        refuse_options("a teacher that is already opened", **of_teacher, size=other_size, dtype=other_dtype)
        of_source["size"] = size if isinstance(source, ViT) else teacher.preprocess.size
    elif isinstance(teacher, nn.Module):
        options = _opening_of_module(teacher, source, saved, of_teacher, allow_other_teacher)
        module = copy.deepcopy(teacher) if options.get("weights") else teacher
        teacher = open_vit(module, size=size or saved.preprocess["size"], **both, **options)
    elif teacher is not None:
        teacher = open_vit(teacher, size=size or saved.preprocess["size"], **both, **of_teacher)
    # A surrogate of a module of one's own is built from that module.
    surrogate = open_vit(source, teacher=teacher if saved.base is None else None, **of_source)
    if teacher is None:
        both["device"] = device or surrogate.device
        made_from = surrogate.source.get("teacher") or {}
        teacher = _open_teacher(source, made_from, of_source["size"], of_teacher, both)
    check_teacher(surrogate, teacher, source, allow_other_teacher)
    if teacher.classes is None and teacher.num_classes == surrogate.num_classes:  # the run was told their names
        teacher = replace(teacher, classes=surrogate.classes)
    return Pair(surrogate, teacher)


def _opening_of_module(
    module: nn.Module, source: Source, saved: Saved, given: dict[str, Any], allow_other_teacher: bool
) -> dict[str, Any]:
    """The options for a user's module: as `given`, else as it was opened when the surrogate was made.

    source: the surrogate. saved: its description.
    """
    if saved.base is not None:  # the teacher was opened by its name
        return given
    structure = given_options(**asdict(saved.structure))
    options = {**structure, "head_classes": saved.num_classes, "preprocess": Preprocess.from_dict(saved.preprocess)}
    if "weights" not in given and not allow_other_teacher:
        options["weights"] = _weights_of_module(module, source, saved)
    return options | given


def _weights_of_module(module: nn.Module, source: Source, saved: Saved) -> str | None:
    """The weight file of the module when the surrogate was made; None without one, or if the module has its weights."""
    shown = str(source)
    recorded = saved.teacher or {}
    if isinstance(source, ViT):
        shown = saved.name
    else:
        folder = saved_folder(str(source))
        assert folder is not None
        recorded = find_teacher_files(folder, recorded)
    known, weights = recorded.get("fingerprint"), recorded.get("weights")
    if not weights or known == fingerprint(module):
        return None
    if _is_gone(weights):
        raise RunError(f"{weights}, which {shown} was made with, is not there: give its new place with --weights")
    print(f"{weights}, which {shown} was made with, is loaded into a copy of the module", file=sys.stderr)
    return str(weights)


def _open_teacher(
    source: Source, made_from: dict[str, Any], size: int | None, given: dict[str, Any], both: dict[str, Any]
) -> ViT:
    """The teacher that a surrogate names, with the recorded options where none is given now."""
    if not made_from.get("model"):
        raise ValueError(
            f"{source} does not say what its teacher was opened as: name it with --teacher or --module (in Python also "
            "the module itself)"
        )
    options = {name: value for name, value in made_from.items() if name not in ("model", "fingerprint")}
    kwargs = {name: value for name, value in options.items() if name not in _RECORDED_OPTIONS}
    check_recorded(made_from["model"], kwargs, f"{source}: its config.json", both["trust_hub"])
    if both["dtype"] != "fp32":
        options.pop("dtype", None)
    options |= given_options(size=size, **given)
    name = str(made_from["model"])
    own = None if isinstance(source, ViT) else saved_folder(str(source))
    of_teacher = saved_folder(name)
    if is_built_in(own) and not is_built_in(of_teacher):  # a folder of the built-in teacher's name is here
        of_teacher = ASSETS / name
        name = str(of_teacher)
    if own is not None and of_teacher is not None and own.resolve() == of_teacher.resolve():
        raise RunError(f"{source} names itself as its teacher: name the model it was made from with --teacher")
    for path in (name, options.get("weights")):
        if path and _is_gone(path):
            raise RunError(f"{path}, which {source} was made from, is not there: give its new place with --teacher")
    return open_vit(name, **both | options)


def _is_gone(path: str) -> bool:
    """Whether `path` is a file or folder that does not exist, and not the name of a model."""
    is_name = saved_folder(path) is not None or path.split("/")[0] in ("timm", "hf", "hub")
    return not is_name and not Path(path).expanduser().exists()


def check_teacher(surrogate: ViT, teacher: ViT, source: Source, allow: bool = False) -> None:
    """Raise OtherTeacher unless `teacher` has the weights from which `surrogate` was made, if these are recorded.

    source: the name from which the surrogate was opened. allow: mark the teacher's name instead of raising.
    """
    known = (surrogate.source.get("teacher") or {}).get("fingerprint")
    if known is None or known == teacher.opened.get("fingerprint") or known == fingerprint(teacher.model):
        return
    if not allow:
        shown = surrogate.name if isinstance(source, ViT) else source
        raise OtherTeacher(
            f"{shown} was not made from {teacher.name} as it is now (its weights differ): name its teacher with "
            "--teacher, --module or --weights, or compare them all the same with --allow_other_teacher"
        )
    teacher.name = teacher.name.removesuffix(OTHER_TEACHER) + OTHER_TEACHER
