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

from raptor.checks import WEIGHT_SUFFIXES

_NESTED = ("state_dict", "model", "teacher", "model_ema", "state_dict_ema", "student")
_PREFIXES = ("module.", "backbone.", "_orig_mod.", "model.", "encoder.")
_POSITIONS = ("pos_embed", "visual.positional_embedding", "visual.trunk.pos_embed", "vision_encoder.pos_embed")
_REGISTERS = ("reg_token", "register_tokens")
BLOCK_NUMBER = re.compile(r"(?:blocks|layers?)\.(\d+)\.")
_HEAD_KEYS = ("head.weight", "classifier.weight", "fc.weight", "heads.head.weight")


def is_weight_file(text: str) -> bool:
    """Whether `text` is a file, or ends like the name of a weight file and is not a folder.

    The results of `raptor study mine.pt` are in the folder `runs/study-mine.pt`.
    """
    if not text:
        return False
    path = Path(text).expanduser()
    return path.is_file() or (text.endswith(WEIGHT_SUFFIXES) and not path.is_dir())


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a weight file by their names in the file, real numbers as float32.

    Nested dictionaries (`state_dict`, `model`, `teacher`, `model_ema`) are entered. If a file holds several sets of
    weights, a line on stderr says which one is taken. Only plain tensors are ever unpickled.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"weights file {path} {problem}: give a .safetensors or .pth file")
    try:
        state = load_tensors(path)
    except ValueError as error:
        kind = "safetensors" if path.suffix == ".safetensors" else "weights-only"
        raise ValueError(f"{path} cannot be read as a {kind} file: {error}") from None
    for _ in range(8):  # a dictionary may hold itself
        if not isinstance(state, Mapping):
            raise ValueError(f"{path} holds a {type(state).__name__}, not a dictionary of tensors: save a state dict")
        found = [key for key in _NESTED if isinstance(state.get(key), Mapping)]
        if not found:
            break
        taken = found[0]
        if len(found) > 1:
            others = ", ".join(found[1:])
            hint = "save the other as a file of its own to take that"
            print(f"{path} holds {others} beside {taken}: {taken} is taken; {hint}", file=sys.stderr)
        state = state[taken]
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"{path} holds no tensors: save a state dict")
    for name, tensor in tensors.items():
        # A file of a few bytes can hold a tensor of any size that repeats one value.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path}: {name} has more values than the file holds: save it contiguous")
        # Numbers of 8 bits are quantised weights without their scales; `fit_weights` refuses whole ones.
        if tensor.is_floating_point() and tensor.element_size() == 1:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{path}: {name} holds {kind} numbers: give weights in fp32, fp16 or bf16")
        # One precision for what follows: fingerprints, comparisons and measured norms.
        if tensor.is_floating_point():
            tensors[name] = tensor.float()
    return tensors


def load_tensors(path: Path) -> Any:
    """The content of a safetensors or weights-only file, of which no code is run; ValueError with the reason."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings(action="ignore"):  # torch warns of odd pickles
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes lead to errors of every type
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and refused:
            raise ValueError(
                f"it holds {refused[1]}, which is not a tensor and could run code: save only its tensors, in the "
                "program that made it, with torch.save(model.state_dict(), FILE)"
            ) from None
        # torch's files are zip archives, and a truncated one still begins as such.
        with path.open("rb") as file:
            begins_as_archive = file.read(4) == b"PK\x03\x04"
        reason = "it holds no tensors"
        if "unexpected EOF" in str(error) or (begins_as_archive and not zipfile.is_zipfile(path)):
            reason = "it is damaged or not complete"
        elif isinstance(error, OSError | RuntimeError | SafetensorError) and str(error).strip():
            reason = str(error).strip().splitlines()[0][:200]
        raise ValueError(f"{reason}: fetch it again") from None


def fingerprint(model: nn.Module) -> str:
    """A short name of all weights of a model as float32: the same on every device and in every process."""

    def digest(tensor: Tensor) -> bytes:
        values = tensor.float().cpu().contiguous()
        # blake2b takes no key of more than 64 bytes.
        shape = str(tuple(values.shape)).encode()[:64]
        return hashlib.blake2b(values.numpy(), key=shape, digest_size=16).digest()

    # Counters, such as that of batch norm, are no weights. Names are left out: libraries rename them.
    floats = [tensor.detach() for tensor in model.state_dict().values() if tensor.is_floating_point()]
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        # `map` keeps the order of the weights, on which the name depends.
        digests = list(pool.map(digest, floats))
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def check_weights(state: Mapping[str, Tensor], what: str | Path) -> None:
    """Raise if weights hold NaN or infinite values, or none; the message names `what` they are of and the first tensor.

    All loaded weights are checked here: models, weight files, saved folders, checkpoints and heads.
    """
    for name, tensor in state.items():
        if tensor.is_meta:
            raise ValueError(f"{what}: {name} is on the meta device and has no values: load its weights first")
        # A single number of this name is a bound and may be infinite, as in Gemma's vision encoder.
        if tensor.numel() == 1 and tensor.isinf().all() and name.endswith(("_min", "_max")):
            continue
        if tensor.is_floating_point() and not tensor.isfinite().all():
            num = int((~tensor.isfinite()).sum())
            raise ValueError(
                f"{what}: {num} of {tensor.numel()} values of {name} are NaN or infinite: give weights that are whole"
            )


def classes_in_file(state: Mapping[str, Tensor]) -> int:
    """The number of classes of the file's classifier; 0 if it holds none."""
    names = _strip_prefixes(dict(state))
    for key in _HEAD_KEYS:
        if key in names and names[key].ndim == 2:
            return names[key].shape[0]
    return 0


def size_in_file(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The image size of the file's position embedding if `model` is built for another size, else None.

    A model built for the file's size keeps the values of the file. In another model they would be interpolated twice:
    to the size of the model's name, and then to the size of the images. Only timm's models interpolate by themselves.
    """
    names = _strip_prefixes(dict(state))
    table = next((names[key] for key in _POSITIONS if key in names), None)
    patches: Any = getattr(model, "patch_embed", None)
    is_resized = patches is not None and getattr(model, "dynamic_img_size", False)
    if table is None or not 2 <= table.ndim <= 3 or not is_resized:
        return None
    # The table may hold positions for cls and registers before the patches.
    num_others = int(getattr(model, "num_prefix_tokens", 1))
    if getattr(model, "no_embed_class", False):
        num_others = 0
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
    """The tensors of `state` under the names of `model`; ValueError if a name or a shape differs.

    If names and shapes are not the model's already, prefixes of wrappers are removed and timm's own filter is applied.
    """
    own = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in state.items()}
    # Weights that fit need no filter, and timm's may rename or resample them.
    if shapes != {name: tensor.shape for name, tensor in own.items()}:
        state = _timm_filter(model, _strip_prefixes(state), path)
    faults = []
    for problem, names in (("missing", own.keys() - state.keys()), ("unexpected", state.keys() - own.keys())):
        # A few names tell a person which model the file is of; all of them would fill the screen.
        if names:
            few = ", ".join(sorted(names)[:6])
            rest = f" and {len(names) - 6} more" if len(names) > 6 else ""
            faults.append(f"{problem}: {few}{rest}")
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    for name in wrong[:3]:
        faults.append(f"{name}: {tuple(state[name].shape)} in the file, {tuple(own[name].shape)} in the model")
    if faults:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {'; '.join(faults)}: {_which_model(path)}")
    for name, tensor in own.items():
        # Whole numbers in the place of real ones are quantised weights without their scales.
        if tensor.is_floating_point() and not state[name].is_floating_point():
            kind = str(state[name].dtype).removeprefix("torch.")
            raise ValueError(f"{path}: {name} holds {kind} numbers: give weights in fp32, fp16 or bf16")
    return state


def _strip_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove wrapper prefixes. Beside `backbone.`, a classifier on its output is kept and other heads are dropped."""
    state = {name: tensor for name, tensor in state.items() if name != "n_averaged"}  # of torch's AveragedModel
    for prefix in _PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            return _strip_prefixes({name.removeprefix(prefix): tensor for name, tensor in state.items()})
    backbone = {name[len("backbone.") :]: tensor for name, tensor in state.items() if name.startswith("backbone.")}
    embedding = next((tensor for name, tensor in backbone.items() if name.endswith("patch_embed.proj.weight")), None)
    if embedding is None:
        return state
    # A probe's head on the backbone's output is its classifier; a head of self-supervision is not.
    weight = state.get("head.weight")
    if weight is not None and weight.shape[1:] == embedding.shape[:1]:
        for name in ("head.weight", "head.bias"):
            if name in state:
                backbone[name] = state[name]
    return _strip_prefixes(backbone)


def _timm_filter(model: nn.Module, state: dict[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    module = sys.modules.get(type(model).__module__)
    if module is None or not module.__name__.startswith("timm."):
        return state
    from timm.models import vision_transformer

    found, wanted = _facts(state), _facts(model.state_dict())
    differs = [fact for fact in wanted if fact not in found] or ["the same shapes under other names"]
    other = f"{path} has {', '.join(found)}; the model has {', '.join(differs)}: {_which_model(path)}"
    own_patches = patch_weight(model.state_dict())
    has_patches = own_patches is None or any(tensor.shape == own_patches.shape for tensor in state.values())
    if not has_patches and patch_weight(state) is not None:  # the filter would resample or reshape them
        raise ValueError(other)
    filter_keys: Any = getattr(module, "checkpoint_filter_fn", vision_transformer.checkpoint_filter_fn)
    kwargs: dict[str, Any] = {}
    if filter_keys is vision_transformer.checkpoint_filter_fn and any("gamma_" in name for name in state):
        # timm gives `gamma_1` the name of its own LayerScale only if it is asked to.
        kwargs["adapt_layer_scale"] = True
    try:
        return dict(filter_keys(state, model, **kwargs))
    # The filter was written for files of its own models, and fails in any way on others.
    except (RuntimeError, KeyError, AttributeError, AssertionError, IndexError, TypeError):
        raise ValueError(other) from None


def _which_model(path: str | Path) -> str:
    return f"name the model that these weights are of (raptor models --for {path} lists the models that fit)"


def _facts(state: Mapping[str, Tensor]) -> list[str]:
    """Width, patches, depth, registers and positions of a ViT, as far as its weights show them."""
    numbers = {match[1] for match in map(BLOCK_NUMBER.search, state) if match}
    # The first convolution of another network cuts no patches.
    if not numbers:
        return ["no list of blocks"]
    facts = []
    patches = patch_weight(state)
    if patches is not None:
        facts += [f"width {patches.shape[0]}", f"patches of {patches.shape[2]} x {patches.shape[3]} px"]
    facts.append(f"{len(numbers)} blocks")
    registers = next((tensor for name, tensor in state.items() if name.endswith(_REGISTERS)), None)
    facts.append("no registers" if registers is None else f"{registers.shape[-2]} registers")
    positions = next((tensor for name, tensor in state.items() if name.endswith(_POSITIONS)), None)
    if positions is not None:
        facts.append(f"{positions.shape[-2]} positions")
    return facts


def patch_weight(state: Mapping[str, Tensor]) -> Tensor | None:
    """The convolution that cuts an image of three channels into patches; its name differs between libraries."""
    return next((tensor for tensor in state.values() if tensor.ndim == 4 and tensor.shape[1] == 3), None)
