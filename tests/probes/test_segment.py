"""The segmentation probe: gradients, the kernel and mIoU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_timm

from raptor.data import open_dense
from raptor.probes.segment import Segment, entropy_gradient, iou_metric, mean_iou


def test_entropy_gradient_is_autograds() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(4, (2, 3, 5), generator=generator)
    labels[0, :2] = 255
    F.cross_entropy(logits.permute(0, 3, 1, 2), labels, ignore_index=255).backward()
    gradient = entropy_gradient(logits.detach(), labels, (labels != 255).sum())
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-9, atol=1e-12)


def test_a_gradient_in_bf16_points_the_same_way() -> None:
    vit = tiny_timm()
    frames = [open_dense("scenes", split, "segment", limit=4, size=vit.preprocess.size) for split in ("train", "val")]
    whole, half = (Segment(vit, 4, *frames, batch_size=2, precision=precision) for precision in ("fp32", "bf16"))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, *whole.geometry.grid, whole.num_outputs, generator=generator)
    labels = torch.randint(whole.num_outputs, (2, whole.geometry.height, whole.geometry.width), generator=generator)
    labels[0, :5] = 255
    exact, rough = whole.gradient(logits, labels), half.gradient(logits, labels)
    assert rough.dtype == torch.float32
    assert F.cosine_similarity(exact.flatten(), rough.flatten(), dim=0) > 0.999
    assert float(rough.norm()) == pytest.approx(float(exact.norm()), rel=0.01)


KERNEL = """
import torch
import torch.nn.functional as F
from raptor.probes.frames import Geometry
from raptor.probes.segment import fused_gradient

generator = torch.Generator().manual_seed(0)
for height, width, patch, num_classes in ((14, 28, 14, 5), (20, 33, 8, 17), (9, 6, 4, 1)):
    geometry = Geometry(height, width, patch, (height, width))
    logits = 4 * torch.randn(2, *geometry.grid, 3, num_classes, generator=generator)
    labels = torch.randint(num_classes, (2, height, width), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = 255
    ours = fused_gradient(logits, labels, *geometry.cells(), patch)
    (top, left), exact = geometry.start, logits.double().requires_grad_()
    for g in range(3):
        large = F.interpolate(exact[..., g, :].permute(0, 3, 1, 2), geometry.padded, mode="bilinear")
        F.cross_entropy(large[..., top : top + height, left : left + width], labels, ignore_index=255).backward()
    torch.testing.assert_close(ours.double(), exact.grad, rtol=1e-4, atol=1e-6)
    none = fused_gradient(logits, torch.full_like(labels, 255), *geometry.cells(), patch)
    assert (none == 0).all() and ours.shape == logits.shape
print("same")
"""


def test_the_kernel_gives_the_gradient_of_the_upsampled_entropy() -> None:
    """Run by Triton's interpreter on the CPU: frames that fill their patches and that do not, classes that fill a tile
    and that do not."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def test_miou_by_a_confusion_matrix() -> None:
    rng = np.random.default_rng(0)
    true, guess = rng.integers(0, 6, (4, 9, 9)), rng.integers(0, 8, (4, 9, 9))
    true[0, :4] = 255
    metric = iou_metric(8)
    for t, g in zip(true, guess):
        metric.update(torch.from_numpy(g)[None], torch.from_numpy(t)[None])
    counts = np.zeros((8, 8))
    for t, g in zip(true[true != 255], guess[true != 255]):
        counts[t, g] += 1
    iou = np.diag(counts) / (counts.sum(0) + counts.sum(1) - np.diag(counts))
    scores = mean_iou(metric)
    assert scores["miou"] == pytest.approx(iou[:6].mean(), rel=1e-6)  # 6 and 7 are guessed but never occur
    assert scores["num_classes"] == 6
    assert scores["pixel_accuracy"] == pytest.approx((guess == true).sum() / (true != 255).sum())
