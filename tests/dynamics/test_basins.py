from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.model_selection import LeaveOneOut, cross_val_score
from sklearn.neighbors import NearestCentroid

from raptor.dynamics.basins import Basins, centroid_accuracy, class_means, group_basins, scatter_ratio
from raptor.vit.groups import TokenGroups


def test_two_class_toy_scatter() -> None:
    """Classes at +-m along one axis, each with points at +-w along another: between/within is m^2 / w^2."""
    w = 0.5
    for m in (0.25, 1.0, 3.0):
        x = torch.tensor([[m, w], [m, -w], [-m, w], [-m, -w]], dtype=torch.float64)[:, None]
        labels = torch.tensor([0, 0, 1, 1])
        ratio = scatter_ratio(x, class_means(x, labels), labels)
        assert ratio.item() == pytest.approx(m**2 / w**2, rel=1e-12)


def blobs(num: int = 20, num_classes: int = 3, num_layers: int = 4, dim: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes that move apart with depth."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num * num_classes) % num_classes
    centres = torch.randn(num_classes, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), num_layers, dim, generator=generator, dtype=torch.float64)
    depth = torch.arange(num_layers, dtype=torch.float64)[None, :, None]
    return noise + depth * centres[labels][:, None], labels


def test_accuracy_equals_sklearn_leave_one_out() -> None:
    x, labels = blobs()
    keep = torch.ones(len(labels), dtype=torch.bool)
    keep[:9:3] = False  # unequal classes
    x, labels = x[keep], labels[keep]
    accuracy = centroid_accuracy(x, class_means(x, labels), labels)
    for l in range(x.shape[1]):
        expected = cross_val_score(NearestCentroid(), x[:, l].numpy(), labels.numpy(), cv=LeaveOneOut()).mean()
        assert accuracy[l].item() == pytest.approx(expected, abs=1e-12)
    assert accuracy[-1] > accuracy[0] + 0.3


def test_pca_equals_sklearn() -> None:
    x, labels = blobs()
    basins = group_basins(x, labels)
    points = x.flatten(0, 1).numpy()
    pca = PCA(3, svd_solver="full").fit(points)
    np.testing.assert_allclose(basins.explained, pca.explained_variance_ratio_, rtol=1e-10)
    projected = pca.transform(points).reshape(basins.paths.shape)
    np.testing.assert_allclose(np.abs(basins.paths), np.abs(projected), atol=1e-10)
    for c in range(3):
        np.testing.assert_allclose(basins.class_paths[c], basins.paths[labels.numpy() == c].mean(0), atol=1e-12)


def test_streaming_keeps_the_asked_classes_and_no_more() -> None:
    groups = TokenGroups(cls=1, registers=0, patches=3)
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(40, 4, 8, generator=generator) for _ in range(3)]
    labels = torch.arange(40) % 4  # ten of each
    measure = Basins(groups, classes=[2, 0, 9], per_class=6)
    for start in range(0, 40, 16):
        measure.update([a[start : start + 16] for a in states], labels[start : start + 16])
    result = measure.result()
    assert result.classes == [2, 0]
    assert result.note is not None and "[9]" in result.note
    assert result.labels.tolist() == [1, 0] * 6
    assert result.groups["cls"].paths.shape == (12, 3, 3)
    rows = [i for i in range(40) if i % 4 in (0, 2)][:12]
    x = torch.stack([a[rows, 1:].double().mean(1) for a in states], 1)
    x = x / x.norm(dim=-1, keepdim=True)
    expected = group_basins(x, torch.tensor([1, 0] * 6))
    np.testing.assert_allclose(result.groups["patches"].scatter_ratio, expected.scatter_ratio, rtol=1e-5)
    np.testing.assert_allclose(result.groups["patches"].accuracy, expected.accuracy)
    json.dumps(result.to_dict(), allow_nan=False)


def test_too_few_classes_are_refused() -> None:
    groups = TokenGroups(cls=1, registers=0, patches=3)
    with pytest.raises(ValueError, match="two different classes"):
        Basins(groups, [3, 3])
    measure = Basins(groups, [0, 1])
    measure.update([torch.randn(2, 4, 8) for _ in range(3)], [0, 0])
    with pytest.raises(ValueError, match="had two images"):
        measure.result()
