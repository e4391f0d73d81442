"""The ridge probe against scikit-learn, and the features it is fitted on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from tiny_certified import blobs, plain_vit, two_class_batches

from raptor.certificate import ridge
from raptor.certificate.ridge import accuracy, collect_features, fit_ridge


@pytest.mark.parametrize("alpha", [0.5, 40.0])
def test_ridge_is_sklearns(alpha: float) -> None:
    features, labels = blobs()
    head = fit_ridge(features, labels, 4, alphas=(alpha,))
    scaler = StandardScaler().fit(features.double().numpy())
    reference = Ridge(alpha=alpha).fit(scaler.transform(features.double().numpy()), np.eye(4)[labels.numpy()])
    fresh, _ = blobs(seed=5)
    expected = reference.predict(scaler.transform(fresh.double().numpy()))
    np.testing.assert_allclose(head(fresh).numpy(), expected, atol=1e-4)
    assert head.alpha == alpha


def test_alpha_is_chosen_on_a_split_of_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few noisy samples in many dimensions a large penalty generalises; the choice must see that."""
    generator = torch.Generator().manual_seed(3)
    features, labels = torch.randn(80, 60, generator=generator), torch.arange(80) % 2
    features[:, 0] += 1.5 * labels
    fitted: list[int] = []
    path = ridge._ridge_path
    monkeypatch.setattr(ridge, "_ridge_path", lambda x, *rest: fitted.append(len(x)) or path(x, *rest))
    head = fit_ridge(features, labels, 2, alphas=(1e-6, 100.0))
    assert fitted == [64, 80]
    assert head.alpha == 100.0
    np.testing.assert_array_equal(head.weight, path(features, labels, 2, [100.0])[100.0].weight)


def test_of_penalties_that_are_as_accurate_the_better_fit_is_taken() -> None:
    """Classes that every penalty separates: with the largest one a head may predict the most frequent class only."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        counts = 12 - torch.randint(0, 2, (3,), generator=generator)
        labels = torch.repeat_interleave(torch.arange(3), counts)
        labels = labels[torch.randperm(len(labels), generator=generator)]
        means, others = torch.randn(3, 96, generator=generator), torch.arange(3).repeat(30)
        head = fit_ridge(means[labels] + 0.3 * torch.randn(len(labels), 96, generator=generator), labels, 3)
        features = means[others] + 0.3 * torch.randn(90, 96, generator=generator)
        assert accuracy(head(features), others) == 1.0


def test_a_constant_feature_does_no_harm() -> None:
    features, labels = blobs()
    features[:, 2] = 7.0
    head = fit_ridge(features, labels, 4)
    assert torch.isfinite(head.weight).all() and accuracy(head(features), labels) > 0.7


def test_bad_labels_are_refused() -> None:
    features, labels = blobs()
    with pytest.raises(ValueError, match=r"labels must be 0\.\.2"):
        fit_ridge(features, labels, 3)


def test_features_are_the_normed_cls_and_mean_patch() -> None:
    vit, batches = plain_vit(num_classes=5), two_class_batches()
    features, labels = collect_features(vit, batches)
    images = torch.cat([b.images for b in batches])
    with torch.no_grad():
        tokens = vit.model.forward_features(images)
        expected = torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1)
        torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)
    assert labels is not None and labels.tolist() == [0, 1] * 12
    assert collect_features(plain_vit(), two_class_batches(labels=False))[1] is None
