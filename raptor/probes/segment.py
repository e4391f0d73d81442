"""Segmentation on patch tokens: a 1x1 head on the grid of patches, bilinear upsampling, mIoU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raptor.data.dense import IGNORE_INDEX, DenseData
from raptor.devices import HAS_TRITON
from raptor.probes.dense_task import MAX_ELEMENTS, DenseTask
from raptor.probes.frames import crop_targets, on_device, pixel_centres, resize
from raptor.vit.view import ViT

if TYPE_CHECKING:
    from torchmetrics.classification import MulticlassJaccardIndex

WARPS = 2
"""That share a program of the kernel."""
_DIVERGED = dict.fromkeys(("miou", "num_classes", "pixel_accuracy"), float("nan"))


class Segment(DenseTask):
    """The segmentation task; the loss is taken at the image's resolution, the score at the target's."""

    metric = "miou"
    higher_is_better = True
    no_target = IGNORE_INDEX

    def __init__(self, vit: ViT, layer: int, train_data: DenseData, val_data: DenseData, **options: Any) -> None:
        if train_data.num_classes != val_data.num_classes or not train_data.num_classes:
            raise ValueError("segmentation needs masks of the same classes for training and scores")
        super().__init__(vit, layer, train_data, val_data, **options)
        self.num_outputs = train_data.num_classes
        self.num_features = vit.dim
        sides = self.geometry.sides
        self.to_image = on_device([side.to_image() for side in sides], self.device)
        self.to_target = on_device([side.to_target() for side in sides], self.device)
        rows, columns = sides
        self.cells = (on_device(rows.cells(), self.device), on_device(columns.cells(), self.device))
        self.places = on_device(pixel_centres(*self.size), self.device)

    def features(self, tokens_btd: Tensor) -> Tensor:
        return tokens_btd[:, self.vit.groups.slice("patches")]

    def train_targets(self, targets: Tensor, boxes: Tensor) -> Tensor:
        # `scatter_add_` takes int64 indices only.
        return crop_targets(targets, boxes, *self.places, IGNORE_INDEX).long()

    def gradients(self, logits_bhwgc: Tensor, targets_bhw: Tensor) -> Tensor:
        # The plain way writes upsampled logits, head by head; the kernel writes nothing of the image's size.
        if logits_bhwgc.is_cuda and HAS_TRITON:
            num_valid = self._num_valid(targets_bhw)
            return fused_gradient(logits_bhwgc, targets_bhw, *self.cells, self.geometry.patch, num_valid)
        return super().gradients(logits_bhwgc, targets_bhw)

    def _num_valid(self, targets_bhw: Tensor) -> Tensor:
        """The labelled pixels of the batch, over all ranks; at least 1."""
        return self.ranks.add_((targets_bhw != IGNORE_INDEX).sum()).clamp(min=1)

    def has_target(self, targets: Tensor) -> Tensor:
        return targets != IGNORE_INDEX

    def gradient(self, logits_bhwc: Tensor, targets_bhw: Tensor) -> Tensor:
        num_valid = self._num_valid(targets_bhw)
        num = max(1, MAX_ELEMENTS // (self.num_outputs * self.size[0] * self.size[1]))
        # The logits come out of a product in this precision; upsampled, they are the largest tensors of a step.
        dtype = torch.bfloat16 if self.precision == "bf16" else logits_bhwc.dtype
        rows = self.to_image[0].to(dtype)
        columns = self.to_image[1].to(dtype)
        parts = []
        for logits, targets in zip(logits_bhwc.to(dtype).split(num), targets_bhw.split(num)):
            upsampled = entropy_gradient(resize(logits, rows, columns), targets, num_valid)
            parts.append(resize(upsampled, rows.T, columns.T))
        return torch.cat(parts).to(logits_bhwc.dtype)

    def scores(self, weight_gcf: Tensor, bias_gc: Tensor, part: str) -> list[dict[str, float]]:
        metrics = [iou_metric(self.num_outputs).to(self.device) for _ in range(len(weight_gcf))]
        for logits_bhwgc, targets in self.scored_batches(weight_gcf, bias_gc, part):
            for g, metric in enumerate(metrics):
                guess = resize(logits_bhwgc[..., g, :], *self.to_target).argmax(dim=-1)
                metric.update(guess, targets.long())
        # Counts are added over ranks before the ratio: a mean of ratios would be another number.
        counts_gcc = self.ranks.add_(torch.stack([metric.confmat for metric in metrics]))
        scores = []
        for g, metric in enumerate(metrics):
            metric.confmat = counts_gcc[g]
            is_finite = bool(weight_gcf[g].isfinite().all() and bias_gc[g].isfinite().all())
            scores.append(mean_iou(metric) if is_finite else dict(_DIVERGED))
        return self.ranks.first(lambda: scores)

    def floors(self) -> dict[str, float]:
        height, width = self.fit.data.frame
        num_pixels = height * width
        counts = torch.zeros(self.num_outputs * num_pixels, dtype=torch.int64, device=self.device)
        places = torch.arange(num_pixels, device=self.device)
        for targets in self.targets_of(self.fit):
            labels = targets.long().flatten(1)
            is_labelled = labels != IGNORE_INDEX
            flat = (labels * num_pixels + places)[is_labelled]
            # Added in place: with 150 classes a new count per batch would be larger than the batch.
            counts.scatter_add_(0, flat, torch.ones_like(flat))
        counts_chw = self.ranks.add_(counts).view(self.num_outputs, height, width)
        commonest = counts_chw.sum((1, 2)).argmax()
        commonest_hw = counts_chw.argmax(0)
        # A pixel that has no label in any training frame tells nothing of its own.
        commonest_hw = torch.where(counts_chw.sum(0) > 0, commonest_hw, commonest)
        guesses = {"majority class": commonest.expand_as(commonest_hw), "majority map": commonest_hw}
        found = {}
        for name, guess_hw in guesses.items():
            metric = iou_metric(self.num_outputs).to(self.device)
            for targets in self.targets_of(self.parts["reported"]):
                metric.update(guess_hw.expand_as(targets), targets.long())
            metric.confmat = self.ranks.add_(metric.confmat)
            found[name] = mean_iou(metric)["miou"]
        return found


def entropy_gradient(logits_bhwc: Tensor, labels_bhw: Tensor, num_valid: Tensor) -> Tensor:
    """Gradient of the cross-entropy, summed over labelled pixels and divided by `num_valid`: softmax less one-hot."""
    valid = (labels_bhw != IGNORE_INDEX)[..., None]
    gradient = logits_bhwc.softmax(dim=-1)
    # Scatter takes no index outside the classes; pixels without a label are zeroed at the end.
    labels = torch.where(valid, labels_bhw[..., None], 0)
    gradient.scatter_add_(-1, labels, torch.full_like(labels, -1, dtype=gradient.dtype))
    return gradient.mul_(valid.to(gradient.dtype) / num_valid)


def fused_gradient(
    logits_bhwgc: Tensor,
    labels_bhw: Tensor,
    rows: tuple[Tensor, Tensor],
    columns: tuple[Tensor, Tensor],
    patch: int,
    num_valid: Tensor,
) -> Tensor:
    """`entropy_gradient` of all heads' upsampled logits, back on the grid, with nothing of the image's size written.

    rows, columns, patch: of the geometry (`cells`). num_valid: the labelled pixels, of all ranks. Each program
    of the kernel takes the pixels of a cell and adds up what they give the four patches around it; what a patch
    gets from its four cells is added here, in a fixed order.
    """
    from raptor.probes.segment_kernel import kernel

    # The kernel counts its offsets itself and knows no strides.
    logits = logits_bhwgc.float().contiguous()
    labels = labels_bhw.contiguous()
    num, h, w, num_heads, num_classes = logits.shape
    parts = logits.new_empty(4, num, h + 1, w + 1, num_heads, num_classes)
    # Triton wants powers of 2.
    sizes = {"PIXELS": 1 << (patch - 1).bit_length(), "CLASSES": 1 << (num_classes - 1).bit_length()}
    kernel[(num * (h + 1) * (w + 1) * num_heads,)](
        logits,
        labels,
        parts,
        rows[0],
        columns[0],
        rows[1],
        columns[1],
        num_valid,
        *labels.shape[1:],
        h,
        w,
        num_heads,
        num_classes,
        IGNORE=IGNORE_INDEX,
        num_warps=WARPS,
        **sizes,
    )
    above = parts[0, :, 1:, 1:] + parts[1, :, 1:, :-1]
    below = parts[2, :, :-1, 1:] + parts[3, :, :-1, :-1]
    return above + below


def iou_metric(num_classes: int) -> MulticlassJaccardIndex:
    """A running IoU per class, pixels of `ignore_index` left out. It does not add up ranks: `Segment` does."""
    from torchmetrics.classification import MulticlassJaccardIndex  # with transformers, where that is installed

    # Its checks would look for the different values of every batch and wait for the device.
    return MulticlassJaccardIndex(
        num_classes, average="none", ignore_index=IGNORE_INDEX, validate_args=False, sync_on_compute=False
    )


def mean_iou(metric: MulticlassJaccardIndex) -> dict[str, float]:
    """mIoU over the classes that occur in the targets, their number, and pixel accuracy."""
    # A class that does not occur in the targets has no IoU to average.
    counts = metric.confmat.double()
    occurs = counts.sum(dim=1) > 0
    num_classes = int(occurs.sum())
    if num_classes == 0:
        return dict(_DIVERGED)
    return {
        "miou": float(metric.compute()[occurs].double().mean()),
        "num_classes": float(num_classes),
        "pixel_accuracy": float(counts.diagonal().sum() / counts.sum()),
    }
