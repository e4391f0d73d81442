"""Frozen features: the tokens of any layer through the final norm, at any image size."""

from __future__ import annotations

import dataclasses
import inspect

import torch
from torch import Tensor

from raptor.vit.trajectory import NonFiniteStates, autocast
from raptor.vit.view import ViT


def view_at(vit: ViT, height: int, width: int) -> ViT:
    """The same model for images of this size, with as many patch tokens; it must accept them."""
    size = vit.preprocess.size
    num_patches = (height // vit.patch_size) * (width // vit.patch_size)
    kwargs = dict(vit.forward_kwargs)
    if (height, width) != (size, size):
        # Some models of transformers need these for images of another size than their own.
        if "interpolate_pos_encoding" in inspect.signature(vit.model.forward).parameters:
            kwargs["interpolate_pos_encoding"] = True
        if "noise" in kwargs:
            # A masked autoencoder orders its patches by this noise: rising, they keep their order.
            kwargs["noise"] = torch.arange(num_patches, dtype=torch.float32, device=vit.device)[None]
    groups = dataclasses.replace(vit.groups, patches=num_patches)
    # The weights are shared with `vit`; only the counts and arguments are the view's own.
    view = dataclasses.replace(vit, groups=groups, forward_kwargs=kwargs)
    blank = torch.zeros(1, 3, height, width, device=vit.device)
    # Whether a model interpolates its position embedding cannot be read off: a blank image tells.
    try:
        with torch.no_grad():
            num_tokens = view.embed(blank)[0].shape[1]
    except (AssertionError, RuntimeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0][:100]
        reason = first_line or type(error).__name__
        remedy = f"use its own {size}"
        if height != width:
            remedy = "frames are not square, so take a model that interpolates its position embedding"
        raise ValueError(f"{vit.name} does not take images of {height} x {width} ({reason}): {remedy}") from None
    if num_tokens != groups.num_tokens:
        raise ValueError(
            f"{vit.name} gives {num_tokens} tokens for {height} x {width}, not {groups.num_tokens}; use {size}"
        )
    return view


def check_finite(features: Tensor, vit: ViT, layer: int) -> Tensor:
    """The features, which are scored; raise where one is not finite, because every head gives such an image class 0."""
    if not bool(features.isfinite().all()):
        raise NonFiniteStates.of(vit.name, f"up to layer {layer}, for one image or more")
    return features


@torch.no_grad()
def normed_tokens(vit: ViT, images: Tensor, layer: int, precision: str) -> Tensor:
    """The final norm of the state at `layer`, float32 (B, T, D); blocks after it are not run."""
    with autocast(precision, images.device):
        x_btd, context = vit.embed(images)
        for number in range(1, layer + 1):
            x_btd = vit.step(number, x_btd, context)
        # The final norm at every layer: heads of different layers then see states of one scale.
        return vit.norm(x_btd).float()
