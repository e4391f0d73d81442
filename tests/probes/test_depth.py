"""The depth probe: loss, gradient, expectation, crop and colours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_probe import data_for
from torchvision.transforms.v2.functional import adjust_brightness, adjust_contrast, adjust_saturation

from raptor.data import DenseData
from raptor.data.scenes.drawn import SceneFrames
from raptor.probes import probe
from raptor.probes.depth import Depth, bin_depths, depth_loss_gradient, eigen_crop, expected_depth, nearest_bin
from raptor.probes.features import normed_tokens
from raptor.vit.view import ViT


def _depth_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 4, 256, generator=generator, dtype=torch.float64) * 3
    true = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64) * 9.9 + 0.05
    true[0, 0, :2], true[1, 2, 3] = 0.0, 12.0
    return logits, true, bin_depths().double()


def test_depth_gradient_is_that_of_the_loss_and_ignores_invalid_pixels() -> None:
    logits, true, bins = _depth_case()
    keep = (true > 0) & (true <= 10)
    assert keep.sum() == 21
    logits.requires_grad_()
    x, d = logits[keep], true[keep]
    g = (x.softmax(-1) @ bins + 1e-3).log() - (d + 1e-3).log()
    nearest = (d[:, None] - bins).abs().argmin(1)
    assert torch.equal(nearest_bin(true, bins)[keep], nearest)
    loss = 10 * (g.square().mean() - 0.85 * g.mean() ** 2) + F.cross_entropy(x, nearest)
    loss.backward()
    gradient = depth_loss_gradient(logits.detach(), true, bins)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-9, atol=1e-12)
    assert (gradient[~keep] == 0).all()
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


def test_colours_stay_in_range_and_change_per_image(vit: ViT) -> None:
    train, val = data_for("depth")
    assert isinstance(train, DenseData) and isinstance(val, DenseData)
    task = Depth(vit, 3, train, val, batch_size=3, precision="fp32")
    images = torch.rand(3, 3, 8, 8) * 255
    changed = task.augment(images, torch.Generator().manual_seed(0))
    drawn = 1 + 0.2 * (2 * torch.rand(3, len(images), generator=torch.Generator().manual_seed(0)) - 1)
    for image, ours, (brightness, contrast, saturation) in zip(images / 255, changed / 255, drawn.T.tolist()):
        expected = adjust_contrast(adjust_brightness(image, brightness), contrast)
        torch.testing.assert_close(ours, adjust_saturation(expected, saturation), rtol=1e-5, atol=1e-6)
    assert changed.min() >= 0 and changed.max() <= 255
    shifts = (changed - images).mean(dim=(1, 2, 3))
    assert len({round(v, 3) for v in shifts.tolist()}) == 3


def test_reported_rmse_in_numpy(vit: ViT) -> None:
    train, val = data_for("depth")
    assert isinstance(train, DenseData) and isinstance(val, SceneFrames)
    result = probe(vit, "depth", train, val, lrs=[0.05], epochs=2, batch_size=16)
    images, true = val.pairs(torch.arange(len(val)), val.frame, torch.device("cpu"))
    tokens = normed_tokens(vit, vit.preprocess.normalise(images), 3, "fp32")
    features = torch.cat([tokens[:, 3:], tokens[:, :1].expand(-1, 16, -1)], dim=-1).view(-1, 4, 4, 64)
    weight, bias = result.head
    fine = torch.nn.functional.interpolate(
        (features @ weight.T + bias).permute(0, 3, 1, 2), scale_factor=4, mode="bilinear"
    )
    depth = (fine.softmax(1) * torch.linspace(1e-3, 12, 256).view(1, -1, 1, 1)).sum(1, keepdim=True)
    guess = torch.nn.functional.interpolate(depth, size=(24, 24), mode="bilinear")[:, 0]
    assert result.score == pytest.approx(math.sqrt(float(((guess - true).double() ** 2).mean())), rel=1e-5)


def test_floors_in_numpy(vit: ViT) -> None:
    train, val = data_for("depth")
    assert isinstance(train, DenseData)
    train.worth_caching = lambda _: True  # type: ignore[method-assign]  # in memory, so that targets can be changed
    task = Depth(vit, 3, train, val, batch_size=5, precision="fp32")
    # A tenth of train is kept for choices; the floors are fitted on the rest, as heads are.
    fit = task.fit.batch(torch.arange(task.num_fit))[1].double().numpy()
    fit[:, 0, 0] = 0  # no reading in any frame
    assert task.fit.targets is not None
    task.fit.targets[:, 0, 0] = 0
    true = val.pairs(torch.arange(len(val)), val.frame, torch.device("cpu"))[1].double().numpy()
    valid = fit > 0
    constant = fit[valid].mean()
    mean_map = np.full(val.frame, constant)
    for row, column in np.ndindex(*val.frame):
        readings = fit[:, row, column][valid[:, row, column]]
        if len(readings):
            mean_map[row, column] = readings.mean()
    assert mean_map[0, 0] == constant
    kept = true > 0
    expected = {}
    for name, guess in (("constant depth", np.full(val.frame, constant)), ("mean map", mean_map)):
        errors = (np.broadcast_to(guess, true.shape) - true)[kept]
        expected[name] = math.sqrt((errors**2).mean())
    assert task.floors() == pytest.approx(expected, rel=1e-6)
