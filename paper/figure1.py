"""Figure 1: layer-layer similarity of ViTs trained in many ways, side by side, with phases outlined."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Unpack

from raptor.data import ChosenData, iterate
from raptor.devices import pick_device, pick_precision
from raptor.options import HeldOut, Trusting, with_defaults
from raptor.phases import PhasesFile, check_cuts, study_phases
from raptor.provenance import Provenance, recorded
from raptor.report.phases import SavedPhases, save_phases
from raptor.run import check_folder
from raptor.vit.open import open_vit, tell_apart

MODELS = [
    "timm/vit_base_patch14_reg4_dinov2.lvd142m",
    "timm/vit_base_patch16_dinov3.lvd1689m",
    "timm/vit_base_patch16_clip_224.openai",
    "timm/vit_base_patch16_siglip_224.webli",
    "timm/vit_base_patch16_224.mae",
    "timm/deit3_base_patch16_224.fb_in1k",
    "timm/vit_base_patch16_224.augreg_in21k",
]

_BATCH_SIZE = 64


class Figure1Options(HeldOut, Trusting, total=False):
    """The options that figure1 shares with other experiments."""


@recorded
def run(
    *,
    data: list[str] | str,
    models: list[str] = MODELS,
    k: list[int] | None = None,
    num_images: int = 10_000,
    pretrained: bool = True,
    out: str = "runs/figure1",
    device: str = "auto",
    num_workers: int | None = None,
    **given: Unpack[Figure1Options],
) -> SavedPhases:
    """Similarity and phases of DINOv2, DINOv3, CLIP, SigLIP, MAE, DeiT-3 and AugReg, side by side.

    Args:
        data: images, such as ImageNet's validation folder.
        models: the models to compare.
        k: phases to outline; by default those of 2, 3 and 4 that there is room for.
        num_images: images per model.
        pretrained: false uses the same models untrained.
        out: folder for phases.json and the figure.
        device: auto, cpu or cuda.
        num_workers: processes that decode images.
    """
    started = time.monotonic()
    options = with_defaults(Figure1Options, given)
    chosen = ChosenData(data, options["val"])
    device = pick_device(device)
    precision = pick_precision("auto", device)
    views = [open_vit(name, pretrained=pretrained, trust_hub=options["trust_hub"], device=device) for name in models]
    views = tell_apart(views)
    for vit in views:
        check_cuts(vit, k)
    folder = check_folder(out)
    entries = []
    for vit in views:
        images = chosen.judged(num_images, vit.preprocess.size)
        batches = iterate(images, vit.preprocess, _BATCH_SIZE, device=device, num_workers=num_workers, shuffle=True)
        entries.append(replace(study_phases(vit, batches, k, precision=precision), data=chosen.name))
    return save_phases(PhasesFile(entries, Provenance.since(started, device)), folder)
