"""open_vit: names, files, folders and modules to a view.

timm/NAME            any timm model, e.g. timm/vit_base_patch14_reg4_dinov2.lvd142m
hf/REPO              a transformers model, from the hub or a local folder
hub/REPO:ENTRY       a torch.hub entry, e.g. hub/facebookresearch/dinov2:dinov2_vitb14_reg
scenes               the built-in teacher; scenes-k2 and scenes-k3 are its shipped surrogates
FOLDER               a run folder or a saved model: a surrogate or a trained teacher
an nn.Module         a model of your own
"""

from __future__ import annotations

import difflib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from raptor.data.preprocess import Preprocess
from raptor.structure import inspect_vit
from raptor.surrogate import make_surrogate
from raptor.vit import ViT
from raptor.weights import head_classes, load_weights, read_weights

ASSETS = Path(__file__).parent / "assets"
TIMM_MODULES = ("vision_transformer", "eva", "beit", "deit")
FORMAT = "raptor-vit/1"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def open_vit(
    source: str | Path | nn.Module | ViT,
    *,
    weights: str | None = None,
    pretrained: bool = True,
    size: int | None = None,
    num_classes: int | None = None,
    blocks: str | None = None,
    norm: str | None = None,
    head: str | None = None,
    cls: int | None = None,
    registers: int | None = None,
    preprocess: Preprocess | None = None,
    teacher: nn.Module | ViT | None = None,
    device: str | torch.device = "cpu",
    **model_kwargs: Any,
) -> ViT:
    """A view over any Vision Transformer.

    Args:
        source: `timm/NAME`, `hf/REPO`, `hub/REPO:ENTRY`, `scenes`, a folder, or a module (see the module's docstring).
        weights: a local weight file (safetensors or weights-only .pth) instead of the hub's.
        pretrained: with no `weights`, whether to fetch the published ones; False gives random weights.
        size: image size; by default 224, or the model's own where that is smaller.
        num_classes: classes of the head; by default the published ones, or what the weight file holds.
        blocks, norm, head: dotted paths in a model whose structure cannot be guessed.
        cls, registers: counts of these tokens, where they cannot be guessed.
        preprocess: how images are prepared, where the model does not say.
        teacher: the module a surrogate of your own module was made from.
        model_kwargs: further arguments of the model's constructor (timm) or configuration (transformers).
    """
    if isinstance(source, ViT):
        return source.to(device)
    given: dict[str, Any] = dict(blocks=blocks, norm=norm, head=head, cls=cls, registers=registers)
    if isinstance(source, nn.Module):
        if weights is not None:
            load_weights(source, read_weights(weights), weights)
        images = preprocess or model_preprocess(source, size)
        arguments = forward_arguments(source, images.size)
        return inspect_vit(source, type(source).__name__, images, forward_kwargs=arguments, **given).to(device)
    text = str(source)
    folder = saved_folder(text)
    if folder is not None:
        return load_saved(folder, teacher=teacher, size=size, weights=weights).to(device)
    kind, _, rest = text.partition("/")
    if kind not in ("timm", "hf", "hub") or not rest:
        raise ValueError(_unknown(text))
    state = read_weights(weights) if weights else None
    if state is not None and num_classes is None:
        num_classes = head_classes(state)
    fetch = pretrained and weights is None
    base = {"source": text, "kwargs": dict(model_kwargs), "num_classes": num_classes}
    model = build_base(base, fetch=fetch)
    if state is not None:
        load_weights(model, state, str(weights))
    images = preprocess or model_preprocess(model, size)
    view = inspect_vit(model, text, images, forward_kwargs=forward_arguments(model, images.size), source=base, **given)
    if is_embedding_head(text):
        view.num_classes = 0
    return view.to(device)


def save_vit(vit: ViT, folder: str | Path) -> Path:
    """Save a model so that `open_vit(folder)` gives it back: every weight as safetensors, how to build it as JSON."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    base, surrogates = _layers_of(vit.source)
    config = {
        "format": FORMAT,
        "name": vit.name,
        "base": base or None,
        "preprocess": vit.preprocess.to_dict(),
        "structure": {
            "blocks": vit.blocks_path,
            "norm": next((n for n, m in vit.model.named_modules() if m is vit.norm), None),
            "cls": vit.groups.cls,
            "registers": vit.groups.registers,
        },
        "num_classes": vit.num_classes,
        "surrogate": surrogates[-1] if surrogates else None,
        "inner_surrogates": surrogates[:-1],
    }
    tensors = {k: v.detach().cpu().contiguous() for k, v in vit.model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def _layers_of(source: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The plain model a view comes from, and the surrogates made from it, one of the other, the outermost last."""
    surrogates: list[dict[str, Any]] = []
    while "surrogate" in source:
        surrogates.insert(0, source["surrogate"])
        source = source["base"]
    return source, surrogates


def load_saved(
    folder: str | Path,
    *,
    teacher: nn.Module | ViT | None = None,
    size: int | None = None,
    weights: str | None = None,
) -> ViT:
    """Open a folder written by `save_vit`. A surrogate of a user's own module needs that module as `teacher`."""
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{folder}/config.json is not whole ({error})") from None
    if config.get("format") != FORMAT:
        raise ValueError(f"{folder} holds no raptor model: its config.json says format {config.get('format')!r}")
    if config["base"] is None and teacher is None:
        raise ValueError(f"{folder} was made from a module of your own: open it with teacher=that module")
    base = config["base"]
    model = build_base(base) if teacher is None else (teacher.model if isinstance(teacher, ViT) else teacher)
    images = Preprocess.from_dict(config["preprocess"])
    if size is not None and size != images.size:
        images = Preprocess.for_native(max(size, images.size), images.mean, images.std, size=size)
    structure = {k: v for k, v in config["structure"].items() if v is not None}
    arguments = forward_arguments(model, images.size)
    vit = inspect_vit(model, config["name"], images, forward_kwargs=arguments, source=base or {}, **structure)
    for surrogate in [*config.get("inner_surrogates", []), config["surrogate"]]:
        vit = make_surrogate(vit, **surrogate) if surrogate else vit
    vit.name = config["name"]
    load_weights(vit.model, read_weights(weights or folder / "model.safetensors"), str(weights or folder))
    vit.num_classes = config["num_classes"]
    return vit


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
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        if not fetch:
            raise ValueError(f"{base['source']} could not be built ({reason})") from None
        raise ValueError(
            f"the weights of {base['source']} could not be fetched ({reason}): "
            "give a local file with weights=, or pretrained=False for random ones"
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
    folder = Path(getattr(config, "_name_or_path", "") or ".") / "preprocessor_config.json"
    if folder.is_file():
        values = json.loads(folder.read_text())
        return tuple(values.get("image_mean", mean)), tuple(values.get("image_std", std))
    if "clip" in family:
        return (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    if "siglip" in family or family in ("vit", "deit", "beit"):
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    return mean, std


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


def saved_folder(text: str) -> Path | None:
    """The folder with `config.json` that `text` names: a built-in, a saved model, or a run folder's surrogate."""
    places = [ASSETS / text] if text.replace("-", "").isalnum() else []
    path = Path(text).expanduser()
    places += [path / "surrogate", path / "teacher", path]
    for place in places:
        config = place / "config.json"
        if config.is_file() and "raptor" in config.read_text()[:200]:
            return place
    return None


def list_models(filter: str = "") -> list[str]:
    """Names that `open_vit` accepts and that contain `filter` (or match it, when it has a `*`)."""
    import timm

    pattern = filter if "*" in filter else f"*{filter}*"
    pattern = pattern.removeprefix("timm/")
    names = ["scenes", *(p.name for p in sorted(ASSETS.glob("scenes-*")))]
    names = [n for n in names if filter.strip("*") in n]
    known = timm.list_models(pattern, module=list(TIMM_MODULES), pretrained=True)
    return names + [f"timm/{n}" for n in known if "sam" not in n.split("_")[0]]


def _unknown(text: str) -> str:
    path = Path(text)
    if path.is_dir():
        return f"{text} is a folder but holds no raptor model (no config.json of one)"
    import timm

    known = ["scenes", *(f"timm/{n}" for n in timm.list_models(module=list(TIMM_MODULES)))]
    close = [f"timm/{text}"] if timm.is_model(text.split(".")[0]) else difflib.get_close_matches(text, known, n=1)
    hint = (
        f": did you mean {close[0]!r}?" if close else ": write timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes or a folder"
    )
    return f"unknown model {text!r}{hint}"
