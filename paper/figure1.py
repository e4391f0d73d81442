"""Figure 1: layer-layer similarity of ViTs trained in many ways, side by side, with phases outlined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sweep import read_config

from raptor.commands import phases

MODELS = (
    "timm/vit_base_patch14_reg4_dinov2.lvd142m",
    "timm/vit_base_patch16_dinov3.lvd1689m",
    "timm/vit_base_patch16_clip_224.openai",
    "timm/vit_base_patch16_siglip_224.webli",
    "timm/vit_base_patch16_224.mae",
    "timm/deit3_base_patch16_224.fb_in1k",
    "timm/vit_base_patch16_224.augreg_in21k",
)


@dataclass(kw_only=True)
class Figure1:
    """Similarity and phases of DINOv2, DINOv3, CLIP, SigLIP, MAE, DeiT-3 and AugReg, side by side."""

    data: list[str]
    """Images, such as ImageNet's validation folder."""
    models: list[str] = field(default_factory=lambda: list(MODELS))
    """The models to compare."""
    k: list[int] | None = None
    """Phases to outline; by default those of 2, 3 and 4 that there is room for."""
    num_images: int = 10_000
    """Images per model."""
    pretrained: bool = True
    """False uses the same models untrained."""
    out: str = "runs/figure1"
    """Folder for phases.json and the figure."""
    device: str = "auto"
    """auto, cpu or cuda."""
    num_workers: int | None = None
    """Processes that decode images."""


def main(config: Figure1) -> Any:
    return phases(  # type: ignore[operator]
        config.models,
        data=config.data,
        k=config.k,
        num_images=config.num_images,
        pretrained=config.pretrained,
        twin=False,
        out=config.out,
        device=config.device,
        num_workers=config.num_workers,
    )


if __name__ == "__main__":
    main(read_config(Figure1))
