"""raptor phases: layer-layer similarity of one or more models, the phases cut from it, and the heatmap figure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raptor.commands.job import Job
from raptor.config import PhasesConfig
from raptor.data import ChosenData, iterate
from raptor.data.split import part_read
from raptor.phases.study import PhasesFile, check_cuts, study_phases
from raptor.provenance import command
from raptor.report.phases import SavedPhases, save_phases
from raptor.run import check_folder, result_folder
from raptor.streaming import folder_of
from raptor.vit.open import tell_apart
from raptor.vit.saved import is_surrogate
from raptor.vit.view import ViT


@dataclass
class _Compared:
    """A model whose matrix is shown: `side` is teacher or surrogate where both are."""

    side: str
    vit: ViT


@command(PhasesConfig)
def phases(config: PhasesConfig) -> SavedPhases:
    """Layer-layer similarity, the phases depth falls into, and the heatmap figure."""
    job = Job(config)
    is_single = len(config.models) == 1
    named = folder_of(config.models[0])
    has_run = any(is_surrogate(folder_of(model)) for model in config.models)
    compared = _open_models(job, has_run)
    for one in compared:
        check_cuts(one.vit, config.k, config.method, tokens=config.tokens)
    main = compared[0].vit
    folder = job.ranks.first(lambda: _choose_folder(config, named, main))
    if is_single:  # a comparison of several models is not about one
        job.about_models("phases", named, compared[1].vit if has_run else None, main, folder)
    # Nothing is fitted, so that images need not be held out: only a run has images that its surrogate was trained on.
    split = config.split
    if split is None:
        split = "val" if has_run else "own"
    chosen = ChosenData.of(named, {**vars(config), "split": split})
    # Scenes are drawn at the size of each model.
    images_of = [chosen.judged(config.num_images, one.vit.preprocess.size) for one in compared]
    subject = None
    if is_single:
        job.judge(images_of[0], PhasesFile.FILE)
        subject = job.subject
    entries = []
    for one, images in zip(compared, images_of):
        # CKA is computed within batches, and a folder that is read in order gives batches of one class.
        batches = iterate(
            images,
            one.vit.preprocess,
            config.batch_size,
            device=job.device,
            num_workers=config.num_workers,
            ranks=job.ranks,
            shuffle=True,
        )
        entry = study_phases(
            one.vit,
            batches,
            config.k,
            config.method,
            tokens=config.tokens,
            standardise=config.standardise,
            precision=job.precision,
            twin=config.twin,
        )
        entries.append(
            replace(
                entry,
                side=one.side,
                data=chosen.name,
                split=part_read(split, images.parts),
                bad_images=batches.bad_images(),
            )
        )
    found = PhasesFile(entries, job.provenance(), subject)
    return job.ranks.first(lambda: save_phases(found, folder))


def _choose_folder(config: PhasesConfig, named: Any, main: ViT) -> Path:
    if config.out is not None:
        return check_folder(config.out)
    if len(config.models) > 1:
        return result_folder(None, main, "phases")  # named by the first model, and not in its run folder
    return result_folder(None, named, "phases", config.weights_name())


def _open_models(job: Job, has_run: bool) -> list[_Compared]:
    """The models in their order; of a run, its teacher and then its surrogate."""
    found: list[_Compared] = []
    for model in job.config.models:
        changes: dict[str, Any] = {}
        if has_run and not is_surrogate(folder_of(model)):
            changes["teacher"] = None  # --teacher is of the runs
        surrogate, vit = job.open_pair(model, **changes)
        if surrogate is None:
            found.append(_Compared("", vit))
        else:
            found += [_Compared("teacher", vit), _Compared("surrogate", surrogate)]
    apart = tell_apart([one.vit for one in found])
    return [_Compared(one.side, vit) for one, vit in zip(found, apart)]
