"""Singular values of steps and phases against dense Jacobians in float64, by the chain rule written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import noise_images, shake, tiny_timm
from tiny_tangents import LinearViT, dense_jacobian, in_batches

from raptor.dynamics.jacobian import measure_jacobians, sphere_paths
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.vit.view import ViT


def surrogate_of(teacher: ViT, block: str) -> ViT:
    surrogate = make_surrogate(teacher, (2, 2), block=block, conditioning="mlp" if block == "paper" else "table")
    shake(shared_blocks(surrogate), size=0.05)
    return surrogate


def tiny(**kwargs: Any) -> ViT:
    """A cls token and four patches of width 12, two blocks, in float64."""
    options = dict(reg_tokens=0, num_classes=5, embed_dim=12, depth=2) | kwargs
    vit = tiny_timm("vit_small_patch14_reg4_dinov2", **options)
    vit.model.double()
    return vit


@pytest.mark.parametrize("kind", ["teacher", "rotary", "copied block", "paper's block"])
def test_leading_singular_values_are_those_of_the_dense_jacobian(kind: str) -> None:
    torch.manual_seed(0)  # with two singular values that happen to be close, the iteration would take long
    vit = tiny()
    if kind == "rotary":
        vit = tiny_timm("vit_small_patch16_dinov3", embed_dim=24, depth=2)
    if "block" in kind:
        vit = make_surrogate(vit, (2,), block="paper" if "paper" in kind else "teacher")
        shake(shared_blocks(vit), size=0.05)
    vit.model.double()
    images = noise_images(vit, 2).double()
    found = measure_jacobians(vit, in_batches(images), (2,), max_iterations=100, tolerance=1e-4, num_random=1)
    assert found.phases == [2] and found.num_images == 2
    for name in ("all", "patches"):
        expected = []
        for span in ((0, 1), (1, 2), (0, 2)):
            dense = [dense_jacobian(vit, image, *span, vit.groups.slice(name)) for image in images]
            expected.append(np.mean([float(torch.linalg.matrix_norm(matrix, 2)) for matrix in dense]))
        values = np.array([*found.step[name].mean, *found.phase[name].mean])
        # The iteration stops at a small change and approaches from below.
        assert (values < np.array(expected) * (1 + 1e-9)).all()
        np.testing.assert_allclose(values, expected, rtol=0.03)


def test_random_directions_grow_by_the_root_mean_square_of_the_singular_values() -> None:
    vit = tiny()
    image = noise_images(vit, 1).double()
    (path,) = sphere_paths(vit, in_batches(image))
    tokens = vit.groups.slice("all")
    growth_b = path.random_growth(0, 2, tokens, 30, torch.Generator().manual_seed(0))
    dense = dense_jacobian(vit, image[0], 0, 2, tokens)
    num_dimensions = vit.groups.num_tokens * (vit.dim - 1)
    expected = float(torch.linalg.matrix_norm(dense)) / math.sqrt(num_dimensions)
    assert growth_b.item() == pytest.approx(expected, rel=0.1)


def test_a_diagonal_map_grows_by_the_ratio_of_its_factors() -> None:
    """At the eigenvector of the factor 2 a turn towards an eigenvector of the factor 3 grows by 3 / 2 a step."""
    factors = torch.tensor([2.0, 3.0, 1.0, 0.5], dtype=torch.float64)
    vit = LinearViT([torch.diag(factors)] * 3)
    start = torch.zeros(2, 1, 4, dtype=torch.float64)
    start[..., 0] = 5.0
    found = measure_jacobians(vit, in_batches(start, 1), (1, 2), max_iterations=100, tolerance=1e-6)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.step["patches"].mean, 1.5, rtol=1e-5)
    np.testing.assert_allclose(found.phase["patches"].mean, [1.5, 1.5**2], rtol=1e-5)


def test_weights_in_half_precision_are_refused() -> None:
    vit = tiny()
    vit.model.bfloat16()
    with pytest.raises(ValueError, match="half precision"):
        measure_jacobians(vit, in_batches(noise_images(vit, 1)))
