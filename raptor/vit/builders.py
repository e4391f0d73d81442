"""Build the plain model a name stands for, and read off it how images are prepared."""

from __future__ import annotations

import difflib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raptor.data.preprocess import Preprocess

TIMM_MODULES = ("vision_transformer", "eva", "beit", "deit")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def build_base(base: dict[str, Any], fetch: bool = False) -> nn.Module:
    """The plain model named by `base` (source, arguments, class count), with published weights if `fetch`."""
    kind, _, rest = base["source"].partition("/")
    try:
        if kind == "timm":
            return _build_timm(rest, base, fetch)
        if kind == "hf":
            return _build_transformers(rest, base, fetch)
        return _build_hub(rest, base, fetch)
    except ValueError:
        raise
    except (OSError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        if not fetch:
            raise ValueError(f"{base['source']} could not be built ({reason})") from None
        raise ValueError(
            f"the weights of {base['source']} could not be fetched ({reason}): "
            "give a local file with --weights, or --pretrained false for random ones"
        ) from None


def _build_timm(name: str, base: dict[str, Any], fetch: bool) -> nn.Module:
    import timm

    if not timm.is_model(name.split(".")[0]):
        close = difflib.get_close_matches(name.split(".")[0], timm.list_models(module=list(TIMM_MODULES)), n=1)
        raise ValueError(f"timm has no model {name!r}" + (f": did you mean timm/{close[0]}?" if close else ""))
    if "." in name and not timm.is_model_pretrained(name):
        tags = sorted(n.split(".", 1)[1] for n in timm.list_pretrained(name.split(".")[0] + ".*"))
        raise ValueError(f"timm has no weights {name!r}" + (f": its tags are {', '.join(tags)}" if tags else ""))
    kwargs = dict(base["kwargs"])
    if base.get("num_classes") is not None:
        kwargs["num_classes"] = base["num_classes"]
    module = timm.model_entrypoint(name.split(".")[0]).__module__.rsplit(".", 1)[-1]
    if module in ("vision_transformer", "eva", "deit"):
        kwargs.setdefault("dynamic_img_size", True)
    return timm.create_model(name, pretrained=fetch, **kwargs)


def _build_transformers(repo: str, base: dict[str, Any], fetch: bool) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise ValueError("hf/ models need the extra: pip install 'raptor-vit[hf]'") from None
    if "config" in base:
        config = transformers.AutoConfig.for_model(**base["config"])
    else:
        config = transformers.AutoConfig.from_pretrained(repo, **base["kwargs"])
    config = getattr(config, "vision_config", config)
    config._name_or_path = repo
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
    if base.get("num_classes"):
        config.num_labels = base["num_classes"]
    classifier = any("ForImageClassification" in a for a in config.architectures or [])
    auto = transformers.AutoModelForImageClassification if classifier else transformers.AutoModel
    if fetch:
        model, missing = _fetch_transformers(auto, repo, config)
        base["add_pooling_layer"] = not missing
    else:
        options = {} if base.get("add_pooling_layer", True) else {"add_pooling_layer": False}
        model = auto.from_config(config, **options)
    base["config"] = config.to_dict()
    return model


def _fetch_transformers(auto: Any, repo: str, config: Any) -> tuple[nn.Module, list[str]]:
    """The model with its published weights, and the keys of a pooler it was left without for want of weights."""
    _processor_file(repo, fetch=True)
    model, info = auto.from_pretrained(repo, config=config, output_loading_info=True)
    missing = sorted(info["missing_keys"])
    if missing and all(k.startswith("pooler.") for k in missing):
        return auto.from_pretrained(repo, config=config, add_pooling_layer=False), missing
    if missing:
        raise ValueError(f"the weights of hf/{repo} lack {', '.join(missing[:6])}: they would be random")
    return model, missing


def _build_hub(rest: str, base: dict[str, Any], fetch: bool) -> nn.Module:
    repo, _, entry = rest.rpartition(":")
    if not repo:
        raise ValueError(f"hub/{rest} lacks its entry: write hub/REPO:ENTRY")
    where = "local" if Path(repo).is_dir() else "github"
    kwargs = dict(base["kwargs"])
    signature = "pretrained" not in kwargs
    try:
        return torch.hub.load(repo, entry, source=where, **({"pretrained": fetch} if signature else {}), **kwargs)
    except TypeError:
        return torch.hub.load(repo, entry, source=where, **kwargs)


def model_preprocess(model: nn.Module, size: int | None = None) -> Preprocess:
    """Mean, deviation and image size as the model states them, at SPEC's default size."""
    mean, std = IMAGENET
    config = getattr(model, "pretrained_cfg", None) or {}
    mean, std = tuple(config.get("mean", mean)), tuple(config.get("std", std))
    hf_config = getattr(model, "config", None)
    if hf_config is not None:
        mean, std = _processor_statistics(hf_config, mean, std)
    return Preprocess.for_native(_native_size(model), mean, std, size=size)


def _processor_statistics(config: Any, mean: Any, std: Any) -> tuple[Any, Any]:
    """Mean and deviation of a transformers model: its image processor's file, else the family's published ones."""
    family = getattr(config, "model_type", "")
    file = _processor_file(getattr(config, "_name_or_path", ""))
    if file is not None:
        values = json.loads(file.read_text())
        return tuple(values.get("image_mean", mean)), tuple(values.get("image_std", std))
    if "clip" in family:
        return (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    if "siglip" in family or family in ("vit", "deit", "beit"):
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    return mean, std


def _processor_file(repo: str, fetch: bool = False) -> Path | None:
    """The image processor's settings of a local folder or of a repository: fetched, or as fetched before."""
    if not repo:
        return None
    from transformers.utils import cached_file

    quiet = ("missing_entries", "connection_errors", "gated_repo")
    try:
        found = cached_file(
            repo, "preprocessor_config.json", local_files_only=not fetch,
            **{f"_raise_exceptions_for_{name}": False for name in quiet},
        )  # fmt: skip
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _native_size(model: nn.Module) -> int:
    """The image size the model was made for; 224 when it does not say."""
    candidates = [
        getattr(getattr(model, "patch_embed", None), "img_size", None),
        (getattr(model, "pretrained_cfg", None) or {}).get("input_size"),
        getattr(getattr(model, "config", None), "image_size", None),
        getattr(model, "image_size", None),
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
        num_patches = (size // config.patch_size) ** 2
        kwargs["noise"] = torch.arange(num_patches, dtype=torch.float32)[None]
    return kwargs


def is_embedding_head(name: str) -> bool:
    """Whether the head of this timm name is CLIP's projection, whose output holds no classes."""
    return name.startswith("timm/") and "_clip_" in name and "_ft_" not in name
