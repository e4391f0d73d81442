from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from raptor.vit.open import open_vit
from raptor.vit.view import ViT


def make_vit(**changes: Any) -> ViT:
    torch.manual_seed(0)
    options: dict[str, Any] = dict(
        img_size=24, patch_size=6, embed_dim=32, depth=3, num_heads=2, num_classes=0, reg_tokens=2
    )
    model = timm.create_model("vit_tiny_patch16_224", **{**options, "dynamic_img_size": True, **changes})
    return open_vit(model, size=24)


@pytest.fixture(scope="session")
def vit() -> ViT:
    return make_vit()


@pytest.fixture(scope="session")
def bare_vit() -> ViT:
    """Without cls and registers."""
    return make_vit(class_token=False, reg_tokens=0, global_pool="avg")
