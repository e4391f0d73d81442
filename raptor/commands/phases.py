"""raptor phases: layer-layer similarity of one or more models, the phases cut from it, and the heatmap figure."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from raptor.config import PhasesConfig
from raptor.data import ChosenData, iterate
from raptor.data.split import own_validation
from raptor.devices import join_ranks, pick_device, pick_precision, seeded
from raptor.phases.study import PhasesFile, check_cuts, study_phases
from raptor.provenance import Provenance, command
from raptor.report.phases import SavedPhases, save_phases
from raptor.run import check_folder, result_folder
from raptor.streaming import folder_of
from raptor.subject import Subject, check_place
from raptor.vit.open import tell_apart
from raptor.vit.pair import open_pair
from raptor.vit.saved import check_folder_of, is_surrogate
from raptor.vit.view import ViT


@command(PhasesConfig)
def phases(config: PhasesConfig) -> SavedPhases:
    """Layer-layer similarity, the phases depth falls into, and the heatmap figure."""
    started = time.monotonic()
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    ranks = join_ranks(device)
    models = config.models
    views: list[tuple[str, ViT]] = []
    opening: dict[str, Any] = {**config.of_teacher(), **config.opening()}
    of_runs = [is_surrogate(folder_of(name)) for name in models]
    for name, is_run in zip(models, of_runs):
        own = opening if is_run or not any(of_runs) else {**opening, "teacher": None}  # it is that of the runs
        with seeded():
            surrogate, model = open_pair(name, device=ranks.device, **own)
        views += [("", model)] if surrogate is None else [("teacher", model), ("surrogate", surrogate)]
    views = [(side, vit) for (side, _), vit in zip(views, tell_apart([vit for _, vit in views]))]
    for _, vit in views:
        check_cuts(vit, config.k, config.method, config.score, config.min_length, config.tokens)
    about = folder_of(models[0]) if len(models) == 1 else views[0][1]
    # A comparison of several models is named by the first, and goes into no folder of theirs.
    folder = ranks.first(
        lambda: check_folder(config.out) if config.out else result_folder(None, about, "phases", config.weights_name())
    )
    if len(models) == 1:
        check_folder_of(folder, folder_of(models[0]), surrogate, model)
    # Nothing is fitted, so that images need not be held out: only a run has images that its surrogate was trained on.
    split = config.split or ("val" if any(of_runs) else "own")
    chosen = ChosenData.of(folder_of(models[0]), {**vars(config), "split": split})
    images_of = [chosen.judged(config.num_images, vit.preprocess.size) for _, vit in views]
    subject = None  # a comparison of several models is not about one
    if len(models) == 1:
        subject = ranks.first(lambda: Subject.of(model, images_of[0], surrogate))
        ranks.first(lambda: check_place(folder, subject, PhasesFile.FILE))
    entries = []
    for (side, vit), images in zip(views, images_of):
        read_split = split
        if split == "own":
            read_split = "all" if own_validation(images.parts) is None else "val"
        batches = iterate(
            images,
            vit.preprocess,
            config.batch_size,
            device=ranks.device,
            num_workers=config.num_workers,
            ranks=ranks,
            shuffle=True,
        )
        entry = study_phases(
            vit,
            batches,
            config.k,
            config.method,
            config.score,
            config.min_length,
            config.tokens,
            config.standardise,
            precision,
            config.twin,
            config.sample_images,
        )
        entries.append(replace(entry, side=side, data=chosen.name, split=read_split, bad_images=batches.bad_images()))
    found = PhasesFile(entries, Provenance.since(started, device), subject)
    return ranks.first(lambda: save_phases(found, folder))
