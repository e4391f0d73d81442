"""Build the plain model a name stands for, and read off it how images are prepared."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raptor.data.preprocess import Preprocess
from raptor.run import read_json

TIMM_MODULES = ("vision_transformer", "eva", "beit", "deit")
MAX_SIZE = 4096
MAX_DEPTH = 1024
MAX_COUNT = 2**20  # the largest number in a recorded configuration: tokens, widths, classes
# What a file may not give a model: it would fetch or run something, or belongs to whoever opens it.
UNTRUSTED_ARGUMENTS = {
    *("trust_remote_code", "code_revision", "revision", "auto_map", "use_kernels", "quantization_config"),
    *("attn_implementation", "_attn_implementation", "cache_dir", "token", "proxies", "checkpoint_path"),
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "device", "source", "teacher", "trust_hub"),
}
# Families of transformers that are normalised otherwise than for ImageNet, by how their model types start.
_HALF_FAMILIES = ("siglip", "beit", "data2vec-vision", "dpt", "idefics3", "smolvlm", "phi4_multimodal")
_CLIP_FAMILIES = ("blip", "git", "owlvit", "owlv2", "flava", "mlcd", "aimv2")
# Implementations of attention that a configuration file may ask for. Others are kernels, which transformers fetches
# from the hub and runs.
_OWN_ATTENTION = (None, "eager", "sdpa", "flex_attention")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def build_base(base: dict[str, Any], fetch: bool = False, trust_hub: bool = False) -> nn.Module:
    """The plain model named by `base` (source, arguments, class count), with published weights if `fetch`.

    Half-precision weights are widened to fp32. `trust_hub` allows a torch.hub entry, which runs code of its repository.
    """
    kind, _, rest = base["source"].partition("/")
    try:
        if kind == "timm":
            model = _build_timm(rest, base, fetch)
        elif kind == "hf":
            model = _build_transformers(rest, base, fetch)
        elif kind == "hub":
            model = _build_hub(rest, base, fetch, trust_hub)
        else:
            raise ValueError(f"unknown model {base['source']!r}: write timm/NAME, hf/REPO or hub/REPO:ENTRY")
        return model.float() if is_half(model) else model
    except ValueError:
        raise
    except (OSError, RuntimeError, AssertionError, ZeroDivisionError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        if not fetch:
            raise ValueError(f"{base['source']} could not be built ({reason}): change its shape") from None
        raise ValueError(
            f"the weights of {base['source']} could not be fetched ({reason}): "
            "give a local file with --weights, or --pretrained false for random ones"
        ) from None


def is_half(model: nn.Module) -> bool:
    """Whether any weight has fewer than 32 bits."""
    return any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())


def check_recorded(source: Any, kwargs: Any, where: str | Path, trust_hub: bool = False) -> None:
    """Raise unless `source` and `kwargs`, which were read from the file `where`, can be built without running its code.

    timm's names with arguments of its ViTs, transformers' own models with plain values, and saved folders. A torch.hub
    entry is code, so it needs `trust_hub`, which only a person can give.
    """
    if not isinstance(source, str) or not isinstance(kwargs, dict):
        raise ValueError(f"{where} does not say which model it was made from")
    kind = source.partition("/")[0]
    if kind == "hub" and not trust_hub:
        raise ValueError(f"{where} names {source}, which runs code: add --trust_hub if you trust it")
    allowed = _timm_arguments() if kind == "timm" else None
    for name, value in kwargs.items():
        if name in UNTRUSTED_ARGUMENTS or (allowed is not None and name not in allowed) or not _is_plain(value):
            raise ValueError(f"{where} gives {source} the argument {name}, which is not allowed in a file")
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise ValueError(f"{where} gives {source} {name}={value}, which is more than {MAX_COUNT}")


def check_memory(base: dict[str, Any]) -> None:
    """Raise for a recorded model that does not fit in this machine's memory, before any of it is taken."""
    source, kwargs = base.get("source"), base.get("kwargs") or {}
    values = [value for value in _numbers({**base, "kwargs": kwargs}) if isinstance(value, int | float)]
    depth = kwargs.get("depth")
    if any(not abs(value) <= MAX_COUNT for value in values) or (isinstance(depth, int) and depth > MAX_DEPTH):
        raise ValueError(f"{source} is recorded with a number beyond any model's: save it again, or fetch it again")
    if str(source).startswith("hub/") or all(abs(v) <= (2048 if isinstance(v, int) else 8) for v in values):
        return
    try:
        with torch.device("meta"):
            num = sum(p.numel() for p in build_base(dict(base)).parameters())
    except NotImplementedError:  # a model that reads its weights as it is built
        return
    if 4 * num > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise ValueError(f"{source} is recorded with {num:,} weights, more than this machine's memory holds")


def _numbers(config: Any) -> Iterator[Any]:
    """All values of nested dictionaries."""
    for value in config.values() if isinstance(config, dict) else ():
        yield from _numbers(value) if isinstance(value, dict) else [value]


@cache
def _timm_arguments() -> frozenset[str]:
    """Names of the arguments of timm's ViTs, without those that take a class or a function."""
    from timm.models import beit, deit, eva, vision_transformer

    kinds = (vision_transformer.VisionTransformer, deit.VisionTransformerDistilled, eva.Eva, beit.Beit)
    names = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    return frozenset(names - {"self", "args", "kwargs", "embed_layer", "block_fn", "mlp_layer", "attn_layer"})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _build_timm(name: str, base: dict[str, Any], fetch: bool) -> nn.Module:
    import timm

    if not timm.is_model(name.split(".")[0]):
        close = difflib.get_close_matches(name.split(".")[0], timm.list_models(module=list(TIMM_MODULES)), n=1)
        raise ValueError(
            f"timm has no model {name!r}" + (f": did you mean timm/{close[0]}?" if close else ": see raptor models")
        )
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
    if "trust_remote_code" in base["kwargs"]:
        raise ValueError("code from a repository is never run: load the model yourself and pass the module to open_vit")
    if "config" in base:
        config = transformers.AutoConfig.for_model(**_plain_config(base["config"]))
    else:
        config = transformers.AutoConfig.from_pretrained(repo, trust_remote_code=False, **base["kwargs"])
    _check_attention(config, repo)
    classifier = any("ForImageClassification" in a for a in config.architectures or [])
    if not classifier:
        config = getattr(config, "vision_config", config)
    config._name_or_path = repo
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
    if base.get("num_classes"):
        config.num_labels = base["num_classes"]
    auto = transformers.AutoModelForImageClassification if classifier else transformers.AutoModel
    if type(config) not in auto._model_mapping:
        kind = type(config).__name__
        raise ValueError(
            f"transformers has no {auto.__name__} for {kind}: load the model in Python and give the module"
        )
    if fetch:
        model, missing = _fetch_transformers(auto, repo, config)
        base["add_pooling_layer"] = not missing
    else:
        options = {} if base.get("add_pooling_layer", True) else {"add_pooling_layer": False}
        model = auto.from_config(config, trust_remote_code=False, **options)
    base["config"] = config.to_dict()
    return model


def _check_attention(config: Any, repo: str) -> None:
    """Raise where a configuration, or one inside it, asks for attention that is fetched from the hub."""
    for part in [config, *(getattr(config, name) for name in config.sub_configs)]:
        asked = getattr(part, "_attn_implementation", None)
        if asked not in _OWN_ATTENTION:
            raise ValueError(
                f"config.json of hf/{repo} asks for attention {asked!r}, which is code from the hub and never run: "
                "remove attn_implementation from it"
            )


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """A recorded configuration without what would fetch or run code: remote classes, kernels, quantisers."""
    return {
        name: _plain_config(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in UNTRUSTED_ARGUMENTS
    }


def _fetch_transformers(auto: Any, repo: str, config: Any) -> tuple[nn.Module, list[str]]:
    """The model with its published weights, and the keys of a pooler it was left without for want of weights."""
    _processor_file(repo, fetch=True)
    model, info = auto.from_pretrained(
        repo, config=config, output_loading_info=True, dtype=torch.float32, trust_remote_code=False
    )
    missing = sorted(info["missing_keys"])
    if missing and all(k.startswith("pooler.") for k in missing):
        options = dict(add_pooling_layer=False, dtype=torch.float32, trust_remote_code=False)
        return auto.from_pretrained(repo, config=config, **options), missing
    if missing:
        raise ValueError(f"the weights of hf/{repo} lack {', '.join(missing[:6])}: they would be random")
    return model, missing


def _build_hub(rest: str, base: dict[str, Any], fetch: bool, trust_hub: bool) -> nn.Module:
    repo, _, entry = rest.rpartition(":")
    if not repo:
        raise ValueError(f"hub/{rest} lacks its entry: write hub/REPO:ENTRY")
    if not trust_hub:
        raise ValueError(f"hub/{rest} runs the code of {repo}: add --trust_hub (trust_hub=True) if you trust it")
    where = "local" if Path(repo).is_dir() else "github"
    kwargs = dict(base["kwargs"])
    signature = "pretrained" not in kwargs
    try:
        return torch.hub.load(
            repo, entry, source=where, trust_repo=True, **({"pretrained": fetch} if signature else {}), **kwargs
        )
    except TypeError:
        return torch.hub.load(repo, entry, source=where, trust_repo=True, **kwargs)


def model_preprocess(model: nn.Module, size: int | None = None, blocks: str | None = None) -> Preprocess:
    """Mean, deviation and image size as the model states them, at the default size of docs/method.md.

    A module of one's own around a model of timm or transformers is prepared for as that model is: the first one, or the
    one that holds the block list at `blocks`.
    """
    modules = list(model.modules()) if blocks is None else _around(model, blocks)
    configs = [getattr(module, "config", None) for module in modules]
    stated = (getattr(one, "pretrained_cfg", None) for pair in zip(modules, configs) for one in pair)
    published: dict[str, Any] = next((found for found in stated if found), {})
    mean, std = (tuple(published.get(name, value)) for name, value in zip(("mean", "std"), IMAGENET))
    hf_config = next((config for config in configs if hasattr(config, "model_type")), None)
    if hf_config is not None:
        mean, std = _processor_statistics(hf_config, mean, std)
    return default_preprocess(model, size, mean, std)


def default_preprocess(
    model: nn.Module, size: int | None = None, mean: Any = IMAGENET[0], std: Any = IMAGENET[1]
) -> Preprocess:
    """Images at the default size for this model, or at `size`, normalised by ImageNet's statistics or by others."""
    check_size(size)
    return Preprocess.for_native(_native_size(model), mean, std, size=size)


def _around(model: nn.Module, blocks: str) -> list[nn.Module]:
    """The modules around the block list at `blocks`, from the outside in."""
    names = blocks.split(".")
    return [model.get_submodule(".".join(names[:end])) for end in range(len(names))]


def check_size(size: int | None) -> None:
    """Raise for an image size that no model takes; the memory of attention grows as its fourth power."""
    if size is not None and (not isinstance(size, int) or not 1 <= size <= MAX_SIZE):
        raise ValueError(f"images of {size} px are not possible: give a --size of 1..{MAX_SIZE}")


def _processor_statistics(config: Any, mean: Any, std: Any) -> tuple[Any, Any]:
    """Mean and deviation of a transformers model: its image processor's file, else the family's published ones.

    Images here are in 0..1: a processor that scales pixels in another way has its statistics scaled to that.
    """
    mean, std = _family_statistics(getattr(config, "model_type", ""), mean, std)
    file = _processor_file(getattr(config, "_name_or_path", ""))
    if file is None:
        return mean, std
    values = read_json(file, "fetch the model again")
    if values.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    else:
        mean, std = values.get("image_mean") or mean, values.get("image_std") or std
    factor = 1.0 if values.get("do_rescale") is False else values.get("rescale_factor") or 1 / 255
    scale = round(255 * factor, 9)
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _family_statistics(family: str, mean: Any, std: Any) -> tuple[Any, Any]:
    """The published mean and deviation of a family of transformers models; the given ones where there are none."""
    if family == "vit" or family.startswith(_HALF_FAMILIES):
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    if "clip" in family or family.startswith(_CLIP_FAMILIES):
        return (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return mean, std


def _processor_file(repo: str, fetch: bool = False) -> Path | None:
    """The image processor's settings of a local folder or of a repository: fetched, or as fetched before."""
    if not repo:
        return None
    from transformers.utils import cached_file

    quiet = ("missing_entries", "connection_errors", "gated_repo")
    try:
        found = cached_file(
            repo,
            "preprocessor_config.json",
            local_files_only=not fetch,
            **{f"_raise_exceptions_for_{name}": False for name in quiet},
        )
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _native_size(model: nn.Module) -> int:
    """The image size that the model, or the first part of it that says so, was made for; 224 when none says."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        candidates = [
            getattr(getattr(module, "patch_embed", None), "img_size", None),
            _size_of(getattr(module, "pretrained_cfg", None)) or _size_of(getattr(config, "pretrained_cfg", None)),
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


def _size_of(published: Any) -> Any:
    return published.get("input_size") if isinstance(published, dict) else None


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
