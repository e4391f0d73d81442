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
            definition = self.certificate.definition
            first = [] if definition is None else [definition.line()]
            for line in [*first, *self.certificate.judged.lines()]:
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
    surrogate, model = open_pair(run, **config.of_teacher(), device=ranks.device, **config.opening())
    if surrogate is None:
        source = folder_of(run) if isinstance(folder_of(run), str | Path) else None
        words = source or model.opened.get("model") or module_option(Provenance.here().module)
        raise ValueError(f"{source or model.name} is no surrogate: make one with raptor distill {words}")
    folder = ranks.first(lambda: result_folder(config.out, folder_of(run), "evaluate"))
    check_folder_of(folder, folder_of(run), surrogate, model)
    num_classes, names = head_outputs(model, config.head_file)
    num_images = config.num_images
    bar = Progress("certificate", num_images, "images")
    chosen, size = ChosenData.of(folder_of(run), vars(config), names, num_classes), model.preprocess.size
    if chosen.classes is not None and config.head_file is None:
        model = replace(model, classes=list(chosen.classes))

    def stream(images: ImageData, progress: Any = None) -> ImageStream:
        return iterate(
            images,
            model.preprocess,
            config.batch_size,
            device=ranks.device,
            num_workers=config.num_workers,
            progress=progress,
            ranks=ranks,
        )

    fitted = chosen.training(config.train_images, size, any_class=True)
    seen = chosen.trained_on(folder_of(run), size)
    own_head = config.head_file is None and chosen.classes is None
    like: ImageData = fitted
    other: ImageData | None = seen
    if own_head and seen is not None and 0 < len(seen.classes or ()) == model.num_classes:
        like, other = seen, fitted  # the head's classes are called as those of the run
    judged = chosen.judged(num_images, size, like=like, also=other)
    subject = ranks.first(lambda: Subject.of(model, judged, surrogate))
    ranks.first(lambda: check_place(folder, subject, Certificate.FILE, Complexity.FILE))
    held_out, training = stream(judged, bar.update), stream(fitted)
    folder.mkdir(parents=True, exist_ok=True)
    head_file, head_images = config.head_file, config.head_images
    fitting = None
    if head_file is None and not model.num_classes:
        images = chosen.labelled(chosen.training(None, size), judged, size)
        fitting = head_batches(
            model,
            images,
            config.batch_size,
            head_images=head_images,
            num_workers=config.num_workers,
            ranks=ranks,
        )
    head, reason = resolve_head(
        model, fitting, file=head_file, cache=folder / "head.safetensors", head_images=head_images, precision=precision
    )
    certificate = certify(
        surrogate,
        model,
        held_out,
        eps=config.eps,
        null_models=config.null_models,
        head=head,
        precision=precision,
        bootstrap=config.bootstrap,
        seed=config.seed,
        train_batches=training,
        training=None if isinstance(run, ViT) else read_training(Path(folder_of(run))),
        split=chosen.split,
    )
    bar.finish()
    certificate.notes.append(f"head: {reason}")
    few = judged.select(judged.sample(min(256, num_images)))
    rounding = _cost_of_rounding(surrogate, model, stream(few), precision)
    about = Provenance.since(started, device)
    bad = sorted({name for used in (held_out, training, fitting) if used is not None for name in used.bad_images()})
    certificate = replace(certificate, data=chosen.name, bad_images=bad, provenance=about)
    complexity = Complexity(
        **levin_bounds(surrogate, model),
        quantisation=rounding,
        data=chosen.name,
        split=chosen.split,
        provenance=about,
        subject=subject,
    )
    found = Evaluation(certificate, complexity, folder)
    ranks.first(lambda: _write(found))
    return found


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
