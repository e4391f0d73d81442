"""Small models of every family that is supported, with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import timm.models.vision_transformer as timm_vit
import torch
import torchvision
import transformers
from tiny_models import shake, tiny_timm
from torch import Tensor, nn

from raptor.vit.open import open_vit
from raptor.vit.view import ViT

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
HALF = (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406)


@dataclasses.dataclass
class Family:
    build: Callable[[], ViT]
    groups: tuple[int, int, int]
    mean: tuple[float, ...]
    num_classes: int = 0


def timm_family(name: str, prefix: tuple[int, int], mean: tuple[float, ...], num_classes: int = 0, **kwargs) -> Family:
    return Family(lambda: tiny_timm(name, depth=3, **kwargs), (*prefix, 4), mean, num_classes)


SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96)
AT_16 = SMALL | dict(image_size=32, patch_size=16)
AT_14 = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, image_size=28, patch_size=14)
HF_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int], tuple[float, ...], int]] = {
    "ViT": (lambda: transformers.ViTModel(transformers.ViTConfig(**AT_16)), (1, 0, 4), HALF, 0),
    "ViTForImageClassification": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**AT_16, num_labels=7)),
        (1, 0, 4),
        HALF,
        7,
    ),
    "Dinov2": (lambda: transformers.Dinov2Model(transformers.Dinov2Config(**AT_14)), (1, 0, 4), IMAGENET, 0),
    "Dinov2WithRegisters": (
        lambda: transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**AT_14)),
        (1, 4, 4),
        IMAGENET,
        0,
    ),
    "DINOv3ViT": (
        lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**AT_16, num_register_tokens=3)),
        (1, 3, 4),
        IMAGENET,
        0,
    ),
    "CLIPVision": (
        lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**AT_16)),
        (1, 0, 4),
        CLIP_MEAN,
        0,
    ),
    "SiglipVision": (
        lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**AT_16)),
        (0, 0, 4),
        HALF,
        0,
    ),
    "ViTMAE": (
        lambda: transformers.ViTMAEModel(transformers.ViTMAEConfig(**AT_16, mask_ratio=0.0)),
        (1, 0, 4),
        IMAGENET,
        0,
    ),
    "CLIPForImageClassification": (
        lambda: transformers.CLIPForImageClassification(transformers.CLIPConfig(vision_config=AT_16, num_labels=7)),
        (1, 0, 4),
        CLIP_MEAN,
        7,
    ),
    "SiglipForImageClassification": (
        lambda: transformers.SiglipForImageClassification(transformers.SiglipConfig(vision_config=AT_16, num_labels=7)),
        (0, 0, 4),
        HALF,
        7,
    ),
    "Aimv2Vision": (
        lambda: transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**AT_16)),
        (0, 0, 4),
        CLIP_MEAN,
        0,
    ),
    "DeiT": (lambda: transformers.DeiTModel(transformers.DeiTConfig(**AT_16)), (1, 1, 4), IMAGENET, 0),
}


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=3, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=6
    )


ZOO: dict[str, Family] = {
    "dinov2": timm_family("vit_small_patch14_dinov2", (1, 0), IMAGENET),
    "dinov2-registers": timm_family("vit_small_patch14_reg4_dinov2", (1, 4), IMAGENET),
    "dinov3": timm_family("vit_small_patch16_dinov3", (1, 4), IMAGENET),
    "eva02": timm_family("eva02_tiny_patch14_224", (1, 0), CLIP_MEAN),
    "clip": timm_family("vit_base_patch16_clip_224.openai", (1, 0), CLIP_MEAN),
    "clip-finetuned": timm_family("vit_base_patch16_clip_224.laion2b_ft_in1k", (1, 0), CLIP_MEAN, 1000),
    "siglip": timm_family("vit_base_patch16_siglip_224", (0, 0), HALF),
    "deit": timm_family("deit_tiny_patch16_224", (1, 0), IMAGENET, 1000),
    "deit-distilled": timm_family("deit_tiny_distilled_patch16_224", (1, 1), IMAGENET, 1000),
    "deit3": timm_family("deit3_small_patch16_224", (1, 0), IMAGENET, 1000),
    "mae": timm_family("vit_base_patch16_224.mae", (1, 0), IMAGENET),
    "beit": timm_family("beit_base_patch16_224", (1, 0), HALF, 1000, img_size=32),
    "augreg": timm_family("vit_tiny_patch16_224", (1, 0), HALF, 1000),
    "swiglu-giant": timm_family("vit_giant_patch14_dinov2", (1, 0), IMAGENET),
    "rope-mixed": timm_family("vit_small_patch16_rope_mixed_224", (1, 0), IMAGENET, 1000),
    "registers-no-cls": timm_family("vit_little_patch16_reg4_gap_256", (0, 4), HALF, 1000),
    "relative-bias": timm_family("vit_relpos_small_patch16_224", (0, 0), HALF, 1000, img_size=32),
    "naflexvit": timm_family("naflexvit_base_patch16_gap", (0, 4), HALF, 1000),
    "perception-encoder": timm_family("vit_pe_core_tiny_patch16_384", (1, 0), HALF),
    "grouped-queries": timm_family("vit_base_patch16_sapiens2", (1, 8), IMAGENET, num_heads=4, num_kv_heads=2),
    "branches-side-by-side": timm_family("vit_small_patch16_18x2_224", (1, 0), HALF, 1000),
    "differential": timm_family("vit_dlittle_patch16_reg1_gap_256", (0, 1), HALF, 1000),
    "torchvision": Family(lambda: open_vit(shake(torchvision_vit())), (1, 0, 4), IMAGENET, 6),
}
for hf_name, (hf_build, hf_groups, hf_mean, hf_classes) in HF_MODELS.items():
    ZOO[f"hf-{hf_name}"] = Family(lambda build=hf_build: open_vit(shake(build())), hf_groups, hf_mean, hf_classes)


@cache
def opened(family: str) -> ViT:
    return ZOO[family].build()


each_family = pytest.mark.parametrize("family", ZOO)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.normed = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.normed(x)).mean(1, keepdim=True))


class Unheard(nn.Module):
    """A model nobody has heard of: patches by unfolding, two extra tokens under odd names, an odd block list."""

    def __init__(self, dim: int = 24, num_blocks: int = 5) -> None:
        super().__init__()
        self.lift = nn.Linear(3 * 8 * 8, dim)
        self.summary = nn.Parameter(torch.randn(1, 1, dim))
        self.scratch = nn.Parameter(torch.randn(1, 1, dim))
        self.trunk = nn.Module()
        self.trunk.stack = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.last = nn.LayerNorm(dim)
        self.answer = nn.Linear(dim, 4)

    def forward(self, images: Tensor) -> Tensor:
        patches = nn.functional.unfold(images, 8, stride=8).transpose(1, 2)
        extra = torch.cat([self.summary, self.scratch], 1).expand(len(images), -1, -1)
        x = torch.cat([extra, self.lift(patches)], 1)
        for block in self.trunk.stack:
            x = block(x)
        return self.answer(self.last(x)[:, 0])


class CalledByDepth(nn.Module):
    """Blocks that are called with further arguments, which differ between them: `arguments(layer, num_tokens)`."""

    def __init__(self, arguments: Callable[[int, int], dict[str, Any]], make_block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.arguments = arguments
        self.patches = nn.Conv2d(3, 24, 8, 8)
        self.places = nn.Parameter(torch.randn(1, 16, 24))
        self.cls_token = nn.Parameter(torch.randn(1, 1, 24))
        self.blocks = nn.ModuleList(make_block() for _ in range(6))
        self.norm = nn.LayerNorm(24)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT + self.places
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for layer, block in enumerate(self.blocks, start=1):
            x = block(x, **self.arguments(layer, x.shape[1]))
        return self.norm(x)[:, 0]


def masked(*layers: int) -> nn.Module:
    """timm's plain blocks, of which those of `layers` see only near tokens."""

    def arguments(layer: int, num_tokens: int) -> dict[str, Any]:
        place = torch.arange(num_tokens)
        near = (place[:, None] - place).abs() <= 2
        return {"attn_mask": near if layer in layers else None}

    def make_block() -> nn.Module:
        block = timm_vit.Block(24, 2, qkv_bias=True)
        nn.init.normal_(block.attn.qkv.weight)  # so that it matters what is attended to
        return block

    return CalledByDepth(arguments, make_block)


class _ScaledByNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.attn, self.mlp = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, layer: int) -> Tensor:
        x = x + layer * self.attn(self.norm1(x)).mean(1, keepdim=True)
        return x + layer * self.mlp(self.norm2(x))


def numbered() -> nn.Module:
    """Blocks that are told their layer as a plain number."""
    return CalledByDepth(lambda layer, _: {"layer": layer}, _ScaledByNumber)
