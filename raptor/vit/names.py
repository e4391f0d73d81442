"""Names of models: the names that can be opened, the models that a weight file fits, messages for unknown names."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

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
    exact = []
    resized = []
    # Several hundred architectures: first one block of each, then the whole model of the few that may fit.
    for name in timm.list_models(module=list(TIMM_MODULES)):
        base = Base(source=f"timm/{name}", num_classes=num_classes)
        if not _may_fit(base, state):
            continue
        try:
            model = _build_without_weights(base)
            size = size_in_file(model, state)
            if size is not None:
                model = _build_without_weights(replace(base, kwargs={"img_size": size}))
            fit_weights(model, state, "")
        except ValueError:
            continue
        if size is None:
            exact.append(f"timm/{name}")
        else:
            resized.append(f"timm/{name}")
    return exact or resized


def _build_without_weights(base: Base) -> nn.Module:
    # Shapes are enough, and memory for random weights is not taken.
    with torch.device("meta"):
        return build_base(base)


def _may_fit(base: Base, state: dict[str, Tensor]) -> bool:
    """Whether the model's patches and width are in the file. One block is built, which takes some milliseconds."""
    try:
        model = _build_without_weights(replace(base, kwargs={"depth": 1}, num_classes=0))
    except ValueError:  # a model that takes no depth
        return True
    own = patch_weight(model.state_dict())
    return own is not None and any(tensor.shape == own.shape for tensor in state.values())


def named_for(weights: str) -> str:
    """The only model that a weight file fits, as `timm/NAME@FILE`; ValueError if none or several fit."""
    # The name may only end like that of a file.
    if not Path(weights).expanduser().is_file():
        raise ValueError(f"weights file {weights} does not exist: correct the path, or write timm/NAME for a model")
    fitting = models_for(weights)
    if not fitting:
        raise ValueError(f"{weights} fits no ViT of timm: give the module it belongs to, with the file as its weights")
    # The weights do not say with which mean and deviation their images were prepared, so no guess is made.
    if len(fitting) > 1:
        others = ""
        if len(fitting) > 4:
            others = f" and {len(fitting) - 4} more"
        raise ValueError(
            f"{weights} fits {', '.join(fitting[:4])}{others}, which may prepare images differently: "
            f"write {fitting[0]}@{weights} for the model it belongs to"
        )
    return f"{fitting[0]}@{weights}"


def unknown_model(text: str) -> str:
    """The message about a name or a folder that is not a model."""
    import timm

    path = Path(text).expanduser()
    if path.is_dir():
        return unfinished(path) or _folder_without_model(path, text)

    known = ["scenes", *(f"timm/{name}" for name in timm.list_models(module=list(TIMM_MODULES)))]
    if timm.is_model(text.split(".")[0]):
        hint = f"did you mean 'timm/{text}'?"
    elif close := difflib.get_close_matches(text, known, n=1):
        hint = f"did you mean {close[0]!r}?"
    else:
        hint = "write timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes or a folder"
    return f"unknown model {text!r}: {hint}"


def _folder_without_model(path: Path, text: str) -> str:
    try:
        config = read_json(path / "config.json")
    except ValueError:
        config = {}
    if "model_type" in config or "architectures" in config:
        return f"{text} is a folder but holds no raptor model: write hf/{text} for a model of transformers"
    return f"{text} is a folder but holds no raptor model (no config.json of one): name the --out of distill"
