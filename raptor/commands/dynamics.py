"""raptor dynamics: depth as a dynamical system, of a model or of a surrogate beside its teacher."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from raptor.certificate.heads import given_head, head_batches, resolve_head
from raptor.config import DynamicsConfig
from raptor.data import ChosenData, ImageData, ImageStream, iterate
from raptor.data.split import part_read
from raptor.devices import join_ranks, pick_device, pick_precision, seeded
from raptor.dynamics.findings import find
from raptor.dynamics.interventions import Interventions, InterventionsFile, intervene
from raptor.dynamics.measure import DynamicsFile, DynamicsResult, check_perturbable, measure_dynamics
from raptor.dynamics.tangents import TANGENT_BATCH, Tangents, TangentsFile, compare_tangents
from raptor.phases.cut import Phases, check_phases, find_phases
from raptor.phases.similarity import measure_similarity
from raptor.phases.study import DEFAULT_TOKENS, check_cuts
from raptor.progress import Progress
from raptor.provenance import Provenance, command
from raptor.run import result_folder
from raptor.streaming import Result, folder_of
from raptor.subject import Subject, check_place
from raptor.vit.pair import open_pair
from raptor.vit.saved import check_folder_of
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT

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
        lines += [self.measured.few_images] if self.measured.few_images else []
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
    started = time.monotonic()
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    model, seed = config.model, config.seed
    ranks = join_ranks(device)
    # An untrained model gets the same weights on every rank and in every run.
    with seeded(seed):
        surrogate, main = open_pair(model, device=ranks.device, **config.opening())
    if config.stability or config.tangents:
        # Before images are opened: half-precision weights lose a small perturbation.
        check_perturbable(main)
    folder = ranks.first(lambda: result_folder(config.out, folder_of(model), "dynamics", config.weights_name()))
    check_folder_of(folder, folder_of(model), surrogate, main)
    if config.phases is not None:
        check_phases(main, config.phases)
    elif surrogate is None:
        check_cuts(main, [config.k])
    if config.head_file is not None:
        # Opened once more where it is used. Here a head that takes other features is told before anything is measured.
        given_head(config.head_file, main)
    data = ChosenData.of(folder_of(model), vars(config), main.classes, main.num_classes)
    # A ridge head is fitted on training images, which then must not be among those that are measured.
    training = None
    may_fit = config.interventions and not main.num_classes and config.head_file is None
    if may_fit:
        with suppress(ValueError):  # only held-out images: no head is fitted, and the reason comes with the results
            training = data.training(None, main.preprocess.size)
    is_unlabelled = training is not None and training.labels is None
    # Where nothing is fitted no image has to be held out, so a plain folder is measured whole.
    if config.split is None and surrogate is None and (is_unlabelled or not may_fit):
        data = replace(data, split="own")
    fitted = None if is_unlabelled else training
    images = data.judged(config.num_images, main.preprocess.size, also=fitted)
    subject = ranks.first(lambda: Subject.of(main, images, surrogate))
    # A refusal to replace a result comes now, and not after minutes of measuring.
    ranks.first(lambda: check_place(folder, subject, DynamicsFile.FILE, InterventionsFile.FILE))
    batches = iterate(
        images,
        main.preprocess,
        config.batch_size,
        device=ranks.device,
        num_workers=config.num_workers,
        ranks=ranks,
    )
    # One cut for both sides, so that their numbers can be compared phase by phase.
    cut = _choose_phases(main, surrogate, batches, config.k, config.phases, precision)
    chosen = choose_classes(images, config.num_classes)
    sides: dict[str, DynamicsResult] = {}
    for side, vit in (("teacher", main), ("surrogate", surrogate)):
        if vit is None:
            continue
        bar = Progress(f"dynamics of {vit.name}", None, "image passes")
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
            precision=precision,
            seed=seed,
            progress=bar.update,
        )
        bar.finish()
        if chosen is None and config.num_classes:
            found.notes.append("no basins: the data has fewer than two classes with two images")
        found.findings = find(found, cut)
        sides[side] = found
    facts: dict[str, Any] = dict(
        data=data.name,
        split=part_read(data.split, images.parts),
        image_size=main.preprocess.size,
        phases=list(cut.lengths),
        class_names=_class_names(images, chosen),
        seed=seed,
        subject=subject,
    )
    measured = DynamicsFile(
        sides["teacher"],
        sides.get("surrogate"),
        num_images=sides["teacher"].num_images,
        bad_images=batches.bad_images(),
        provenance=Provenance.since(started, device),
        **facts,
    )
    # Written now: an interruption of what follows does not lose it.
    ranks.first(lambda: _write(measured, folder))
    # Without the unreadable images, so that none of the few that are chosen below is missing.
    bad = set(measured.bad_images)
    few = images.select([i for i, name in enumerate(images.names) if name not in bad]) if bad else images
    changed = None
    if config.interventions:
        to_fit = None
        if training is not None:
            num_workers = config.num_workers
            to_fit = head_batches(
                main, training, config.batch_size, head_images=config.train_images, num_workers=num_workers, ranks=ranks
            )
        head, reason = resolve_head(
            main,
            to_fit,
            file=config.head_file,
            cache=folder / "head.safetensors",
            head_images=config.train_images,
            precision=precision,
        )
        some = iterate(few, main.preprocess, config.batch_size, device=ranks.device, limit=config.sample_images)
        # Read once and sent to all: every rank gives the same images to `intervene`, which shares the pairs of blocks.
        shown = ranks.first(lambda: torch.cat([batch.images.cpu() for batch in some]))
        parts = intervene(main, surrogate, shown, cut, head, ranks)
        changed = InterventionsFile(
            parts["teacher"],
            parts.get("surrogate"),
            findings=_findings(parts, subject),
            head=reason,
            num_images=len(shown),
            provenance=Provenance.since(started, device),
            **facts,
        )
    tangents = None
    if config.tangents:
        num_tangents = min(_TANGENT_IMAGES, config.sample_images)
        some = iterate(few, main.preprocess, TANGENT_BATCH, device=ranks.device, limit=num_tangents)
        stability, notes = ranks.first(lambda: compare_tangents(main, surrogate, list(some), cut, seed))
        tangents = TangentsFile(
            stability["teacher"],
            stability.get("surrogate"),
            stability.get("twin"),
            findings=_findings(stability, subject),
            notes=notes,
            num_images=stability["teacher"].jacobians.num_images,
            provenance=Provenance.since(started, device),
            **facts,
        )
    figures = ranks.first(lambda: _write_rest(measured, changed, tangents, folder))
    return Dynamics(measured, changed, tangents, folder, figures)


def _findings(sides: Mapping[str, Interventions | Tangents], subject: Subject) -> list[str]:
    """What was found on each side, each line with the side's name."""
    return [f"{subject.name_of(side)}: {line}" for side, found in sides.items() for line in found.findings()]


def _write(measured: DynamicsFile, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    measured.write(folder)


def _write_rest(
    measured: DynamicsFile, changed: InterventionsFile | None, tangents: TangentsFile | None, folder: Path
) -> list[str]:
    """Write interventions.json, tangents.json and the figures; the names of the figures."""
    from raptor.report.dynamics import dynamics_charts
    from raptor.report.figures import save_figures
    from raptor.report.interventions import intervention_charts
    from raptor.report.stability import tangent_charts

    figures = folder / "figures"
    names = ", ".join(side.model.name for side in measured.sides().values())
    written = save_figures(dynamics_charts(measured), figures, f"{names}; {measured.images}")
    if changed is not None:
        changed.write(folder)
        written += save_figures(intervention_charts(changed), figures, changed.images)
    if tangents is not None:
        tangents.write(folder)
        written += save_figures(tangent_charts(tangents), figures, tangents.images)
    return written


def _choose_phases(
    teacher: ViT, surrogate: ViT | None, batches: ImageStream, k: int, phases: Sequence[int] | None, precision: str
) -> Phases:
    """Phase lengths: those given, else the surrogate's, else max-cut on the model's own similarity."""
    if phases is not None:
        return check_phases(teacher, phases)
    if surrogate is not None and surrogate.phases is not None:
        return Phases.from_lengths(surrogate.phases)
    similarity = measure_similarity(
        Trajectories(teacher, batches, precision),
        teacher.num_layers,
        teacher.groups,
        # A cut reads cosines only, so CKA is left out.
        cka_features=None,
        model=teacher.name,
    )
    return batches.ranks.first(lambda: find_phases(similarity.matrices[DEFAULT_TOKENS], k))


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
