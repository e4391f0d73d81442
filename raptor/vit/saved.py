"""Models on disk: the weights as safetensors, and a JSON file that says how to build the model. No code is run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from pydantic import ConfigDict
from safetensors.torch import save_file
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.devices import torch_defaults
from raptor.files import RunError, allow_readers, read_json, sync, write_text
from raptor.streaming import decode
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.block_list import WrongSize
from raptor.vit.builders import MAX_COUNT, build_base, check_memory, check_recorded
from raptor.vit.calls import reason_of
from raptor.vit.names import ASSETS
from raptor.vit.origin import Base, Opened, Origin, Structure, SurrogateSpec
from raptor.vit.stated import check_size
from raptor.vit.structure import inspect_vit
from raptor.vit.view import ViT
from raptor.vit.weights import check_weights, fingerprint, load_weights, read_weights

_FORMAT = "raptor-vit/1"
FILES = ("config.json", "model.safetensors")
_BLOCKS = "shared_blocks."  # how the names of the tied blocks' weights begin
_REMEDY = "save the model again, or fetch it again"


@dataclass(kw_only=True)
class Saved:
    """The config.json of a saved model.

    Attributes:
        base: the plain model; None for a module of the user's own.
        surrogate: what a surrogate is made of; None for a plain model.
        teacher: how a surrogate's teacher was opened, with its fingerprint and the places of its files.
        inner_surrogates: for a surrogate of a surrogate, the surrogates between the plain model and the outermost one.
        only_blocks: whether the weights are only those of the tied blocks, and the others are the teacher's.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    format: str = _FORMAT
    name: str
    base: Base | None
    preprocess: Preprocess
    structure: Structure
    num_classes: int
    classes: list[str] | None = None
    surrogate: SurrogateSpec | None
    teacher: Opened | None = None
    inner_surrogates: tuple[SurrogateSpec, ...] = ()
    only_blocks: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.num_classes <= MAX_COUNT:
            raise ValueError(f"it says {self.num_classes} classes, not 0..{MAX_COUNT}")
        if self.classes is not None and len(self.classes) != self.num_classes:
            raise ValueError(f"it does not name {self.num_classes} classes in classes")

    @property
    def needs_teacher(self) -> bool:
        """Whether it is built around its teacher: it is of a module of the user's own, or has tied blocks only."""
        return self.base is None or self.only_blocks

    @classmethod
    def of(cls, vit: ViT) -> Saved:
        """The description of `vit`, still without the places of its teacher's files."""
        surrogate = None
        if vit.origin.surrogates:
            surrogate = vit.origin.surrogates[-1]
        return cls(
            name=vit.name,
            base=vit.origin.base,
            preprocess=vit.preprocess,
            structure=vit.structure(),
            num_classes=vit.num_classes,
            classes=vit.classes,
            surrogate=surrogate,
            teacher=vit.origin.teacher,
            inner_surrogates=vit.origin.surrogates[:-1],
        )

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """The config.json in `folder`; ValueError with the entry that is wrong."""
        path = folder / "config.json"
        config = read_json(path, _REMEDY)
        if config.get("format") != _FORMAT:
            raise ValueError(f"{folder} holds no raptor model: its config.json says format {config.get('format')!r}")
        try:
            return decode(cls, config)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): {_REMEDY}") from None


def saved_folder(text: str) -> Path | None:
    """The folder of the saved model that `text` names: a saved model, a run folder with one, or a built-in; else None.

    A folder in the working directory wins over a built-in of the same name. If it is a run without a model yet, or
    holds a model of another kind, the result is None, because the built-in would be measured in its place.
    """
    path = Path(text).expanduser()
    # The surrogate is the result of a run, and its teacher may stand beside it.
    for place in (path / "surrogate", path / "teacher", path):
        if _holds_model(place):
            return place
    holds_other = (path / "config.yaml").is_file() or (path / "config.json").is_file()
    is_name = text.replace("-", "").isalnum()
    if is_name and not holds_other and _holds_model(ASSETS / text):
        return ASSETS / text
    return None


def _holds_model(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.is_file():
        return False
    with config.open("rb") as file:
        return b"raptor" in file.read(200)  # the format is the first entry


def describe_surrogate(source: str | Path | nn.Module | ViT) -> Saved | None:
    """The description of a surrogate, opened or named; None for other models."""
    saved = None
    if isinstance(source, ViT):
        saved = Saved.of(source)
    elif not isinstance(source, nn.Module):
        folder = saved_folder(str(source))
        if folder is not None:
            saved = Saved.read(folder)
    if saved is None or saved.surrogate is None:
        return None
    return saved


def is_surrogate(source: str | Path | nn.Module | ViT) -> bool:
    """Whether `source` is a surrogate, or names one."""
    return describe_surrogate(source) is not None


def needs_teacher(source: str | Path) -> bool:
    """Whether `source` names a saved model that can only be opened together with the teacher it was made from."""
    folder = saved_folder(str(source))
    return folder is not None and Saved.read(folder).needs_teacher


def save_vit(vit: ViT, folder: str | Path, *, only_blocks: bool = False, half: bool = False) -> Path:
    """Save a model so that `open_vit(folder)` gives it back. Other files in the folder stay.

    only_blocks: of a surrogate, leave out all weights that are the teacher's; `open_vit(folder, teacher=...)` then
        takes them from there. Places of files of this machine are left out too.
    half: store the weights in fp16; they are widened when they are read.

    After a fault the folder holds the model it held before, or none, but never a part of one: both files are first
    written to a folder beside it and synced.
    """
    folder = Path(folder).expanduser()
    # NaN would be found when the folder is opened, long after the training that made it.
    check_weights(vit.model.state_dict(), f"{vit.name} cannot be saved")
    saved = Saved.of(vit)
    saved.only_blocks = only_blocks
    if saved.teacher is not None:
        saved.teacher = _written_teacher(saved.teacher, folder, for_others=only_blocks)
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, weight in vit.model.state_dict().items():
        if only_blocks and not name.startswith(_BLOCKS):
            continue
        tensor = weight.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory. Tied blocks are registered once, but a user's module may hold
        # one weight under two names. It is written under both, because both are loaded.
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen:
            tensor = tensor.clone()
        seen.add(memory)
        if half and tensor.is_floating_point():
            # Beyond its range fp16 is infinite, and such weights are refused when they are opened.
            limit = torch.finfo(torch.float16).max
            tensor = tensor.clamp(-limit, limit).half()
        tensors[name] = tensor
    partial = folder.with_name(f"{folder.name}.tmp")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        # safetensors writes files that only their owner can read, so that a colleague could not open a shared run.
        allow_readers(partial / "model.safetensors")
        sync(partial / "model.safetensors")
        write_text(partial / "config.json", json.dumps(asdict(saved), indent=1) + "\n")
        folder.mkdir(exist_ok=True)
        # A folder without config.json does not count as a model. From here to the last rename there is none, rather
        # than new weights beside an old config.json.
        (folder / "config.json").unlink(missing_ok=True)
        for name in reversed(FILES):
            os.replace(partial / name, folder / name)
        sync(folder)
        sync(folder.absolute().parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _written_teacher(teacher: Opened, folder: Path, for_others: bool) -> Opened:
    """How a surrogate's teacher was opened, as it is written in `folder`.

    The places of its files are relative to the folder as well, so that a run and its teacher can be moved together.
    `for_others` gives of a file of this machine only its name.
    """
    names: dict[str, str] = {}
    relative = {}
    for name, text in (("model", teacher.model), ("weights", teacher.weights)):
        if text is not None and (_is_local(text) or name == "weights"):
            names[name] = Path(text).name
        if _is_local(text):
            path = Path(str(text)).expanduser().resolve()
            relative[name] = os.path.relpath(path, folder.resolve())
    if for_others:
        return replace(teacher, relative={}, **names)  # type: ignore[arg-type]
    return replace(teacher, relative=relative)


def find_teacher_files(folder: Path, teacher: Opened) -> Opened:
    """How a teacher was opened, with its paths as they were written or, if one is gone, relative to `folder`."""
    found = replace(teacher, relative={})
    for name, place in teacher.relative.items():
        if not _is_local(getattr(teacher, name)) and (folder / place).exists():
            found = replace(found, **{name: os.path.normpath(folder / place)})  # type: ignore[arg-type]
    return found


def _is_local(text: str | None) -> bool:
    """Whether this names an existing file or folder, not a built-in or a model of a library."""
    if not text or not Path(text).expanduser().exists():
        return False
    folder = saved_folder(text)
    return folder is None or folder.parent != ASSETS


@torch_defaults()
def load_saved(
    folder: str | Path,
    *,
    teacher: nn.Module | ViT | None = None,
    size: int | None = None,
    weights: str | None = None,
    trust_hub: bool = False,
) -> ViT:
    """Open a folder written by `save_vit`; no code in it is run. A model from a torch.hub entry needs `trust_hub`.

    A surrogate of a user's own module needs as `teacher` this module, or the surrogate from which it was made. A folder
    with only the blocks of a surrogate needs the teacher that it was made from.
    """
    folder = Path(folder)
    saved = Saved.read(folder)
    origin = Origin(base=saved.base)
    if teacher is None:
        if saved.only_blocks:
            raise ValueError(
                f"{folder} holds only the blocks of a surrogate: give its teacher (in a terminal "
                f"raptor export {folder} --to folder --teacher FILE --out NEW, in Python open_vit(..., teacher=...))"
            )
        if saved.base is None:
            raise ValueError(
                f"{folder} was made from a module of your own: open it with teacher=that module (in a terminal "
                "--module FILE.py:FUNCTION, or --teacher NAME)"
            )
        check_recorded(saved.base.source, saved.base.kwargs, f"{folder}/config.json", trust_hub)
    try:
        if isinstance(teacher, ViT):
            model = teacher.model
            if saved.base is None and teacher.phases:
                origin = teacher.origin
        elif teacher is not None:
            model = teacher
        else:
            assert saved.base is not None
            # Before anything of the file's choosing is built.
            check_memory(saved.base)
            model = build_base(saved.base, trust_hub=trust_hub)
        images = resized(saved.preprocess, size)
        check_size(images.size)
        vit = inspect_vit(model, saved.name, images, saved.structure, origin)
        if saved.surrogate is not None:
            made_from = find_teacher_files(folder, saved.teacher or Opened())
            surrogates = (*saved.inner_surrogates, saved.surrogate)
            # From the inside out: a surrogate of a surrogate is made of the inner one.
            for spec in surrogates[len(origin.surrogates) :]:
                vit = make_surrogate(vit, **vars(spec), made_from=made_from)
    # A damaged config.json causes errors of every type, which become one line with the name of the file.
    except ValueError as error:
        if size is not None and isinstance(error, WrongSize):  # the user's size, which is not the fault of the file
            raise
        raise ValueError(f"{folder}/config.json: {error}") from None
    except (TypeError, KeyError, AttributeError, IndexError, OverflowError, RuntimeError, MemoryError) as error:
        raise ValueError(f"{folder}/config.json is damaged ({reason_of(error)[:120]}): {_REMEDY}") from None
    # The folder has all weights, of frozen parts too, so no teacher is needed to open a surrogate.
    file = weights or folder / "model.safetensors"
    tensors = read_weights(file)
    if saved.only_blocks:  # the others came with the teacher
        for name, tensor in vit.model.state_dict().items():
            if not name.startswith(_BLOCKS):
                tensors[name] = tensor
    load_weights(vit.model, tensors, str(weights or folder))
    return replace(vit, name=saved.name, num_classes=saved.num_classes, classes=saved.classes)


def resized(images: Preprocess, size: int | None) -> Preprocess:
    """The same preparation for images of `size`."""
    if size is None or size == images.size:
        return images
    other = Preprocess.for_native(max(size, images.size), images.mean, images.std, size=size)
    return replace(other, interpolation=images.interpolation)


def check_folder_of(folder: Path, source: object, surrogate: ViT | None, model: ViT) -> None:
    """Raise if `folder` is the run of another model, because its page would show results of both as one model.

    source: the name from which `surrogate` and its teacher `model`, or `model` alone, were opened.
    """
    held = saved_folder(str(folder.absolute()))
    if held is None:
        return
    if isinstance(source, str | Path) and saved_folder(str(source)) == saved_folder(str(folder)):
        return
    saved = Saved.read(held)
    if surrogate is None and saved.surrogate is not None:
        known = (saved.teacher or Opened()).fingerprint
        if known in (None, fingerprint(model.model)):  # the teacher of the run by itself
            return
    if not _holds(held, surrogate or model):
        raise RunError(f"{folder} is the run of another model ({saved.name}): choose another --out")


def repair_saved(vit: ViT, folder: Path) -> None:
    """Write the model of a finished run again if its folder is missing or damaged."""
    try:
        read_json(folder / "config.json")
        if _holds(folder, vit):
            return
    except ValueError:
        pass
    save_vit(vit, folder)
    print(f"{folder} was missing or damaged: written again from the run's checkpoint", file=sys.stderr)


def _holds(folder: Path, vit: ViT) -> bool:
    """Whether the model saved in `folder` has the weights of `vit`; ValueError if its file is damaged."""
    kept = read_weights(folder / "model.safetensors")
    ours = vit.model.state_dict()
    return kept.keys() == ours.keys() and all(torch.equal(kept[name], ours[name].cpu()) for name in ours)
