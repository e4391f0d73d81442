"""open_vit: a view from a name, a file, a folder or a module.

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
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raptor.data.preprocess import Preprocess
from raptor.vit.builders import build_base, is_half
from raptor.vit.names import named_for, unknown_model
from raptor.vit.saved import load_saved, resized, saved_folder
from raptor.vit.stated import check_size, default_preprocess, forward_arguments, model_preprocess
from raptor.vit.structure import inspect_vit
from raptor.vit.view import ViT
from raptor.vit.weights import (
    classes_in_file,
    fingerprint,
    is_weight_file,
    load_weights,
    read_weights,
    size_in_file,
)

Source = str | Path | nn.Module | ViT
"""A name, a file, a folder, a module, or an opened model."""

_FLAGS = {
    *("weights", "pretrained", "layer_scale", "size", "blocks", "norm", "cls", "registers", "head_classes", "dtype"),
    *("trust_hub", "name"),
}
"""The options that are flags of commands, too."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        name: the name of the model in titles, figures and files; by default the weight file's stem, else `source`.
        device: the device of the model; by default a module or an opened model stays on its own, others are on the CPU.
        model_kwargs: further arguments of the model's constructor (timm) or configuration (transformers).
    """
    prepared = Preprocess.from_dict(preprocess) if isinstance(preprocess, dict) else preprocess
    structure: dict[str, Any] = dict(
        blocks=blocks, norm=norm, head=head, cls=cls, registers=registers, head_classes=head_classes
    )
    check_size(size)
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    untrained = None if pretrained else False
    built = dict(num_classes=num_classes, pretrained=untrained, layer_scale=layer_scale, **model_kwargs)
    if isinstance(source, ViT):
        other_dtype = None if dtype == "fp32" else dtype
        opened = dict(weights=weights, size=size, preprocess=prepared, name=name, dtype=other_dtype)
        refuse_options("a model that is already opened", **opened, **structure, **built)
        return source if device is None else source.to(device)
    if isinstance(source, nn.Module):
        refuse_options("a module of your own", **built)
        if dtype != "fp32" or is_half(source):
            source = copy.deepcopy(source).float()
        view = _open_module(source, name or type(source).__name__, weights, size, prepared, structure)
        return _as_dtype(view, dtype).to(device or view.device)
    text, weights = _split_source(str(source), weights)
    folder = saved_folder(text)
    if folder is not None:
        refuse_options(f"{text}, which is saved with its own", preprocess=prepared, **structure, **built)
        view = load_saved(folder, teacher=teacher, size=size, weights=weights, trust_hub=trust_hub)
        view.name = name or view.name
        view.opened = {"model": text, "weights": weights, "size": size, "fingerprint": fingerprint(view.model)}
        return _as_dtype(view, dtype).to(device or "cpu")

    kind, _, rest = text.partition("/")
    if kind not in ("timm", "hf", "hub") or not rest:
        raise ValueError(unknown_model(text))
    if kind == "timm" and "@" in rest and (weights or not pretrained):
        raise ValueError(f"{text} names a revision of published weights: leave out --weights and --pretrained false")
    state = read_weights(weights) if weights else None
    base: dict[str, Any] = {"source": text, "kwargs": dict(model_kwargs), "num_classes": num_classes}
    if state is not None and num_classes is None:
        base["num_classes"] = classes_in_file(state)
    model = build_base(base, fetch=pretrained and state is None, trust_hub=trust_hub)
    if state is not None:
        own_size = None if "img_size" in model_kwargs else size_in_file(model, state)
        if own_size is not None:
            base["kwargs"]["img_size"] = own_size
            model = build_base(base, trust_hub=trust_hub)
        load_weights(model, state, str(weights))
    if layer_scale is not None:
        _set_layer_scale(model, layer_scale, trained=pretrained or state is not None, name=text)
    images = resized(prepared, size) if prepared else model_preprocess(model, size)
    if name:
        shown = name
    elif weights:
        shown = Path(weights).stem
    else:
        shown = text if pretrained else f"{text} (untrained)"  # so that no result passes for the published weights'
    arguments = forward_arguments(model, images.size)
    view = inspect_vit(model, shown, images, forward_kwargs=arguments, source=base, **structure)
    view.opened = {"model": text, "weights": weights, "size": size, "pretrained": pretrained, **model_kwargs}
    further = dict(num_classes=num_classes, preprocess=prepared and prepared.to_dict(), layer_scale=layer_scale)
    view.opened |= given_options(**further, **structure, name=name)
    view.opened["fingerprint"] = fingerprint(model)
    return _as_dtype(view, dtype).to(device or "cpu")


def _open_module(
    module: nn.Module,
    name: str,
    weights: str | None,
    size: int | None,
    prepared: Preprocess | None,
    structure: dict[str, Any],
) -> ViT:
    """The view over a module of the user's own, with the weights of a file if one is given."""
    if weights is not None:
        load_weights(module, read_weights(weights), weights)
    images = resized(prepared, size) if prepared else default_preprocess(module, size)
    arguments = forward_arguments(module, images.size)
    view = inspect_vit(module, name, images, forward_kwargs=arguments, **structure)
    if not prepared:  # there may be other models beside the one around the blocks
        view.preprocess = model_preprocess(module, size, view.blocks_path)
    view.opened = given_options(weights=weights)
    return view


def _split_source(text: str, weights: str | None) -> tuple[str, str | None]:
    """The name of a model and its weight file, from `timm/NAME@FILE` or from a file by itself."""
    given = text
    if is_weight_file(text) and not text.startswith(("timm/", "hf/", "hub/")):
        text = named_for(text)
        print(f"{given} fits {text.partition('@')[0]} alone: opened as that model", file=sys.stderr)
    name, _, file = text.partition("@")
    if not name.startswith(("timm/", "hf/")) or not is_weight_file(file):
        return text, weights
    if weights is not None:
        raise ValueError(f"{given} names its weight file: leave out --weights")
    return name, file


def _set_layer_scale(model: nn.Module, value: float, trained: bool, name: str) -> None:
    """Fill the LayerScale parameters of a model with random weights."""
    if trained:
        raise ValueError(f"--layer_scale would change the weights of {name}: give --pretrained false too")
    scales: list[nn.Parameter] = []
    for module in model.modules():
        if type(module).__name__.endswith("LayerScale"):
            scales += module.parameters()
    if not scales:
        raise ValueError(f"{name} has no LayerScale: leave out --layer_scale")
    with torch.no_grad():
        for scale in scales:
            scale.fill_(value)


def _as_dtype(vit: ViT, dtype: str) -> ViT:
    """The weights of `vit` as `dtype`, which `opened` notes unless it is fp32."""
    if dtype != "fp32":
        vit.model.to(DTYPES[dtype])
        if vit.opened:
            vit.opened = {**vit.opened, "dtype": dtype}
    return vit


def tell_apart(views: Sequence[ViT]) -> list[ViT]:
    """The same views with distinct names: weight files of one name also get their folder, or else their whole path."""
    found = list(views)
    for whole_path in (False, True):
        counts = Counter(vit.name for vit in found)
        for i, vit in enumerate(found):
            weights = vit.opened.get("weights")
            if counts[vit.name] == 1 or not weights or vit.opened.get("name"):
                continue
            path = Path(weights).expanduser().resolve()
            place = str(path) if whole_path else f"{path.parent.name}/{path.stem}"
            found[i] = replace(vit, name=place)
    return found


def given_options(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def refuse_options(what: str, **options: Any) -> None:
    """Raise for options that would have no effect."""
    known = inspect.signature(open_vit).parameters
    names = []
    for name in given_options(**options):
        # Any other keyword is an argument of a model's constructor, so a misspelt option gets here too.
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if close and name not in known:
            raise ValueError(f"unknown option {name!r}: did you mean {close[0]!r}?")
        names.append(f"--{name}" if name in _FLAGS else name)
    if names:
        them = "them" if len(names) > 1 else "it"
        raise ValueError(f"{', '.join(names)} cannot be given for {what}: leave {them} out")
