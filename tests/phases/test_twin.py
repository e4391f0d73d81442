"""The untrained twin: the same architecture with other weights, the same every time."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_timm

from raptor.phases.twin import untrained_twin
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.open import open_vit


def test_a_twin_has_the_shapes_of_the_model_and_weights_of_its_own() -> None:
    teacher = open_vit("scenes")
    twin = untrained_twin(teacher)
    again = untrained_twin(teacher)
    other = untrained_twin(teacher, seed=1)
    assert twin.groups == teacher.groups and twin.num_layers == teacher.num_layers
    key = "blocks.0.attn.qkv.weight"
    weights = [vit.model.state_dict()[key] for vit in (teacher, twin, again, other)]
    assert weights[0].shape == weights[1].shape and torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[3])


def test_a_model_that_cannot_be_built_anew_has_no_twin() -> None:
    own = open_vit(tiny_timm(depth=3).model)
    with pytest.raises(ValueError, match="a module of your own cannot be built anew"):
        untrained_twin(own)
    with pytest.raises(ValueError, match="a surrogate has none"):
        untrained_twin(make_surrogate(own, [2, 1]))
