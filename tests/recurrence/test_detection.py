"""Scores against scikit-learn, and an attack on a linear model, whose best step is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.covariance import ShrunkCovariance
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.neighbors import NearestNeighbors
from tiny_models import noise_images, tiny_timm

from raptor.data.stream import Batch
from raptor.recurrence.detection import Baselines, attack, auroc, detection, false_alarm_rate


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
    scores = Baselines(teacher, teacher.finish).fit(batches).scores([Batch(judged, None, [0, 1, 2, 3])])
    shrunk = ShrunkCovariance(shrinkage=0.1).fit(fitted)
    assert scores["mahalanobis"].square().tolist() == pytest.approx(shrunk.mahalanobis(found).tolist(), rel=1e-6)
    # With labels, the nearest of the classes' means, and one covariance around them.
    classes = np.arange(30) % 3
    labelled = [Batch(usual, torch.tensor(classes + 4), list(range(30)))]
    found_by_class = Baselines(teacher, teacher.finish).fit(labelled).scores([Batch(judged, None, [0, 1, 2, 3])])
    means = np.stack([fitted[classes == c].mean(0) for c in range(3)])
    around = ShrunkCovariance(shrinkage=0.1, assume_centered=True).fit(fitted - means[classes])
    nearest = np.min([around.mahalanobis(found - mean) for mean in means], axis=0)
    assert found_by_class["mahalanobis"].square().tolist() == pytest.approx(nearest.tolist(), rel=1e-6)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (fitted, found)]
    distances, _ = NearestNeighbors(n_neighbors=10).fit(unit[0]).kneighbors(unit[1])
    assert scores["nearest neighbours"].tolist() == pytest.approx(distances[:, 9].tolist(), rel=1e-6)
    assert scores["maximum softmax"].tolist() == pytest.approx((-logits.softmax(-1).amax(-1)).tolist(), rel=1e-5)
    assert scores["energy"].tolist() == pytest.approx((-logits.exp().sum(-1).log()).tolist(), rel=1e-5)


def test_an_attack_takes_the_largest_step_against_a_linear_model() -> None:
    """Two classes by the sign of the mean pixel: the best change within the limit is the same for every pixel."""
    means = torch.tensor([0.05, -0.15, 0.3])
    images = means[:, None, None, None] + torch.zeros(3, 3, 2, 2)

    def logits_of(x: torch.Tensor) -> torch.Tensor:
        mean_b = x.mean((1, 2, 3))
        return torch.stack([mean_b, -mean_b], dim=1)

    found, is_fooled = attack(images, logits_of, torch.full((3,), 0.2), num_steps=6)
    assert is_fooled.tolist() == [True, True, False]
    moved = found - images
    assert torch.allclose(moved[0], torch.tensor(-0.2)) and torch.allclose(moved[1], torch.tensor(0.2))
    # An image that no step fools is given back as it was.
    assert torch.equal(found[2], images[2])
    # No pixel of an attacked picture is darker than black or lighter than white.
    valid = (torch.full((3,), -0.1), torch.full((3,), 0.02))
    found, is_fooled = attack(images[:2].clamp(-0.1, 0.02), logits_of, torch.full((3,), 0.2), num_steps=6, valid=valid)
    assert is_fooled.all() and found.min() >= -0.1 and found.max() <= 0.02
    assert torch.allclose(found[0], torch.tensor(-0.1)) and torch.allclose(found[1], torch.tensor(0.02))


def test_an_attack_that_knows_the_watcher_keeps_the_image_with_the_lowest_score() -> None:
    """The watcher looks at one pixel, whose best value is its own: the attack flips the class by the others."""
    images = torch.full((1, 3, 2, 2), 0.05)

    def logits_of(x: torch.Tensor) -> torch.Tensor:
        mean_b = x.mean((1, 2, 3))
        return torch.stack([mean_b, -mean_b], dim=1)

    def score_of(x: torch.Tensor) -> torch.Tensor:
        return (x[:, 0, 0, 0] - 0.05).abs()

    limit = torch.full((3,), 0.2)
    plain = attack(images, logits_of, limit, num_steps=12)
    aware = attack(images, logits_of, limit, num_steps=12, score_of=score_of)
    assert bool(plain[1]) and bool(aware[1])
    assert float(score_of(aware[0])) < 0.3 * float(score_of(plain[0]))
    assert float((aware[0] - images).abs().max()) <= 0.2 + 1e-6
