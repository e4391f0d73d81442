"""What a model states about itself: image size and statistics, the arguments of a call, the number of its classes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raptor.data.preprocess import Preprocess
from raptor.files import read_json

MAX_SIZE = 4096
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
# Families of transformers that are normalised otherwise than for ImageNet, by how their model types start.
_HALF_FAMILIES = ("siglip", "beit", "data2vec-vision", "dpt", "idefics3", "smolvlm", "phi4_multimodal")
_CLIP_FAMILIES = ("blip", "git", "owlvit", "owlv2", "flava", "mlcd", "aimv2")
_REMEDY = "fetch the model again"

Channels = tuple[float, float, float]
Statistics = tuple[Channels, Channels]
"""Mean and standard deviation of each channel, for pixels in 0..1."""


def model_preprocess(model: nn.Module, size: int | None = None, blocks: str | None = None) -> Preprocess:
    """Mean, deviation and image size as the model states them, at the default size of docs/method.md.

    A module of one's own around a model of timm or transformers is prepared for as that model is: the first one, or the
    one that holds the block list at `blocks`.
    """
    modules = list(model.modules()) if blocks is None else _around(model, blocks)
    return default_preprocess(model, size, _stated_statistics(modules))


def default_preprocess(model: nn.Module, size: int | None = None, statistics: Statistics = IMAGENET) -> Preprocess:
    """Images at the default size for this model, or at `size`, normalised by ImageNet's statistics or by others."""
    check_size(size)
    mean, std = statistics
    return Preprocess.for_native(_native_size(model), mean, std, size=size)


def _around(model: nn.Module, blocks: str) -> list[nn.Module]:
    """The modules around the block list at `blocks`, from the outside in."""
    names = blocks.split(".")
    return [model.get_submodule(".".join(names[:end])) for end in range(len(names))]


def check_size(size: int | None) -> None:
    """Raise for an image size that no model takes; the memory of attention grows as its fourth power."""
    if size is not None and (not isinstance(size, int) or not 1 <= size <= MAX_SIZE):
        raise ValueError(f"images of {size} px are not possible: give a --size of 1..{MAX_SIZE}")


def _stated_statistics(modules: list[nn.Module]) -> Statistics:
    """The statistics of the first of these modules that is a model of timm or transformers, else ImageNet's."""
    statistics = IMAGENET
    published = next(filter(None, (_timm_config(module) for module in modules)), None)
    if published is not None:
        statistics = (tuple(published.get("mean", IMAGENET[0])), tuple(published.get("std", IMAGENET[1])))
    configs = (getattr(module, "config", None) for module in modules)
    hf_config = next((config for config in configs if hasattr(config, "model_type")), None)
    return statistics if hf_config is None else _processor_statistics(hf_config, statistics)


def _timm_config(module: nn.Module) -> dict[str, Any] | None:
    """What timm publishes beside the weights of a model, also of one inside transformers' wrapper."""
    config = getattr(module, "pretrained_cfg", None)
    return config or getattr(getattr(module, "config", None), "pretrained_cfg", None)


def _processor_statistics(config: Any, statistics: Statistics) -> Statistics:
    """Those of a transformers model: of its image processor's file, else the family's published ones.

    Images here are in 0..1: a processor that scales pixels in another way has its statistics scaled to that.
    """
    mean, std = _family_statistics(getattr(config, "model_type", ""), statistics)
    settings, file = processor_settings(getattr(config, "_name_or_path", ""))
    if not settings:
        return mean, std
    if settings.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    else:
        mean = _channels(settings.get("image_mean") or mean, "image_mean", file)
        std = _channels(settings.get("image_std") or std, "image_std", file)
    factor = 1.0 if settings.get("do_rescale") is False else settings.get("rescale_factor") or 1 / 255
    scale = round(255 * factor, 9)
    return (mean[0] / scale, mean[1] / scale, mean[2] / scale), (std[0] / scale, std[1] / scale, std[2] / scale)


def _family_statistics(family: str, otherwise: Statistics) -> Statistics:
    """The published mean and deviation of a family of transformers models."""
    if family == "vit" or family.startswith(_HALF_FAMILIES):
        return _HALF
    if "clip" in family or family.startswith(_CLIP_FAMILIES):
        return _CLIP
    return otherwise


def _channels(value: Any, name: str, file: Path | None) -> Channels:
    """A statistic of each channel; a processor may give one number for all three."""
    values = [value] * 3 if isinstance(value, int | float) else value
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(isinstance(v, int | float) for v in values):
        raise ValueError(f"{file} has {name}={value!r}, not one number or three: {_REMEDY}")
    red, green, blue = values
    return red, green, blue


def split_revision(name: str) -> tuple[str, str | None]:
    """A repository and the revision that stands after its `@`; a local folder has none."""
    if Path(name).expanduser().is_dir():
        return name, None
    repo, _, revision = name.partition("@")
    return repo, revision or None


def processor_settings(name: str, fetch: bool = False) -> tuple[dict[str, Any], Path | None]:
    """The image processor's settings of a local folder or of a repository (fetched, or as fetched before), and the file
    they are from; no settings and None where there is no such file.

    transformers 5 writes them as one entry of the file of a whole processor, which goes before the older file.
    """
    repo, revision = split_revision(name)
    whole = _cached_file(repo, revision, "processor_config.json", fetch)
    if whole is not None:
        settings = read_json(whole, _REMEDY).get("image_processor")
        if isinstance(settings, dict):
            return settings, whole
    older = _cached_file(repo, revision, "preprocessor_config.json", fetch)
    return ({}, None) if older is None else (read_json(older, _REMEDY), older)


def _cached_file(repo: str, revision: str | None, name: str, fetch: bool) -> Path | None:
    if not repo:
        return None
    from transformers.utils import cached_file

    quiet = ("missing_entries", "connection_errors", "gated_repo")
    options: dict[str, Any] = {f"_raise_exceptions_for_{case}": False for case in quiet}
    try:
        found = cached_file(repo, name, revision=revision, local_files_only=not fetch, **options)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _native_size(model: nn.Module) -> int:
    """The image size that the model, or the first part of it that says so, was made for; 224 when none says."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        candidates = [
            getattr(getattr(module, "patch_embed", None), "img_size", None),
            (_timm_config(module) or {}).get("input_size"),
            getattr(config, "image_size", None),
            getattr(getattr(config, "vision_config", None), "image_size", None),
            getattr(module, "image_size", None),
        ]
        for value in candidates:
            if isinstance(value, int):
                return value
            if isinstance(value, tuple | list) and value:
                return int(value[-1])
    return 224


def forward_arguments(model: nn.Module, size: int) -> dict[str, Any]:
    """Arguments of every call: position interpolation where the model wants it said, patch order for MAE."""
    accepted = inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {}
    if "interpolate_pos_encoding" in accepted and size != _native_size(model):
        kwargs["interpolate_pos_encoding"] = True
    config: Any = getattr(model, "config", None)
    if "noise" in accepted and hasattr(config, "mask_ratio"):
        if config.mask_ratio:
            hides = f"{type(model).__name__} hides {config.mask_ratio:.0%} of the patches"
            raise ValueError(f"{hides}: set its config.mask_ratio to 0")
        num_patches = (size // config.patch_size) ** 2
        kwargs["noise"] = torch.arange(num_patches, dtype=torch.float32)[None]
    return kwargs


def stated_classes(model: nn.Module) -> int:
    """Number of classes that the model's own configuration gives its output; 0 where it states none.

    transformers: the labels of a model for image classification. Others: `num_classes`, except where timm publishes a
    head of that width for no label set that it knows, as for CLIP's projections.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "id2label"):
        return int(config.num_labels) if "ForImageClassification" in type(model).__name__ else 0
    stated = getattr(model, "num_classes", None)
    published = getattr(model, "pretrained_cfg", None) or {}
    if not isinstance(stated, int) or isinstance(stated, bool):
        return 0
    if stated == published.get("num_classes") and not published.get("label_names"):
        from timm.data.imagenet_info import infer_imagenet_subset

        return 0 if infer_imagenet_subset({"num_classes": stated}) is None else stated
    return stated
