"""Weights of an exported model: rounding against its definition, torchao and counted bytes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tiny_models import noise_images, tiny_timm
from tiny_surrogates import conditioned
from torch import nn

from raptor.export.weights import (
    FourBits,
    copy_of,
    pack,
    rounded_layers,
    stored_bytes,
    unpack,
    with_rounded_values,
    with_weights,
)
from raptor.vit.view import ViT


@pytest.fixture(scope="module")
def surrogate() -> ViT:
    return conditioned(tiny_timm(), (3, 1))


def test_packed_numbers_come_back() -> None:
    steps = torch.arange(-7, 8).repeat(2)[None].float()
    packed = pack(steps)
    assert packed.dtype == torch.uint8 and packed.shape == (1, 15)
    assert torch.equal(unpack(packed), steps)


def test_four_bits_against_numpy() -> None:
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    kept = FourBits()(*FourBits().right_inverse(weight)).numpy()
    rows = weight.numpy()
    scale = np.abs(rows).max(1, keepdims=True) / 7
    np.testing.assert_allclose(kept, np.round(rows / scale) * scale, rtol=1e-6)


@torch.no_grad()
def test_packed_weights_compute_what_rounded_values_do(surrogate: ViT) -> None:
    images = noise_images(surrogate)
    packed = with_weights(surrogate, "int4")
    torch.testing.assert_close(packed(images), with_rounded_values(surrogate, "int4")(images))
    assert not torch.equal(packed(images), surrogate(images))


@torch.no_grad()
def test_eight_bits_are_those_of_torchao(surrogate: ViT) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    rounded = with_weights(surrogate, "int8")
    name, layer = next(iter(rounded_layers(surrogate)))
    alone = nn.Sequential(copy.deepcopy(layer))
    torchao.quantize_(alone, torchao.Int8WeightOnlyConfig())
    eye = torch.eye(layer.in_features)
    torch.testing.assert_close(rounded.model.get_submodule(name)(eye), alone(eye))
    # Half a step of 255 in each row, and torchao's own rounding of the scale.
    largest = layer.weight.abs().amax(1) / 127 * 0.51
    difference = (alone(eye) - layer(eye)).abs().amax(0)
    assert (difference <= largest).all() and difference.max() > 0


def test_the_model_itself_is_not_changed(surrogate: ViT, snapshot) -> None:
    before = snapshot(surrogate.model)
    for weights in ("fp32", "fp16", "int4"):
        with_weights(surrogate, weights)
        with_rounded_values(surrogate, weights)
    after = surrogate.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    copied = copy_of(surrogate)
    assert copied.norm is copied.model.norm and not any(p.requires_grad for p in copied.model.parameters())


def test_bytes_are_counted_once_for_tied_blocks(surrogate: ViT) -> None:
    full = 4 * sum(p.numel() for p in surrogate.model.parameters())
    assert stored_bytes(surrogate, "fp32") == full and stored_bytes(surrogate, "fp16") == full // 2
    layers = [layer for _, layer in rounded_layers(surrogate)]
    assert len(layers) == 2 * 4  # two tied blocks of four linear layers
    numbers = sum(layer.weight.numel() for layer in layers)
    rows = sum(layer.out_features for layer in layers)
    assert stored_bytes(surrogate, "int4") == full - 4 * numbers + numbers // 2 + 4 * rows


def test_what_cannot_be_rounded_is_one_line(surrogate: ViT) -> None:
    odd = copy_of(surrogate)
    block = odd.model.shared_blocks[1]
    name, layer = next((name, one) for name, one in block.named_modules() if type(one) is nn.Linear)
    block.set_submodule(name, nn.Linear(layer.in_features + 1, layer.out_features))
    with pytest.raises(ValueError, match=r"shared_blocks\.1\..* has an odd number of inputs, 49: take --weights int8"):
        with_weights(odd, "int4")
    paper = conditioned(tiny_timm(), (3, 1), adapters=2)
    for _, module in paper.model.shared_blocks.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = type("Own", (nn.Linear,), {})
    with pytest.raises(ValueError, match="no plain linear layers to round: take --weights fp16"):
        with_weights(paper, "int8")
