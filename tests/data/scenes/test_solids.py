"""Rays and solids, against marching along the ray."""

from __future__ import annotations

import pytest
import torch

from raptor.data.scenes import solids


def inside(shape: str, p: torch.Tensor) -> torch.Tensor:
    x, y, z = p
    ring = torch.hypot(x, z)
    if shape == "sphere":
        return x * x + y * y + z * z < 1
    if shape == "cube":
        return p.abs().amax(0) < solids.CUBE_HALF
    if shape == "cylinder":
        return (ring < solids.CYLINDER_RADIUS) & (y.abs() < 1)
    if shape == "cone":
        return (ring < solids.CONE_SLOPE * (1 - y)) & (y.abs() < 1)
    return (ring - solids.RING_RADIUS).square() + y * y < solids.TUBE_RADIUS**2


@pytest.mark.parametrize("number, shape", enumerate(solids.SHAPES))
def test_rays_meet_solids_where_marching_enters_them(number: int, shape: str) -> None:
    generator = torch.Generator().manual_seed(number)
    origin = torch.tensor([0.0, 2.5, -4.0])[:, None].expand(3, 400)
    target = torch.rand(3, 400, generator=generator) * 2.4 - 1.2
    direction = target - origin
    t = solids.MEET[number](origin, direction)
    steps = torch.linspace(0.3, 2.0, 6000)
    points = origin[:, :, None].double() + direction[:, :, None] * steps.double()
    entered = inside(shape, points)
    first = torch.where(entered.any(1), steps[entered.int().argmax(1)], torch.inf)
    # Rays that only graze differ: a torus counts them as hits from 0.02 outside on.
    agree = ((t - first).abs() < 3e-3) | (t.isinf() & first.isinf())
    assert agree.float().mean() > (0.95 if shape == "torus" else 0.99)

    hit = t < torch.inf
    at = origin[:, hit] + t[hit] * direction[:, hit]
    normal = solids.NORMAL[number](at)
    normal = normal / normal.norm(dim=0)
    assert inside(shape, at - 0.03 * normal).float().mean() > 0.97
    assert not inside(shape, at + 0.03 * normal).any()
