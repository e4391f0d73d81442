"""raptor probe: linear probes on a model, or on a surrogate beside its teacher, under one protocol."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raptor.data import DenseData, ImageData, open_data, open_dense
from raptor.devices import pick_device, pick_precision
from raptor.open import open_pair
from raptor.probes import ProbeResult, recovery
from raptor.probes import probe as train_probe
from raptor.progress import Progress
from raptor.provenance import provenance
from raptor.run import check_folder, slug, write_text


@dataclass
class Probed:
    """Probe results of the teacher and, given a run, of the surrogate beside it."""

    task: str
    results: dict[str, ProbeResult]
    folder: Path

    @property
    def recovery(self) -> float | None:
        return recovery(self.results["surrogate"], self.results["teacher"]) if "surrogate" in self.results else None

    def to_dict(self) -> dict[str, Any]:
        results = {name: result.to_dict() for name, result in self.results.items()}
        return {"task": self.task, "results": results, "recovery": self.recovery}

    def text(self) -> str:
        lines = [f"{self.task}: {result.metric} of the {n} {result.score:.4f}" for n, result in self.results.items()]
        if self.recovery is not None:
            lines.append(f"recovery {self.recovery:.1%}")
        return "\n".join([*lines, f"written to {self.folder}/probe-{self.task}.json"])


def probe(
    model: str,
    *,
    task: str = "classify",
    data: str = "scenes",
    lrs: list[float] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    seeds: list[int] = [0],  # noqa: B006
    layer: int | None = None,
    closed_form: str | None = None,
    init_head: str = "own",
    max_seconds: float | None = None,
    limit: int | None = None,
    val_images: int | None = None,
    teacher: str | None = None,
    weights: str | None = None,
    size: int | None = None,
    blocks: str | None = None,
    norm: str | None = None,
    cls: int | None = None,
    registers: int | None = None,
    out: str | None = None,
    device: str = "auto",
    precision: str = "auto",
    num_workers: int = 0,
    skip_bad: bool = False,
) -> Probed:
    """Train linear probes on a frozen model; given a run, on the surrogate and on its teacher alike.

    Args:
        model: a run folder, or any model name.
        task: classify, segment or depth.
        data: labelled images (classify); scenes, ade20k:PATH or nyuv2:PATH (segment, depth).
        lrs: learning rates, all trained in one backbone pass; by default twelve around the task's own.
        epochs: passes over the training images; by default the task's own.
        batch_size: images a step; by default the task's own.
        seeds: several give mean and deviation.
        layer: the state to probe (0..L); by default the last.
        closed_form: ridge or logistic on cached features, for a quick look at classification.
        init_head: where the classifier starts: own (the model's own linear head, where it has one of as many classes),
            random, or the file of a published linear head.
        max_seconds: of training for each seed.
        limit: use only this many training images.
        val_images: use only this many held-out images.
        teacher: what the teacher is, where the run does not say.
        weights: a local weight file for the teacher.
        size: image size; of frames (segment, depth) the shorter side.
        blocks: dotted path of the block list, for a model whose structure cannot be guessed.
        norm: dotted path of the final norm, likewise.
        cls: number of cls tokens (0 or 1), likewise.
        registers: number of register tokens, likewise.
        out: folder for probe-TASK.json and the heads; by default the run's own.
        device: auto, cpu or cuda.
        precision: auto, fp32 or bf16.
        num_workers: processes that decode images.
        skip_bad: pass over unreadable images instead of stopping (classify).
    """
    started = time.monotonic()
    device = pick_device(device)
    precision = pick_precision(precision, device)
    if task not in ("classify", "segment", "depth"):
        raise ValueError(f"unknown task {task!r}: choose from classify, segment, depth")
    # Frames of the dense tasks are padded to whole patches, so any size of theirs will do, and the model keeps its own.
    surrogate, of_teacher = open_pair(
        model, teacher=teacher, weights=weights, size=size if task == "classify" else None, blocks=blocks, norm=norm,
        cls=cls, registers=registers, device=device,
    )  # fmt: skip
    side = size or of_teacher.preprocess.size
    train_data: ImageData | DenseData
    val_data: ImageData | DenseData
    if task == "classify":
        train_data = open_data(data, "train", limit=limit, size=side, skip_bad=skip_bad)
        val_data = open_data(data, "val", limit=val_images, size=side, skip_bad=skip_bad)
    else:
        train_data = open_dense(data, "train", task, limit=limit, size=side)
        val_data = open_dense(data, "val", task, limit=val_images, size=side)
    folder = check_folder(out or (model if Path(model).is_dir() else f"runs/probe-{slug(model)}"), of=model)
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for name, vit in {"teacher": of_teacher, "surrogate": surrogate}.items():
        if vit is None:
            continue
        bar = Progress(f"{task} probe of the {name}", None, "steps")

        def show(done: int, total: int, bar: Progress = bar) -> None:
            bar.total = total
            bar.advance(done - bar.done)

        results[name] = train_probe(
            vit, task, train_data, val_data, lrs=lrs, epochs=epochs, batch_size=batch_size, seeds=seeds, layer=layer,
            precision=precision, size=size, closed_form=closed_form, init_head=init_head, num_workers=num_workers,
            max_seconds=max_seconds, progress=show,
        )  # fmt: skip
        bar.finish()
        results[name].save(folder / f"probe-{task}-{name}")
    probed = Probed(task, results, folder)
    found = {"provenance": provenance(started, device), "data": data, **probed.to_dict()}
    write_text(folder / f"probe-{task}.json", json.dumps(found))
    return probed
