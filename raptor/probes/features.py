"""Frozen features: the normed tokens of any layer of any view, at any image size."""

from __future__ import annotations

import dataclasses
import inspect

import torch
from torch import Tensor

from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT


def view_at(vit: ViT, height: int, width: int) -> ViT:
    """The same model, called so that it takes images of this size; it must accept them."""
    kwargs = dict(vit.forward_kwargs)
    size = vit.preprocess.size
    if (height, width) != (size, size):
        if "interpolate_pos_encoding" in inspect.signature(vit.model.forward).parameters:
            kwargs["interpolate_pos_encoding"] = True
        if "noise" in kwargs:
            num_patches = (height // vit.patch_size) * (width // vit.patch_size)
            kwargs["noise"] = torch.arange(num_patches, dtype=torch.float32, device=vit.device)[None]
    view = dataclasses.replace(vit, forward_kwargs=kwargs)
    blank = torch.zeros(1, 3, height, width, device=vit.device)
    expected = vit.groups.cls + vit.groups.registers + (height // vit.patch_size) * (width // vit.patch_size)
    try:
        with torch.no_grad():
            num_tokens = view.embed(blank)[0].shape[1]
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:100] if str(error).strip() else type(error).__name__
        message = f"{vit.name} does not take images of {height} x {width} ({reason}); use its own {size}"
        raise ValueError(message) from None
    if num_tokens != expected:
        raise ValueError(f"{vit.name} gives {num_tokens} tokens for {height} x {width}, not {expected}; use {size}")
    return view


def check_layer(vit: ViT, layer: int | None) -> int:
    """The layer to probe: `layer`, or the last one when it is None."""
    layer = vit.num_layers if layer is None else layer
    if not 0 <= layer <= vit.num_layers:
        raise ValueError(f"layer {layer} is not a state of {vit.name}: states are numbered 0..{vit.num_layers}")
    return layer


@torch.no_grad()
def normed_tokens(vit: ViT, images: Tensor, layer: int, precision: str) -> Tensor:
    """Final norm of the state at `layer`, float32 (B, T, D); blocks after it are not run."""
    with autocast(precision, images.device):
        x_btd, context = vit.embed(images)
        for number in range(1, layer + 1):
            x_btd = vit.step(number, x_btd, context)
        return vit.norm(x_btd).float()


def pooled(vit: ViT, tokens_btd: Tensor) -> Tensor:
    """cls and mean patch, those there are, concatenated: (B, D) or (B, 2 D), at any image size."""
    parts = [tokens_btd[:, 0]] if vit.groups.cls else []
    patches_bpd = patches(vit, tokens_btd)
    if patches_bpd.shape[1]:
        parts.append(patches_bpd.mean(dim=1))
    return torch.cat(parts, dim=-1)


def patches(vit: ViT, tokens_btd: Tensor) -> Tensor:
    """Patch tokens (B, P, D): all that follow cls and registers."""
    return tokens_btd[:, vit.groups.cls + vit.groups.registers :]
