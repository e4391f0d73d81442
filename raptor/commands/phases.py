"""raptor phases: layer-layer similarity of one or more models, the phases cut from it, and the heatmap figure."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import nn

from raptor.data import ChosenData, iterate
from raptor.devices import join_ranks, pick_device, pick_precision, seeded
from raptor.options import AnySplit, Measuring, OfTeacher, OpeningModel, part, with_defaults
from raptor.phases import DEFAULT_TOKENS, PhasesFile, check_cuts, study_phases
from raptor.provenance import Provenance, recorded
from raptor.report.phases import SavedPhases, save_phases
from raptor.report.results import check_results_of
from raptor.run import check_folder, result_folder
from raptor.streaming import Result, folder_of
from raptor.subject import Subject
from raptor.vit.open import tell_apart
from raptor.vit.pair import open_pair
from raptor.vit.saved import check_folder_of, is_surrogate
from raptor.vit.view import ViT


class PhasesOptions(OpeningModel, OfTeacher, Measuring, AnySplit, total=False):
    """The options that `phases` shares with other commands."""


@recorded
def phases(
    models: str | Path | nn.Module | ViT | Result | list[str | Path | nn.Module | ViT | Result],
    *,
    k: list[int] | None = None,
    method: Literal["maxcut", "dp"] = "maxcut",
    score: Literal["weighted", "mean", "cut"] = "weighted",
    min_length: int | None = None,
    tokens: str = DEFAULT_TOKENS,
    standardise: bool = False,
    twin: bool | None = None,
    out: str | None = None,
    **given: Unpack[PhasesOptions],
) -> SavedPhases:
    """Layer-layer similarity, the phases depth falls into, and the heatmap figure.

    Args:
        models: one or more of timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes, or a run folder, whose teacher and surrogate
            are then shown side by side (in Python also a module of your own, an opened model, or what
            `distill` returned).
        k: how many phases to cut depth into; several at once. By default those of 2, 3 and 4 that there is room for.
        method: `maxcut` (hierarchical, phases nest) or `dp` (exact for an additive score).
        score: with dp: `weighted`, `mean` (the printed one) or `cut`.
        min_length: shortest phase; by default 1 with maxcut and 2 with dp.
        tokens: which similarity is cut: all, cls, registers, patches or pooled (cls + mean patch).
        standardise: divide each coordinate by its deviation first, so that a few huge ones do not dominate.
        twin: also measure the model's untrained twin on up to 64 images; by default where that takes less than 20 s.
        out: folder for phases.json and the figure; by default the run folder, else runs/phases-MODEL.
        weights: a local weight file (one model only).
    """
    started = time.monotonic()
    options = with_defaults(PhasesOptions, given)
    k = [k] if isinstance(k, int) else k
    device = pick_device(options["device"])
    precision = pick_precision(options["precision"], device)
    ranks = join_ranks(device)
    models = models if isinstance(models, list) else [models]
    if method == "maxcut" and score != "weighted":
        raise ValueError(f"--score {score} goes with --method dp: max-cut has a score of its own")
    if options["weights"] is not None and len(models) > 1:
        raise ValueError("--weights goes with one model: write timm/NAME@FILE for several")
    if options["name"] is not None and len(models) > 1:
        raise ValueError("--name goes with one model: leave it out for several")
    views: list[tuple[str, ViT]] = []
    opening: dict[str, Any] = {**part(OfTeacher, options), **part(OpeningModel, options)}
    of_runs = [is_surrogate(folder_of(name)) for name in models]
    for name, is_run in zip(models, of_runs):
        own = opening if is_run or not any(of_runs) else {**opening, "teacher": None}  # it is that of the runs
        with seeded():
            surrogate, model = open_pair(name, device=ranks.device, **own)
        views += [("", model)] if surrogate is None else [("teacher", model), ("surrogate", surrogate)]
    views = [(side, vit) for (side, _), vit in zip(views, tell_apart([vit for _, vit in views]))]
    for _, vit in views:
        check_cuts(vit, k, method, score, min_length, tokens)
    about = folder_of(models[0]) if len(models) == 1 else views[0][1]
    folder = ranks.first(lambda: check_folder(out) if out else result_folder(None, about, "phases"))
    if len(models) == 1:
        check_folder_of(folder, folder_of(models[0]), surrogate, model)
        ranks.first(lambda: check_results_of(folder, surrogate, model, ["phases"]))
    chosen = ChosenData.of(folder_of(models[0]), options)
    entries = []
    for side, vit in views:
        images = chosen.judged(options["num_images"], vit.preprocess.size)
        batches = iterate(
            images,
            vit.preprocess,
            options["batch_size"],
            device=ranks.device,
            num_workers=options["num_workers"],
            ranks=ranks,
            shuffle=True,
        )
        entry = study_phases(vit, batches, k, method, score, min_length, tokens, standardise, precision, twin)
        entries.append(replace(entry, side=side, data=chosen.name, split=chosen.split, bad_images=batches.bad_images()))
    about_one = len(models) == 1
    subject = ranks.first(lambda: Subject.of(model, images, surrogate)) if about_one else None
    found = PhasesFile(entries, Provenance.since(started, device), subject)
    return ranks.first(lambda: save_phases(found, folder))
