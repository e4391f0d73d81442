"""raptor dynamics: depth as a dynamical system, of a model or of a surrogate beside its teacher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from raptor.certificate.heads import given_head
from raptor.commands.job import Job
from raptor.config import DynamicsConfig
from raptor.data import ChosenData, ImageData, ImageStream
from raptor.data.split import part_read
from raptor.devices import ONE_PROCESS
from raptor.dynamics.findings import find
from raptor.dynamics.interventions import Interventions, InterventionsFile, intervene
from raptor.dynamics.measure import DynamicsFile, DynamicsResult, check_perturbable, measure_dynamics
from raptor.dynamics.tangents import TANGENT_BATCH, Tangents, TangentsFile, compare_tangents
from raptor.phases.cut import Phases, check_phases, find_phases
from raptor.phases.similarity import measure_similarity
from raptor.phases.study import DEFAULT_TOKENS, check_cuts
from raptor.progress import Progress
from raptor.provenance import command
from raptor.streaming import Result
from raptor.subject import Subject
from raptor.vit.trajectory import Trajectories

_TANGENT_IMAGES = 8  # at most: they take minutes


@dataclass
class Dynamics(Result):
    """The results in dynamics.json, interventions.json and tangents.json, and where they were written."""

    measured: DynamicsFile
    interventions: InterventionsFile | None
    tangents: TangentsFile | None
    folder: Path
    figures: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "dynamics": self.measured.to_dict(),
            "interventions": None if self.interventions is None else self.interventions.to_dict(),
            "tangents": None if self.tangents is None else self.tangents.to_dict(),
            "folder": str(self.folder),
            "figures": self.figures,
        }

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per side, token group and layer: norm, gamma and the speed of the step to it."""
        rows: list[dict[str, Any]] = []
        for side, found in self.measured.sides().items():
            d = found.direction
            for group in d.norm:
                for layer, (norm, gamma) in enumerate(zip(d.norm[group].mean, d.gamma[group].mean)):
                    speed = float(d.speed[group].mean[layer - 1]) if layer else None
                    row = {"side": side, "group": group, "layer": layer, "norm": float(norm)}
                    rows.append({**row, "gamma": float(gamma), "speed": speed})
        return rows

    def plot(self) -> Any:
        """The angle of each step over layers; the other figures are in `folder`/figures."""
        from raptor.report.dynamics import dynamics_charts
        from raptor.report.figures import drawn

        return drawn("dynamics-speed", dynamics_charts(self.measured), self.measured.images)

    def text(self) -> str:
        lines = []
        for side, found in self.measured.sides().items():
            whose = "" if len(self.measured.sides()) == 1 else f"{side}: "
            lines.append(f"{whose}{found.model.name}, {self.measured.images}")
            lines += [f"  {line}" for line in found.findings + found.notes]
        if self.measured.few_images:
            lines.append(self.measured.few_images)
        for name, changed in (("interventions", self.interventions), ("tangents", self.tangents)):
            if changed is not None:
                lines.append(f"{name}, {changed.images}:")
                lines += [f"  {line}" for line in changed.findings]
        return "\n".join([*lines, f"written to {self.folder}: dynamics.json, {len(self.figures)} figures in figures/"])


@command(DynamicsConfig)
def dynamics(config: DynamicsConfig) -> Dynamics:
    """Direction, stability, rank, modes and basins along depth, and interventions on it.

    A run folder or another surrogate is measured beside its teacher.
    """
    from raptor.report.dynamics import dynamics_charts
    from raptor.report.interventions import intervention_charts
    from raptor.report.stability import tangent_charts

    job = Job(config)
    surrogate, teacher = job.open_pair(config.model, config.seed)
    if config.stability or config.tangents:
        # Before images are opened: half-precision weights lose a small perturbation.
        check_perturbable(teacher)
    job.about_models("dynamics", config.model, surrogate, teacher)
    if config.phases is not None:
        check_phases(teacher, config.phases)
    elif surrogate is None:
        check_cuts(teacher, [config.k])
    if config.head_file is not None:
        # Opened once more where it is used. Here a head that takes other features is told before anything is measured.
        given_head(config.head_file, teacher)
    training = _choose_images(job)
    batches = job.stream()
    # One cut for both sides, so that their numbers can be compared phase by phase.
    cut = _choose_phases(job, batches)
    chosen = choose_classes(job.judged, config.num_classes)
    facts: dict[str, Any] = dict(
        data=job.data.name,
        split=part_read(job.data.split, job.judged.parts),
        image_size=teacher.preprocess.size,
        phases=list(cut.lengths),
        class_names=_class_names(job.judged, chosen),
        seed=config.seed,
        subject=job.subject,
    )
    measured = _measure(job, batches, cut, chosen, facts)
    # Each part is written when it is there: an interruption of what follows does not lose it.
    names = ", ".join(side.model.name for side in measured.sides().values())
    figures = job.write(measured, dynamics_charts, f"{names}; {measured.images}")
    # Without the unreadable images, so that none of the few that are chosen below is missing.
    few = job.judged
    if measured.bad_images:
        bad = set(measured.bad_images)
        few = few.select([i for i, name in enumerate(few.names) if name not in bad])
    changed = None
    if config.interventions:
        changed = _intervene(job, few, training, cut, facts)
        figures += job.write(changed, intervention_charts, changed.images)
    tangents = None
    if config.tangents:
        tangents = _compare_tangents(job, few, cut, facts)
        figures += job.write(tangents, tangent_charts, tangents.images)
    return Dynamics(measured, changed, tangents, job.folder, figures)


def _choose_images(job: Job) -> ImageData | None:
    """Choose what is measured, and give the training images where a head may be fitted for the interventions."""
    config = job.config
    size = job.teacher.preprocess.size
    data = ChosenData.of(job.source, vars(config), job.teacher.classes, job.teacher.num_classes)
    # A ridge head is fitted on training images, which then must not be among those that are measured.
    training = None
    may_fit = config.interventions and job.fits_head
    if may_fit:
        with suppress(ValueError):  # only held-out images: no head is fitted, and the reason comes with the results
            training = data.training(None, size)
    is_unlabelled = training is not None and training.labels is None
    # Where nothing is fitted no image has to be held out, so a plain folder is measured whole.
    if config.split is None and job.surrogate is None and (is_unlabelled or not may_fit):
        data = replace(data, split="own")
    fitted = None if is_unlabelled else training
    job.data = data
    job.judge(data.judged(config.num_images, size, also=fitted), DynamicsFile.FILE, InterventionsFile.FILE)
    return training


def _measure(
    job: Job, batches: ImageStream, cut: Phases, chosen: list[int] | None, facts: dict[str, Any]
) -> DynamicsFile:
    """dynamics.json: both sides on the same images. chosen: the classes whose basins are drawn."""
    config = job.config
    sides: dict[str, DynamicsResult] = {}
    for side, vit in job.sides.items():
        with Progress(f"dynamics of {vit.name}", None, "image passes") as bar:
            found = measure_dynamics(
                vit,
                batches,
                num_images=batches.num_images,
                phases=cut,
                classes=chosen,
                stability_images=config.sample_images if config.stability else 0,
                rank_images=config.sample_images,
                eps=config.eps,
                perturbation=config.perturbation,
                precision=job.precision,
                seed=config.seed,
                progress=bar.update,
            )
        if chosen is None and config.num_classes:
            found.notes.append("no basins: the data has fewer than two classes with two images")
        found.findings = find(found, cut)
        sides[side] = found
    return DynamicsFile(
        sides["teacher"],
        sides.get("surrogate"),
        num_images=sides["teacher"].num_images,
        bad_images=batches.bad_images(),
        provenance=job.provenance(),
        **facts,
    )


def _intervene(
    job: Job, images: ImageData, training: ImageData | None, cut: Phases, facts: dict[str, Any]
) -> InterventionsFile:
    """interventions.json: what changes where layers are swapped or run longer."""
    head = job.choose_head(training)
    some = job.stream(images, limit=job.config.sample_images, ranks=ONE_PROCESS)
    # Read once and sent to all: every rank gives the same images to `intervene`, which shares the pairs of blocks.
    shown = job.ranks.first(lambda: torch.cat([batch.images.cpu() for batch in some]))
    parts = intervene(job.teacher, job.surrogate, shown, cut, head, job.ranks)
    return InterventionsFile(
        parts["teacher"],
        parts.get("surrogate"),
        findings=_findings(parts, job.subject),
        head=job.head_source,
        num_images=len(shown),
        provenance=job.provenance(),
        **facts,
    )


def _compare_tangents(job: Job, images: ImageData, cut: Phases, facts: dict[str, Any]) -> TangentsFile:
    """tangents.json: how small differences grow along depth, beside an untrained twin."""
    num_images = min(_TANGENT_IMAGES, job.config.sample_images)
    some = job.stream(images, batch_size=TANGENT_BATCH, limit=num_images, ranks=ONE_PROCESS)
    sides, notes = job.ranks.first(
        lambda: compare_tangents(job.teacher, job.surrogate, list(some), cut, job.config.seed)
    )
    return TangentsFile(
        sides["teacher"],
        sides.get("surrogate"),
        sides.get("twin"),
        findings=_findings(sides, job.subject),
        notes=notes,
        num_images=sides["teacher"].jacobians.num_images,
        provenance=job.provenance(),
        **facts,
    )


def _findings(sides: Mapping[str, Interventions | Tangents], subject: Subject) -> list[str]:
    """What was found on each side, each line with the side's name."""
    return [f"{subject.name_of(side)}: {line}" for side, found in sides.items() for line in found.findings()]


def _choose_phases(job: Job, batches: ImageStream) -> Phases:
    """Phase lengths: those given, else the surrogate's, else max-cut on the model's own similarity."""
    teacher = job.teacher
    if job.config.phases is not None:
        return check_phases(teacher, job.config.phases)
    if job.surrogate is not None and job.surrogate.phases is not None:
        return Phases.from_lengths(job.surrogate.phases)
    similarity = measure_similarity(
        Trajectories(teacher, batches, job.precision),
        teacher.num_layers,
        teacher.groups,
        # A cut reads cosines only, so CKA is left out.
        cka_features=None,
        model=teacher.name,
    )
    return job.ranks.first(lambda: find_phases(similarity.matrices[DEFAULT_TOKENS], job.config.k))


def choose_classes(data: ImageData, num: int) -> list[int] | None:
    """The `num` classes with the most images, ties to the lower number; None if two with two images are not there."""
    if data.labels is None or num < 1:
        return None
    # A class needs two images: accuracy leaves each image out of the mean of its own class.
    counts = Counter(data.labels)
    ranked = sorted((label for label, n in counts.items() if n >= 2), key=lambda label: (-counts[label], label))
    return sorted(ranked[:num]) if len(ranked[:num]) >= 2 else None


def _class_names(data: ImageData, chosen: Sequence[int] | None) -> dict[str, str] | None:
    if chosen is None or data.classes is None:
        return None
    return {str(label): data.classes[label] for label in chosen}
