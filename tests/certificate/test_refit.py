"""The file of a refitted head, and weights that are replaced for a while."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_certified import image_batches, tiny_vit
from torch import nn

from raptor.certificate.heads import resolve_head
from raptor.certificate.refit import TENSORS, Refitted, after_blocks, replaced_weights
from raptor.files import RunError
from raptor.surrogate.surrogate import make_surrogate


def test_weights_come_back_from_their_file(tmp_path: Path) -> None:
    teacher = tiny_vit(num_classes=3)
    surrogate = make_surrogate(teacher, (2, 3), conditioning="none")
    head, _ = resolve_head(teacher)
    tensors = {name: parameter.detach() + 1 for name, parameter in after_blocks(surrogate, head).items()}
    assert set(tensors) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    Refitted(tensors).save(tmp_path)
    read = Refitted.load(tmp_path, surrogate)
    assert read.linear is None and read.tensors.keys() == tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(RunError, match=r"does not fit .* fit it again with raptor head"):
        Refitted.load(tmp_path, tiny_vit(num_classes=4))
    (tmp_path / TENSORS).write_bytes(b"no tensors")
    with pytest.raises(RunError, match="cannot be read"):
        Refitted.load(tmp_path, surrogate)


def test_a_linear_head_comes_back_too(tmp_path: Path) -> None:
    teacher = tiny_vit()
    head, _ = resolve_head(teacher, image_batches(0))
    assert head is not None
    Refitted({}, head.linear).save(tmp_path)
    read = Refitted.load(tmp_path, teacher)
    assert read.tensors == {} and read.linear is not None
    assert torch.equal(read.linear.weight, head.linear.weight) and torch.equal(read.linear.bias, head.linear.bias)


def test_autocast_sees_the_replaced_weights() -> None:
    """It keeps half-precision copies of weights that take gradients, also where none are asked for."""
    layer = torch.nn.Linear(3, 2, bias=False)
    x = torch.ones(1, 3)
    new = torch.full_like(layer.weight, 4.0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        with replaced_weights([layer.weight], [new]):
            assert layer(x).tolist() == [[12.0, 12.0]]
        assert torch.equal(layer(x), before)


def test_weights_are_put_back_after_an_error() -> None:
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(KeyError), replaced_weights([parameter], [torch.zeros(3)]):
        assert parameter.detach().sum() == 0
        raise KeyError
    assert torch.equal(parameter.detach(), torch.ones(3))
