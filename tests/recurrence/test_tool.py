"""Classes are read from a state by the model's own head, or by a linear head on its features."""

from __future__ import annotations

import torch
from tiny_models import noise_images, tiny_timm

from raptor.certificate.heads import Head
from raptor.certificate.linear_head import LinearHead
from raptor.recurrence.tool import read_out_of


def test_classes_of_a_state_are_those_of_the_head() -> None:
    vit = tiny_timm(depth=2, num_classes=5)
    images = noise_images(vit, 3)
    linear = LinearHead(torch.randn(4, vit.features(vit.record(images)[0][-1]).shape[1]), torch.randn(4))
    with torch.no_grad():
        last = vit.record(images)[0][-1]
        assert torch.equal(read_out_of(Head("own", 5), vit)(last), vit(images))
        expected = vit.features(last) @ linear.weight.T + linear.bias
        assert torch.allclose(read_out_of(Head("file", 4, linear), vit)(last), expected, atol=1e-5)
