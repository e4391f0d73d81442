"""Finite-time Lyapunov exponents against linear maps with known ones, and against dense Jacobians."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import noise_images, tiny_timm
from tiny_tangents import LinearViT, dense_jacobian, in_batches

from raptor.dynamics.lyapunov import measure_lyapunov


def test_exponents_of_a_linear_map_are_those_of_its_eigenvalues() -> None:
    """A matrix that is not normal, with known eigenvalues: on the sphere each exponent loses the largest one."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.eye(4, dtype=torch.float64) + 0.3 * torch.randn(4, 4, generator=generator, dtype=torch.float64)
    eigenvalues = torch.tensor([1.5, 1.0, 0.6, 0.3], dtype=torch.float64)
    matrix = basis @ torch.diag(eigenvalues) @ torch.linalg.inv(basis)
    vit = LinearViT([matrix] * 30)
    start = torch.randn(3, 1, 4, generator=generator, dtype=torch.float64)
    found = measure_lyapunov(vit, in_batches(start), (20, 10), num_vectors=16)  # type: ignore[arg-type]
    expected = torch.log(eigenvalues[1:] / eigenvalues[0])
    assert found.exponents["patches"].mean.shape == (2, 3)  # the tangent space has three dimensions
    np.testing.assert_allclose(found.exponents["patches"].mean[1], expected, atol=1e-3)
    assert found.exponents["patches"].std is not None and found.exponents["patches"].std[1].max() < 1e-3


def test_phases_of_different_maps_have_their_own_exponents() -> None:
    """Diagonal maps at the eigenvector of factor 1: growth is by the other factors, in each phase by its own."""
    first = torch.diag(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    second = torch.diag(torch.tensor([1.0, 0.8, 0.1], dtype=torch.float64))
    vit = LinearViT([first] * 20 + [second] * 20)
    start = torch.zeros(1, 1, 3, dtype=torch.float64)
    start[..., 0] = 1
    found = measure_lyapunov(vit, in_batches(start), (20, 20))  # type: ignore[arg-type]
    growth = found.growth["all"].mean
    np.testing.assert_allclose(growth[10:20], np.log([[2.0, 0.5]] * 10), atol=1e-6)
    np.testing.assert_allclose(found.exponents["all"].mean[1], np.log([0.8, 0.1]), atol=1e-6)


def test_the_sum_of_all_exponents_is_the_growth_of_volume() -> None:
    """With as many vectors as a cls token's tangent space has dimensions, their sum is the log determinant."""
    vit = tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=0, embed_dim=12, depth=2)
    vit.model.double()
    images = noise_images(vit, 2).double()
    found = measure_lyapunov(vit, in_batches(images, 1), (1, 1), num_vectors=vit.dim - 1)
    cls = vit.groups.slice("cls")
    for layer in range(2):
        volumes = []
        for image in images:
            singular = torch.linalg.svdvals(dense_jacobian(vit, image, layer, layer + 1, cls))
            volumes.append(float(singular[: vit.dim - 1].log().sum()))  # the radial direction is lost
        assert found.growth["cls"].mean[layer].sum() == pytest.approx(np.mean(volumes), rel=1e-6)
    with pytest.raises(ValueError, match="at least one tangent vector"):
        measure_lyapunov(vit, [], num_vectors=0)
