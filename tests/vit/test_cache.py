"""TransformerLens' names mean the states and parts that TransformerLens means by them."""

from __future__ import annotations

import pytest
import torch
from tiny_models import noise_images

from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.cache import choose_names
from raptor.vit.parts import PARTS
from raptor.vit.view import ViT


@torch.no_grad()
def test_every_name(teacher: ViT) -> None:
    images = noise_images(teacher)
    output, cache = teacher.run_with_cache(images)
    states, plain, inside = teacher.record(images, PARTS)
    assert torch.equal(output, plain)
    assert len(cache) == 4 * 6
    assert torch.equal(cache["blocks.0.hook_resid_pre"], states[0])
    assert torch.equal(cache["blocks.3.hook_resid_post"], states[4])
    assert torch.equal(cache["blocks.2.attn.hook_pattern"], inside.attn[3])
    assert torch.equal(cache["blocks.2.hook_attn_out"], inside.attn_out[3])
    assert torch.equal(cache["blocks.2.hook_mlp_out"], inside.mlp_out[3])
    for block in range(4):
        middle = cache[f"blocks.{block}.hook_resid_pre"] + cache[f"blocks.{block}.hook_attn_out"]
        assert torch.equal(cache[f"blocks.{block}.hook_resid_mid"], middle)
        assert torch.equal(cache[f"blocks.{block}.hook_resid_post"], middle + cache[f"blocks.{block}.hook_mlp_out"])


@torch.no_grad()
def test_names_are_chosen_by_name_by_list_and_by_function(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, [1, 3])
    images = noise_images(surrogate)
    name = "blocks.1.attn.hook_pattern"
    for names_filter in (name, [name], lambda text: text == name):
        _, cache = surrogate.run_with_cache(images, names_filter)
        assert list(cache) == [name]
    assert cache[name].shape == (3, 3, 7, 7)
    _, cache = surrogate.run_with_cache(images, names_filter=lambda text: text.endswith("hook_resid_post"))
    assert list(cache) == [f"blocks.{block}.hook_resid_post" for block in range(4)]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"did you mean .blocks\.1\.hook_resid_p"):
        choose_names(4, "blocks.1.hook_resid_past")
    with pytest.raises(ValueError, match="unknown name 'ln_final'"):
        choose_names(4, ["blocks.0.hook_resid_pre", "ln_final"])
