"""Depth on demand against loops over single images."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny_models import noise_images, tiny_timm

from raptor import open_vit
from raptor.vit.exits import FixedLengths, RandomSkip, Rule, Turn, turn
from raptor.vit.groups import TokenGroups
from raptor.vit.on_demand import PerImageContext, run_on_demand
from raptor.vit.view import Context


def test_without_a_rule_it_is_the_models_own_depth() -> None:
    vit = open_vit("scenes-k3")
    images = noise_images(vit, 3)
    run = run_on_demand(vit, images, Rule())
    with torch.no_grad():
        assert torch.equal(run.last_btd, vit.record(images)[0][-1])
    assert run.num_blocks_b.tolist() == [vit.num_layers] * 3


def test_each_image_is_as_it_would_be_alone() -> None:
    vit = open_vit("scenes-k3")
    images = noise_images(vit, 6)
    assert vit.phases is not None
    with torch.no_grad():
        states = vit.record(images)[0]
        turns_lb = torch.stack([turn(a[:, 0], b[:, 0]) for a, b in pairwise(states)])
    threshold = float(turns_lb.median())
    run = run_on_demand(vit, images, Turn(vit.groups, threshold))
    assert len(set(run.num_blocks_b.tolist())) > 1, "the rule must tell images apart here"
    for i in range(len(images)):
        with torch.no_grad():
            x_btd, context = vit.embed(images[i : i + 1])
            layer, num_blocks = 0, 0
            for length in vit.phases:
                for step in range(1, length + 1):
                    before_btd = x_btd
                    x_btd = vit.step(layer + step, x_btd, context)
                    num_blocks += 1
                    cosine = torch.nn.functional.cosine_similarity(before_btd[:, 0], x_btd[:, 0]).double()
                    if float(torch.arccos(cosine.clamp(-1, 1))) < threshold:
                        break
                layer += length
        assert int(run.num_blocks_b[i]) == num_blocks
        assert torch.allclose(run.last_btd[i], x_btd[0], atol=1e-4)


def test_a_shorter_schedule_is_the_composition_of_its_blocks() -> None:
    vit = tiny_timm(depth=4)
    images = noise_images(vit, 2)
    run = run_on_demand(vit, images, FixedLengths([1, 2]), phases=[2, 2])
    with torch.no_grad():
        x_btd, context = vit.embed(images)
        for layer in (1, 3, 4):
            x_btd = vit.step(layer, x_btd, context)
    assert torch.equal(run.last_btd, x_btd) and run.num_blocks_bk.tolist() == [[1, 2], [1, 2]]


def test_a_teacher_needs_its_phases_and_a_rule_never_skips_a_whole_phase() -> None:
    vit = tiny_timm(depth=4)
    with pytest.raises(ValueError, match="say where its phases are"):
        run_on_demand(vit, noise_images(vit, 2), Rule())
    run = run_on_demand(vit, noise_images(vit, 2), RandomSkip(1.0), phases=[3, 1])
    assert run.num_blocks_bk.tolist() == [[1, 1], [1, 1]]


def test_arguments_of_single_images_go_with_their_images() -> None:
    vit = tiny_timm(depth=2)
    images = noise_images(vit, 3)
    context_of = PerImageContext(vit, images, Context([((), {}), ((), {})]))
    mask_b = torch.tensor([10.0, 11.0, 12.0])
    context_of._leaves = [mask_b, 7]
    context_of._per_image = [True, False]
    context_of._structure = torch.utils._pytree.tree_flatten([((1,), {"depth": 2})])[1]
    found = context_of.rows(torch.tensor([2, 0]))
    assert found.calls[0][0][0].tolist() == [12.0, 10.0] and found.calls[0][1] == {"depth": 7}


def test_states_keep_their_digits_between_phases() -> None:
    """Under autocast the embedding may be in half precision, and the stream after a block is not."""

    class Thirds:
        name = "thirds"
        groups = TokenGroups(cls=1, registers=0, patches=1)
        phases = (1, 2)
        num_classes = 0
        num_layers = 3

        def embed(self, images: torch.Tensor) -> tuple[torch.Tensor, Context]:
            return torch.ones(len(images), 2, 4, dtype=torch.bfloat16), Context([((), {})] * 3)

        def step(self, layer: int, x_btd: torch.Tensor, context: Context) -> torch.Tensor:
            return x_btd.float() / 3

        def finish(self, x_btd: torch.Tensor) -> torch.Tensor:
            return x_btd

    run = run_on_demand(Thirds(), torch.zeros(2, 3, 8, 8), Rule())
    assert run.last_btd.dtype == torch.float32
    assert torch.allclose(run.last_btd, torch.tensor(1 / 27), rtol=1e-6)


def test_a_rule_by_its_name_gives_the_models_output() -> None:
    vit = open_vit("scenes-k3")
    images = noise_images(vit, 4)
    with torch.no_grad():
        assert torch.equal(vit.run(images).output, vit(images))
    early = vit.run(images, exit="turn<10")
    assert early.num_blocks_bk.tolist() == [[1, 1, 1]] * 4 and early.num_read_outs == 0
    # An entropy is read after each step but the last one of a phase: of 4 images twice, twice and five times.
    assert vit.run(images, exit="entropy<1e-9").num_read_outs == 4 * (2 + 2 + 5)
    # The divergence needs the state before the first step of a phase as well.
    assert vit.run(images, exit="kl<1e-30").num_read_outs == 4 * (3 + 3 + 6)
    with pytest.raises(ValueError, match=r"phases \[3, 3\] do not add up to the 12 layers"):
        vit.run(images, phases=[3, 3])
