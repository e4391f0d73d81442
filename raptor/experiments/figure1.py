"""Figure 1: layer-layer similarity of ViTs trained in many ways, side by side, with phases outlined."""

from __future__ import annotations

from raptor.commands.phases import PhasesResult, phases

MODELS = [
    "timm/vit_base_patch14_reg4_dinov2.lvd142m",
    "timm/vit_base_patch16_dinov3.lvd1689m",
    "timm/vit_base_patch16_clip_224.openai",
    "timm/vit_base_patch16_siglip_224.webli",
    "timm/vit_base_patch16_224.mae",
    "timm/deit3_base_patch16_224.fb_in1k",
    "timm/vit_base_patch16_224.augreg_in21k",
]


def run(
    *,
    data: str,
    models: list[str] = MODELS,
    k: list[int] = [2, 3, 4],  # noqa: B006
    num_images: int = 10_000,
    pretrained: bool = True,
    out: str = "runs/figure1",
    device: str = "auto",
    num_workers: int = 8,
) -> PhasesResult:
    """Similarity and phases of DINOv2, DINOv3, CLIP, SigLIP, MAE, DeiT-3 and AugReg, side by side.

    Args:
        data: images, such as ImageNet's validation folder.
        models: the models to compare.
        k: phases to outline.
        num_images: images a model.
        pretrained: false draws the untrained twins.
        out: folder for phases.json and the figure.
        device: auto, cpu or cuda.
        num_workers: processes that decode images.
    """
    return phases(
        models, data=data, k=k, num_images=num_images, pretrained=pretrained, out=out, device=device,
        num_workers=num_workers,
    )  # fmt: skip
