"""Surrogates of small teachers, of each kind of block and conditioning."""

from __future__ import annotations

import pytest
import torchvision
import transformers
from tiny_models import shake, tiny_timm
from torch import nn

from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

BLOCKS = ("teacher", "paper")
CONDITIONINGS = ("none", "mlp", "table")
every_kind = pytest.mark.parametrize(("block", "conditioning"), [(b, c) for b in BLOCKS for c in CONDITIONINGS])


def conditioned(teacher: ViT, phases: tuple[int, ...], **options) -> ViT:
    """A surrogate with all its trainable weights moved, so that each depth does something else."""
    surrogate = make_surrogate(teacher, phases, **options)
    shake(shared_blocks(surrogate), seed=5)
    return surrogate


AT_16 = dict(
    hidden_size=48, num_hidden_layers=4, num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=16
)


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=4, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=6
    )


TEACHERS = {
    "dinov2-registers": lambda: tiny_timm("vit_small_patch14_reg4_dinov2"),
    "dinov3": lambda: tiny_timm("vit_small_patch16_dinov3"),
    "eva02": lambda: tiny_timm("eva02_tiny_patch14_224"),
    "rope-mixed": lambda: tiny_timm("vit_small_patch16_rope_mixed_224"),
    "clip": lambda: tiny_timm("vit_base_patch16_clip_224"),
    "siglip": lambda: tiny_timm("vit_base_patch16_siglip_224"),
    "beit": lambda: tiny_timm("beit_base_patch16_224", img_size=32),
    "swiglu-giant": lambda: tiny_timm("vit_giant_patch14_dinov2"),
    "torchvision": lambda: open_vit(shake(torchvision_vit())),
    "hf-vit": lambda: open_vit(shake(transformers.ViTModel(transformers.ViTConfig(**AT_16)))),
    "hf-dinov3": lambda: open_vit(shake(transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**AT_16)))),
    "hf-clip": lambda: open_vit(shake(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**AT_16)))),
}
