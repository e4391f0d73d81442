from __future__ import annotations

import pytest
import timm
import torch


@pytest.fixture(scope="session")
def states() -> list[torch.Tensor]:
    """States of a small ViT with registers on random images, by hooks on its blocks."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_small_patch14_reg4_dinov2", img_size=56, depth=12, init_values=1.0, num_classes=0
    ).eval()
    for parameter in model.blocks.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(3)  # an untrained block moves too little to have ten directions
    kept: list[torch.Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: kept.append(output))
    with torch.no_grad():
        model(torch.randn(6, 3, 56, 56))
    return kept
