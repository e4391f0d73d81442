"""The view: recording, embed, unroll and finish give the states and output of the model, for every supported family."""

from __future__ import annotations

import copy
import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from families import Unheard, each_family, opened
from PIL import Image
from tiny_models import noise_images, same_tensors, tiny_timm
from tiny_surrogates import TEACHERS
from torch import Tensor, nn

from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.open import open_vit
from raptor.vit.view import Context, ViT


@each_family
@torch.no_grad()
def test_recording_changes_nothing(family: str, snapshot) -> None:
    vit = opened(family)
    images = noise_images(vit)
    weights = snapshot(vit.model)
    before = vit(images)
    states, recorded = vit.record(images)
    assert before.shape[0] == recorded.shape[0] == len(images)
    assert torch.equal(before, recorded)
    assert torch.equal(before, vit(images))
    assert same_tensors(weights, vit.model.state_dict())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in vit.model.modules())
    assert [tuple(s.shape) for s in states] == [(3, vit.groups.num_tokens, 48)] * 4
    assert all(not torch.equal(a, b) for a, b in pairwise(states))


@each_family
@torch.no_grad()
def test_embed_unroll_and_finish_equal_record(family: str) -> None:
    vit = opened(family)
    images = noise_images(vit)
    states, output = vit.record(images)
    a_0, context = vit.embed(images)
    unrolled = vit.unroll(a_0, context)
    assert len(unrolled) == 4
    assert all(torch.equal(a, b) for a, b in zip(states, unrolled))
    assert torch.equal(vit.finish(unrolled[-1]), output)
    assert not torch.allclose(vit.finish(states[0]), output, atol=1e-3)
    assert torch.equal(vit.unroll(states[1], context, start=1)[-1], states[-1])
    middle = vit.unroll(states[1], context, start=1, stop=2)
    assert len(middle) == 2
    assert torch.equal(middle[1], states[2])


def test_final_norm_and_pooled_features() -> None:
    vit = tiny_timm("vit_small_patch14_reg4_dinov2")
    assert vit.norm is vit.model.norm
    assert opened("siglip").norm is opened("siglip").model.norm
    x = torch.randn(2, 9, 48)
    normed = vit.model.norm(x)
    assert torch.equal(vit.features(x), torch.cat([normed[:, 0], normed[:, 5:].mean(1)], -1))


def test_moving_a_view_moves_the_tensors_of_its_calls(teacher: ViT) -> None:
    model = copy.deepcopy(teacher.model)
    plain = model.forward
    model.forward = lambda images, noise=None, ratio=0: plain(images)
    teacher = dataclasses.replace(teacher, model=model, forward_kwargs={"noise": torch.zeros(1, 4), "ratio": 0})
    surrogate = make_surrogate(teacher, [4], block="teacher")
    surrogate.to("meta")
    assert surrogate.forward_kwargs["noise"].device.type == "meta" and surrogate.forward_kwargs["ratio"] == 0
    assert teacher.forward_kwargs["noise"].device.type == "cpu"


@torch.no_grad()
def test_embed_and_finish_restore_after_an_exception(teacher: ViT) -> None:
    images = noise_images(teacher)
    output, blocks = teacher(images), list(teacher.blocks)
    with pytest.raises(ValueError, match="takes images of the shape"):
        teacher.embed(torch.zeros(1, 5, 28, 28))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        teacher.finish(torch.zeros(1, 7, 13))
    assert list(teacher.blocks) == blocks
    assert torch.equal(teacher(images), output)


def test_calls_are_the_same_if_all_their_arguments_are() -> None:
    mask, other = torch.ones(2, 2), object()
    calls = [
        ((), {"mask": mask, "flag": False, "more": [1, "a"]}),
        ((), {"mask": mask.clone(), "flag": False, "more": [1, "a"]}),
        ((), {"mask": mask.clone(), "flag": False, "more": [2, "a"]}),
        ((), {"mask": 2 * mask, "flag": False, "more": [1, "a"]}),
        ((), {"mask": None, "flag": False, "more": [1, "a"]}),
        ((), {"mask": mask.double(), "flag": False, "more": [1, "a"]}),
        ((1,), {}),
        ((True,), {}),
        ((other,), {}),
        ((other,), {}),
        ((object(),), {}),
    ]
    assert Context(calls).distinct() == [0, 2, 3, 4, 5, 6, 7, 8, 10]


@torch.no_grad()
def test_files_and_pictures_are_prepared_as_the_model_wants(teacher: ViT, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, 40, 50, 3), np.uint8)
    pictures = [Image.fromarray(one) for one in noise]
    files = []
    for i, picture in enumerate(pictures):
        files.append(tmp_path / f"{i}.png")
        picture.save(files[-1])
    batch = torch.stack([teacher.preprocess(picture) for picture in pictures])
    wanted, output = teacher.record(batch)
    for images in (pictures, files, [str(file) for file in files]):
        states, found = teacher.record(images)
        assert torch.equal(found, output) and torch.equal(states[-1], wanted[-1])
    for single in (pictures[1], files[1], str(files[1])):
        states, _ = teacher.record(single)
        assert torch.allclose(states[-1], wanted[-1][1:], atol=1e-5)


def test_what_is_no_batch_of_images_gets_one_line(teacher: ViT, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"this one has \(3, 28, 28\): use images\[None\]"):
        teacher.record(torch.zeros(3, 28, 28))
    with pytest.raises(ValueError, match=r"has the shape \(B, 3, H, W\), this one has \(2, 1, 28, 28\)"):
        teacher.record(torch.zeros(2, 1, 28, 28))
    fixed = TEACHERS["torchvision"]()
    with pytest.raises(ValueError, match=r"takes images of the shape \(B, 3, 32, 32\), these have \(2, 3, 40, 40\)"):
        fixed.record(torch.zeros(2, 3, 40, 40))
    with pytest.raises(ValueError, match=r"are not image files: open a folder or a set with raptor.iterate"):
        teacher.record(str(tmp_path))
    with pytest.raises(ValueError, match=r"absent\.png"):
        teacher.record(tmp_path / "absent.png")


@pytest.mark.parametrize("layer", [0, 2, 4])
@pytest.mark.parametrize("group", ["all", "cls", "registers", "patches"])
@torch.no_grad()
def test_patching_sets_the_state_of_a_group(teacher: ViT, layer: int, group: str) -> None:
    """A whole state and the group's part alone do the same, and all other tokens stay."""
    images = noise_images(teacher)
    plain, _ = teacher.record(images)
    other = teacher.record(noise_images(teacher, seed=7))[0][layer]
    where = teacher.groups.slice(group)
    wanted = plain[layer].clone()
    wanted[:, where] = other[:, where]
    expected = teacher.unroll(wanted, teacher.embed(images)[1], start=layer)
    for state in (other, other[:, where]):
        with teacher.patched(layer, state, group=group):
            states, output = teacher.record(images)
        assert all(torch.equal(a, b) for a, b in zip(states[:layer], plain))
        assert all(torch.equal(a, b) for a, b in zip(states[layer:], expected))
        assert torch.equal(output, teacher.finish(expected[-1]))
    assert torch.equal(teacher(images), teacher.finish(plain[-1]))


@torch.no_grad()
def test_a_patch_broadcasts_or_is_refused(teacher: ViT) -> None:
    images = noise_images(teacher)
    mean_d = torch.linspace(-1, 1, 48)
    with teacher.patched(2, mean_d, group="patches"):
        states, _ = teacher.record(images)
    assert torch.equal(states[2][:, 3:], mean_d.expand(3, 4, 48))
    with teacher.patched(2, states[0][:1]):  # of one image into all
        moved, _ = teacher.record(images)
    assert torch.equal(moved[2], states[0][:1].expand(3, -1, -1))
    with (
        pytest.raises(ValueError, match=r"a state of shape \(3, 5, 48\) does not fit the patches tokens \(3, 4, 48\)"),
        teacher.patched(2, torch.zeros(3, 5, 48), group="patches"),
    ):
        teacher(images)


@torch.no_grad()
def test_patching_at_another_image_size_takes_all_patches_of_that_size(teacher: ViT) -> None:
    images = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    states, _ = teacher.record(images)
    assert states[0].shape[1] == 3 + 16 and teacher.groups.patches == 4
    for given in (2 * states[2], 2 * states[2][:, 3:]):
        with teacher.patched(2, given, group="patches"):
            found, _ = teacher.record(images)
        assert torch.equal(found[2][:, 3:], 2 * states[2][:, 3:])
        assert torch.equal(found[2][:, :3], states[2][:, :3])


@torch.no_grad()
def test_registers_behind_the_patches_are_found_at_another_image_size() -> None:
    class RegisterLast(Unheard):
        def forward(self, images: Tensor) -> Tensor:
            patches = self.lift(nn.functional.unfold(images, 8, stride=8).mT)
            x = torch.cat([patches, self.scratch.expand(len(images), -1, -1)], 1)
            for block in self.trunk.stack:
                x = block(x)
            return self.answer(self.last(x).mean(1))

    vit = open_vit(RegisterLast(), size=32)
    assert vit.groups.order == ("cls", "patches", "registers") and vit.groups.registers == 1
    images = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    states, _ = vit.record(images)
    with vit.patched(2, torch.zeros(24), group="registers"):
        found, _ = vit.record(images)
    assert bool((found[2][:, 36] == 0).all()) and torch.equal(found[2][:, :36], states[2][:, :36])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(3, 48, 48), r"use images\[None\] for a single image"),
        (torch.rand(2, 1, 48, 48), r"use images\.expand\(-1, 3, -1, -1\) for grey images"),
        (torch.rand(2, 48, 48, 3), r"use images\.movedim\(3, 1\)"),
        (torch.rand(2, 5, 48, 48), "give files or pictures"),
        (torch.zeros(2, 3, 48, 48, dtype=torch.uint8), "this one holds uint8 pixels"),
    ],
)
def test_images_that_are_not_prepared_are_refused(images: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_vit("scenes").record(images)
