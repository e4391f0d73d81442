"""The ridge probe against scikit-learn, and the features it is fitted on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from tiny_certified import blobs, plain_vit, two_class_batches

from raptor.certificate import ridge
from raptor.certificate.ridge import (
    ALPHAS,
    accuracy,
    collect_features,
    fit_ridge,
    fit_ridge_head,
    head_accuracy,
    standardised,
)


@pytest.mark.parametrize("alpha", [0.5, 40.0])
@pytest.mark.parametrize("are_alike", [False, True])
def test_ridge_is_sklearns(alpha: float, are_alike: bool) -> None:
    features, labels = blobs()
    if are_alike:  # two features that nearly say the same: a direction that hardly varies
        features[:, 1] = features[:, 0] + 0.002 * features[:, 1]
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
    fitted: list[torch.Tensor] = []
    path = ridge.ridge_path
    monkeypatch.setattr(ridge, "ridge_path", lambda x, *rest: fitted.append(x) or path(x, *rest))
    head = fit_ridge(features, labels, 2, alphas=(1e-6, 100.0))
    assert list(map(len, fitted)) == [64, 80]
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fitted[0], features[order[16:]])  # the same in every run
    assert head.alpha == 100.0
    # A single penalty leaves nothing to choose, and of five images one is held out.
    fit_ridge(features, labels, 2, alphas=(100.0,))
    fit_ridge(features[:5], labels[:5], 2)
    assert list(map(len, fitted[2:])) == [80, 4, 5]
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


def test_features_that_never_vary_leave_the_strongest_penalty() -> None:
    """All penalties are equally good."""
    assert ALPHAS == (0.1, 1, 10, 100, 1000, 10_000, 100_000)
    z, mean, scale = standardised(torch.full((4, 3), 7.0))
    assert (z == 0).all() and (mean == 7).all() and (scale == 1).all()
    assert fit_ridge(torch.ones(20, 3), torch.arange(20) % 2, 2).alpha == 100_000


def test_the_size_of_features_does_not_matter() -> None:
    features, _ = blobs()
    z, _, _ = standardised(1e-8 * features)
    torch.testing.assert_close(z, standardised(features)[0], atol=1e-5, rtol=1e-5)


def test_a_ridge_head_of_a_model_and_its_accuracy() -> None:
    vit = plain_vit(num_classes=5)
    features, labels = collect_features(vit, two_class_batches())
    assert labels is not None
    found = fit_ridge_head(vit, two_class_batches())
    assert found is not None
    head, num_images = found
    expected = fit_ridge(features, labels, 2)
    assert num_images == 24 and head.weight.shape == (2, features.shape[1])
    torch.testing.assert_close(head.weight, expected.weight)
    right = sum(int(head(x).argmax()) == int(y) for x, y in zip(features, labels))
    assert head_accuracy(vit, head, two_class_batches()) == right / 24
    more = fit_ridge_head(vit, two_class_batches(), num_classes=5)
    assert more is not None and len(more[0].weight) == 5
    assert fit_ridge_head(vit, two_class_batches(labels=False)) is None


def test_two_images_are_enough_and_one_is_not() -> None:
    features, labels = torch.eye(2), torch.arange(2)
    assert accuracy(fit_ridge(features, labels, 2, alphas=(1.0,))(features), labels) == 1.0
    with pytest.raises(ValueError, match="at least two images with one label each, not 1"):
        fit_ridge(features[:1], labels[:1], 2)


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
