"""Losses, geometry and scores of the dense probes against numpy, autograd, torchvision and closed forms."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_timm
from torchvision.transforms.v2 import functional as TF

from raptor.data import open_dense
from raptor.probes.depth import (
    bin_depths,
    depth_loss,
    depth_loss_gradient,
    eigen_crop,
    expected_depth,
    jitter_colours,
    nearest_bin,
)
from raptor.probes.frames import Geometry, crop_images, crop_targets, draw_boxes, pixel_centres, resize
from raptor.probes.segment import Segment, entropy_gradient, iou_metric, mean_iou


def _depth_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 4, 256, generator=generator, dtype=torch.float64) * 3
    true = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64) * 9.9 + 0.05
    true[0, 0, :2], true[1, 2, 3] = 0.0, 12.0
    return logits, true, bin_depths().double()


def test_depth_loss_in_numpy() -> None:
    logits, true, bins = _depth_case()
    x, d, b = logits.numpy().reshape(-1, 256), true.numpy().ravel(), np.linspace(0.001, 10, 256)
    keep = (d > 0) & (d <= 10)
    assert keep.sum() == 21
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    g = np.log((p * b).sum(1) + 1e-3)[keep] - np.log(d + 1e-3)[keep]
    nearest = np.abs(d[:, None] - b[None]).argmin(1)
    entropy = -np.log(p[np.arange(len(d)), nearest])[keep].mean()
    expected = 10 * ((g**2).mean() - 0.85 * g.mean() ** 2) + entropy
    assert depth_loss(logits, true, bins).item() == pytest.approx(expected, rel=1e-6)
    assert (nearest_bin(true, bins).flatten().numpy()[keep] == nearest[keep]).all()


def test_depth_gradient_is_autograds_and_ignores_invalid_pixels() -> None:
    logits, true, bins = _depth_case()
    logits.requires_grad_()
    depth_loss(logits, true, bins).backward()
    gradient = depth_loss_gradient(logits.detach(), true, bins)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-9, atol=1e-12)
    assert (gradient[0, 0, :2] == 0).all() and (gradient[1, 2, 3] == 0).all()
    nothing = depth_loss_gradient(logits.detach(), torch.zeros_like(true), bins)
    assert (nothing == 0).all()


def test_expected_depth_in_closed_form() -> None:
    bins = bin_depths()
    assert expected_depth(torch.zeros(256), bins).item() == pytest.approx((0.001 + 10) / 2, rel=1e-6)
    two = torch.full((256,), -1e4)
    two[0], two[255] = np.log(0.25), np.log(0.75)
    assert expected_depth(two, bins).item() == pytest.approx(0.25 * 0.001 + 0.75 * 10, rel=1e-6)
    ratio = 0.97  # a geometric distribution over the bins has a known mean
    logits = torch.arange(256) * np.log(ratio)
    mean = ratio / (1 - ratio) - 256 * ratio**256 / (1 - ratio**256)
    assert expected_depth(logits.double(), bins.double()).item() == pytest.approx(0.001 + mean * 9.999 / 255, rel=1e-6)


def test_eigen_crop_scales() -> None:
    assert eigen_crop((480, 640)) == (slice(45, 471), slice(41, 601))
    rows, columns = eigen_crop((240, 320))
    assert (rows.start, rows.stop, columns.start, columns.stop) == (22, 236, 20, 300)


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


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 16))
def test_cells_are_where_bilinear_resizing_takes_its_two_patches(height: int, width: int, patch: int) -> None:
    geometry = Geometry(height, width, patch, (height, width))
    for num, matrix, (starts, shares) in zip(geometry.grid, geometry.to_image(), geometry.cells()):
        assert starts[0] == 0 and starts[-1] == len(shares) and int(starts.diff().max()) <= patch
        rebuilt = torch.zeros(len(shares), num + 2)
        for cell in range(num + 1):
            pixels = slice(starts[cell], starts[cell + 1])
            rebuilt[pixels, cell], rebuilt[pixels, cell + 1] = 1 - shares[pixels], shares[pixels]
        assert (rebuilt[:, 0] == 0).all() and (rebuilt[:, -1] == 0).all()
        torch.testing.assert_close(rebuilt[:, 1:-1], matrix, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("frame", [(30, 47), (28, 42)])
def test_upsampling_is_interpolation_without_the_padding(frame: tuple[int, int]) -> None:
    geometry = Geometry(*frame, patch=7, target=frame)
    assert geometry.padded[0] % 7 == geometry.padded[1] % 7 == 0
    coarse = torch.randn(2, *geometry.grid, 3)
    whole = F.interpolate(coarse.permute(0, 3, 1, 2), size=geometry.padded, mode="bilinear")
    top, left = geometry.start
    expected = whole[:, :, top : top + frame[0], left : left + frame[1]].permute(0, 2, 3, 1)
    torch.testing.assert_close(resize(coarse, *geometry.to_image()), expected, rtol=1e-5, atol=1e-5)


def test_padding_round_trip() -> None:
    geometry = Geometry(30, 47, patch=7, target=(60, 94))
    images = torch.rand(2, 3, 30, 47)
    padded = geometry.pad(images)
    top, left = geometry.start
    assert padded.shape[-2:] == (35, 49) and (top, left) == (2, 1)
    assert torch.equal(padded[:, :, top : top + 30, left : left + 47], images)
    assert padded.count_nonzero() == images.count_nonzero()
    # A ramp over the image, read on the four times finer grid, comes back as the ramp at the target's pixels.
    rows, columns = geometry.cell_centres(4)
    ramp = (100 * rows[:, None] + columns[None])[None, ..., None]
    back = resize(ramp, *geometry.to_target(4))[0, ..., 0]
    y, x = pixel_centres(60, 94)
    inner = (slice(8, -8), slice(8, -8))
    torch.testing.assert_close(back[inner], (100 * y[:, None] + x[None])[inner], rtol=1e-4, atol=1e-3)


def test_a_linear_head_commutes_with_upsampling() -> None:
    geometry = Geometry(30, 47, patch=7, target=(30, 47))
    features, weight, bias = torch.randn(1, *geometry.grid, 6), torch.randn(4, 6), torch.randn(4)
    late = F.linear(resize(features, *geometry.to_image()), weight, bias)
    early = resize(F.linear(features, weight, bias), *geometry.to_image())
    torch.testing.assert_close(early, late, rtol=1e-4, atol=1e-5)


def test_image_crop_is_torchvisions() -> None:
    images = torch.randint(0, 256, (2, 3, 20, 40), dtype=torch.uint8)
    boxes = torch.tensor([[5 / 20, 8 / 40, 10 / 20, 30 / 40, 0.0], [0, 4 / 40, 15 / 20, 20 / 40, 1.0]])
    crops = crop_images(images, boxes)
    first = TF.resize(images[0, :, 5:15, 8:38].float(), [20, 40], antialias=False)
    second = TF.horizontal_flip(TF.resize(images[1, :, 0:15, 4:24].float(), [20, 40], antialias=False))
    edge = (slice(None), slice(1, -1), slice(1, -1))  # at the rim a crop of a picture sees its surroundings
    torch.testing.assert_close(crops[0][edge], first[edge], rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(crops[1][edge], second[edge], rtol=1e-4, atol=1e-2)


def test_images_and_targets_are_cropped_together() -> None:
    rows, columns = pixel_centres(32, 48)
    ramp = (200 * columns[None] + 40 * rows[:, None]).expand(16, 32, 48)
    boxes = draw_boxes(16, torch.Generator().manual_seed(3), (0.5, 1.0))
    assert boxes[:, 4].unique().tolist() == [0, 1] and (boxes[:, 2] * boxes[:, 3]).min() > 0.49
    pictures = crop_images(ramp[:, None].expand(16, 3, 32, 48), boxes)[:, 0]
    targets = crop_targets(ramp, boxes, rows, columns, 0.0)
    assert (pictures - targets).abs().max() < 200 / 48 + 40 / 32  # nearest is at most half a pixel off
    padded = crop_targets(ramp, boxes, torch.tensor([-0.1, 0.5, 1.01]), columns, -7.0)
    assert (padded[:, 0] == -7).all() and (padded[:, 2] == -7).all() and (padded[:, 1] > 0).all()


def test_colours_stay_in_range_and_change_per_image() -> None:
    images = torch.rand(3, 3, 8, 8) * 255
    changed = jitter_colours(images, torch.Generator().manual_seed(0))
    assert changed.min() >= 0 and changed.max() <= 255
    shifts = (changed - images).mean(dim=(1, 2, 3))
    assert len({round(v, 3) for v in shifts.tolist()}) == 3
