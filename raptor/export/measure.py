"""What an exported file is worth: its size, its states against those of the model it was made from, its speed, and how
often it agrees with the teacher. The teacher at the same precision stands in the same table."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raptor.certificate.heads import Head
from raptor.data.stream import Batch
from raptor.export.graphs import Exported
from raptor.export.weights import stored_bytes
from raptor.progress import track
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Record, Result
from raptor.subject import Subject
from raptor.vit.view import ViT

BATCHES = (1, 32)
"""The batch sizes that are timed."""
NOISE = "noise"
"""What a file is compared on if there are no images."""


@dataclass
class ExportRow(Record):
    """One way to run one model.

    Attributes:
        model: `surrogate` or `teacher`.
        form: `pytorch`, or what was written.
        weights: their precision.
        num_bytes: of the file; for `pytorch`, of the weights.
        errors: at each layer 0..L, |a_l - x_l|_F / |a_l|_F, where a_l is the state of the same model in PyTorch at
            fp32, both summed over the images.
        largest: the largest difference of an output from the same model's in PyTorch at the same precision, as a share
            of the largest output where that is above 1.
        agreement: the share of images with the class of the teacher; None without a head.
        p50, p95: milliseconds of a call, by batch size.
    """

    model: str
    form: str
    weights: str
    num_bytes: int
    errors: list[float] = field(default_factory=list)
    largest: float = 0.0
    agreement: float | None = None
    p50: dict[int, float] = field(default_factory=dict)
    p95: dict[int, float] = field(default_factory=dict)


@dataclass
class Export(ResultFile, Result):
    """export.json: what was written, and what it is worth.

    Attributes:
        use: how what was written is opened, as Markdown.
        threads: of the timed calls.
    """

    FILE: ClassVar[str] = "export.json"

    to: str
    weights: str
    use: str
    rows: list[ExportRow]
    num_images: int
    data: str
    head: str
    threads: int
    notes: list[str] = field(default_factory=list)
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per way to run a model."""
        found = []
        for row in self.rows:
            cells: dict[str, Any] = {
                "model": row.model,
                "runs in": row.form,
                "weights": row.weights,
                "MB": round(row.num_bytes / 1e6, 2),
                "agreement": None if row.agreement is None else f"{row.agreement:.1%}",
                "largest error": f"{max(row.errors):.1e}",
            }
            for batch in row.p50:
                cells[f"ms at {batch}: p50"] = f"{row.p50[batch]:.1f}"
                cells[f"p95 at {batch}"] = f"{row.p95[batch]:.1f}"
            found.append(cells)
        return found

    def text(self) -> str:
        rows = self.table_rows()
        names = list(rows[0])
        lines = [" | ".join(names)]
        for row in rows:
            lines.append(" | ".join("-" if row[name] is None else str(row[name]) for name in names))
        lines.append(f"agreement with the teacher's class on {self.num_images} images of {self.data} ({self.head})")
        lines += self.notes
        lines.append("export.json and the model card stand beside it. To open it:")
        lines += self.use.splitlines()
        return "\n".join(lines)


@dataclass
class Runner:
    """One way to run one model, and the model in PyTorch that it is compared with.

    Attributes:
        own: of which model the states should be.
        same: the same model at the same precision in PyTorch; None for `own` itself.
    """

    row: ExportRow
    exported: Exported
    own: ViT
    same: ViT | None = None


def in_pytorch(model: str, vit: ViT, own: ViT, weights: str) -> Runner:
    """A model as PyTorch runs it."""
    row = ExportRow(model, "pytorch", weights, stored_bytes(own, weights))
    return Runner(row, Exported(torch.no_grad()(vit.__call__), torch.no_grad()(vit.record)), own)


def noise(size: int) -> list[Batch]:
    """A batch of noise, which shows whether a file computes what the model does."""
    images = torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(0))
    return [Batch(images, None, torch.arange(len(images)))]


@torch.no_grad()
def measure_runners(runners: list[Runner], teacher: ViT, batches: Iterable[Batch], head: Head | None) -> int:
    """Fill in errors and agreement of every row, in one pass over the images, whose number is the result."""
    sums_lr = []  # of |a_l - x_l| and of |a_l|, in fp64 because fp32 would lose late images
    for runner in runners:
        sums_lr.append(torch.zeros(runner.own.num_layers + 1, 2, dtype=torch.float64))
    agreed = [0] * len(runners)
    num_images = 0
    for batch in track(batches, "compare the exported model"):
        images = batch.images
        taught, teacher_output = teacher.record(images)
        owned: dict[int, list[Tensor]] = {id(teacher): taught}
        classes_b = torch.empty(0)
        if head is not None:
            classes_b = head.logits(teacher, taught[-1], teacher_output).argmax(-1)
        for n, runner in enumerate(runners):
            # Several rows are of one model, whose states are computed once per batch.
            if id(runner.own) not in owned:
                owned[id(runner.own)] = runner.own.record(images)[0]
            states, output = runner.exported.record(images)
            for layer, (state, own) in enumerate(zip(states, owned[id(runner.own)])):
                sums_lr[n][layer, 0] += (state.float() - own).flatten(1).norm(dim=1).double().sum()
                sums_lr[n][layer, 1] += own.flatten(1).norm(dim=1).double().sum()
            if runner.same is not None:
                same = runner.same(images).float()
                difference = (output - same).abs().max() / same.abs().max().clamp_min(1)
                # NaN would be lost by max().
                runner.row.largest = max(difference.nan_to_num(torch.inf).item(), runner.row.largest)
            if head is not None:
                own_b = head.logits(runner.own, states[-1], output).argmax(-1)
                agreed[n] += int(torch.eq(own_b, classes_b).sum())
        num_images += len(images)
    if not num_images:
        raise ValueError("no images to compare on: the held-out data is empty")
    for n, runner in enumerate(runners):
        runner.row.errors = (sums_lr[n][:, 0] / sums_lr[n][:, 1]).tolist()
        if head is not None:
            runner.row.agreement = agreed[n] / num_images
    return num_images


def time_runners(runners: list[Runner], size: int, num_calls: int) -> None:
    """Fill in the times of every row.

    The ways to run take turns, so that a machine that slows down does so for all of them.
    """
    for batch in BATCHES:
        images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
        spent: list[list[float]] = []
        for _ in runners:
            spent.append([])
        for call in track(range(num_calls + 1), f"time batches of {batch}"):
            for n, runner in enumerate(runners):
                # Nothing waits for a device: every form runs on the CPU.
                begin = time.perf_counter()
                runner.exported.run(images)
                if call > 0:  # the first one warms up caches
                    spent[n].append(1000 * (time.perf_counter() - begin))
        for n, runner in enumerate(runners):
            runner.row.p50[batch] = float(np.quantile(spent[n], 0.5))
            runner.row.p95[batch] = float(np.quantile(spent[n], 0.95))


def check_parity(row: ExportRow, tolerance: float) -> None:
    """Raise if a file does not compute what the model computes in PyTorch at the same precision."""
    if row.largest > tolerance:
        raise ValueError(
            f"the {row.form} file in {row.weights} differs from the model by {row.largest:.1e}, more than "
            f"{tolerance:.0e}: do not use it; take another --to or --weights"
        )
