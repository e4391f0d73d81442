"""Surrogates in timm: `import raptor.timm`, then `timm.create_model("raptor_NAME", checkpoint_path=FILE)`.

timm has no plug-ins, so the import is what makes its names known. `raptor_NAME` is timm's model NAME, whose blocks
become the tied ones of the file that is loaded: `raptor export RUN --to timm` writes it, and it says what they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import timm
import torch
from timm.models import load_pretrained, model_entrypoint, register_model
from torch import Tensor, nn

from raptor.certificate.rate import whole_numbers
from raptor.export.weights import check_width, pack, rounded_layers, unpack
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.builders import TIMM_MODULES, timm_arguments
from raptor.vit.calls import reason_of
from raptor.vit.open import open_vit
from raptor.vit.origin import Structure, SurrogateSpec
from raptor.vit.view import ViT

PREFIX = "raptor_"
_MADE_OF = "raptor_surrogate"  # the tensor that says what a surrogate is made of, as the bytes of a JSON text


def tensors_for_timm(vit: ViT, weights: str) -> dict[str, Tensor]:
    """The weights of a surrogate, at the precision `weights`, with what it is made of."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in vit.model.state_dict().items()}
    if weights == "fp16":
        tensors = {name: tensor.half() for name, tensor in tensors.items()}
    if weights.startswith("int"):
        for name, layer in rounded_layers(vit):
            steps, scale = whole_numbers(layer.weight.detach().cpu(), weights)
            del tensors[f"{name}.weight"]
            tensors[f"{name}.weight_scale"] = scale.contiguous()
            check_width(layer, name, weights)
            if weights == "int4":
                tensors[f"{name}.weight_int4"] = pack(steps)
            else:
                tensors[f"{name}.weight_int8"] = steps.to(torch.int8)
    made_of = {
        "surrogates": [asdict(spec) for spec in vit.origin.surrogates],
        "structure": vit.structure().given(),
        "size": vit.preprocess.size,
    }
    tensors[_MADE_OF] = torch.frombuffer(bytearray(json.dumps(made_of).encode()), dtype=torch.uint8)
    return tensors


def model_arguments(vit: ViT) -> tuple[str, dict[str, Any]]:
    """The name of a surrogate in timm, and the arguments of `timm.create_model` that give its shape.

    ValueError for a surrogate of a model that is not timm's.
    """
    base = vit.origin.base
    if base is None or not base.source.startswith("timm/"):
        raise ValueError(f"{vit.name} was not made from a model of timm: take --to pt2, onnx or folder")
    name = base.source.removeprefix("timm/").partition("@")[0].partition(".")[0]
    return PREFIX + name, timm_arguments(name, base)


def timm_config(vit: ViT) -> dict[str, Any]:
    """The config.json of a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` opens."""
    name, arguments = model_arguments(vit)
    num_classes = arguments.pop("num_classes", vit.num_classes)
    images = vit.preprocess
    return {
        "architecture": name,
        "num_classes": num_classes,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [3, images.size, images.size],
            "crop_pct": images.size / images.resize,
            "interpolation": images.interpolation,
            "mean": list(images.mean),
            "std": list(images.std),
            "num_classes": num_classes,
        },
    }


def _entry_point(name: str) -> Callable[..., nn.Module]:
    """The function that timm calls for `raptor_NAME`."""

    def create(pretrained: bool = False, **arguments: Any) -> nn.Module:
        model = model_entrypoint(name)(pretrained=False, **arguments)
        model.register_load_state_dict_pre_hook(_become_surrogate)
        if pretrained:  # of a folder: after the hook, which the weights need
            load_pretrained(model, num_classes=model.num_classes)
        return model

    create.__name__ = PREFIX + name
    create.__module__ = __name__
    create.__doc__ = f"A surrogate of timm's {name}; what its blocks are is in the checkpoint."
    return create


def _become_surrogate(model: Any, state: dict[str, Tensor], prefix: str, *_rest: Any) -> None:
    """Before weights are loaded: give the model the tied blocks that these are of, and widen rounded ones."""
    if prefix + _MADE_OF not in state:
        raise ValueError("these weights are of no surrogate for timm: write them with raptor export RUN --to timm")
    told = state.pop(prefix + _MADE_OF)
    try:
        made_of = json.loads(bytes(told.tolist()))
        structure = Structure(**made_of["structure"])
        specs = [SurrogateSpec(**{**spec, "phases": tuple(spec["phases"])}) for spec in made_of["surrogates"]]
        size = int(made_of["size"])
    except (ValueError, TypeError, KeyError) as error:
        reason = reason_of(error)[:80]
        raise ValueError(f"{_MADE_OF} in these weights is damaged ({reason}): export them again") from None
    _widen(state)
    if hasattr(model, "shared_blocks"):  # it has become one before
        # Phases of other lengths may have weights of the same shapes.
        if model.surrogates != specs:
            raise ValueError("these weights are of another surrogate than the model's: create a new model for them")
        return
    vit = open_vit(model, size=size, **structure.given())
    blocks = vit.blocks
    for spec in specs:
        vit = make_surrogate(vit, **vars(spec))
    for n, step in enumerate(vit.blocks):
        blocks[n] = step
    model.shared_blocks = vit.model.shared_blocks
    model.surrogates = specs


def _widen(state: dict[str, Tensor]) -> None:
    """Put fp32 weights in the place of rounded ones."""
    for name in [name for name in state if name.endswith(".weight_scale")]:
        scale = state.pop(name)
        weight = name.removesuffix("_scale")
        if f"{weight}_int4" in state:
            steps = unpack(state.pop(f"{weight}_int4"))
        else:
            steps = state.pop(f"{weight}_int8").float()
        state[weight] = steps * scale


for _name in timm.list_models(module=list(TIMM_MODULES)):
    register_model(_entry_point(_name))
