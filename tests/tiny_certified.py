"""A small teacher and batches of images for the tests of the certificate."""

from __future__ import annotations

import timm
import torch
from torch import Tensor

from raptor.data.stream import Batch
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

PHASES = (2, 3)


def tiny_vit(num_classes: int = 0, depth: int = 5) -> ViT:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=depth,
        num_heads=2,
        num_classes=num_classes,
        reg_tokens=2,
    ).eval()
    for block in model.blocks:
        for p in block.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.12)
    return open_vit(model)


def image_batches(seed: int, sizes: tuple[int, ...] = (8, 8, 5), labels: bool = True) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for num in sizes:
        label = torch.arange(num) % 3
        images = torch.randn(num, 3, 32, 32, generator=generator) + label[:, None, None, None]
        made.append(Batch(images, label if labels else None, torch.arange(num)))
    return made


def all_states(vit: ViT, batches: list[Batch]) -> list[Tensor]:
    with torch.no_grad():
        return [x.double() for x in vit.record(torch.cat([b.images for b in batches]))[0]]


def plain_vit(num_classes: int = 0) -> ViT:
    """Without registers, three blocks deep."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=num_classes
    )
    return open_vit(model.eval())


def two_class_batches(num_batches: int = 3, labels: bool = True) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(num_batches):
        label = torch.arange(8) % 2
        images = torch.randn(8, 3, 32, 32, generator=generator) + label[:, None, None, None]
        made.append(Batch(images, label if labels else None, torch.arange(8) + 8 * i))
    return made


def blobs(
    num: int = 120, dim: int = 9, num_classes: int = 4, noise: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Features around a centre for each class, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % num_classes
    centres = torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(99))
    features = centres[labels] + noise * torch.randn(num, dim, generator=generator)
    return features * torch.linspace(0.1, 30, dim) + 5, labels
