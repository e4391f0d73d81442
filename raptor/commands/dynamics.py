"""raptor dynamics: depth as a dynamical system, of a model or of a surrogate beside its teacher."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import nn

from raptor.data import ChosenData, ImageData, ImageStream, iterate
from raptor.devices import Ranks, join_ranks, pick_device, pick_precision, seeded
from raptor.dynamics.findings import find
from raptor.dynamics.interventions import InterventionsFile, intervene
from raptor.dynamics.measure import DynamicsFile, DynamicsResult, check_perturbable, measure_dynamics
from raptor.dynamics.stability import KINDS
from raptor.fidelity.heads import Head, given_head, head_batches, resolve_head
from raptor.options import AnySplit, GivenHead, HeadClasses, Measuring, OfTeacher, OpeningModel, part, with_defaults
from raptor.phases import DEFAULT_TOKENS, Phases, check_cuts, check_phases, find_phases
from raptor.progress import Progress
from raptor.provenance import Provenance, recorded
from raptor.report.results import check_results_of
from raptor.run import result_folder
from raptor.similarity.cosine import measure_similarity
from raptor.streaming import Result, folder_of
from raptor.subject import Subject
from raptor.vit.pair import open_pair
from raptor.vit.saved import check_folder_of
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT


@dataclass
class Dynamics(Result):
    """What `raptor dynamics` found, as in dynamics.json and interventions.json, and where it was written."""

    measured: DynamicsFile
    interventions: InterventionsFile | None
    folder: Path
    figures: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "dynamics": self.measured.to_dict(),
            "interventions": None if self.interventions is None else self.interventions.to_dict(),
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
        from raptor.report.dynamics import figure_panel
        from raptor.report.paper import draw

        return draw(figure_panel("speed", self.measured))

    def text(self) -> str:
        lines = []
        for side, found in self.measured.sides().items():
            lines.append(f"{side}: {found.model.name}, {self.measured.images}")
            lines += [f"  {line}" for line in found.findings + found.notes]
        lines += [self.measured.few_images] if self.measured.few_images else []
        if self.interventions is not None:
            lines += [
                f"interventions, {self.interventions.images}:",
                *(f"  {line}" for line in self.interventions.findings),
            ]
        return "\n".join([*lines, f"written to {self.folder}: dynamics.json, {len(self.figures)} figures in figures/"])


class DynamicsOptions(OpeningModel, OfTeacher, Measuring, AnySplit, HeadClasses, GivenHead, total=False):
    """The options that `dynamics` shares with other commands."""


@recorded
def dynamics(
    model: str | Path | nn.Module | ViT | Result,
    *,
    out: str | None = None,
    num_classes: int = 5,
    stability_images: int = 64,
    rank_images: int = 64,
    eps: tuple[float, ...] = (1e-3, 1e-2, 1e-1),
    perturbation: Literal["relative", "paper"] = "relative",
    k: int = 3,
    phases: list[int] | None = None,
    interventions: bool = True,
    intervention_images: int = 32,
    seed: int = 0,
    **given: Unpack[DynamicsOptions],
) -> Dynamics:
    """Direction, stability, rank, modes and basins along depth, and interventions on it.

    A run folder or another surrogate is measured beside its teacher.

    Args:
        model: a run folder, or timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes, scenes-k3 (in Python also a module, an
            opened model or the result of `distill`).
        out: folder for dynamics.json, interventions.json and figures; by default the run's own.
        num_classes: how many classes basins are drawn of: those with the most images; 0 leaves basins out.
        stability_images: images that are perturbed, in fp32; 0 leaves stability out.
        rank_images: images whose updates are factorised.
        eps: sizes of the perturbations.
        perturbation: `relative`, eps times each token's norm, or `paper`, eps times a standard normal vector.
        k: phases that depth is cut into (by max-cut) where they are not given; a surrogate has its own.
        phases: phase lengths instead, e.g. 7 3 2.
        interventions: also swap layers, run phases longer and shorter, and run a surrogate past its last layer.
        intervention_images: images of the interventions, a sample spread over the data.
        seed: of the perturbations, and of the weights of an untrained model.
        precision: auto, fp32 or bf16, of the states; stability and interventions run without autocast.
    """
    started = time.monotonic()
    options = with_defaults(DynamicsOptions, given)
    device = pick_device(options["device"])
    precision = pick_precision(options["precision"], device)
    if perturbation not in KINDS:
        raise ValueError(f"unknown --perturbation {perturbation!r}: choose from {', '.join(KINDS)}")
    ranks = join_ranks(device)
    opening: dict[str, Any] = {**part(OfTeacher, options), **part(OpeningModel, options)}
    with seeded(seed):
        surrogate, main = open_pair(model, device=ranks.device, **opening)
    if stability_images:
        check_perturbable(main)
    folder = ranks.first(lambda: result_folder(out, folder_of(model), "dynamics"))
    check_folder_of(folder, folder_of(model), surrogate, main)
    are_all_new = interventions or not (folder / InterventionsFile.FILE).exists()
    ranks.first(lambda: check_results_of(folder, surrogate, main, ["dynamics"] if are_all_new else []))
    if phases is not None:
        check_phases(main, phases)
    elif surrogate is None:
        check_cuts(main, [k])
    if options["head_file"] is not None:
        given_head(options["head_file"], main)
    data = ChosenData.of(folder_of(model), options, main.classes, main.num_classes)
    images = data.judged(options["num_images"], main.preprocess.size)
    batches = iterate(
        images,
        main.preprocess,
        options["batch_size"],
        device=ranks.device,
        num_workers=options["num_workers"],
        ranks=ranks,
    )
    cut = _choose_phases(main, surrogate, batches, k, phases, precision)
    chosen = choose_classes(images, num_classes)
    sides: dict[str, DynamicsResult] = {}
    for side, vit in (("teacher", main), ("surrogate", surrogate)):
        if vit is None:
            continue
        bar = Progress(f"dynamics of the {side}", None, "image passes")
        found = measure_dynamics(
            vit,
            batches,
            num_images=batches.num_images,
            phases=cut,
            classes=chosen,
            stability_images=stability_images,
            rank_images=rank_images,
            eps=eps,
            perturbation=perturbation,
            precision=precision,
            seed=seed,
            progress=bar.update,
        )
        bar.finish()
        if chosen is None and num_classes:
            found.notes.append("no basins: the data has fewer than two classes with two images")
        found.findings = find(found, cut)
        sides[side] = found
    facts: dict[str, Any] = dict(
        data=data.name,
        split=data.split,
        image_size=main.preprocess.size,
        phases=list(cut.lengths),
        class_names=_class_names(images, chosen),
        seed=seed,
        subject=ranks.first(lambda: Subject.of(main, images, surrogate)),
    )
    measured = DynamicsFile(
        sides["teacher"],
        sides.get("surrogate"),
        num_images=batches.num_images,
        bad_images=batches.bad_images(),
        provenance=Provenance.since(started, device),
        **facts,
    )
    ranks.first(lambda: _write(measured, folder))
    changed = None
    if interventions:
        head, reason = _find_head(main, folder, precision, data, options, ranks)
        bad = set(measured.bad_images)
        few = images.select([i for i, name in enumerate(images.names) if name not in bad]) if bad else images
        some = iterate(few, main.preprocess, options["batch_size"], device=ranks.device, limit=intervention_images)
        shown = ranks.first(lambda: torch.cat([batch.images.cpu() for batch in some]))
        parts = intervene(main, surrogate, shown, cut, head, ranks)
        changed = InterventionsFile(
            parts["teacher"],
            parts.get("surrogate"),
            findings=[f"{side}: {line}" for side, found in parts.items() for line in found.findings()],
            head=reason,
            num_images=len(shown),
            provenance=Provenance.since(started, device),
            **facts,
        )
    return Dynamics(measured, changed, folder, ranks.first(lambda: _write_rest(measured, changed, folder)))


def _write(measured: DynamicsFile, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    measured.write(folder)


def _write_rest(measured: DynamicsFile, changed: InterventionsFile | None, folder: Path) -> list[str]:
    """Write interventions.json and the figures; the names of the figures."""
    from raptor.report.dynamics import save_figures

    if changed is not None:
        changed.write(folder)
    return save_figures(measured, changed, folder / "figures")


def _find_head(
    vit: ViT, folder: Path, precision: str, data: ChosenData, options: DynamicsOptions, ranks: Ranks
) -> tuple[Head | None, str]:
    """The head that predicts after an intervention, and which one it is or why there is none."""
    file, num = options["head_file"], options["head_images"]
    training = None
    if file is None and not vit.num_classes:
        with suppress(ValueError):  # only held-out images: no ridge head can be fitted, and the reason says so
            images = data.training(None, vit.preprocess.size)
            training = head_batches(
                vit, images, options["batch_size"], head_images=num, num_workers=options["num_workers"], ranks=ranks
            )
    cache = folder / "head.safetensors"
    return resolve_head(vit, training, file=file, cache=cache, head_images=num, precision=precision)


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
        cka_features=None,
        model=teacher.name,
    )
    return batches.ranks.first(lambda: find_phases(similarity.matrices[DEFAULT_TOKENS], k))


def choose_classes(data: ImageData, num: int) -> list[int] | None:
    """The `num` classes with the most images, ties to the lower number; None if two with two images are not there."""
    if data.labels is None or num < 1:
        return None
    counts = Counter(data.labels)
    ranked = sorted((label for label, n in counts.items() if n >= 2), key=lambda label: (-counts[label], label))
    return sorted(ranked[:num]) if len(ranked[:num]) >= 2 else None


def _class_names(data: ImageData, chosen: Sequence[int] | None) -> dict[str, str] | None:
    if chosen is None or data.classes is None:
        return None
    return {str(label): data.classes[label] for label in chosen}
