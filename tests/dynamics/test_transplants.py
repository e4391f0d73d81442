"""Transplants against the model run by hand, and limits that hold for any model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_models import noise_images
from tiny_tangents import in_batches
from torch import Tensor

from raptor.dynamics.transplants import (
    TransplantResult,
    choose_donors,
    choose_tokens,
    matched_noise,
    measure_transplants,
)
from raptor.vit.view import ViT


def coordinate_of_cls(state_btd: Tensor) -> Tensor:
    return state_btd[:, 0, :4]


def test_donors_are_the_next_images_of_another_class() -> None:
    assert choose_donors([0, 0, 1, 2, 0]) == [2, 2, 3, 4, 2]
    assert choose_donors([5, 5]) == [None, None]
    assert choose_donors([1]) == [None]


def test_a_share_of_the_tokens_is_replaced() -> None:
    state = torch.zeros(40, 11, 3)
    for share, num in ((0.1, 1), (0.25, 3), (0.3, 3), (1.0, 10)):
        mask = choose_tokens(state, slice(1, 11), share, torch.Generator().manual_seed(0))[..., 0]
        assert (mask.sum(1) == num).all() and not mask[:, 0].any()
        if share < 1:
            assert len(mask.unique(dim=0)) > 3  # each image has its own tokens


def test_the_control_moves_each_token_as_far() -> None:
    difference = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(0))
    noise = matched_noise(difference, torch.Generator().manual_seed(1))
    torch.testing.assert_close(noise.norm(dim=-1), difference.norm(dim=-1))
    assert torch.nn.functional.cosine_similarity(noise, difference, dim=-1).abs().mean() < 0.5


def test_transplants_equal_the_model_run_by_hand(teacher: ViT) -> None:
    images = noise_images(teacher, 6)
    found = measure_transplants(teacher, in_batches(images, 6), shares=(1.0,), predict=coordinate_of_cls)
    assert [name for name, _ in found.parts] == ["all", "cls", "registers", "patches"]
    with torch.no_grad():
        states, _ = teacher.record(images)
        _, context = teacher.embed(images)
        classes = coordinate_of_cls(states[-1]).argmax(-1)
        donors = choose_donors(classes.tolist())
        rows = [row for row, donor in enumerate(donors) if donor is not None]
        assert rows and found.num_pairs == len(rows)
        donor_rows = [donors[row] for row in rows]
        for p, (name, _) in enumerate(found.parts):
            tokens = teacher.groups.slice(name)
            for layer in (0, 2, 4):
                mixed = states[layer].clone()
                mixed[rows, tokens] = states[layer][donor_rows, tokens]
                out = coordinate_of_cls(teacher.unroll(mixed, context, layer)[-1]).argmax(-1)[rows]
                assert found.donor.mean[p, layer] == pytest.approx((out == classes[donor_rows]).float().mean())
                assert found.host.mean[p, layer] == pytest.approx((out == classes[rows]).float().mean())
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert TransplantResult.from_dict(saved).to_dict() == saved


def test_a_whole_state_carries_the_class_of_its_donor(teacher: ViT) -> None:
    images = noise_images(teacher, 7)
    found = measure_transplants(teacher, in_batches(images, 4), layers=[0, 4], predict=coordinate_of_cls)
    whole = found.parts.index(("all", 1.0))
    np.testing.assert_array_equal(found.donor.mean[whole], 1.0)
    np.testing.assert_array_equal(found.host.mean[whole], 0.0)
    # At the last layer the head reads cls alone: patches carry nothing, and cls everything.
    assert found.host.mean[found.parts.index(("patches", 1.0)), 1] == 1.0
    assert found.donor.mean[found.parts.index(("cls", 1.0)), 1] == 1.0


def test_bad_input(teacher: ViT) -> None:
    batches = in_batches(noise_images(teacher, 2))
    with pytest.raises(ValueError, match="shares of tokens"):
        measure_transplants(teacher, batches, shares=(0.0,))
    with pytest.raises(ValueError, match="are not states"):
        measure_transplants(teacher, batches, layers=[9])
    with pytest.raises(ValueError, match="different predictions"):
        measure_transplants(teacher, batches, predict=lambda x: torch.eye(2)[torch.zeros(len(x)).long()])
    teacher.num_classes = 0
    with pytest.raises(ValueError, match="no head"):
        measure_transplants(teacher, batches)
