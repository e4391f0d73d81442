"""Local weight files: safetensors or weights-only `.pth`, unwrapped and matched to a model, every key accounted for."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

_MAX_NESTED = 8
_NESTED = ("state_dict", "model", "teacher", "model_ema", "state_dict_ema", "student")
_PREFIXES = ("module.", "backbone.", "_orig_mod.", "model.", "encoder.")
_POSITIONS = ("pos_embed", "visual.positional_embedding", "visual.trunk.pos_embed", "vision_encoder.pos_embed")
_BLOCK_NUMBER = re.compile(r"(?:blocks|layers?)\.(\d+)\.")
_WHICH_MODEL = "name the model that these weights are of (raptor models --for FILE lists the models that fit)"
_HEAD_KEYS = ("head.weight", "classifier.weight", "fc.weight", "heads.head.weight")


_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


def is_weight_file(text: str) -> bool:
    """Whether `text` is a file, or is written like the name of a weight file."""
    return text.endswith(_SUFFIXES) or (bool(text) and Path(text).expanduser().is_file())


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a weight file in float32, by their name in the file.

    Nested dictionaries (`state_dict`, `model`, `teacher`, `model_ema`) are entered; where a file holds several, it is
    printed which is taken. Nothing is ever unpickled beyond plain tensors.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise ValueError(f"weights file {path} {what}: give a .safetensors or .pth file")
    try:
        state = load_tensors(path)
    except OtherObjects as error:
        raise ValueError(
            f"{path} cannot be read as a weights-only file: {error}: save only its tensors, in the program that made "
            "it, with torch.save(model.state_dict(), FILE)"
        ) from None
    except ValueError as error:
        kind = "safetensors" if path.suffix == ".safetensors" else "weights-only"
        raise ValueError(f"{path} cannot be read as a {kind} file: {error}: fetch it again") from None
    tensors = _unwrap(state, path)
    for name, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path}: {name} has more values than the file holds: save it contiguous")
    return {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}


class OtherObjects(ValueError):
    """A file that holds more than tensors."""


def load_tensors(path: Path) -> Any:
    """What a safetensors or weights-only file holds; ValueError with the reason. Nothing in it is ever run."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings(action="ignore"):  # of odd pickles
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes of a file that holds no tensors lead to
        other = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if other:
            raise OtherObjects(
                f"it holds {other[1]}, which is no tensor and is not read, as it could run code"
            ) from None
        if _is_cut_off(path, error):
            raise ValueError("it is damaged or not complete") from None
        told = isinstance(error, OSError | RuntimeError | SafetensorError) and str(error).strip()
        raise ValueError(str(error).strip().splitlines()[0][:200] if told else "it holds no tensors") from None


def _is_cut_off(path: Path, error: Exception) -> bool:
    """Whether a file begins as one of torch's and is not whole."""
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"
    return "unexpected EOF" in str(error) or (is_archive and not zipfile.is_zipfile(path))


def fingerprint(model: nn.Module) -> str:
    """A short name of all weights of a model, as float32: the same on every device and in every process."""
    floats = [tensor.detach() for tensor in model.state_dict().values() if tensor.is_floating_point()]
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        digests = list(pool.map(_digest, floats))
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def same_weights(model: nn.Module, saved: str) -> bool:
    """Whether `saved` is the fingerprint of this model."""
    return saved == fingerprint(model)


def _digest(tensor: Tensor) -> bytes:
    values = tensor.float().cpu().contiguous()
    return hashlib.blake2b(values.numpy(), key=str(tuple(values.shape)).encode()[:64], digest_size=16).digest()


def check_weights(state: Mapping[str, Tensor], what: str | Path) -> None:
    """Raise for weights that hold NaN or infinite values, naming the first one and `what` they are of.

    Everything that is loaded passes here: models, weight files, saved folders, checkpoints and heads. A single number
    whose name ends in `_min` or `_max` is a bound and may be infinite, as in Gemma's vision encoder.
    """
    for name, tensor in state.items():
        if tensor.numel() == 1 and tensor.isinf().all() and name.endswith(("_min", "_max")):
            continue
        if tensor.is_floating_point() and not tensor.isfinite().all():
            num = int((~tensor.isfinite()).sum())
            raise ValueError(
                f"{what}: {num} of {tensor.numel()} values of {name} are NaN or infinite: give weights that are whole"
            )


def _check_kinds(state: Mapping[str, Tensor], own: Mapping[str, Tensor], what: str | Path) -> None:
    """Raise for integers where the model has real numbers: quantised weights without their scales."""
    for name, tensor in own.items():
        if tensor.is_floating_point() and not state[name].is_floating_point():
            raise ValueError(
                f"{what}: {name} holds {str(state[name].dtype).removeprefix('torch.')} numbers: give weights in fp32, "
                "fp16 or bf16"
            )


def classes_in_file(state: Mapping[str, Tensor]) -> int:
    """How many classes the file's classifier has; 0 when it holds none."""
    names = _strip_prefixes(dict(state))
    return next((names[key].shape[0] for key in _HEAD_KEYS if key in names and names[key].ndim == 2), 0)


def size_in_file(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The image size that the file's position embedding is of, where that is not the size `model` is built for.

    Only of timm's models that interpolate it themselves. A model built for that size keeps the file's values. Otherwise
    they are interpolated twice, to the size of the model's name and then to that of the images.
    """
    names = _strip_prefixes(dict(state))
    table = next((names[key] for key in _POSITIONS if key in names), None)
    patches = getattr(model, "patch_embed", None)
    if table is None or not 2 <= table.ndim <= 3 or not getattr(model, "dynamic_img_size", False) or patches is None:
        return None
    num_others = 0 if getattr(model, "no_embed_class", False) else int(getattr(model, "num_prefix_tokens", 1))
    if any(key.endswith("register_tokens") for key in names):  # DINOv2's own: cls has a position, registers have none
        num_others = 1
    num_patches = max(table.shape[-2] - num_others, 0)
    side = math.isqrt(num_patches)
    rows = patches.grid_size[0]
    if side == 0 or side**2 != num_patches or side == rows:
        return None
    return int(side * patches.img_size[0] // rows)


def load_weights(model: nn.Module, state: dict[str, Tensor], path: str | Path) -> None:
    """Load `state` into `model`; any mismatch is an error."""
    fitted = fit_weights(model, state, path)
    check_weights(fitted, path)
    model.load_state_dict(fitted)


def fit_weights(model: nn.Module, state: dict[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """The tensors of `state` under the names of `model`; ValueError for a name or a shape that differs.

    Names that are the model's own are taken as they are; else wrappers' prefixes are removed and timm's own key filter
    applied.
    """
    own = model.state_dict()
    if {name: tensor.shape for name, tensor in state.items()} != {name: tensor.shape for name, tensor in own.items()}:
        state = _timm_filter(model, _strip_prefixes(state), path)
    faults = []
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing:
        faults.append(f"missing: {_few(missing)}")
    if unexpected:
        faults.append(f"unexpected: {_few(unexpected)}")
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    for name in wrong[:3]:
        faults.append(f"{name}: {tuple(state[name].shape)} in the file, {tuple(own[name].shape)} in the model")
    if faults:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {'; '.join(faults)}: {_WHICH_MODEL}")
    _check_kinds(state, own, path)
    return state


def _unwrap(state: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(_MAX_NESTED):
        if not isinstance(state, Mapping):
            break
        found = [key for key in _NESTED if isinstance(state.get(key), Mapping)]
        if not found:
            break
        if found[1:]:
            others, taken = ", ".join(found[1:]), found[0]
            hint = "save the other as a file of its own to take that"
            print(f"{path} holds {others} beside {taken}: {taken} is taken; {hint}", file=sys.stderr)
        state = state[found[0]]
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a dictionary of tensors: save a state dict")
    tensors = {str(k): v for k, v in state.items() if isinstance(v, Tensor)}
    if not tensors:
        raise ValueError(f"{path} holds no tensors: save a state dict")
    return tensors


def _strip_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove wrapper prefixes. Beside `backbone.`, a classifier on its output is kept and other heads are dropped."""
    state = {k: v for k, v in state.items() if k != "n_averaged"}  # the count of torch's AveragedModel
    for prefix in _PREFIXES:
        if state and all(k.startswith(prefix) for k in state):
            return _strip_prefixes({k.removeprefix(prefix): v for k, v in state.items()})
    backbone = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")}
    embedding = next((v for k, v in backbone.items() if k.endswith("patch_embed.proj.weight")), None)
    if embedding is not None:
        head = {k: v for k, v in state.items() if k in ("head.weight", "head.bias")}
        fits = "head.weight" in head and head["head.weight"].shape[1:] == embedding.shape[:1]
        return _strip_prefixes({**backbone, **head} if fits else backbone)
    return state


def _timm_filter(model: nn.Module, state: dict[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    module = sys.modules.get(type(model).__module__)
    if module is None or not module.__name__.startswith("timm."):
        return state
    from timm.models import vision_transformer

    _check_patches(model, state, path)
    filter_keys: Any = getattr(module, "checkpoint_filter_fn", vision_transformer.checkpoint_filter_fn)
    kwargs: dict[str, Any] = {}
    if filter_keys is vision_transformer.checkpoint_filter_fn and any("gamma_" in name for name in state):
        kwargs["adapt_layer_scale"] = True
    try:
        return dict(filter_keys(state, model, **kwargs))
    except (RuntimeError, KeyError, AttributeError, AssertionError, IndexError, TypeError):
        raise _of_another_model(model, state, path) from None


def _check_patches(model: nn.Module, state: Mapping[str, Tensor], path: str | Path) -> None:
    """Raise where the file's patches or width are others, because timm's filter would resample or reshape them."""
    own = patch_weight(model.state_dict())
    if own is None or any(tensor.shape == own.shape for tensor in state.values()):  # whatever its name
        return
    if patch_weight(state) is not None:
        raise _of_another_model(model, state, path)


def _of_another_model(model: nn.Module, state: Mapping[str, Tensor], path: str | Path) -> ValueError:
    return ValueError(f"{path} has {_shape_of(state)}; the model has {_shape_of(model.state_dict())}: {_WHICH_MODEL}")


def _shape_of(state: Mapping[str, Tensor]) -> str:
    """Width, patches, depth and registers of a ViT, as far as its weights show them."""
    parts = []
    patches = patch_weight(state)
    if patches is not None:
        parts.append(f"width {patches.shape[0]}, patches of {patches.shape[2]} x {patches.shape[3]} px")
    numbers = {match[1] for match in map(_BLOCK_NUMBER.search, state) if match}
    if numbers:
        parts.append(f"{len(numbers)} blocks")
    registers = [tensor for name, tensor in state.items() if name.endswith(("reg_token", "register_tokens"))]
    if registers:
        parts.append(f"{registers[0].shape[-2]} registers")
    positions = next((tensor for name, tensor in state.items() if name.endswith(_POSITIONS)), None)
    if positions is not None:
        parts.append(f"{positions.shape[-2]} positions")
    return ", ".join(parts) or "other names"


def patch_weight(state: Mapping[str, Tensor]) -> Tensor | None:
    """The convolution that cuts an image of three channels into patches; its name differs between libraries."""
    return next((tensor for tensor in state.values() if tensor.ndim == 4 and tensor.shape[1] == 3), None)


def _few(keys: list[str], most: int = 6) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more
