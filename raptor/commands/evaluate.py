"""raptor evaluate: the certificate of a surrogate, its complexity, and the figure."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raptor.certificate.certificate import Certificate
from raptor.certificate.complexity import PRECISIONS, Complexity, Rounding, cost_of_rounding, levin_bounds, quantised
from raptor.certificate.error_curves import ErrorCurves
from raptor.certificate.heads import head_batches, head_outputs, resolve_head
from raptor.certificate.measure import certify
from raptor.certificate.verdict import read_training
from raptor.config import EvaluateConfig
from raptor.data import ChosenData, ImageData, ImageStream, iterate
from raptor.devices import join_ranks, pick_device, pick_precision
from raptor.progress import Progress
from raptor.provenance import Provenance, command, module_option
from raptor.run import result_folder
from raptor.streaming import Result, folder_of
from raptor.subject import Subject, check_place
from raptor.vit.pair import open_pair
from raptor.vit.saved import check_folder_of
from raptor.vit.trajectory import Trajectories, autocast
from raptor.vit.view import ViT


@dataclass
class Evaluation(Result):
    """A certificate, the complexity of both sides, and where they were written."""

    certificate: Certificate
    complexity: Complexity
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        found = {"certificate": self.certificate.to_dict(), "complexity": self.complexity.to_dict()}
        return {**found, "folder": str(self.folder)}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per token group and layer."""
        groups = self.certificate.curves.groups
        return [{"group": group, **row} for group in groups for row in self.certificate.rows(group)]

    def plot(self) -> Any:
        """The error curves over layers."""
        from raptor.report.fidelity import figure_certificate
        from raptor.report.paper import draw

        return draw(figure_certificate(self.certificate))

    def text(self) -> str:
        from rich.console import Console

        console = Console(width=140)
        with console.capture() as capture:
            for line in self.certificate.first_lines():
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            console.print(self.certificate.table())
            console.print(self.certificate.summary_table())
            for note in self.certificate.notes:
                console.print(f"  {note}")
        return capture.get() + f"written to {self.folder}/certificate.json and {self.folder}/figures/certificate.png"


@command(EvaluateConfig)
def evaluate(config: EvaluateConfig) -> Evaluation:
    """Certify a surrogate against its teacher on held-out images."""
    started = time.monotonic()
    run = config.run
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    ranks = join_ranks(device)
    surrogate, teacher = _open_both(config, ranks.device)
    folder = ranks.first(lambda: result_folder(config.out, folder_of(run), "evaluate"))
    check_folder_of(folder, folder_of(run), surrogate, teacher)
    bar = Progress("certificate", config.num_images, "images")
    images = _choose_images(config, teacher)
    if images.chosen.classes is not None and config.head_file is None:
        teacher = replace(teacher, classes=list(images.chosen.classes))
    subject = ranks.first(lambda: Subject.of(teacher, images.judged, surrogate))
    ranks.first(lambda: check_place(folder, subject, Certificate.FILE, Complexity.FILE))
    folder.mkdir(parents=True, exist_ok=True)

    def stream(data: ImageData, progress: Any = None) -> ImageStream:
        return iterate(
            data,
            teacher.preprocess,
            config.batch_size,
            device=ranks.device,
            num_workers=config.num_workers,
            progress=progress,
            ranks=ranks,
        )

    held_out = stream(images.judged, bar.update)
    streams = [held_out, stream(images.fitted)]
    head_fit = None
    if config.head_file is None and not teacher.num_classes:
        size = teacher.preprocess.size
        labelled = images.chosen.labelled(images.chosen.training(None, size), images.judged, size)
        head_fit = head_batches(
            teacher,
            labelled,
            config.batch_size,
            head_images=config.head_images,
            num_workers=config.num_workers,
            ranks=ranks,
        )
        streams.append(head_fit)
    head, reason = resolve_head(
        teacher,
        head_fit,
        file=config.head_file,
        cache=folder / "head.safetensors",
        head_images=config.head_images,
        precision=precision,
    )
    certificate = certify(
        surrogate,
        teacher,
        held_out,
        eps=config.eps,
        null_models=config.null_models,
        head=head,
        precision=precision,
        bootstrap=config.bootstrap,
        seed=config.seed,
        train_batches=streams[1],
        training=None if isinstance(run, ViT) else read_training(Path(folder_of(run))),
        split=images.chosen.split,
    )
    bar.finish()
    certificate.notes.append(f"head: {reason}")
    few = images.judged.select(images.judged.sample(min(256, config.num_images)))
    rounding = _cost_of_rounding(surrogate, teacher, stream(few), precision)
    about = Provenance.since(started, device)
    bad: set[str] = set()
    for each in streams:
        bad.update(each.bad_images())
    certificate = replace(certificate, data=images.chosen.name, bad_images=sorted(bad), provenance=about)
    complexity = Complexity(
        **levin_bounds(surrogate, teacher),
        quantisation=rounding,
        data=images.chosen.name,
        split=images.chosen.split,
        provenance=about,
        subject=subject,
    )
    found = Evaluation(certificate, complexity, folder)
    ranks.first(lambda: _write(found))
    return found


def _open_both(config: EvaluateConfig, device: torch.device) -> tuple[ViT, ViT]:
    """The surrogate and its teacher."""
    run = config.run
    surrogate, model = open_pair(run, **config.of_teacher(), device=device, **config.opening())
    if surrogate is not None:
        return surrogate, model
    source = folder_of(run) if isinstance(folder_of(run), str | Path) else None
    words = source or model.opened.model or module_option(Provenance.here().module)
    raise ValueError(f"{source or model.name} is no surrogate: make one with raptor distill {words}")


@dataclass
class _Images:
    """The images that are judged, and the training images that null models are fitted on."""

    chosen: ChosenData
    judged: ImageData
    fitted: ImageData


def _choose_images(config: EvaluateConfig, teacher: ViT) -> _Images:
    num_classes, names = head_outputs(teacher, config.head_file)
    size = teacher.preprocess.size
    chosen = ChosenData.of(folder_of(config.run), vars(config), names, num_classes)
    fitted = chosen.training(config.train_images, size, any_class=True)
    seen = chosen.trained_on(folder_of(config.run), size)
    like: ImageData = fitted
    other: ImageData | None = seen
    has_own_head = config.head_file is None and chosen.classes is None
    if has_own_head and seen is not None and 0 < len(seen.classes or ()) == teacher.num_classes:
        # The run's classes are those of the head, so that they give the labels their numbers.
        like = seen
        other = fitted
    return _Images(chosen, chosen.judged(config.num_images, size, like=like, also=other), fitted)


def _write(found: Evaluation) -> None:
    from raptor.report.fidelity import figure_certificate
    from raptor.report.paper import draw
    from raptor.report.style import save_figure

    found.certificate.write(found.folder)
    found.complexity.write(found.folder)
    save_figure(draw(figure_certificate(found.certificate)), found.folder / "figures" / "certificate")


def _cost_of_rounding(
    surrogate: ViT, teacher: ViT, batches: ImageStream, precision: str
) -> dict[str, dict[str, dict[str, Rounding]]]:
    """What rounding the weights of each side adds to its errors against the teacher, in one pass over the images."""
    sides = {"surrogate": surrogate, "teacher": copy.deepcopy(teacher)}
    curves = {side: {bits: ErrorCurves(teacher.num_layers, teacher.groups) for bits in PRECISIONS} for side in sides}
    for states, _, batch in Trajectories(teacher, batches, precision, "rounded weights", quiet=True):
        images = batch.images.to(teacher.device, non_blocking=True)
        for side, vit in sides.items():
            for bits, each in curves[side].items():
                own = states if (side, bits) == ("teacher", "fp32") else _rounded_states(vit, bits, images, precision)
                each.update(states, own)
    for by_bits in curves.values():
        for each in by_bits.values():
            each.reduce(batches.ranks)
    return batches.ranks.first(
        lambda: {
            side: cost_of_rounding({bits: _short_errors(each) for bits, each in by_bits.items()})
            for side, by_bits in curves.items()
        }
    )


@torch.no_grad()
def _rounded_states(vit: ViT, bits: str, images: Tensor, precision: str) -> list[Tensor]:
    with quantised(vit, bits), autocast(precision, vit.device):
        return vit.record(images)[0]


def _short_errors(curves: ErrorCurves) -> dict[str, float]:
    """Relative error and R2 at the last layer, and the largest relative error over layers."""
    result = curves.result()
    relative = result.relative["all"]
    return {
        "relative_last": float(relative[-1]),
        "relative_largest": float(relative.max()),
        "r2_last": float(result.r2["all"][-1]),
    }
