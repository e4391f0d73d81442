"""Names of models: those that can be opened, those that a weight file fits, and what an unknown one is answered."""

from __future__ import annotations

import difflib
from pathlib import Path

import torch
from torch import Tensor

from raptor.files import read_json
from raptor.run import unfinished
from raptor.vit.builders import TIMM_MODULES, build_base
from raptor.vit.weights import classes_in_file, fit_weights, patch_weight, read_weights, size_in_file

ASSETS = Path(__file__).parents[1] / "assets"
"""The built-in models."""


def list_models(filter: str = "") -> list[str]:
    """Names that `open_vit` accepts and that contain `filter` (or match it, when it has a `*`)."""
    import timm

    built_in = ["scenes", *sorted(path.name for path in ASSETS.glob("scenes-*"))]
    pattern = filter if "*" in filter else f"*{filter}*"
    published = timm.list_models(pattern.removeprefix("timm/"), module=list(TIMM_MODULES), pretrained=True)
    names = [name for name in built_in if filter.strip("*") in name]
    return names + [f"timm/{name}" for name in published if "sam" not in name.split("_")[0]]


def models_for(weights: str | Path) -> list[str]:
    """The models of timm that a weight file fits, by every name and shape in it.

    Models that are alike in their weights may differ in how images are prepared, so that several fit. Where some are
    built for the file's own image size, only these are given.
    """
    import timm

    state = read_weights(weights)
    exact, resized = [], []
    for name in timm.list_models(module=list(TIMM_MODULES)):
        if not _may_fit(name, state):
            continue
        size = _size_of_fit(name, state)
        if size == "own":
            exact.append(f"timm/{name}")
        elif size == "other":
            resized.append(f"timm/{name}")
    return exact or resized


def _may_fit(name: str, state: dict[str, Tensor]) -> bool:
    """Whether the model's patches and width are the file's. One block is built, which takes some milliseconds."""
    try:
        with torch.device("meta"):
            model = build_base({"source": f"timm/{name}", "kwargs": {"depth": 1}, "num_classes": 0})
    except ValueError:  # a model whose blocks are listed one by one
        return True
    own = patch_weight(model.state_dict())
    return own is not None and any(tensor.shape == own.shape for tensor in state.values())


def _size_of_fit(name: str, state: dict[str, Tensor]) -> str | None:
    """Whether the file fits the model at the model's `own` image size or at an `other` one; None if it does not fit."""
    base = {"source": f"timm/{name}", "kwargs": {}, "num_classes": classes_in_file(state)}
    try:
        with torch.device("meta"):
            model = build_base(base)
        size = size_in_file(model, state)
        if size is not None:
            with torch.device("meta"):
                model = build_base({**base, "kwargs": {"img_size": size}})
        fit_weights(model, state, "")
    except ValueError:
        return None
    return "own" if size is None else "other"


def named_for(weights: str) -> str:
    """The only model that a weight file fits, as `timm/NAME@FILE`; ValueError where there is none, or more than one."""
    if not Path(weights).expanduser().is_file():
        raise ValueError(f"weights file {weights} does not exist: correct the path, or write timm/NAME for a model")
    fitting = models_for(weights)
    if not fitting:
        raise ValueError(f"{weights} fits no ViT of timm: give the module it is of, with the file as its weights")
    if len(fitting) > 1:
        others = f" and {len(fitting) - 4} more" if len(fitting) > 4 else ""
        raise ValueError(
            f"{weights} fits {', '.join(fitting[:4])}{others}, which may prepare images differently: "
            f"write {fitting[0]}@{weights} for the model it is of"
        )
    return f"{fitting[0]}@{weights}"


def unknown_model(text: str) -> str:
    """What to say of a name that stands for no model."""
    path = Path(text).expanduser()
    if path.is_dir():
        return unfinished(path) or _folder_without_model(path, text)
    import timm

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
