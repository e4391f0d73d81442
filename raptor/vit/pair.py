"""A surrogate with its teacher: the one that it was made from, found again and compared by its weights."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
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
"""How the name of a teacher ends that its surrogate was not made from."""

_RECORDED_OPTIONS = {
    *("model", "weights", "size", "pretrained", "num_classes", "preprocess", "blocks", "norm", "head", "cls"),
    *("registers", "head_classes", "dtype", "layer_scale"),
}
"""What a surrogate's config.json may say about opening its teacher, beside arguments of the model's constructor."""


class OtherTeacher(RunError):
    """A surrogate and a model that it was not made from."""


class Pair(NamedTuple):
    """A surrogate and its teacher; of a model that is no surrogate, None and the model."""

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
    """A surrogate and its teacher, or None and the model when `source` is no surrogate.

    The teacher is the one the surrogate says it was made from, or is found at `teacher`; `weights` are the teacher's,
    and so are `blocks`, `norm`, `cls` and `registers` (as in `open_vit`). A module of your own is opened with those
    that the surrogate was made with, unless others are given; the weight file is loaded into a copy of it, unless the
    module has these weights already. `pretrained=False` gives a plain model's untrained copy.
    A teacher whose weights are not the ones the surrogate was made from is refused, unless `allow_other_teacher`; its
    name then says so, in every result. The result of a distillation stands for its folder and brings its teacher.
    """
    if isinstance(source, Result):
        held = getattr(source, "teacher", None)
        teacher = held if teacher is None and isinstance(held, ViT) else teacher
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
                f"{shown} is no surrogate and has no teacher: name a run, or leave out --teacher and --module"
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
    """How the module that a surrogate was made from was opened, where that is not given: its structure, its classes,
    how images are prepared and its weight file.

    source: the surrogate. saved: its config.json, or what that would hold.
    """
    if saved.base is not None:  # the teacher was opened by its name
        return given
    structure = given_options(
        blocks=saved.structure.blocks,
        norm=saved.structure.norm,
        cls=saved.structure.cls,
        registers=saved.structure.registers,
    )
    options = {**structure, "head_classes": saved.num_classes, "preprocess": Preprocess.from_dict(saved.preprocess)}
    if "weights" not in given and not allow_other_teacher:
        options["weights"] = _weights_of_module(module, source, saved)
    return options | given


def _weights_of_module(module: nn.Module, source: Source, saved: Saved) -> str | None:
    """The weight file that a surrogate of one's own module was made with; None where there was none, or the module has
    these weights already."""
    shown, recorded = str(source), saved.teacher or {}
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
    """The teacher that a surrogate names, with the options that are given now."""
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
    """Whether `path` is written like a file or folder, not like a name that can be opened, and is not there."""
    is_name = saved_folder(path) is not None or path.split("/")[0] in ("timm", "hf", "hub")
    return not is_name and not Path(path).expanduser().exists()


def check_teacher(surrogate: ViT, teacher: ViT, source: Source, allow: bool = False) -> None:
    """Raise OtherTeacher unless `teacher` has the weights that `surrogate` was made from, as far as it says which.

    source: what the surrogate was opened as. allow: mark the teacher's name instead.
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
