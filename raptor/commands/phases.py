"""raptor phases: layer-layer similarity of one or more models, the phases cut from it, and the heatmap figure."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raptor.data import iterate, open_data
from raptor.devices import pick_device, pick_precision
from raptor.open import open_vit
from raptor.phases import ModelPhases, PhasesFile, check_cuts, study_phases
from raptor.provenance import Provenance
from raptor.run import check_folder, slug


@dataclass
class PhasesResult:
    """What `raptor phases` found: one entry per model, as in phases.json, and where it was written."""

    models: list[ModelPhases]
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        return {"models": [entry.to_dict() for entry in self.models], "folder": str(self.folder)}

    def text(self) -> str:
        lines = []
        for entry in self.models:
            facts = entry.model
            groups = ", ".join(f"{n} {name}" for name, n in facts.groups.to_dict().items() if n)
            lines.append(
                f"{facts.name}: {facts.num_layers} blocks, dim {facts.dim}, {groups}; "
                f"{entry.num_images} images of {entry.data} at {entry.image_size} px"
            )
            for k, found in entry.phases.items():
                within, across = ("none" if mean is None else f"{mean:.3f}" for mean in entry.within[k])
                lines.append(f"  k={k:>2}  {found!s:<24} similarity within {within}, across {across}")
            lines.append(f"  the gains of further cuts suggest k={entry.chosen_k}")
            if entry.bad_images:
                lines.append(
                    f"  {len(entry.bad_images)} unreadable images were passed over: see bad_images in phases.json"
                )
        return "\n".join([*lines, f"written to {self.folder}/phases.json and {self.folder}/figures/phases.png"])


def phases(
    models: list[str],
    *,
    data: str = "scenes",
    k: list[int] = [2, 3, 4],  # noqa: B006
    method: str = "maxcut",
    score: str = "weighted",
    min_length: int | None = None,
    tokens: str = "all",
    standardise: bool = False,
    num_images: int = 1000,
    split: str = "val",
    weights: str | None = None,
    pretrained: bool = True,
    size: int | None = None,
    blocks: str | None = None,
    norm: str | None = None,
    cls: int | None = None,
    registers: int | None = None,
    batch_size: int = 64,
    out: str | None = None,
    device: str = "auto",
    precision: str = "auto",
    num_workers: int = 0,
    skip_bad: bool = False,
) -> PhasesResult:
    """Layer-layer similarity, the phases depth falls into, and the heatmap figure.

    Args:
        models: one or more of timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes, or a run folder.
        data: images: a folder, zip archives, scenes, cifar10, hf/NAME:split, wds/PATTERN.
        k: how many phases to cut depth into; several at once.
        method: `maxcut` (hierarchical, phases nest) or `dp` (exact for an additive score).
        score: with dp: `weighted`, `mean` (the printed one) or `cut`.
        min_length: shortest phase; by default 1 with maxcut and 2 with dp.
        tokens: which similarity is cut: all, cls, registers, patches or pooled (cls + mean patch).
        standardise: divide each coordinate by its deviation first, so that a few huge ones do not rule.
        num_images: how many images.
        split: val (held out), train or all.
        weights: a local weight file (one model only).
        pretrained: fetch published weights; false gives an untrained twin.
        size: image size.
        blocks: dotted path of the block list, for a model whose structure cannot be guessed.
        norm: dotted path of the final norm, likewise.
        cls: number of cls tokens (0 or 1), likewise.
        registers: number of register tokens, likewise.
        batch_size: images a forward pass.
        out: folder for phases.json and the figure.
        device: auto, cpu or cuda.
        precision: auto, fp32 or bf16.
        num_workers: processes that decode images.
        skip_bad: pass over unreadable images instead of stopping.
    """
    started = time.monotonic()
    device = pick_device(device)
    precision = pick_precision(precision, device)
    models = [models] if isinstance(models, str) else models
    if weights is not None and len(models) > 1:
        raise ValueError("--weights goes with one model")
    opened = [
        open_vit(
            name, weights=weights, pretrained=pretrained, size=size, blocks=blocks, norm=norm, cls=cls,
            registers=registers, device=device,
        )
        for name in models
    ]  # fmt: skip
    for vit in opened:
        check_cuts(vit, k, method, score, min_length, tokens)
    folder = check_folder(out or f"runs/phases-{slug(models[0])}")
    entries = []
    for vit in opened:
        images = open_data(data, split, limit=num_images, size=vit.preprocess.size, skip_bad=skip_bad)  # type: ignore[arg-type]
        batches = iterate(images, vit.preprocess, batch_size, device=device, num_workers=num_workers)
        entry = study_phases(vit, batches, k, method, score, min_length, tokens, standardise, precision)
        entries.append(replace(entry, data=data, bad_images=list(images.bad)))
    result = PhasesResult(entries, folder)
    folder.mkdir(parents=True, exist_ok=True)
    PhasesFile(entries, Provenance.since(started, device)).write(folder)
    from raptor.report.figures_phases import figure_phases
    from raptor.report.style import save_figure

    save_figure(figure_phases(entries), folder / "figures" / "phases")
    return result
