"""Models on disk: every weight as safetensors, how to build the model as JSON. Nothing in a folder is ever run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from pydantic import ConfigDict
from safetensors.torch import save_file
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.files import RunError, read_json, sync, write_text
from raptor.streaming import decode
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.block_list import WrongSize
from raptor.vit.builders import MAX_COUNT, build_base, check_memory, check_recorded
from raptor.vit.names import ASSETS
from raptor.vit.stated import check_size, forward_arguments
from raptor.vit.structure import inspect_vit
from raptor.vit.view import ViT
from raptor.vit.weights import check_weights, fingerprint, load_weights, read_weights

_FORMAT = "raptor-vit/1"
_FILES = ("config.json", "model.safetensors")
_DOWNLOAD_OPTIONS = ("revision", "cache_dir", "force_download", "local_files_only", "token")
_REMEDY = "save the model again, or fetch it again"


@dataclass(kw_only=True)
class Structure:
    """Where a saved model has its blocks, its norm and its tokens, as `inspect_vit` takes them."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    blocks: str
    norm: str | None
    cls: int
    registers: int


@dataclass(kw_only=True)
class Saved:
    """The config.json of a saved model.

    Attributes:
        base: the plain model, as `build_base` takes it; None for a module of the user's own.
        surrogate: what the surrogate is made of, as `make_surrogate` takes it; None for a plain model.
        teacher: how a surrogate's teacher was opened, with its fingerprint and the places of its files.
        inner_surrogates: of a surrogate of a surrogate, what is between the plain model and the outermost one.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    format: str = _FORMAT
    name: str
    base: dict[str, Any] | None
    preprocess: dict[str, Any]
    structure: Structure
    num_classes: int
    classes: list[str] | None = None
    surrogate: dict[str, Any] | None
    teacher: dict[str, Any] | None = None
    inner_surrogates: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 <= self.num_classes <= MAX_COUNT:
            raise ValueError(f"it says {self.num_classes} classes, not 0..{MAX_COUNT}")
        if self.classes is not None and len(self.classes) != self.num_classes:
            raise ValueError(f"it does not name {self.num_classes} classes in classes")

    @classmethod
    def of(cls, vit: ViT) -> Saved:
        """What describes `vit`; the places of its teacher's files are not in it yet."""
        base, surrogates = _layers_of(vit.source)
        norm = next((name for name, module in vit.model.named_modules() if module is vit.norm), None)
        return cls(
            name=vit.name,
            base=base or None,
            preprocess=vit.preprocess.to_dict(),
            structure=Structure(blocks=vit.blocks_path, norm=norm, cls=vit.groups.cls, registers=vit.groups.registers),
            num_classes=vit.num_classes,
            classes=vit.classes,
            surrogate=surrogates[-1] if surrogates else None,
            teacher=vit.source.get("teacher"),
            inner_surrogates=surrogates[:-1],
        )

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """The config.json in `folder`; ValueError that names what is wrong with it."""
        path = folder / "config.json"
        config = read_json(path, _REMEDY)
        if config.get("format") != _FORMAT:
            raise ValueError(f"{folder} holds no raptor model: its config.json says format {config.get('format')!r}")
        try:
            return decode(cls, config)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): {_REMEDY}") from None


def _layers_of(source: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The plain model that a view comes from, and the surrogates made one from the other, the outermost last."""
    surrogates: list[dict[str, Any]] = []
    while "surrogate" in source:
        surrogates.insert(0, source["surrogate"])
        source = source["base"]
    return source, surrogates


def saved_folder(text: str) -> Path | None:
    """The folder with `config.json` that `text` names: a saved model, a run folder's surrogate or teacher, a built-in.

    A folder of a built-in's name that is here wins. Where it is a run that holds no model yet, nothing is named:
    the built-in would be measured in place of the run.
    """
    path = Path(text).expanduser()
    for place in (path / "surrogate", path / "teacher", path):
        if _holds_model(place):
            return place
    is_run = (path / "config.yaml").is_file()
    is_name = text.replace("-", "").isalnum()
    if is_name and not is_run and _holds_model(ASSETS / text):
        return ASSETS / text
    return None


def is_built_in(folder: Path | None) -> bool:
    """Whether a saved model is one of those that come with the package."""
    return folder is not None and folder.parent == ASSETS


def _holds_model(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and b"raptor" in _first_bytes(config)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(200)


def describe_surrogate(source: str | Path | nn.Module | ViT) -> Saved | None:
    """The config.json of the surrogate that `source` names, or what it would hold of an opened one; None for others."""
    if isinstance(source, ViT):
        saved = Saved.of(source)
        return None if saved.surrogate is None else saved
    folder = None if isinstance(source, nn.Module) else saved_folder(str(source))
    if folder is None:
        return None
    saved = Saved.read(folder)
    return None if saved.surrogate is None else saved


def is_surrogate(source: str | Path | nn.Module | ViT) -> bool:
    """Whether `source` is a surrogate, or names one."""
    return describe_surrogate(source) is not None


def is_of_own_module(source: str | Path) -> bool:
    """Whether `source` names a saved model that opens only with the module it was made from."""
    folder = saved_folder(str(source))
    return folder is not None and read_json(folder / "config.json").get("base") is None


def save_vit(vit: ViT, folder: str | Path) -> Path:
    """Save a model so that `open_vit(folder)` gives it back: every weight as safetensors, how to build it as JSON.

    A fault leaves what was there before, or no model, never a part of one: both files are written beside the folder and
    synced first. Other files in the folder stay.
    """
    folder = Path(folder).expanduser()
    check_weights(vit.model.state_dict(), f"{vit.name} cannot be saved")
    saved = Saved.of(vit)
    saved.teacher = _with_relative_paths(saved.teacher, folder)
    partial = folder.with_name(f"{folder.name}.tmp")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(_separate_tensors(vit.model), partial / "model.safetensors", metadata={"format": "pt"})
        sync(partial / "model.safetensors")
        write_text(partial / "config.json", json.dumps(asdict(saved), indent=1) + "\n")
        _put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _separate_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights, each in memory of its own, which safetensors asks for.

    A module of the user's own may hold one weight under two names; it is written under both, as it is loaded.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, weight in model.state_dict().items():
        tensor = weight.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return tensors


def _put_in_place(partial: Path, folder: Path) -> None:
    """Make `folder` hold the model in `partial`. Its config.json goes last: without it a folder is no model."""
    if not folder.exists():
        os.rename(partial, folder)
    else:
        (folder / "config.json").unlink(missing_ok=True)
        for name in reversed(_FILES):
            os.replace(partial / name, folder / name)
        sync(folder)
    sync(folder.absolute().parent)


def _with_relative_paths(teacher: dict[str, Any] | None, folder: Path) -> dict[str, Any] | None:
    """A surrogate's account of its teacher, with the places of the teacher's files as seen from `folder`."""
    if teacher is None:
        return None
    local = {name: _local(teacher.get(name)) for name in ("model", "weights")}
    places = {name: os.path.relpath(path.resolve(), folder.resolve()) for name, path in local.items() if path}
    return {**teacher, "relative": places} if places else teacher


def find_teacher_files(folder: Path, teacher: dict[str, Any]) -> dict[str, Any]:
    """The account with each path as it was written or, where that is gone, as seen from the saved folder."""
    found = {name: value for name, value in teacher.items() if name != "relative"}
    for name, place in (teacher.get("relative") or {}).items():
        if _local(found[name]) is None and (folder / place).exists():
            found[name] = os.path.normpath(folder / place)
    return found


def _local(text: Any) -> Path | None:
    """A file or folder that a name stands for and that is there; None for a built-in or a model of a library."""
    if not text or is_built_in(saved_folder(str(text))):
        return None
    path = Path(str(text)).expanduser()
    return path if path.exists() else None


def load_saved(
    folder: str | Path,
    *,
    teacher: nn.Module | ViT | None = None,
    size: int | None = None,
    weights: str | None = None,
    trust_hub: bool = False,
) -> ViT:
    """Open a folder written by `save_vit`. A surrogate of a user's own module needs that module as `teacher`, or the
    surrogate of it that this one was made from.

    Nothing in the folder is run; a model made from a torch.hub entry needs `trust_hub`.
    """
    folder = Path(folder)
    saved = Saved.read(folder)
    known = saved.base or {}
    if teacher is not None:
        model = teacher.model if isinstance(teacher, ViT) else teacher
        if saved.base is None and isinstance(teacher, ViT) and is_surrogate(teacher):
            known = teacher.source
    elif saved.base is not None:
        check_recorded(saved.base.get("source"), saved.base.get("kwargs"), f"{folder}/config.json", trust_hub)
        with _reading(folder):
            check_memory(saved.base)
            model = build_base(saved.base, trust_hub=trust_hub)
    else:
        raise ValueError(
            f"{folder} was made from a module of your own: open it with teacher=that module (in a terminal "
            "--module FILE.py:FUNCTION, or --teacher NAME)"
        )
    with _reading(folder, given_size=size is not None):
        images = resized(Preprocess.from_dict(saved.preprocess), size)
        check_size(images.size)
        structure = {name: value for name, value in asdict(saved.structure).items() if value is not None}
        arguments = forward_arguments(model, images.size)
        vit = inspect_vit(model, saved.name, images, forward_kwargs=arguments, source=known, **structure)
        made_from = find_teacher_files(folder, saved.teacher or {})
        surrogates = [] if saved.surrogate is None else [*saved.inner_surrogates, saved.surrogate]
        num_made = len(_layers_of(known)[1])
        for surrogate in surrogates[num_made:]:
            vit = make_surrogate(vit, **surrogate, made_from=made_from)
    file = weights or folder / "model.safetensors"
    load_weights(vit.model, read_weights(file), str(weights or folder))
    return replace(vit, name=saved.name, num_classes=saved.num_classes, classes=saved.classes)


def resized(images: Preprocess, size: int | None) -> Preprocess:
    """The same preparation for images of `size`."""
    if size is None or size == images.size:
        return images
    other = Preprocess.for_native(max(size, images.size), images.mean, images.std, size=size)
    return replace(other, interpolation=images.interpolation)


@contextmanager
def _reading(folder: Path, given_size: bool = False) -> Iterator[None]:
    """Inside the context an error that a damaged config.json leads to is one line that names the file.

    given_size: the image size is the user's, so that the file is not at fault for it.
    """
    try:
        yield
    except ValueError as error:
        if given_size and isinstance(error, WrongSize):
            raise
        raise ValueError(f"{folder}/config.json: {error}") from None
    except (TypeError, KeyError, AttributeError, IndexError, OverflowError, RuntimeError, MemoryError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise ValueError(f"{folder}/config.json is damaged ({reason}): {_REMEDY}") from None


def check_folder_of(folder: Path, source: object, surrogate: ViT | None, model: ViT) -> None:
    """Raise where `folder` is the run of another model: its page would show the results of both as one.

    source: what `surrogate` and `model` were opened as; `model` is its teacher, or the model by itself.
    """
    held = saved_folder(str(folder.absolute()))
    if held is None or (isinstance(source, str | Path) and saved_folder(str(source)) == saved_folder(str(folder))):
        return
    saved = Saved.read(held)
    is_its_teacher = False
    if surrogate is None and saved.surrogate is not None:
        known = (saved.teacher or {}).get("fingerprint")
        is_its_teacher = known in (None, fingerprint(model.model))
    if not is_its_teacher and not _holds(held, surrogate or model):
        raise RunError(f"{folder} is the run of another model ({saved.name}): choose another --out")


def repair_saved(vit: ViT, folder: Path) -> None:
    """Write the model of a finished run again where its folder is missing or damaged."""
    try:
        read_json(folder / "config.json")
        if _holds(folder, vit):
            return
    except ValueError:
        pass
    save_vit(vit, folder)
    print(f"{folder} was missing or damaged: written again from the run's checkpoint", file=sys.stderr)


def _holds(folder: Path, vit: ViT) -> bool:
    """Whether the model that is saved in `folder` has the weights of `vit`; ValueError for a damaged one."""
    kept, ours = read_weights(folder / "model.safetensors"), vit.model.state_dict()
    return kept.keys() == ours.keys() and all(torch.equal(kept[name], ours[name].cpu()) for name in ours)


class SharedViT(
    ModelHubMixin,
    library_name="raptor-vit",
    tags=["vision-transformer", "raptor"],
    paper_url="https://arxiv.org/abs/2512.19941",
):
    """A view with `save_pretrained`, `from_pretrained` and `push_to_hub`, to share it on the Hugging Face hub.

        SharedViT(open_vit("runs/scenes-k3")).push_to_hub("me/scenes-k3")
        vit = SharedViT.from_pretrained("me/scenes-k3").vit

    A folder holds only safetensors and JSON, so loading one never runs code that is in it.

    Attributes:
        vit: the view itself.
    """

    def __init__(self, vit: ViT):
        self.vit = vit

    def __call__(self, images: Tensor) -> Tensor:
        """The model's own output for `images` (B, 3, H, W)."""
        return self.vit(images)

    def __repr__(self) -> str:
        return f"SharedViT({self.vit!r})"

    def _save_pretrained(self, save_directory: Path) -> None:
        save_vit(self.vit, save_directory)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, teacher: nn.Module | ViT | None = None, size: int | None = None, **download: Any
    ) -> SharedViT:
        """`teacher` and `size` as in `open_vit`."""
        folder = Path(model_id)
        if not folder.is_dir():
            options = {name: value for name, value in download.items() if name in _DOWNLOAD_OPTIONS}
            folder = Path(snapshot_download(model_id, allow_patterns=list(_FILES), **options))
        if not (folder / "config.json").is_file():
            raise ValueError(f"{model_id} holds no raptor model: it has no config.json")
        return cls(load_saved(folder, teacher=teacher, size=size))
