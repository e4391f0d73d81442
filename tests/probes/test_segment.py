"""The segmentation probe: gradients and mIoU."""

from __future__ import annotations

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
    labels = torch.randint(whole.num_outputs, (2, *whole.size), generator=generator)
    labels[0, :5] = 255
    exact, rough = whole.gradient(logits, labels), half.gradient(logits, labels)
    assert rough.dtype == torch.float32
    assert F.cosine_similarity(exact.flatten(), rough.flatten(), dim=0) > 0.999
    assert float(rough.norm()) == pytest.approx(float(exact.norm()), rel=0.01)


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


def test_floors_in_numpy() -> None:
    vit = tiny_timm()
    size = vit.preprocess.size
    train, val = (open_dense("scenes", split, "segment", limit=12, size=size) for split in ("train", "val"))
    train.worth_caching = lambda _: True  # type: ignore[method-assign]  # in memory, so that targets can be changed
    task = Segment(vit, 4, train, val, batch_size=5, precision="fp32")
    assert task.fit.targets is not None
    task.fit.targets[:, 0, 0] = 255  # without a label in any frame
    fit = task.fit.targets.numpy()
    true = val.pairs(torch.arange(len(val)), val.frame, torch.device("cpu"))[1].numpy()
    classes = np.arange(train.num_classes)
    counts = (fit[..., None] == classes).sum((0, 1, 2))
    majority_map = (fit[..., None] == classes).sum(0).argmax(-1)
    majority_map[0, 0] = counts.argmax()
    expected = {}
    for name, guess in (("majority class", np.full(val.frame, counts.argmax())), ("majority map", majority_map)):
        guess = np.broadcast_to(guess, true.shape)
        known = true != 255
        ious = []
        for one in classes:
            if ((true == one) & known).any():
                both = ((true == one) & (guess == one) & known).sum()
                ious.append(both / (((true == one) | (guess == one)) & known).sum())
        expected[name] = float(np.mean(ious))
    assert task.floors() == pytest.approx(expected, rel=1e-5)
