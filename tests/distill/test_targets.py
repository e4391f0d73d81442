"""The bf16 copy of the teacher and its patches as one product."""

from __future__ import annotations

import pytest
import torch
from tiny_models import noise_images, tiny_timm
from torch import nn

from raptor.distill.targets import PatchProduct, ShortGELU, half_copy


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


def test_the_short_gelu_is_gelu_as_far_as_bf16_can_tell() -> None:
    x = torch.linspace(-12, 12, 100_001)
    exact = nn.functional.gelu(x.double())
    assert (ShortGELU()(x) - exact).abs().max() < 2e-6
    near = x.abs() < 3
    torch.testing.assert_close(ShortGELU()(x[near]).double(), exact[near], rtol=1e-3, atol=1e-6)
    half = x[x > -2].bfloat16()
    rounded = nn.functional.gelu(half.float()).bfloat16()
    assert (ShortGELU()(half) != rounded).float().mean() < 0.01  # values that lie between two bf16 numbers
    assert ShortGELU()(half).dtype == torch.bfloat16


def test_only_a_copy_to_be_compiled_has_the_short_gelu() -> None:
    vit = tiny_timm()
    count = {
        flag: sum(isinstance(m, ShortGELU) for m in half_copy(vit, flag).model.modules()) for flag in (False, True)
    }
    assert count == {False: 0, True: vit.num_layers}
    vit.blocks[0].mlp.act = nn.GELU("tanh")  # type: ignore[union-attr,assignment]
    assert sum(isinstance(m, ShortGELU) for m in half_copy(vit, True).model.modules()) == vit.num_layers - 1
