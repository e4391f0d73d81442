"""Names of models: the names that can be opened, the models that a weight file fits, messages for unknown names."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from raptor.checks import model_name
from raptor.files import read_json
from raptor.run import unfinished
from raptor.vit.builders import TIMM_MODULES, build_base
from raptor.vit.origin import Base
from raptor.vit.weights import classes_in_file, fit_weights, patch_weight, read_weights, size_in_file

ASSETS = Path(__file__).parents[1] / "assets"
"""The built-in models."""


def list_models(filter: str = "") -> list[str]:
    """Names that `open_vit` accepts and that contain `filter`, or match it if it has a `*`."""
    import timm

    built_in = ["scenes", *sorted(path.name for path in ASSETS.glob("scenes-*"))]
    names = [name for name in built_in if filter.strip("*") in name]
    pattern = filter if "*" in filter else f"*{filter}*"
    for name in timm.list_models(pattern.removeprefix("timm/"), module=list(TIMM_MODULES), pretrained=True):
        if "sam" not in name.split("_")[0]:  # SAM's windows change the shape of the states
            names.append(f"timm/{name}")
    return names


def models_for(weights: str | Path) -> list[str]:
    """The models of timm that a weight file fits, by every name and shape in it.

    Models with weights of the same names and shapes may prepare images differently, so several may fit. Models that are
    built for the file's own image size, if there are any, exclude the others.
    """
    import timm

    state = read_weights(weights)
    # A head of another width would make every model misfit.
    num_classes = classes_in_file(state)
    shapes = {tensor.shape for tensor in state.values()}

    def build(**kwargs: Any) -> nn.Module:
        # Shapes are enough, and memory for random weights is not taken.
        with torch.device("meta"):
            return build_base(Base(source=f"timm/{name}", num_classes=num_classes, kwargs=kwargs))

    exact = []
    resized = []
    for name in timm.list_models(module=list(TIMM_MODULES)):
        # Several hundred architectures: first one block of each, then the whole model of the few that may fit.
        with suppress(ValueError):  # a model that takes no depth
            patches = patch_weight(build(depth=1).state_dict())
            if patches is None or patches.shape not in shapes:
                continue
        try:
            model = build()
            size = size_in_file(model, state)
            if size is not None:
                model = build(img_size=size)
            fit_weights(model, state, "")
        except ValueError:
            continue
        if size is None:
            exact.append(f"timm/{name}")
        else:
            resized.append(f"timm/{name}")
    return exact or resized


def named_for(weights: str) -> str:
    """The only model that a weight file fits, as `timm/NAME@FILE`; ValueError if none or several fit."""
    model_name(weights)  # it may only end like the name of a file
    fitting = models_for(weights)
    if not fitting:
        raise ValueError(f"{weights} fits no ViT of timm: give the module it belongs to, with the file as its weights")
    # The weights do not say with which mean and deviation their images were prepared, so no guess is made.
    if len(fitting) > 1:
        others = f" and {len(fitting) - 4} more" if len(fitting) > 4 else ""
        raise ValueError(
            f"{weights} fits {', '.join(fitting[:4])}{others}, which may prepare images differently: "
            f"write {fitting[0]}@{weights} for the model it belongs to"
        )
    return f"{fitting[0]}@{weights}"


def refuse_name(text: str) -> NoReturn:
    """Raise for a name or a folder that is not a model, and say what may have been meant."""
    path = Path(text).expanduser()
    if path.is_dir():
        reason = (
            f"{text} is a folder but holds no raptor model (no config.json of one): name the --out of distill, or give "
            f"images as --data {text}"
        )
        with suppress(ValueError):  # without a config.json, or with a damaged one
            if {"model_type", "architectures"} & read_json(path / "config.json").keys():
                reason = f"{text} is a folder but holds no raptor model: write hf/{text} for a model of transformers"
        raise ValueError(unfinished(path) or reason)
    model_name(text)
    raise ValueError(f"unknown model {text!r}: write timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes or a folder")
