"""raptor phases: layer-layer similarity of one or more models, the phases cut from it, and the heatmap figure."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raptor.data import iterate, open_data
from raptor.devices import pick_device, pick_precision
from raptor.open import open_vit
from raptor.phases import choose_k, find_phases, num_partitions, shortest
from raptor.progress import track
from raptor.provenance import provenance
from raptor.run import check_folder, slug, write_text
from raptor.similarity.cosine import CoordinateStatistics, measure_similarity
from raptor.vit.states import POOLED
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT


@dataclass
class PhasesResult:
    """What `raptor phases` found: one entry a model, as in phases.json, and where it was written."""

    models: list[dict[str, Any]]
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        return {"models": self.models, "folder": str(self.folder)}

    def text(self) -> str:
        lines = []
        for entry in self.models:
            facts = entry["model"]
            groups = ", ".join(f"{n} {name}" for name, n in facts["groups"].items() if n)
            lines.append(
                f"{facts['name']}: {facts['num_layers']} blocks, dim {facts['dim']}, {groups}; "
                f"{entry['num_images']} images of {entry['data']} at {entry['image_size']} px"
            )
            for k, found in entry["phases"].items():
                within, across = ("none" if mean is None else f"{mean:.3f}" for mean in entry["within"][k])
                cut = " | ".join(map(str, found["lengths"]))
                lines.append(f"  k={k:>2}  {cut:<24} similarity within {within}, across {across}")
            lines.append(f"  the gains of further cuts suggest k={entry['chosen_k']}")
            if entry["bad_images"]:
                lines.append(
                    f"  {len(entry['bad_images'])} unreadable images were passed over: see bad_images in phases.json"
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
        entries.append({**entry, "data": data, "bad_images": list(images.bad)})
    result = PhasesResult(entries, folder)
    found = {"provenance": provenance(started, device), "models": entries}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "phases.json", json.dumps(found))
    from raptor.report.figures_phases import figure_phases
    from raptor.report.style import save_figure

    save_figure(figure_phases(entries), folder / "figures" / "phases")
    return result


def study_phases(
    vit: ViT,
    batches: Any,
    k: Sequence[int] = (2, 3, 4),
    method: str = "maxcut",
    score: str = "weighted",
    min_length: int | None = None,
    tokens: str = "all",
    standardise: bool = False,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Similarity and phases of one model over `batches`, as phases.json holds them."""
    check_cuts(vit, k, method, score, min_length, tokens)
    statistics = None
    if standardise:
        statistics = CoordinateStatistics(vit.num_layers, vit.name)
        for states, _, _ in track(Trajectories(vit, batches, precision), f"statistics of {vit.name}"):
            statistics.update(states)
    trajectories = track(Trajectories(vit, batches, precision), f"similarity of {vit.name}", len(batches))
    measured = measure_similarity(
        (states for states, _, _ in trajectories), vit.num_layers, vit.groups, statistics=statistics, model=vit.name
    )
    matrix = measured.matrices[tokens]
    found = {num: find_phases(matrix, num, method=method, score=score, min_length=min_length) for num in k}
    chosen = choose_k(matrix, min_length=shortest("maxcut", min_length))
    saved = measured.to_dict()
    return {
        "model": vit.describe(),
        "num_images": measured.num_images,
        "image_size": vit.preprocess.size,
        "similarity": saved["matrices"],
        "cka": saved["cka"],
        "outliers": saved["outliers"],
        "tokens": tokens,
        "standardised": standardise,
        "phases": {str(num): phases.to_dict() for num, phases in found.items()},
        "within": {str(num): within_and_across(matrix, phases.lengths) for num, phases in found.items()},
        "chosen_k": chosen.k,
        "gains": list(chosen.gains),
    }


def check_cuts(vit: ViT, k: Sequence[int], method: str, score: str, min_length: int | None, tokens: str) -> None:
    """Refuse what cannot be cut before any image is read."""
    present = [name for name, _ in vit.groups.present()]
    known = ["all", *present, *(["pooled"] if set(POOLED) & set(present) else [])]
    if tokens not in known:
        raise ValueError(f"{vit.name} has no {tokens!r} tokens: choose from {', '.join(known)}")
    find_phases(np.eye(vit.num_layers), 1, method, score)
    for num in k:
        num_partitions(vit.num_layers, num, shortest(method, min_length))


def within_and_across(matrix: Any, lengths: Sequence[int]) -> tuple[float | None, float | None]:
    """Mean similarity of different layers of the same phase, and of layers of different phases; None where none are."""
    phase = np.repeat(np.arange(len(lengths)), lengths)
    same = phase[:, None] == phase[None, :]
    other = ~np.eye(len(phase), dtype=bool)
    mean = [float(np.mean(matrix[mask])) if mask.any() else None for mask in (same & other, ~same)]
    return mean[0], mean[1]
