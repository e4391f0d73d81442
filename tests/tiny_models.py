"""Small models with random weights, and what the tests compare them with."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from raptor.open import open_vit
from raptor.vit.view import ViT


def shake(model: nn.Module, seed: int = 0, size: float = 0.1) -> nn.Module:
    """Move every parameter, so that layer scales of 1e-5, zero heads and zero tokens cannot hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=size)
    return model


def noise_images(vit: ViT, num: int = 3, seed: int = 1) -> Tensor:
    """`num` noise images of the size the view takes."""
    size = vit.preprocess.size
    return torch.randn(num, 3, size, size, generator=torch.Generator().manual_seed(seed))


def tiny_timm(name: str = "vit_tiny_patch16_224", depth: int = 4, shaken: bool = True, **kwargs) -> ViT:
    """A timm model of dim 48 and a 2x2 grid with random weights."""
    patch = 14 if "patch14" in name else 16
    options = dict(pretrained=False, embed_dim=48, num_heads=3, depth=depth, size=2 * patch) | kwargs
    vit = open_vit(f"timm/{name}", **options)
    if shaken:
        shake(vit.model)
    return vit


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def sum_over_threads(num_ranks: int) -> Callable[[Tensor], Tensor]:
    """A sum over ranks, each a thread: every rank calls it, waits for the others and gets the sum."""
    values: list[Tensor] = []
    barrier = threading.Barrier(num_ranks)

    def add_ranks(value: Tensor) -> Tensor:
        values.append(value)
        barrier.wait(timeout=10)
        total = torch.stack(values).sum(0)
        if barrier.wait(timeout=10) == 0:
            values.clear()
        barrier.wait(timeout=10)
        return total

    return add_ranks
