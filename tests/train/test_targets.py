"""The bf16 copy of the teacher and its patches as one product."""

from __future__ import annotations

import pytest
import torch
from tiny_models import noise_images, tiny_timm
from torch import nn

from raptor.train.targets import PatchProduct, half_copy


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("patch", "size"), [((14, 14), (42, 28)), ((3, 5), (12, 10)), ((4, 4), (15, 18))])
def test_a_patch_product_is_the_convolution(patch: tuple[int, int], size: tuple[int, int], bias: bool) -> None:
    conv = nn.Conv2d(3, 10, patch, stride=patch, bias=bias).double()
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(PatchProduct(conv)(images), conv(images))


def test_the_half_copy_has_no_convolution_left_and_the_same_states() -> None:
    vit = tiny_timm()
    copied = half_copy(vit)
    assert not any(isinstance(m, nn.Conv2d) for m in copied.model.modules())
    assert any(isinstance(m, nn.Conv2d) for m in vit.model.modules())
    images = noise_images(vit)
    with torch.no_grad():
        exact, half = vit.embed(images)[0], copied.embed(images.bfloat16())[0]
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.05)


def test_other_convolutions_stay() -> None:
    vit = tiny_timm()
    for conv in (
        nn.Conv2d(3, 8, 3, stride=2),
        nn.Conv2d(3, 8, 4, stride=4, padding=1),
        nn.Conv2d(4, 8, 2, 2, groups=2),
    ):
        vit.model.extra = conv
        try:
            assert type(half_copy(vit).model.extra) is type(conv)
        finally:
            del vit.model.extra
