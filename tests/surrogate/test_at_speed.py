"""A surrogate with the factors of each depth computed once, against the same surrogate as its formula is written."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import noise_images, same_tensors, tiny_timm
from tiny_surrogates import TEACHERS, conditioned
from torch._dynamo.testing import CompileCounter

from raptor.certificate.complexity import count_flops
from raptor.surrogate.at_speed import at_speed
from raptor.surrogate.block import fast_switched
from raptor.surrogate.surrogate import shared_blocks
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit

KINDS = {
    "no LayerScale": ("clip", {}),
    "LayerScale": ("dinov2-registers", {}),
    "mlp": ("dinov2-registers", {"conditioning": "mlp"}),
    "unconditioned": ("siglip", {"conditioning": "none"}),
    "adapters": ("dinov2-registers", {"adapters": 2}),
    "adapters of the MLP": ("dinov2-registers", {"adapters": 2, "adapted": "mlp"}),
    "paper, table": ("clip", {"block": "paper"}),
    "paper, mlp": ("clip", {"block": "paper", "conditioning": "mlp"}),
    "paper, none": ("clip", {"block": "paper", "conditioning": "none"}),
    "rotary": ("dinov3", {}),
    "rotary adapters": ("dinov3", {"adapters": 2}),
    "position bias": ("beit", {}),
    "transformers": ("hf-vit", {}),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_state_is_that_of_the_plain_formula(kind: str) -> None:
    name, options = KINDS[kind]
    surrogate = conditioned(TEACHERS[name](), (3, 1), **options)
    surrogate.model.double()
    quick = at_speed(surrogate)
    images = noise_images(surrogate).double()
    with fast_switched(False):
        plain, plain_output = surrogate.record(images)
    for switched in (True, False):
        with fast_switched(switched):
            states, output = quick.record(images)
        torch.testing.assert_close(states, plain, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(output, plain_output, rtol=1e-10, atol=1e-10)


def test_the_copy_is_tied_and_apart_and_saves_as_its_original(tmp_path) -> None:
    surrogate = conditioned(tiny_timm(), (3, 1))
    before = copy.deepcopy(surrogate.model.state_dict())
    quick = at_speed(surrogate)
    assert same_tensors(quick.model.state_dict(), before)
    assert len(list(shared_blocks(quick))) == 2 and count_flops(quick) == count_flops(surrogate)
    assert not any(parameter.requires_grad for parameter in quick.model.parameters())
    assert any(parameter.requires_grad for parameter in surrogate.model.parameters())
    with torch.no_grad():
        for parameter in quick.model.parameters():
            parameter.zero_()
    assert same_tensors(surrogate.model.state_dict(), before)
    save_vit(at_speed(surrogate), tmp_path / "saved")
    images = noise_images(surrogate)
    with torch.no_grad():
        assert torch.equal(open_vit(tmp_path / "saved")(images), surrogate(images))


@pytest.mark.parametrize("kind", ["LayerScale", "rotary"])
def test_all_layers_are_one_compiled_graph(kind: str) -> None:
    name, options = KINDS[kind]
    quick = at_speed(conditioned(TEACHERS[name](), (2, 1, 1), **options))
    images = noise_images(quick)
    with torch.no_grad():
        expected = quick(images)
        torch._dynamo.reset()
        counter = CompileCounter()
        for step in quick.blocks:
            step.compile(backend=counter, fullgraph=True)
        torch.testing.assert_close(quick(images), expected)
    torch._dynamo.reset()
    assert counter.frame_count == 1


def test_a_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a surrogate"):
        at_speed(tiny_timm())
