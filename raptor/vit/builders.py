"""Build the plain model that a name stands for, by timm, transformers or torch.hub."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.utils._pytree import tree_leaves

from raptor.checks import near_miss
from raptor.vit.calls import reason_of
from raptor.vit.origin import Arguments, Base
from raptor.vit.stated import processor_settings, split_revision
from raptor.vit.weights import BLOCK_NUMBER

TIMM_MODULES = ("vision_transformer", "eva", "beit", "deit")
# Beyond these, a file is damaged or made to exhaust the machine. The largest ViTs have 64 blocks.
MAX_DEPTH = 1024
MAX_COUNT = 2**20  # the largest number in a recorded configuration: tokens, widths, classes
# Arguments that a file may not give a model: they fetch or run something, or are for the person who opens it to say.
UNTRUSTED_ARGUMENTS = {
    *("trust_remote_code", "code_revision", "revision", "auto_map", "use_kernels", "quantization_config"),
    *("attn_implementation", "_attn_implementation", "cache_dir", "token", "proxies", "checkpoint_path"),
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "device", "source", "teacher", "trust_hub"),
    *("self", "args", "kwargs", "embed_layer", "block_fn", "mlp_layer", "attn_layer"),
}
# Implementations of attention that a configuration file may ask for. Other names are kernels, which transformers would
# fetch from the hub and run.
_OWN_ATTENTION = (None, "eager", "sdpa", "flex_attention")
_QUANTISED = "the weights of hf/{} are quantised: name a repository with fp32, fp16 or bf16 ones"


def build_base(base: Base, fetch: bool = False, trust_hub: bool = False) -> nn.Module:
    """The plain model `base`, with published weights if `fetch`.

    Half-precision weights are widened to fp32. `trust_hub` allows a torch.hub entry, which runs code of its repository.
    A source may end in `@REVISION`, a commit, tag or branch of the hub's repository. Of a transformers model `base`
    keeps the configuration, so that it can be built again without its repository.
    """
    kind, _, rest = base.source.partition("/")
    if kind == "timm":
        model = _build_timm(rest, base, fetch)
    elif kind == "hf":
        model = _build_transformers(rest, base, fetch)
    elif kind == "hub":
        model = _build_hub(rest, base, fetch, trust_hub)
    else:
        raise ValueError(f"unknown model {base.source!r}: write timm/NAME, hf/REPO or hub/REPO:ENTRY")
    # Norms and errors are measured in fp32, and half weights would round each state before it is measured.
    if is_half(model):
        model.float()
    return model


@contextmanager
def _built_by_library(source: str, fetch: bool) -> Iterator[None]:
    """Inside the context every error becomes one line: libraries raise errors of any type on files that are damaged."""
    try:
        yield
    except Exception as error:
        reason = reason_of(error)[:120]
        if not fetch:
            raise ValueError(f"{source} could not be built ({reason}): correct its name or change its shape") from None
        raise ValueError(
            f"the weights of {source} could not be fetched ({reason}): "
            "give a local file with --weights, or --pretrained false for random ones"
        ) from None


def is_half(model: nn.Module) -> bool:
    """Whether any weight has fewer than 32 bits."""
    return any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())


def check_recorded(source: str, kwargs: Arguments, where: str | Path, trust_hub: bool = False) -> None:
    """Raise unless `source` and `kwargs`, which were read from the file `where`, can be built without running its code.

    timm's names with arguments of its ViTs, transformers' own models with plain values, and saved folders. A torch.hub
    entry is code, so it needs `trust_hub`, which only a person can give.
    """
    kind = source.partition("/")[0]
    if kind == "hub" and not trust_hub:
        raise ValueError(f"{where} names {source}, which runs code: add --trust_hub if you trust it")
    known = set(kwargs)
    if kind == "timm":
        from timm.models import beit, deit, eva, vision_transformer

        known = set()
        for vit in (vision_transformer.VisionTransformer, deit.VisionTransformerDistilled, eva.Eva, beit.Beit):
            known.update(inspect.signature(vit.__init__).parameters)
    for name, value in kwargs.items():
        values = [value]
        if isinstance(value, list | tuple):
            values = list(value)
        # A class or a function as an argument would be code of whoever wrote the file.
        is_plain = all(one is None or isinstance(one, bool | int | float | str) for one in values)
        if name in UNTRUSTED_ARGUMENTS or name not in known or not is_plain:
            raise ValueError(f"{where} gives {source} the argument {name}, which is not allowed in a file")
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise ValueError(f"{where} gives {source} {name}={value}, which is more than {MAX_COUNT}")


def check_memory(base: Base) -> None:
    """Raise for a recorded model that does not fit in this machine's memory, before any of it is taken."""
    numbers = [leaf for leaf in tree_leaves(asdict(base)) if isinstance(leaf, int | float)]
    depth = base.kwargs.get("depth")
    if any(abs(number) > MAX_COUNT for number in numbers) or (isinstance(depth, int) and depth > MAX_DEPTH):
        raise ValueError(
            f"{base.source} is recorded with a number beyond any model's: save it again, or fetch it again"
        )
    # Models of ordinary numbers are not counted, which takes up to a second; nor is an entry of torch.hub built twice.
    is_ordinary = all(abs(number) <= (2048 if isinstance(number, int) else 8) for number in numbers)
    if is_ordinary or base.source.startswith("hub/"):
        return
    try:
        # On meta a model takes no memory, however large the file says it is.
        with torch.device("meta"):
            num_weights = sum(p.numel() for p in build_base(replace(base)).parameters())
    except ValueError:  # such as a model that reads its weights as it is built, or one that its builder refuses
        return
    if 4 * num_weights > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise ValueError(
            f"{base.source} is recorded with {num_weights:,} weights, more than this machine's memory holds"
        )


def _build_timm(name: str, base: Base, fetch: bool) -> nn.Module:
    import timm

    name, _, revision = name.partition("@")
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        hint = near_miss(architecture, timm.list_models(module=list(TIMM_MODULES)), mark="timm/")
        raise ValueError(f"timm has no model {architecture!r}{hint or ': see raptor models'}")
    if tag and not timm.is_model_pretrained(f"{architecture}.{tag}"):
        tags = sorted(name.split(".", 1)[1] for name in timm.list_pretrained(f"{architecture}.*"))
        hint = f": its tags are {', '.join(tags)}" if tags else ""
        raise ValueError(f"timm has no weights '{architecture}.{tag}'{hint}")
    kwargs = timm_arguments(architecture, base)
    if revision and fetch:
        repository = getattr(timm.get_pretrained_cfg(name), "hf_hub_id", None)
        if not repository:
            raise ValueError(f"timm has no weights of {name!r} on the hub: leave out @{revision}")
        # timm prefers a url, which has no revisions.
        kwargs["pretrained_cfg_overlay"] = {"hf_hub_id": f"{repository}@{revision}", "url": ""}
    with _built_by_library(base.source, fetch):
        return timm.create_model(name, pretrained=fetch, **kwargs)


def timm_arguments(architecture: str, base: Base) -> Arguments:
    """The arguments of `timm.create_model` for the shape of `base`."""
    import timm

    kwargs = dict(base.kwargs)
    if base.num_classes is not None:
        kwargs["num_classes"] = base.num_classes
    # The default size is 224 also for models of another one, and only these families interpolate by themselves.
    if timm.model_entrypoint(architecture).__module__.rsplit(".", 1)[-1] in ("vision_transformer", "eva", "deit"):
        kwargs.setdefault("dynamic_img_size", True)
    return kwargs


def _build_transformers(name: str, base: Base, fetch: bool) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise ValueError("hf/ models need the extra: pip install 'raptor-vit[hf]'") from None
    if "trust_remote_code" in base.kwargs:
        raise ValueError("code from a repository is never run: load the model yourself and pass the module to open_vit")
    repo, revision = split_revision(name)
    if base.config is None:
        with _built_by_library(base.source, fetch):
            config = transformers.AutoConfig.from_pretrained(
                repo, revision=revision, trust_remote_code=False, **base.kwargs
            )
    else:
        config = transformers.AutoConfig.for_model(**_plain_config(base.config))
    # Before anything is built: transformers would fetch a kernel while it makes the attention layers.
    for part in [config, *(getattr(config, name) for name in config.sub_configs)]:
        asked = getattr(part, "_attn_implementation", None)
        if asked not in _OWN_ATTENTION:
            raise ValueError(
                f"config.json of hf/{repo} asks for attention {asked!r}, which is code from the hub and never run: "
                "remove attn_implementation from it"
            )
        depth = getattr(part, "num_hidden_layers", None)
        if isinstance(depth, int) and depth > MAX_DEPTH:  # without weights, building them would never end
            raise ValueError(f"config.json of hf/{repo} says {depth} layers, more than any model has: fetch it again")
        if getattr(part, "quantization_config", None):
            raise ValueError(_QUANTISED.format(repo))
    classifier = any("ForImageClassification" in str(name) for name in config.architectures or [])
    if not classifier:
        # Of a model of images and text only the images are studied.
        config = getattr(config, "vision_config", config)
    # MAE would drop three quarters of the patches, at random in each call.
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
    if base.num_classes:
        config.num_labels = base.num_classes
    auto: Any = transformers.AutoModel
    if classifier:
        auto = transformers.AutoModelForImageClassification
    if type(config) not in auto._model_mapping:
        kind = type(config).__name__
        raise ValueError(
            f"transformers has no {auto.__name__} for {kind}: load the model in Python and give the module"
        )
    if fetch:
        model = _fetch_transformers(auto, repo, config, base, revision)
        processor_settings(name, fetch=True)
    else:
        options: Arguments = {}
        if not base.add_pooling_layer:
            options["add_pooling_layer"] = False
        with _built_by_library(base.source, fetch):
            model = auto.from_config(config, trust_remote_code=False, **options)
    model.config._name_or_path = name  # with its revision, for the settings of the image processor
    # A saved surrogate must be built again without the repository, which may change or go.
    base.config = config.to_dict()
    return model


def _plain_config(config: dict[str, Any]) -> Arguments:
    """A recorded configuration without entries that fetch or run code: remote classes, kernels, quantisers."""
    plain = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = _plain_config(value)
        if name not in UNTRUSTED_ARGUMENTS:
            plain[name] = value
    return plain


def _fetch_transformers(auto: Any, repo: str, config: Any, base: Base, revision: str | None) -> Any:
    """The model with its published weights; without its pooler, which `base` notes, if these have none for it."""
    from transformers.utils import cached_file

    options: Arguments = dict(config=config, revision=revision, dtype=torch.float32, trust_remote_code=False)
    with _built_by_library(base.source, fetch=True):
        model, info = auto.from_pretrained(repo, output_loading_info=True, **options)
        folder = Path(str(cached_file(repo, "config.json", revision=revision, local_files_only=True))).parent
    # Without a quantization_config transformers takes numbers of 8 bits for the weights, without their scales.
    whole = folder / "model.safetensors"
    for path in [whole] if whole.exists() else sorted(folder.glob("model-*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                if file.get_slice(key).get_dtype() in ("I8", "U8", "F8_E4M3", "F8_E5M2"):
                    raise ValueError(_QUANTISED.format(repo))
    missing = sorted(info["missing_keys"])
    # Many models are published without the pooler that their class has.
    if missing and all(key.startswith("pooler.") for key in missing):
        base.add_pooling_layer = False
        with _built_by_library(base.source, fetch=True):
            return auto.from_pretrained(repo, add_pooling_layer=False, **options)
    if missing:
        raise ValueError(f"the weights of hf/{repo} lack {', '.join(missing[:6])}: they would be random")
    own = model.state_dict()
    for key in info["unexpected_keys"]:
        # A text encoder or a decoder beside the model is left out. Blocks of its own list are only if the caller asks
        # for fewer.
        block = BLOCK_NUMBER.search(key)
        if block and not base.kwargs and any(name.startswith(key[: block.start(1)]) for name in own):
            raise ValueError(
                f"the weights of hf/{repo} hold {key}, for which its config.json has no block: fetch the model again"
            )
    return model


def _build_hub(rest: str, base: Base, fetch: bool, trust_hub: bool) -> nn.Module:
    repo, _, entry = rest.rpartition(":")
    if not repo:
        raise ValueError(f"hub/{rest} lacks its entry: write hub/REPO:ENTRY")
    if not trust_hub:
        raise ValueError(f"hub/{rest} runs the code of {repo}: add --trust_hub (trust_hub=True) if you trust it")
    where = "local"
    if not Path(repo).is_dir():
        where = "github"
        repo = repo.replace("@", ":")  # torch.hub's own way to name a revision
    kwargs = {"pretrained": fetch, **base.kwargs}
    with _built_by_library(base.source, fetch):
        try:
            # The person was asked above. torch would ask again in the terminal, where a job has nobody to answer.
            return torch.hub.load(repo, entry, source=where, trust_repo=True, **kwargs)
        except TypeError:  # an entry without such an argument
            return torch.hub.load(repo, entry, source=where, trust_repo=True, **base.kwargs)
