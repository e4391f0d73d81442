"""open_vit: a view from a name, a file, a folder or a module.

timm/NAME            any timm model, e.g. timm/vit_base_patch14_reg4_dinov2.lvd142m
hf/REPO              a transformers model, from the hub or a local folder
hub/REPO:ENTRY       a torch.hub entry, e.g. hub/facebookresearch/dinov2:dinov2_vitb14_reg
scenes               the built-in teacher; scenes-k2 and scenes-k3 are its shipped surrogates
FILE                 a weight file that fits one model of timm
FOLDER               a run folder or a saved model: a surrogate or a trained teacher
an nn.Module         a model of your own
a result             the surrogate that distill gave, or the model in a result's run folder
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from raptor.data.preprocess import Preprocess
from raptor.devices import torch_defaults
from raptor.streaming import Result, folder_of
from raptor.vit.builders import build_base, is_half
from raptor.vit.calls import copied
from raptor.vit.names import named_for, refuse_name
from raptor.vit.origin import Arguments, Base, Opened, Origin, Structure
from raptor.vit.saved import load_saved, resized, saved_folder
from raptor.vit.stated import check_size, model_preprocess, native_size
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

_FLAGS = {"weights", "pretrained", "layer_scale", "size", "trust_hub"}
"""The options that are flags of commands, too."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@torch_defaults()
def open_vit(
    source: Source | Result,
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
    preprocess: Preprocess | None = None,
    teacher: nn.Module | ViT | None = None,
    dtype: str = "fp32",
    trust_hub: bool = False,
    name: str | None = None,
    device: str | torch.device | None = None,
    **model_kwargs: Any,
) -> ViT:
    """A view over any Vision Transformer.

    Args:
        source: `timm/NAME`, `hf/REPO`, `hub/REPO:ENTRY`, `scenes`, a folder, a module, or what `distill` gave (see the
            module's docstring).
            `NAME@FILE` is the model NAME with the weight file FILE; `timm/NAME@REVISION`, `hf/REPO@REVISION` and
            `hub/REPO@REVISION:ENTRY` name a commit, tag or branch of the hub.
        weights: a local weight file (safetensors or weights-only .pth) instead of the hub's.
        pretrained: with no `weights`, whether to fetch the published ones; False gives random weights.
        layer_scale: what every LayerScale of a model with random weights starts from, instead of its own value.
        size: image size; by default 224, or the model's own where that is smaller.
        num_classes: classes of the head; by default the published ones, or what the weight file holds.
        blocks, norm, head: dotted paths in a model whose structure cannot be guessed.
        cls, registers: counts of these tokens, where they cannot be guessed.
        head_classes: number of class scores that the model gives, where its configuration does not say; 0 for none.
        preprocess: how images are prepared, where the model does not say.
        teacher: the module a surrogate of your own module was made from.
        dtype: type of the weights: fp32, also where they are stored in half precision, or bf16 or fp16. A module of
            your own in half precision is copied, not changed.
        trust_hub: run the code of a torch.hub repository, for `hub/REPO:ENTRY`.
        name: the name of the model in titles, figures and files; by default the weight file's stem, else `source`.
        device: the device of the model; by default a module or an opened model stays on its own, others are on the CPU.
        model_kwargs: further arguments of the model's constructor (timm) or configuration (transformers).
    """
    check_size(size)
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    for option in model_kwargs:
        # The model's constructor would refuse it with a message about something else.
        if close := difflib.get_close_matches(option, inspect.signature(open_vit).parameters, n=1, cutoff=0.8):
            raise ValueError(f"unknown option {option!r}: did you mean {close[0]!r}?")
    structure = Structure(blocks=blocks, norm=norm, head=head, cls=cls, registers=registers, head_classes=head_classes)
    building: Arguments = dict(num_classes=num_classes, layer_scale=layer_scale, **model_kwargs)
    if not pretrained:
        building["pretrained"] = False
    if isinstance(source, Result):
        source = _model_of(source)
    if isinstance(source, ViT):
        # Its structure has been found already: other options would describe another model.
        options = dict(weights=weights, size=size, preprocess=preprocess, name=name, **vars(structure), **building)
        if dtype != "fp32":
            options["dtype"] = dtype
        refuse_options("a model that is already opened", **options)
        return source if device is None else source.to(device)
    if isinstance(source, nn.Module):
        refuse_options("a module of your own", **building)
        vit = _open_module(source, dtype, name, weights, size, preprocess, structure)
    elif callable(source):
        named = getattr(source, "__name__", type(source).__name__)
        raise ValueError(f"{named} makes a model but is none: call it, as in open_vit({named}())")
    else:
        text, weights = _split_source(str(source), weights)
        folder = saved_folder(text)
        opened = Opened(model=text, weights=weights, size=size)
        # A folder comes first, so that a run called `timm` or `scenes` is still that run.
        if folder is not None:
            refuse_options(f"{text}, which is saved with its own", preprocess=preprocess, **vars(structure), **building)
            vit = load_saved(folder, teacher=teacher, size=size, weights=weights, trust_hub=trust_hub)
            vit.name = name or vit.name
        else:
            opened = replace(
                opened,
                pretrained=pretrained,
                layer_scale=layer_scale,
                num_classes=num_classes,
                preprocess=preprocess,
                structure=structure,
                name=name,
                kwargs=model_kwargs,
            )
            vit = _open_library(opened, trust_hub)
        vit.opened = replace(opened, fingerprint=fingerprint(vit.model))
    if dtype != "fp32":
        # Last of all, so that structure and fingerprint are those of the fp32 weights.
        vit.model.to(DTYPES[dtype])
        vit.opened = replace(vit.opened, dtype=dtype)
    return vit.to(device or vit.device)


def _model_of(result: Result) -> Source:
    """What a result stands for: the surrogate that a distillation made, or the model in its run folder."""
    made = getattr(result, "surrogate", None)
    if isinstance(made, ViT):
        return made
    folder = folder_of(result)
    if isinstance(folder, Result):
        raise ValueError(f"a {type(result).__name__} holds no model: give what distill returned, or a run folder")
    return folder


def _open_library(opened: Opened, trust_hub: bool) -> ViT:
    """The view over a model of timm, transformers or torch.hub."""
    text = opened.model
    assert text is not None
    kind, _, rest = text.partition("/")
    if kind not in ("timm", "hf", "hub") or not rest:
        refuse_name(text)
    # The revision would be ignored without a word.
    if kind == "timm" and "@" in rest and (opened.weights or not opened.pretrained):
        raise ValueError(f"{text} names a revision of published weights: leave out --weights and --pretrained false")
    base = Base(source=text, kwargs=dict(opened.kwargs), num_classes=opened.num_classes)
    model = _build(base, opened.weights, opened.pretrained, trust_hub)
    if opened.layer_scale is not None:
        if opened.pretrained or opened.weights:
            remedy = "leave it out" if opened.weights else "give --pretrained false too"
            raise ValueError(f"--layer_scale would change the weights of {text}: {remedy}")
        # transformers puts the family before the name, as in Dinov2LayerScale.
        scaling = [module for module in model.modules() if type(module).__name__.endswith("LayerScale")]
        if not scaling:
            raise ValueError(f"{text} has no LayerScale: leave out --layer_scale")
        for module in scaling:
            for scale in module.parameters():
                nn.init.constant_(scale, opened.layer_scale)
    name = text
    if opened.weights:
        name = Path(opened.weights).stem
    elif not opened.pretrained:
        name = f"{text} (untrained)"  # so that no result passes for the published weights'
    if opened.preprocess is None:
        images = model_preprocess(model, opened.size)
    else:
        images = resized(opened.preprocess, opened.size)
    return inspect_vit(model, opened.name or name, images, opened.structure, Origin(base=base))


def _build(base: Base, weights: str | None, pretrained: bool, trust_hub: bool) -> nn.Module:
    """The model of a library with the weights of a file, the published ones, or random ones."""
    if weights is None:
        return build_base(base, fetch=pretrained, trust_hub=trust_hub)
    state = read_weights(weights)
    if base.num_classes is None:
        # The head of the file must fit, and the published one may have another width.
        base.num_classes = classes_in_file(state)
    model = build_base(base, trust_hub=trust_hub)
    own_size = size_in_file(model, state)
    if own_size is not None and "img_size" not in base.kwargs:
        # Built for the file's own size, positions are interpolated once: to the size of the images.
        base.kwargs["img_size"] = own_size
        model = build_base(base, trust_hub=trust_hub)
    load_weights(model, state, weights)
    return model


def _open_module(
    module: nn.Module,
    dtype: str,
    name: str | None,
    weights: str | None,
    size: int | None,
    preprocess: Preprocess | None,
    structure: Structure,
) -> ViT:
    """The view over a module of the user's own, with the weights of a file if one is given."""
    kind = type(module).__name__
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise ValueError(f"{kind} has weights that its first call makes: call it once with images, then open it")
    made_for_inference = any(tensor.is_inference() for tensor in chain(module.parameters(), module.buffers()))
    # The module belongs to the user, whose own precision must not change. Of tensors that were made inside of
    # `torch.inference_mode` torch refuses views, and a copy of one is an ordinary one.
    if dtype != "fp32" or is_half(module) or made_for_inference:
        module = copied(module, kind)
    if is_half(module):
        module.float()
    if weights is not None:
        load_weights(module, read_weights(weights), weights)
    images = Preprocess.for_native(native_size(module), size=size)
    if preprocess is not None:
        images = resized(preprocess, size)
    vit = inspect_vit(module, name or kind, images, structure, Origin())
    if preprocess is None:  # there may be other models beside the one around the blocks
        vit.preprocess = model_preprocess(module, size, vit.blocks_path)
    vit.opened = Opened(weights=weights)
    return vit


def _split_source(text: str, weights: str | None) -> tuple[str, str | None]:
    """The name of a model and its weight file, from `NAME@FILE` or from a file by itself."""
    path = Path(text).expanduser()
    if path.is_dir():  # its name may have an `@`
        return text, weights
    given = text
    if path.is_file() or (is_weight_file(text) and "@" not in text):
        text = named_for(text)
        print(f"{given} fits {text.partition('@')[0]} alone: opened as that model", file=sys.stderr)
    name, _, file = text.partition("@")
    if not is_weight_file(file):
        return text, weights
    if weights is not None:
        raise ValueError(f"{given} names its weight file: leave out --weights")
    return name, file


def tell_apart(views: Sequence[ViT]) -> list[ViT]:
    """The same views with distinct names: weight files of one name also get their folder, or else their whole path."""
    found = list(views)
    # Two runs often hold weight files of one name, such as `best.pth`, and figures tell models apart by name.
    for whole_path in (False, True):
        counts = Counter(vit.name for vit in found)
        for i, vit in enumerate(found):
            weights = vit.opened.weights
            if counts[vit.name] == 1 or not weights or vit.opened.name:
                continue
            path = Path(weights).expanduser().resolve()
            place = str(path) if whole_path else f"{path.parent.name}/{path.stem}"
            found[i] = replace(vit, name=place)
    return found


def refuse_options(what: str, **options: Any) -> None:
    """Raise for options that would have no effect."""
    names = [f"--{name}" if name in _FLAGS else name for name, value in options.items() if value is not None]
    if names:
        them = "them" if len(names) > 1 else "it"
        raise ValueError(f"{', '.join(names)} cannot be given for {what}: leave {them} out")
