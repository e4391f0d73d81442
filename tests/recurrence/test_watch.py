"""The watcher against discrepancies computed one by one, and its statistics against scikit-learn and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.covariance import ShrunkCovariance
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.neighbors import NearestNeighbors
from tiny_models import noise_images, tiny_timm

from raptor import open_data, open_vit
from raptor.data import iterate
from raptor.data.stream import Batch
from raptor.recurrence.watch import (
    Watcher,
    auroc,
    baseline_scores,
    conformal_threshold,
    detection,
    false_alarm_rate,
)
from raptor.vit.view import ViT


def _scenes(teacher: ViT, num: int) -> list[Batch]:
    return list(iterate(open_data("scenes", "val", limit=num), teacher.preprocess, 16))


def test_a_score_is_the_largest_standardised_discrepancy() -> None:
    surrogate, teacher = open_vit("scenes-k3"), open_vit("scenes")
    usual = _scenes(teacher, 40)
    images = noise_images(teacher, 2)
    watcher = Watcher(surrogate, teacher).calibrate(usual, false_alarms=0.1)
    found = watcher.watch([Batch(images, None, [0, 1])])

    def errors(x: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            target, own = teacher.record(x)[0], surrogate.record(x)[0]
        groups = [teacher.groups.slice(name) for name in ("cls", "registers", "patches")]
        rows = [
            [[float((a[i, s] - b[i, s]).norm()) for s in groups] for a, b in zip(target, own)] for i in range(len(x))
        ]
        return np.array(rows)[:, 1:]

    calibration = np.concatenate([errors(batch.images) for batch in usual])
    fitted, held_out = calibration[0::2], calibration[1::2]
    # torch's median of an even number is the lower one of the middle pair.
    centre = np.sort(fitted, axis=0)[(len(fitted) - 1) // 2]
    deviation = np.sort(np.abs(fitted - centre), axis=0)[(len(fitted) - 1) // 2]
    held_out_scores = ((held_out - centre) / (1.4826 * deviation)).max(axis=(1, 2))
    standardised = (errors(images) - centre) / (1.4826 * deviation)
    assert found.score_n.tolist() == pytest.approx(standardised.max(axis=(1, 2)).tolist(), rel=1e-3)
    assert watcher.threshold == pytest.approx(np.sort(held_out_scores)[math.ceil(21 * 0.9) - 1], rel=1e-3)
    for i in range(2):
        layer, group = np.unravel_index(standardised[i].argmax(), standardised[i].shape)
        assert (int(found.layer_n[i]), int(found.group_n[i])) == (layer + 1, group)
    assert found.map_np.shape == (2, teacher.groups.patches) and found.map_np.median(dim=1).values.tolist() == [1, 1]
    assert found.alarm_n.all(), "noise is not like the scenes"


def test_false_alarms_stay_below_what_was_promised() -> None:
    generator = torch.Generator().manual_seed(0)
    alarms = []
    for _ in range(2000):
        scores = torch.rand(40, generator=generator).square()
        new = float(torch.rand(1, generator=generator).square())
        alarms.append(new > conformal_threshold(scores[:39], 0.1))
    # With 39 calibration scores the rank is 36 of 40 places: the probability is exactly .1.
    assert np.mean(alarms) == pytest.approx(0.1, abs=3 * math.sqrt(0.1 * 0.9 / 2000))
    assert conformal_threshold(torch.arange(5.0), 0.1) == math.inf


def test_detection_is_that_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(1)
    usual = torch.randn(200, generator=generator).round(decimals=1)  # with ties
    unusual = (torch.randn(100, generator=generator) + 1).round(decimals=1)
    labels = np.r_[np.zeros(200), np.ones(100)]
    scores = torch.cat([usual, unusual]).numpy()
    assert auroc(usual, unusual) == pytest.approx(roc_auc_score(labels, scores))
    false_rates, true_rates, _ = roc_curve(labels, scores, drop_intermediate=False)
    assert false_alarm_rate(usual, unusual) == pytest.approx(false_rates[true_rates >= 0.95].min())
    found = detection(usual, unusual, num_resamples=300)
    low, high = found.auroc_interval
    # Hanley and McNeil's standard error of this area is about .03.
    assert low < found.auroc < high and 0.08 < high - low < 0.17


def test_baselines_are_those_of_scikit_learn() -> None:
    teacher = tiny_timm(depth=2, num_classes=5)
    usual, judged = noise_images(teacher, 30, seed=1), 2 * noise_images(teacher, 4, seed=2)
    batches = [Batch(usual, None, list(range(30)))]
    with torch.no_grad():
        last = teacher.record(usual)[0][-1], teacher.record(judged)[0][-1]
        fitted, found = (teacher.features(x).double().numpy() for x in last)
        logits = teacher(judged).double()
    scores = baseline_scores(teacher, batches, [Batch(judged, None, [0, 1, 2, 3])], teacher.finish)
    shrunk = ShrunkCovariance(shrinkage=0.1).fit(fitted)
    assert scores["mahalanobis"].square().tolist() == pytest.approx(shrunk.mahalanobis(found).tolist(), rel=1e-6)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (fitted, found)]
    distances, _ = NearestNeighbors(n_neighbors=10).fit(unit[0]).kneighbors(unit[1])
    assert scores["nearest neighbours"].tolist() == pytest.approx(distances[:, 9].tolist(), rel=1e-6)
    assert scores["maximum softmax"].tolist() == pytest.approx((-logits.softmax(-1).amax(-1)).tolist(), rel=1e-5)
    assert scores["energy"].tolist() == pytest.approx((-logits.exp().sum(-1).log()).tolist(), rel=1e-5)
    assert "energy" not in baseline_scores(teacher, batches, [Batch(judged, None, [0, 1, 2, 3])], None)


def test_what_cannot_be_watched_is_refused() -> None:
    surrogate, teacher = open_vit("scenes-k3"), open_vit("scenes")
    watcher = Watcher(surrogate, teacher)
    few = _scenes(teacher, 8)
    with pytest.raises(ValueError, match="calibrate it first"):
        watcher.watch(few)
    with pytest.raises(ValueError, match=r"8 calibration images are too few .* give at least 38"):
        watcher.calibrate(few)
    with pytest.raises(ValueError, match="between 0 and 1"):
        watcher.calibrate(few, false_alarms=5)
    with pytest.raises(ValueError, match="no images to watch"):
        watcher.calibrate(few, false_alarms=0.3).watch([])
    with pytest.raises(ValueError, match="surrogate of its own"):
        Watcher(surrogate, tiny_timm(depth=2))
