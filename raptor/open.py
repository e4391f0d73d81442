"""open_vit: names, files, folders and modules to a view.

timm/NAME            any timm model, e.g. timm/vit_base_patch14_reg4_dinov2.lvd142m
hf/REPO              a transformers model, from the hub or a local folder
hub/REPO:ENTRY       a torch.hub entry, e.g. hub/facebookresearch/dinov2:dinov2_vitb14_reg
scenes               the built-in teacher; scenes-k2 and scenes-k3 are its shipped surrogates
FILE                 a weight file that fits one model of timm
FOLDER               a run folder or a saved model: a surrogate or a trained teacher
an nn.Module         a model of your own
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack, cast

import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from safetensors.torch import save_file
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.options import OpeningModel, declared, with_defaults
from raptor.run import RunError, read_config, read_json, sync, write_text
from raptor.streaming import Result, folder_of
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.block_list import WrongSize
from raptor.vit.builders import MAX_COUNT, build_base, check_memory, check_recorded, is_half
from raptor.vit.names import ASSETS, named_for, unknown_model
from raptor.vit.stated import check_size, default_preprocess, forward_arguments, model_preprocess
from raptor.vit.structure import inspect_vit
from raptor.vit.view import ViT
from raptor.vit.weights import (
    check_weights,
    classes_in_file,
    fingerprint,
    is_weight_file,
    load_weights,
    read_weights,
    same_weights,
    size_in_file,
)

_FORMAT = "raptor-vit/1"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_RECORDED_OPTIONS = {
    *("model", "weights", "size", "pretrained", "num_classes", "preprocess", "blocks", "norm", "head", "cls"),
    *("registers", "head_classes", "dtype", "layer_scale"),
}
"""What a surrogate's config.json may say about opening its teacher, beside arguments of the model's constructor."""
OTHER_TEACHER = " (another teacher)"
"""How the name of a teacher ends that its surrogate was not made from."""
_SAVED_FILES = ("config.json", "model.safetensors")
_DOWNLOAD_OPTIONS = ("revision", "cache_dir", "force_download", "local_files_only", "token")


def open_vit(
    source: str | Path | nn.Module | ViT,
    *,
    weights: str | None = None,
    pretrained: bool = True,
    layer_scale: float | None = None,
    size: int | None = None,
    num_classes: int | None = None,
    blocks: str | None = None,
    norm: str | None = None,
    head: str | None = None,
    cls: int | None = None,
    registers: int | None = None,
    head_classes: int | None = None,
    preprocess: Preprocess | dict[str, Any] | None = None,
    teacher: nn.Module | ViT | None = None,
    dtype: str = "fp32",
    trust_hub: bool = False,
    name: str | None = None,
    device: str | torch.device | None = None,
    **model_kwargs: Any,
) -> ViT:
    """A view over any Vision Transformer.

    Args:
        source: `timm/NAME`, `hf/REPO`, `hub/REPO:ENTRY`, `scenes`, a folder, or a module (see the module's docstring).
            `timm/NAME@FILE` is `timm/NAME` with the weight file FILE; `timm/NAME@REVISION`, `hf/REPO@REVISION` and
            `hub/REPO@REVISION:ENTRY` name a commit, tag or branch of the hub.
        weights: a local weight file (safetensors or weights-only .pth) instead of the hub's.
        pretrained: with no `weights`, whether to fetch the published ones; False gives random weights.
        layer_scale: what every LayerScale of a model with random weights starts from, instead of its own value.
        size: image size; by default 224, or the model's own where that is smaller.
        num_classes: classes of the head; by default the published ones, or what the weight file holds.
        blocks, norm, head: dotted paths in a model whose structure cannot be guessed.
        cls, registers: counts of these tokens, where they cannot be guessed.
        head_classes: number of class scores that the model gives, where its configuration does not say; 0 for none.
        preprocess: how images are prepared, where the model does not say (also as `Preprocess.to_dict` gives it).
        teacher: the module a surrogate of your own module was made from.
        dtype: type of the weights: fp32, also where they are stored in half precision, or bf16 or fp16. A module of
            your own in half precision is copied, not changed.
        trust_hub: run the code of a torch.hub repository, for `hub/REPO:ENTRY`.
        name: of the model in titles, figures and files; by default the weight file's stem, else `source`.
        device: where it runs: by default where a module or an opened model is, and the CPU for others.
        model_kwargs: further arguments of the model's constructor (timm) or configuration (transformers).
    """
    prepared = Preprocess.from_dict(preprocess) if isinstance(preprocess, dict) else preprocess
    structure: dict[str, Any] = dict(
        blocks=blocks, norm=norm, head=head, cls=cls, registers=registers, head_classes=head_classes
    )
    check_size(size)
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose from {', '.join(_DTYPES)}")
    untrained = dict(pretrained=None if pretrained else False, layer_scale=layer_scale)
    built = dict(num_classes=num_classes, **untrained, **model_kwargs)
    if isinstance(source, ViT):
        opened = dict(
            weights=weights, size=size, preprocess=prepared, name=name, dtype=None if dtype == "fp32" else dtype
        )
        _refuse("a model that is already opened", **opened, **structure, **built)
        return source if device is None else source.to(device)
    if isinstance(source, nn.Module):
        _refuse("a module of your own", **built)
        if dtype != "fp32" or is_half(source):
            source = copy.deepcopy(source).float()
        if weights is not None:
            load_weights(source, read_weights(weights), weights)
        images = _resized(prepared, size) if prepared else default_preprocess(source, size)
        arguments = forward_arguments(source, images.size)
        view = inspect_vit(source, name or type(source).__name__, images, forward_kwargs=arguments, **structure)
        if not prepared:  # there may be other models beside the one around the blocks
            view.preprocess = model_preprocess(source, size, view.blocks_path)
        view.opened = _given(weights=weights)
        return _as_dtype(view, dtype).to(device or view.device)
    device = device or "cpu"
    text = str(source)
    if is_weight_file(text):
        if weights is not None:
            raise ValueError(f"{text} is a weight file already: leave out --weights")
        file, text = text, named_for(text)
        print(f"{file} fits {text.partition('@')[0]} alone: opened as that model", file=sys.stderr)
    if text.startswith(("timm/", "hf/")) and is_weight_file(text.partition("@")[2]):
        if weights is not None:
            raise ValueError(f"{text} names its weight file: leave out --weights")
        text, _, weights = text.partition("@")
    folder = saved_folder(text)
    if folder is not None:
        _refuse(f"{text}, which is saved with its own", preprocess=prepared, **structure, **built)
        view = _load_saved(folder, teacher=teacher, size=size, weights=weights, trust_hub=trust_hub)
        view.name = name or view.name
        view.opened = {"model": text, "weights": weights, "size": size, "fingerprint": fingerprint(view.model)}
        return _as_dtype(view, dtype).to(device)
    kind, _, rest = text.partition("/")
    if kind not in ("timm", "hf", "hub") or not rest:
        raise ValueError(unknown_model(text))
    opened = {"model": text, "weights": weights, "size": size, "pretrained": pretrained, **model_kwargs}
    opened |= _given(
        num_classes=num_classes, preprocess=prepared and prepared.to_dict(), layer_scale=layer_scale, **structure
    )
    state = read_weights(weights) if weights else None
    if state is not None and num_classes is None:
        num_classes = classes_in_file(state)
    fetch = pretrained and weights is None
    if kind == "timm" and "@" in text and not fetch:
        raise ValueError(f"{text} names a revision of published weights: leave out --weights and --pretrained false")
    base: dict[str, Any] = {"source": text, "kwargs": dict(model_kwargs), "num_classes": num_classes}
    model = build_base(base, fetch=fetch, trust_hub=trust_hub)
    if state is not None:
        own_size = None if "img_size" in model_kwargs else size_in_file(model, state)
        if own_size is not None:
            base["kwargs"]["img_size"] = own_size
            model = build_base(base, trust_hub=trust_hub)
        load_weights(model, state, str(weights))
    if layer_scale is not None:
        _set_layer_scale(model, layer_scale, trained=fetch or state is not None, name=text)
    images = _resized(prepared, size) if prepared else model_preprocess(model, size)
    arguments = forward_arguments(model, images.size)
    own_name = name or (Path(weights).stem if weights else text)
    view = inspect_vit(model, own_name, images, forward_kwargs=arguments, source=base, **structure)
    if not name and not weights and not pretrained:
        view.name = f"{text} (untrained)"
    view.opened = {**opened, **_given(name=name), "fingerprint": fingerprint(model)}
    return _as_dtype(view, dtype).to(device)


def _set_layer_scale(model: nn.Module, value: float, trained: bool, name: str) -> None:
    """Fill the LayerScale parameters of a model with random weights."""
    if trained:
        raise ValueError(f"--layer_scale would change the weights of {name}: give --pretrained false too")
    scales = [p for m in model.modules() if type(m).__name__.endswith("LayerScale") for p in m.parameters()]
    if not scales:
        raise ValueError(f"{name} has no LayerScale: leave out --layer_scale")
    with torch.no_grad():
        for scale in scales:
            scale.fill_(value)


def _as_dtype(vit: ViT, dtype: str) -> ViT:
    """The weights of `vit` as `dtype`; noted in `opened` where it is not fp32."""
    if dtype != "fp32":
        vit.model.to(_DTYPES[dtype])
        vit.opened = {**vit.opened, "dtype": dtype} if vit.opened else {}
    return vit


def tell_apart(views: Sequence[ViT]) -> list[ViT]:
    """The same views; weight files of the same name are called by their folder too, or else by their whole path."""
    found = list(views)
    for place in (lambda path: f"{path.parent.name}/{path.stem}", str):
        counts = Counter(vit.name for vit in found)
        for i, vit in enumerate(found):
            weights = vit.opened.get("weights")
            if counts[vit.name] > 1 and weights and not vit.opened.get("name"):
                found[i] = replace(vit, name=place(Path(weights).expanduser().resolve()))
    return found


def open_pair(
    source: str | Path | nn.Module | ViT | Result,
    *,
    teacher: str | Path | nn.Module | ViT | None = None,
    allow_other_teacher: bool = False,
    device: str | torch.device | None = None,
    **opening: Unpack[OpeningModel],
) -> tuple[ViT | None, ViT]:
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
    source = cast("str | Path | nn.Module | ViT", folder_of(source))
    options = with_defaults(OpeningModel, opening)
    size, pretrained, layer_scale = options.pop("size"), options.pop("pretrained"), options.pop("layer_scale")
    both: dict[str, Any] = dict(device=device, dtype=options.pop("dtype"), trust_hub=options.pop("trust_hub"))
    of_teacher = _given(**options)
    saved = _described_surrogate(source)
    own = {} if saved else of_teacher
    inner = None
    if teacher is not None and saved is None:
        shown = source if isinstance(source, str | Path) else "this model"
        raise ValueError(f"{shown} is no surrogate and has no teacher: name a run, or leave out --teacher and --module")
    if isinstance(teacher, ViT):
        _refuse("a teacher that is already opened", **of_teacher, **_unlike(teacher, size, both["dtype"]))
        size = size if isinstance(source, ViT) else teacher.preprocess.size
    elif teacher is not None and saved is not None:
        recorded: dict[str, Any] = {}
        if isinstance(teacher, nn.Module):
            recorded = _opening_of(saved, saved["name"] if isinstance(source, ViT) else str(source))
            if "weights" not in of_teacher and not allow_other_teacher:
                recorded["weights"] = _weights_of_module(teacher, source, saved)
            loaded = recorded.get("weights") or of_teacher.get("weights")
            teacher = copy.deepcopy(teacher) if loaded else teacher
        teacher = open_vit(teacher, size=size or saved["preprocess"]["size"], **both, **recorded | of_teacher)
    if saved is not None and saved["base"] is None and isinstance(teacher, ViT):
        inner = teacher  # a surrogate of a module of one's own is built from that module
    view = open_vit(source, teacher=inner, size=size, pretrained=pretrained, layer_scale=layer_scale, **both, **own)
    if not view.phases:
        return None, view
    both["device"] = device or view.device
    made_from = dict(view.source.get("teacher") or {})
    if teacher is None and not made_from.get("model"):
        raise ValueError(
            f"{source} does not say what its teacher was opened as: name it with --teacher or --module (in Python also "
            "the module itself)"
        )
    found = teacher if isinstance(teacher, ViT) else _open_teacher(source, made_from, size, of_teacher, both)
    check_teacher(view, found, source, allow_other_teacher)
    if found.classes is None and found.num_classes == view.num_classes:  # the run was told their names
        found = replace(found, classes=view.classes)
    return view, found


def is_surrogate(source: str | Path | nn.Module | ViT) -> bool:
    """Whether `source` is a surrogate, or names one."""
    return _described_surrogate(source) is not None


def _unlike(vit: ViT, size: int | None, dtype: str) -> dict[str, Any]:
    """Those of the options that an opened model does not have."""
    other_size = None if size == vit.preprocess.size else size
    return {"size": other_size, "dtype": None if dtype == "fp32" or _DTYPES[dtype] == vit.dtype else dtype}


def _open_teacher(
    source: str | Path | nn.Module | ViT,
    made_from: dict[str, Any],
    size: int | None,
    given: dict[str, Any],
    both: dict[str, Any],
) -> ViT:
    """The teacher that a surrogate names, with the options that are given now."""
    options = {name: value for name, value in made_from.items() if name not in ("model", "fingerprint")}
    kwargs = {key: value for key, value in options.items() if key not in _RECORDED_OPTIONS}
    check_recorded(made_from["model"], kwargs, f"{source}: its config.json", both["trust_hub"])
    if both["dtype"] != "fp32":
        options.pop("dtype", None)
    options |= _given(size=size, **given)
    name = str(made_from["model"])
    own, of_teacher = (None if isinstance(text, ViT) else saved_folder(str(text)) for text in (source, name))
    if own is not None and of_teacher is not None and own.resolve() == of_teacher.resolve():
        raise RunError(f"{source} names itself as its teacher: name the model it was made from with --teacher")
    missing = [path for path in (name, options.get("weights")) if path and _is_gone(path)]
    if missing:
        raise RunError(f"{missing[0]}, which {source} was made from, is not there: give its new place with --teacher")
    return open_vit(name, **both | options)


def _is_gone(path: str) -> bool:
    """Whether `path` is written like a file or folder, not like a name that can be opened, and is not there."""
    is_name = saved_folder(path) is not None or path.split("/")[0] in ("timm", "hf", "hub")
    return not is_name and not Path(path).expanduser().exists()


def check_teacher(surrogate: ViT, teacher: ViT, source: str | Path | nn.Module | ViT, allow: bool = False) -> None:
    """Raise OtherTeacher unless `teacher` has the weights that `surrogate` was made from, as far as it says which.

    source: what the surrogate was opened as. allow: mark the teacher's name instead.
    """
    saved = _made_from(source, surrogate.source.get("teacher"), "fingerprint")
    if saved is None or saved == teacher.opened.get("fingerprint") or same_weights(teacher.model, saved):
        return
    shown = surrogate.name if isinstance(source, ViT) else source
    if not allow:
        raise OtherTeacher(
            f"{shown} was not made from {teacher.name} as it is now (its weights differ): name its teacher with "
            "--teacher, --module or --weights, or compare them all the same with --allow_other_teacher"
        )
    teacher.name = teacher.name.removesuffix(OTHER_TEACHER) + OTHER_TEACHER


def _made_from(
    source: str | Path | nn.Module | ViT, recorded: dict[str, Any] | None, entry: Literal["fingerprint", "weights"]
) -> str | None:
    """What a surrogate says about its teacher; where an earlier version did not say it, the config of its run does."""
    saved = (recorded or {}).get(entry)
    folder = None if saved or isinstance(source, ViT) else saved_folder(str(source))
    if folder is not None and (folder.parent / "config.yaml").is_file():
        saved = read_config(folder.parent).get(entry)
    return str(saved) if saved else None


def _weights_of_module(module: nn.Module, source: str | Path | nn.Module | ViT, saved: dict[str, Any]) -> str | None:
    """The weight file that a surrogate of one's own module was made with; None where there was none, or the module has
    these weights already.

    source: the surrogate. saved: its config.json, or what that would hold.
    """
    if saved["base"] is not None:
        return None
    shown, recorded = saved["name"], saved.get("teacher") or {}
    if not isinstance(source, ViT):
        shown, recorded = source, _found_from(cast(Path, saved_folder(str(source))), recorded)
    known, weights = (_made_from(source, recorded, entry) for entry in ("fingerprint", "weights"))
    if weights is None or (known is not None and same_weights(module, known)):
        return None
    if _is_gone(weights):
        raise RunError(f"{weights}, which {shown} was made with, is not there: give its new place with --weights")
    print(f"{weights}, which {shown} was made with, is loaded into a copy of the module", file=sys.stderr)
    return weights


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _refuse(what: str, **options: Any) -> None:
    """Raise for options that would have no effect."""
    names = [f"--{name}" if name in declared(OpeningModel) else name for name in _given(**options)]
    known = inspect.signature(open_vit).parameters
    for name in _given(**options):
        close = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if close:
            raise ValueError(f"unknown option {name!r}: did you mean {close[0]!r}?")
    if names:
        raise ValueError(f"{', '.join(names)} cannot be given for {what}: leave {'them' if names[1:] else 'it'} out")


def _resized(images: Preprocess, size: int | None) -> Preprocess:
    if size is None or size == images.size:
        return images
    other = Preprocess.for_native(max(size, images.size), images.mean, images.std, size=size)
    return replace(other, interpolation=images.interpolation)


def _described_surrogate(source: str | Path | nn.Module | ViT) -> dict[str, Any] | None:
    """The config.json of the surrogate that `source` names, or what it would hold of an opened one; None for others."""
    if isinstance(source, ViT):
        config = _described(source)
    else:
        folder = None if isinstance(source, nn.Module) else saved_folder(str(source))
        config = {"surrogate": None} if folder is None else _read_saved(folder)
    return config if config["surrogate"] is not None else None


def _opening_of(saved: dict[str, Any], shown: str) -> dict[str, Any]:
    """How the module that a surrogate was made from was opened, so that it need not be said again: its structure, its
    classes and how images are prepared. Empty where it was no such module.

    saved: the config.json of the surrogate `shown`, or what it would hold.
    """
    if saved["base"] is not None:
        return {}
    kinds = {"blocks": str, "norm": str, "cls": int, "registers": int}
    structure = {
        name: saved["structure"].get(name) for name in kinds if isinstance(saved["structure"].get(name), kinds[name])
    }
    with _reading(Path(shown)):
        prepared = Preprocess.from_dict(saved["preprocess"])
    return {**structure, "head_classes": saved["num_classes"], "preprocess": prepared}


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
    config = _described(vit)
    config["teacher"] = _with_relative_paths(config["teacher"], folder)
    tensors = {k: v.detach().cpu().contiguous() for k, v in vit.model.state_dict().items()}
    partial = folder.with_name(f"{folder.name}.tmp")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        sync(partial / "model.safetensors")
        write_text(partial / "config.json", json.dumps(config, indent=1) + "\n")
        _put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _described(vit: ViT) -> dict[str, Any]:
    """What the config.json of a saved model holds, less the places of its teacher's files as seen from there."""
    base, surrogates = _layers_of(vit.source)
    return {
        "format": _FORMAT,
        "name": vit.name,
        "base": base or None,
        "preprocess": vit.preprocess.to_dict(),
        "structure": {
            "blocks": vit.blocks_path,
            "norm": next((n for n, m in vit.model.named_modules() if m is vit.norm), None),
            "cls": vit.groups.cls,
            "registers": vit.groups.registers,
        },
        "num_classes": vit.num_classes,
        "classes": vit.classes,
        "surrogate": surrogates[-1] if surrogates else None,
        "teacher": vit.source.get("teacher"),
        "inner_surrogates": surrogates[:-1],
    }


def check_folder_of(folder: Path, source: object, surrogate: ViT | None, model: ViT) -> None:
    """Raise where `folder` is the run of another model: its page would show the results of both as one.

    source: what `surrogate` and `model` were opened as; `model` is its teacher, or the model by itself.
    """
    held = saved_folder(str(folder.absolute()))
    if held is None or (isinstance(source, str | Path) and saved_folder(str(source)) == saved_folder(str(folder))):
        return
    config = _read_saved(held)
    is_its_teacher = False
    if surrogate is None and config["surrogate"] is not None:
        known = (config.get("teacher") or {}).get("fingerprint")
        is_its_teacher = known is None or same_weights(model.model, known)
    if not is_its_teacher and not _holds(held, surrogate or model):
        raise RunError(f"{folder} is the run of another model ({config['name']}): choose another --out")


def _holds(folder: Path, vit: ViT) -> bool:
    """Whether the model that is saved in `folder` has the weights of `vit`; ValueError for a damaged one."""
    kept, ours = read_weights(folder / "model.safetensors"), vit.model.state_dict()
    return kept.keys() == ours.keys() and all(torch.equal(kept[n], ours[n].cpu()) for n in ours)


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


def _put_in_place(partial: Path, folder: Path) -> None:
    """Make `folder` hold the model in `partial`. Its config.json goes last: without it a folder is no model."""
    if not folder.exists():
        os.rename(partial, folder)
    else:
        (folder / "config.json").unlink(missing_ok=True)
        for name in reversed(_SAVED_FILES):
            os.replace(partial / name, folder / name)
        sync(folder)
    sync(folder.absolute().parent)


def _with_relative_paths(made_from: dict[str, Any] | None, folder: Path) -> dict[str, Any] | None:
    """What a surrogate says about its teacher, and where its files lie as seen from `folder`."""
    if made_from is None:
        return None
    local = {name: _local(made_from.get(name)) for name in ("model", "weights")}
    places = {name: os.path.relpath(path.resolve(), folder.resolve()) for name, path in local.items() if path}
    return {**made_from, "relative": places} if places else made_from


def _found_from(folder: Path, made_from: dict[str, Any]) -> dict[str, Any]:
    """The same with each path as it was written or, where that is gone, as seen from the saved folder."""
    found = {name: value for name, value in made_from.items() if name != "relative"}
    for name, place in (made_from.get("relative") or {}).items():
        if _local(found[name]) is None and (folder / place).exists():
            found[name] = os.path.normpath(folder / place)
    return found


def _local(text: Any) -> Path | None:
    """A file or folder that a name stands for and that is there; None for a built-in or a model of a library."""
    if not text or (str(text).isidentifier() and (ASSETS / str(text)).is_dir()):
        return None
    path = Path(str(text)).expanduser()
    return path if path.exists() else None


def _layers_of(source: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The plain model a view comes from, and the surrogates made from it, one of the other, the outermost last."""
    surrogates: list[dict[str, Any]] = []
    while "surrogate" in source:
        surrogates.insert(0, source["surrogate"])
        source = source["base"]
    return source, surrogates


def _load_saved(
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
    config = _read_saved(folder)
    if config["base"] is None and teacher is None:
        raise ValueError(
            f"{folder} was made from a module of your own: open it with teacher=that module (in a terminal "
            "--module FILE.py:FUNCTION, or --teacher NAME)"
        )
    base = config["base"]
    if teacher is None:
        check_recorded(base.get("source"), base.get("kwargs"), f"{folder}/config.json", trust_hub)
        with _reading(folder):
            check_memory(base)
            model = build_base(base, trust_hub=trust_hub)
    else:
        model = teacher.model if isinstance(teacher, ViT) else teacher
    known = base or {}
    if base is None and isinstance(teacher, ViT) and is_surrogate(teacher):
        known = teacher.source
    with _reading(folder, given_size=size is not None):
        images = _resized(Preprocess.from_dict(config["preprocess"]), size)
        check_size(images.size)
        structure = {k: v for k, v in config["structure"].items() if v is not None}
        arguments = forward_arguments(model, images.size)
        vit = inspect_vit(model, config["name"], images, forward_kwargs=arguments, source=known, **structure)
        for surrogate in [*config.get("inner_surrogates", []), config["surrogate"]][len(_layers_of(known)[1]) :]:
            made_from = _found_from(folder, config.get("teacher") or {})
            vit = vit if surrogate is None else make_surrogate(vit, **surrogate, made_from=made_from)
    vit.name = config["name"]
    load_weights(vit.model, read_weights(weights or folder / "model.safetensors"), str(weights or folder))
    vit.num_classes, vit.classes = config["num_classes"], config.get("classes")
    return vit


_KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "base": (dict, type(None)),
    "preprocess": (dict,),
    "structure": (dict,),
    "num_classes": (int,),
    "surrogate": (dict, type(None)),
}
"""The keys of config.json that a saved model needs, with their types."""


def _read_saved(folder: Path) -> dict[str, Any]:
    """The config.json of a saved model, with all its keys; ValueError that names what is wrong."""
    path, remedy = folder / "config.json", "save the model again, or fetch it again"
    config = read_json(path, remedy)
    if config.get("format") != _FORMAT:
        raise ValueError(f"{folder} holds no raptor model: its config.json says format {config.get('format')!r}")
    optional: dict[str, tuple[type, ...]] = {
        "teacher": (dict, type(None)),
        "inner_surrogates": (list,),
        "classes": (list, type(None)),
    }
    for key, kinds in (_KINDS | {key: kinds for key, kinds in optional.items() if key in config}).items():
        if key not in config or not isinstance(config[key], kinds) or isinstance(config[key], bool):
            held = "has no" if key not in config else "has a damaged"
            raise ValueError(f"{path} {held} {key}: {remedy}")
    if not all(isinstance(entry, dict) for entry in config.get("inner_surrogates", [])):
        raise ValueError(f"{path} has a damaged inner_surrogates: {remedy}")
    if not 0 <= config["num_classes"] <= MAX_COUNT:
        raise ValueError(f"{path} says {config['num_classes']} classes, not 0..{MAX_COUNT}: {remedy}")
    names = config.get("classes")
    if names is not None and (len(names) != config["num_classes"] or not all(isinstance(n, str) for n in names)):
        raise ValueError(f"{path} does not name {config['num_classes']} classes in classes: {remedy}")
    return config


@contextmanager
def _reading(folder: Path, given_size: bool = False) -> Iterator[None]:
    """Inside, what a damaged config.json leads to is one line that names it.

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
        remedy = "save the model again, or fetch it again"
        raise ValueError(f"{folder}/config.json is damaged ({reason}): {remedy}") from None


class OtherTeacher(RunError):
    """A surrogate and a model that it was not made from."""


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
            folder = Path(snapshot_download(model_id, allow_patterns=list(_SAVED_FILES), **options))
        if not (folder / "config.json").is_file():
            raise ValueError(f"{model_id} holds no raptor model: it has no config.json")
        return cls(_load_saved(folder, teacher=teacher, size=size))


def saved_folder(text: str) -> Path | None:
    """The folder with `config.json` that `text` names: a built-in, a saved model, or a run folder's surrogate."""
    places = [ASSETS / text] if text.replace("-", "").isalnum() else []
    path = Path(text).expanduser()
    places += [path / "surrogate", path / "teacher", path]
    for place in places:
        config = place / "config.json"
        if config.is_file() and b"raptor" in _first_bytes(config):
            return place
    return None


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(200)
