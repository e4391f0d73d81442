"""Which teachers keep places, and where their blocks can be modulated."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import masked
from tiny_models import noise_images, tiny_timm
from tiny_surrogates import AT_16, TEACHERS

from raptor.surrogate.block import CopiedBlock, Modulation
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.surrogate.teacher_blocks import modulation_points, uses_places
from raptor.vit.open import open_vit

BY_PLACE = ("dinov3", "eva02", "rope-mixed", "beit", "hf-dinov3")  # rotary embeddings, or a bias by relative position


@pytest.mark.parametrize("name", TEACHERS)
def test_paper_block_has_the_teachers_heads_or_is_refused(name: str) -> None:
    if name in BY_PLACE:
        with pytest.raises(ValueError, match=r"use the places of patches .* take --block teacher"):
            make_surrogate(TEACHERS[name](), [4], block="paper", conditioning="mlp")
        return
    surrogate = make_surrogate(TEACHERS[name](), [4], block="paper", conditioning="mlp")
    assert shared_blocks(surrogate)[0].block.num_heads == 3


def test_paper_block_is_refused_for_masks_on_any_block() -> None:
    teacher = open_vit(masked(2, 4, 5), size=32)
    with pytest.raises(ValueError, match="use the places of patches"):
        make_surrogate(teacher, [3, 3], block="paper", conditioning="mlp")


@torch.no_grad()
def test_a_branch_that_adds_the_state_itself_is_not_scaled_with_it() -> None:
    """DPT's second branch ends in a module that returns the sum: the block is then modulated as a whole."""
    config = transformers.DPTConfig(
        **AT_16, is_hybrid=False, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8] * 4
    )
    teacher = open_vit(transformers.DPTModel(config), size=32)
    assert modulation_points(teacher, 1) == []
    assert modulation_points(tiny_timm("vit_small_patch14_reg4_dinov2"), 1) == ["norm1", "ls1", "norm2", "ls2"]
    block = shared_blocks(make_surrogate(teacher, [teacher.num_layers]))[0].block
    assert isinstance(block, CopiedBlock)
    x_btd, context = teacher.embed(noise_images(teacher))
    one, none = torch.ones(teacher.dim), torch.zeros(teacher.dim)
    args, kwargs = context.calls[0]
    still = Modulation(t1=none, t2=none, t3=one, scale1=one, shift1=none, scale2=one, shift2=none, shift3=none)
    assert torch.allclose(block(x_btd, still, *args, **kwargs), x_btd, atol=1e-6)


@torch.no_grad()
def test_permuted_patches_tell_a_rotary_model_and_its_surrogate_apart_from_a_plain_one() -> None:
    """With the arguments of the blocks kept, a block that knows places does not follow a permutation of the patches."""
    for name, by_place in (("vit_small_patch16_dinov3", True), ("vit_small_patch14_dinov2", False)):
        assert uses_places(tiny_timm(name)) is by_place
        vit = make_surrogate(tiny_timm(name), [4])
        x_btd, context = vit.embed(noise_images(vit))
        order = torch.arange(x_btd.shape[1])
        order[vit.groups.slice("patches")] = order[vit.groups.slice("patches")].roll(1)
        moved, plain = vit.unroll(x_btd[:, order], context)[-1], vit.unroll(x_btd, context)[-1][:, order]
        assert torch.allclose(moved, plain, atol=1e-4) is not by_place
