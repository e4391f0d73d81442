"""Facts that a model states about itself: image size and statistics, arguments of its calls, number of classes."""

from __future__ import annotations

import inspect
import math
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
# Families of transformers with other statistics than ImageNet's, by how their model types start.
_HALF_FAMILIES = ("siglip", "beit", "data2vec-vision", "dpt", "idefics3", "smolvlm", "phi4_multimodal")
_CLIP_FAMILIES = ("blip", "git", "owlvit", "owlv2", "flava", "mlcd", "aimv2")
_REMEDY = "fetch the model again"

Channels = tuple[float, float, float]
Statistics = tuple[Channels, Channels]
"""Mean and standard deviation of each channel, for pixels in 0..1."""


def model_preprocess(model: nn.Module, size: int | None = None, blocks: str | None = None) -> Preprocess:
    """Mean, deviation and image size as the model states them, at the default size of docs/method.md.

    A user's module may hold a model of timm or transformers, which then decides: the first one in it or, given the
    dotted path `blocks` of the block list, the outermost one around the blocks.
    """
    modules = list(model.modules())
    if blocks is not None:
        names = blocks.split(".")
        modules = [model.get_submodule(".".join(names[:end])) for end in range(len(names))]
    mean, std = _stated_statistics(modules)
    return Preprocess.for_native(native_size(model), mean, std, size=size)


def check_size(size: int | None) -> None:
    """Raise for an image size that no model takes; the memory of attention grows with its fourth power."""
    if size is not None and (not isinstance(size, int) or not 1 <= size <= MAX_SIZE):
        raise ValueError(f"images of {size} px are not possible: give a --size of 1..{MAX_SIZE}")


def _stated_statistics(modules: list[nn.Module]) -> Statistics:
    """The statistics of the first of these modules that is a model of timm or transformers, else ImageNet's."""
    mean, std = IMAGENET
    # Of a timm model inside transformers' wrapper these hold where the processor has no file.
    published = next(filter(None, map(_timm_config, modules)), {})
    if published:
        mean = tuple(published.get("mean", mean))
        std = tuple(published.get("std", std))
    configs = [getattr(module, "config", None) for module in modules]
    config: Any = next((config for config in configs if hasattr(config, "model_type")), None)
    if config is None:
        return mean, std
    family = str(config.model_type)
    if family == "vit" or family.startswith(_HALF_FAMILIES):
        mean, std = _HALF
    elif "clip" in family or family.startswith(_CLIP_FAMILIES):
        mean, std = _CLIP
    # The file beside the weights is nearer to them than what is published of their family.
    settings, file = processor_settings(getattr(config, "_name_or_path", ""))
    if not settings:
        return mean, std
    if settings.get("do_normalize") is False:
        mean = (0.0, 0.0, 0.0)
        std = (1.0, 1.0, 1.0)
    else:
        mean = _channels(settings.get("image_mean"), mean, "image_mean", file)
        std = _channels(settings.get("image_std"), std, "image_std", file)
    factor, _, _ = _channels(settings.get("rescale_factor"), (1 / 255, 1 / 255, 1 / 255), "rescale_factor", file)
    if settings.get("do_rescale") is False:
        factor = 1.0
    if factor <= 0 or min(std) <= 0:
        raise ValueError(f"{file} has a rescale_factor or an image_std that is not above 0: {_REMEDY}")
    # Pixels here are in 0..1; the processor's statistics are for pixels that it scales by its own factor.
    scale = round(255 * factor, 9)
    return (mean[0] / scale, mean[1] / scale, mean[2] / scale), (std[0] / scale, std[1] / scale, std[2] / scale)


def _timm_config(module: nn.Module) -> dict[str, Any] | None:
    """What timm publishes beside the weights of a model, also for a timm model inside transformers' wrapper."""
    config = getattr(module, "pretrained_cfg", None)
    return config or getattr(getattr(module, "config", None), "pretrained_cfg", None)


def _channels(value: Any, otherwise: Channels, name: str, file: Path | None) -> Channels:
    """A statistic of the three channels; a processor may give one number for all, or none."""
    if value is None:
        return otherwise
    values = value
    if not isinstance(value, list | tuple):
        values = [value] * 3
    numbers = [one for one in values if type(one) in (int, float) and math.isfinite(one)]
    if len(values) != 3 or len(numbers) != 3:
        raise ValueError(f"{file} has {name}={value!r}, not one number or three: {_REMEDY}")
    red, green, blue = numbers
    return red, green, blue


def split_revision(name: str) -> tuple[str, str | None]:
    """A repository and the revision after its `@`, None without one; the name of a local folder may contain an `@`."""
    if Path(name).expanduser().is_dir():
        return name, None
    repo, _, revision = name.partition("@")
    return repo, revision or None


def processor_settings(name: str, fetch: bool = False) -> tuple[dict[str, Any], Path | None]:
    """The settings of the image processor of a local folder or a repository, and their file; `({}, None)` without one.

    A repository is asked only if `fetch`; otherwise files that were fetched before are read.
    """
    repo, revision = split_revision(name)
    if not repo:
        return {}, None
    from transformers.utils import cached_file

    quiet = {f"_raise_exceptions_for_{problem}": False for problem in ("missing_entries", "connection_errors")}
    quiet["_raise_exceptions_for_gated_repo"] = False
    # transformers 5 writes them into the file of a whole processor, and reads this file before the older one.
    for file_name in ("processor_config.json", "preprocessor_config.json"):
        try:
            found = cached_file(repo, file_name, revision=revision, local_files_only=not fetch, **quiet)
        except (OSError, ValueError):
            continue
        if found is None:
            continue
        settings: Any = read_json(Path(found), _REMEDY)
        if file_name == "processor_config.json":
            settings = settings.get("image_processor")
        if isinstance(settings, dict):
            return settings, Path(found)
    return {}, None


def native_size(model: nn.Module) -> int:
    """The image size for which the model, or the first module in it that states a size, was made; 224 without any."""
    # The outermost module that states a size: a part of it may be made for crops.
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
    """Arguments of every call: interpolation of positions if it must be asked for, an order of patches for MAE."""
    accepted = inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {}
    if "interpolate_pos_encoding" in accepted and size != native_size(model):
        kwargs["interpolate_pos_encoding"] = True
    config: Any = getattr(model, "config", None)
    if "noise" in accepted and hasattr(config, "mask_ratio"):
        if config.mask_ratio:
            kind = type(model).__name__
            raise ValueError(f"{kind} hides {config.mask_ratio:.0%} of the patches: set its config.mask_ratio to 0")
        # Without it MAE shuffles the patches at random; noise that rises keeps their order.
        num_patches = (size // config.patch_size) ** 2
        kwargs["noise"] = torch.arange(num_patches, dtype=torch.float32)[None]
    return kwargs


def stated_classes(model: nn.Module) -> int:
    """The number of classes of the model's output as its own configuration states it; 0 if it states none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "id2label"):  # of transformers, where every model has labels but few have a classifier
        return int(config.num_labels) if "ForImageClassification" in type(model).__name__ else 0
    stated = getattr(model, "num_classes", None)
    # A bool is an int as well.
    if not isinstance(stated, int) or isinstance(stated, bool):
        return 0
    published = getattr(model, "pretrained_cfg", None) or {}
    if stated == published.get("num_classes") and not published.get("label_names"):
        from timm.data.imagenet_info import infer_imagenet_subset

        # A published head whose width is of no label set that timm knows is a projection, as CLIP's.
        if infer_imagenet_subset({"num_classes": stated}) is None:
            return 0
    return stated
