"""The null models by brute force."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from tiny_certified import PHASES, all_states, image_batches, tiny_vit
from torch import Tensor

from raptor.certificate.certificate import Certificate
from raptor.certificate.measure import certify
from raptor.certificate.null_models import LinearFit, fit_null_models, standards_of
from raptor.vit.groups import TokenGroups
from raptor.vit.trajectory import NonFiniteStates
from raptor.vit.view import ViT


def test_null_models_by_brute_force(teacher: ViT, certificate: Certificate) -> None:
    train, held_out = all_states(teacher, image_batches(0)), all_states(teacher, image_batches(1))
    patches = teacher.groups.slice("patches")

    def r2(layer: int, predicted: Tensor) -> float:
        t = held_out[layer][:, patches]
        return float(1 - (predicted[:, patches] - t).square().sum() / (t - t.mean((0, 1))).square().sum())

    linear = held_out[0]
    tied = held_out[0]
    layer = 0
    for first, last in ((1, 2), (3, 5)):
        x = torch.cat([train[i - 1].flatten(0, 1) for i in range(first, last + 1)])
        y = torch.cat([train[i].flatten(0, 1) for i in range(first, last + 1)])
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
        matrix = torch.from_numpy(np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0])
        middle = teacher.blocks[(first + last) // 2 - 1]
        for _ in range(first, last + 1):
            layer += 1
            linear = linear @ matrix[:-1] + matrix[-1]
            with torch.no_grad():
                tied = middle(tied.float()).double()
            mean = train[layer][:, patches].mean((0, 1)).expand_as(held_out[layer])
            expected = {"identity": held_out[0], "mean": mean, "tied": tied, "linear": linear}
            for name, states in expected.items():
                assert certificate.nulls[name].r2["patches"][layer - 1] == pytest.approx(r2(layer, states), abs=2e-4), (
                    name
                )
    assert "21 training images" in certificate.notes[0]


def test_null_models_are_fitted_on_the_held_out_images_when_there_are_no_others(teacher: ViT, surrogate: ViT) -> None:
    certificate = certify(surrogate, teacher, image_batches(1), bootstrap=0)
    np.testing.assert_allclose(certificate.nulls["mean"].r2["cls"], 0, atol=1e-5)
    assert "held-out" in certificate.notes[0]
    assert np.isnan(certificate.intervals["r2"]["all"]).all()
    json.dumps(certificate.to_dict(), allow_nan=False)


def test_the_mean_is_that_of_each_group_where_registers_stand_last() -> None:
    teacher = tiny_vit()
    moved = copy.copy(teacher)
    num = teacher.groups
    moved.groups = TokenGroups(num.cls, num.registers, num.patches, order=("cls", "patches", "registers"))
    batches = image_batches(0)
    states = all_states(moved, batches)
    nulls = fit_null_models(moved, PHASES, batches, "fp32")
    for group, where in moved.groups.present():
        expected = torch.stack([x[:, where].mean((0, 1)) for x in states]).float()
        for token in range(where.start, where.stop):
            torch.testing.assert_close(nulls.mean_ltd[:, token], expected, rtol=1e-4, atol=1e-5, msg=group)


def test_images_that_null_models_are_fitted_on_must_be_finite(teacher: ViT, surrogate: ViT) -> None:
    """Otherwise mean and linear maps are NaN, and the surrogate counts as ahead of them at no layer."""
    train = image_batches(0)
    train[1].images[0] = torch.nan
    with pytest.raises(NonFiniteStates, match="at layer 0 on the images that null models are fitted on"):
        certify(surrogate, teacher, image_batches(1), train_batches=train, bootstrap=0)


def test_linear_fit_survives_a_huge_coordinate_and_offset() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator) * torch.tensor([1.0, 1, 1, 1, 1, 500]) + torch.tensor(
        [0, 0, 300.0, 0, 0, 0]
    )
    weight = torch.randn(6, 4, generator=generator)
    y = x @ weight + 3
    fit = LinearFit(*standards_of(x[None, :90], y[None, :90]))
    for a, b in zip(x.split(90), y.split(90)):
        fit.update(a[None], b[None])
    matrix = fit.solve()
    torch.testing.assert_close(matrix[:-1], weight, atol=1e-4, rtol=1e-4)
    assert (y - x @ matrix[:-1] - matrix[-1]).abs().max() < 0.02


def test_null_models_leave_the_teacher_alone(teacher: ViT) -> None:
    before = [p.clone() for p in teacher.model.parameters()]
    fit_null_models(teacher, PHASES, image_batches(0), "fp32")
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.model.parameters()))
