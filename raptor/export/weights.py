"""The precision of exported weights: halves, or the linear layers of the blocks in eight or four bits.

Eight bits are torchao's. Its four bits (torchao 0.18 with torch 2.15) need a GPU or the package mslk, and what it
offers on a CPU keeps each number in a byte. So four bits are packed here, and rounded by `raptor.certificate.rate`.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from raptor.certificate.complexity import BITS, block_list
from raptor.certificate.rate import rounded, whole_numbers
from raptor.vit.view import ViT


def check_installed(option: str, *packages: str) -> None:
    """Raise unless the packages that an option needs are here."""
    for package in packages:
        try:
            with quiet():
                __import__(package)
        except ImportError:
            raise ValueError(f"{option} needs the extra: pip install 'raptor-vit[export]'") from None


def with_weights(vit: ViT, weights: str) -> ViT:
    """A copy of the model whose weights have the precision `weights`: `fp32`, `fp16`, `int8` or `int4`.

    In `fp16` the whole model computes in half precision. In `int8` and `int4` only the linear layers of the blocks are
    rounded, one scale per output row, and the arithmetic stays fp32.
    """
    found = copy_of(vit)
    if weights == "fp16":
        found.model.half()
    elif weights == "int8":
        _round_to_eight_bits(found)
    elif weights == "int4":
        for name, layer in rounded_layers(found):
            check_width(layer, name, weights)
            parametrize.register_parametrization(layer, "weight", FourBits())
    return found


@torch.no_grad()
def with_rounded_values(vit: ViT, weights: str) -> ViT:
    """A copy of the model that computes in fp32 with the values that its weights have when stored as `weights`."""
    same = copy_of(vit)
    if weights == "fp16":
        for tensor in same.model.state_dict().values():
            tensor.copy_(rounded(tensor, "fp16"))
    elif weights != "fp32":
        for name, layer in rounded_layers(same):
            check_width(layer, name, weights)
            layer.weight.copy_(rounded(layer.weight, weights))
    return same


def copy_of(vit: ViT) -> ViT:
    """The same model with weights of its own, frozen, on the CPU."""
    return vit.around(copy.deepcopy(vit.model).requires_grad_(False).eval()).to("cpu")


def rounded_layers(vit: ViT) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of the blocks by their names in the model, each tied one once; ValueError without any."""
    inside = {id(module) for module in block_list(vit).modules()}
    found = False
    for name, module in vit.model.named_modules():
        # Not subclasses: a layer with adapters takes another weight at every depth.
        if id(module) in inside and type(module) is nn.Linear:
            found = True
            yield name, module
    if not found:
        raise ValueError(f"the blocks of {vit.name} have no plain linear layers to round: take --weights fp16")


def _round_to_eight_bits(vit: ViT) -> None:
    check_installed("--weights int8", "torchao")
    with quiet():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
        from torchao.utils import unwrap_tensor_subclass
    # By identity: torchao gives names below the module it is called on.
    chosen = {id(layer) for _, layer in rounded_layers(vit)}
    quantize_(vit.model, Int8WeightOnlyConfig(), filter_fn=lambda module, _name: id(module) in chosen)
    unwrap_tensor_subclass(vit.model)  # a file with torchao's own tensors could not be read without torchao


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the context torchao and the exporters say nothing: what they tell is about their own parts."""
    loggers = []
    for name in ("onnxscript", "onnx_ir", "torch.onnx", "torch.export", "torch.utils._pytree"):
        logger = logging.getLogger(name)
        loggers.append((logger, logger.level))
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)


class FourBits(nn.Module):
    """A weight as packed numbers and scales: a parametrisation of a linear layer."""

    def forward(self, packed: Tensor, scale: Tensor) -> Tensor:
        return unpack(packed) * scale

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        steps, scale = whole_numbers(weight, "int4")
        return pack(steps), scale


def check_width(layer: nn.Linear, name: str, weights: str) -> None:
    """Raise for a layer whose rows cannot be packed."""
    if weights == "int4" and layer.in_features % 2:
        raise ValueError(
            f"--weights int4 stores two numbers per byte, and {name} has an odd number of inputs, "
            f"{layer.in_features}: take --weights int8"
        )


def pack(steps: Tensor) -> Tensor:
    """Whole numbers -7..7, (rows, columns), as (rows, columns / 2) bytes: even columns in the lower four bits."""
    unsigned = (steps + 8).to(torch.uint8)
    return unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The numbers that `pack` was given, as fp32."""
    numbers = packed.to(torch.int32)  # ONNX lacks shifts and remainders of bytes
    columns = torch.stack((numbers % 16, numbers // 16), dim=-1)
    return columns.flatten(1).float() - 8


def stored_bytes(vit: ViT, weights: str) -> int:
    """How many bytes the weights take at this precision, each tied one once."""
    packed: set[str] = set()
    if weights.startswith("int"):
        packed = {f"{name}.weight" for name, _ in rounded_layers(vit)}
    per_weight = 2 if weights == "fp16" else 4
    total = 0
    for name, tensor in vit.model.state_dict().items():
        if name in packed:
            total += tensor.numel() * BITS[weights] // 8 + 4 * len(tensor)
        else:
            total += tensor.numel() * per_weight
    return total
