"""Blocks run in another order, by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from raptor.vit.view import ViT


def angle_by_hand(x: Tensor, y: Tensor) -> Tensor:
    """Mean angle over tokens and images, in float64."""
    return torch.arccos(torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1).clamp(-1, 1)).mean()


def chained(vit: ViT, images: Tensor, layers: list[int]) -> Tensor:
    """The last state when the blocks `layers` run one after the other."""
    with torch.no_grad():
        x, context = vit.embed(images)
        for layer in layers:
            x = vit.step(layer, x, context)
    return x
