"""raptor phases: layer-layer similarity of one or more models, the phases cut from it, and the heatmap figure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raptor.commands.job import Job
from raptor.config import PhasesConfig
from raptor.data import ChosenData, iterate
from raptor.data.split import part_read
from raptor.phases.evidence import CutEvidence
from raptor.phases.study import ModelPhases, PhasesFile, check_cuts, study_phases
from raptor.provenance import command
from raptor.report.paper import draw
from raptor.report.phases import cost_line, evidence_cells, figure_phases, remarks_on
from raptor.report.style import save_figure
from raptor.run import check_folder, result_folder
from raptor.streaming import Result, folder_of
from raptor.vit.open import tell_apart
from raptor.vit.saved import is_surrogate
from raptor.vit.view import ViT


@dataclass
class SavedPhases(Result):
    """What was found, one entry per model as in phases.json, and the folder it was written to."""

    models: list[ModelPhases]
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        return {"models": [entry.to_dict() for entry in self.models], "folder": str(self.folder)}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per model and k, with the contrast of the cut and of matrices without phases."""
        rows = []
        for entry in self.models:
            for k, found in entry.phases.items():
                within, across = entry.within[k]
                row = {"model": entry.model.name, "k": k, "phases": str(found), "within": within, "across": across}
                cut = entry.evidence.get(k, CutEvidence())
                row |= {"contrast": cut.contrast, "shuffled": cut.shuffled, "smooth": cut.smooth, "twin": cut.twin}
                row |= {"cost": cut.cost, "random cost": cut.random_cost}
                # No k is suggested where nothing tells phases from a shuffled matrix.
                rows.append({**row, "suggested": k == entry.chosen_k and not entry.structure})
        return rows

    def plot(self) -> Any:
        """The heat maps."""
        return draw(figure_phases(self.models))

    def text(self) -> str:
        lines = []
        for entry in self.models:
            facts = entry.model
            groups = ", ".join(f"{where.stop - where.start} {name}" for name, where in facts.groups.present())
            lines.append(
                f"{entry.whose}: {facts.num_layers} blocks, dim {facts.dim}, {groups}; "
                f"{entry.num_images} images of {entry.data} at {entry.image_size} px"
            )
            for k, found in entry.phases.items():
                within, across = ("none" if mean is None else f"{mean:.3f}" for mean in entry.within[k])
                lines.append(f"  k={k:>2}  {found!s:<24} similarity within {within}, across {across}")
                cut = entry.evidence.get(k)
                if cut is None:
                    continue
                edges, contrast, shuffled, smooth, twin = evidence_cells(found, cut)
                lines.append(f"        boundaries [95 %], share of resamples: {edges}")
                of_cut = f"contrast {contrast}; shuffled (95 % below) {shuffled}, smooth {smooth}, twin {twin}"
                if cut.cost is not None:
                    of_cut = cost_line(entry, found, cut)
                lines.append(f"        {of_cut}")
            if entry.no_parts:
                lines.append(f"  {entry.no_parts}")
            lines += [f"  {line}" for line in remarks_on(entry)]
            if entry.bad_images:
                lines.append(f"  {len(entry.bad_images)} unreadable images were skipped: see bad_images in phases.json")
        return "\n".join([*lines, f"written to {self.folder}/phases.json and {self.folder}/figures/phases.png"])


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

    def save() -> SavedPhases:
        folder.mkdir(parents=True, exist_ok=True)
        found.write(folder)
        save_figure(draw(figure_phases(found.models)), folder / "figures" / "phases")
        return SavedPhases(found.models, folder)

    return job.ranks.first(save)


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
