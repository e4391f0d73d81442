"""Streaming states, and interventions that always put the model back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from tiny_models import noise_images, same_tensors, tiny_timm
from torch import Tensor, nn

from raptor.data.stream import Batch
from raptor.vit.groups import TokenGroups
from raptor.vit.trajectory import Trajectories, check_states, perturb, pool_layers, replace_block, swap_blocks
from raptor.vit.view import ViT, recording

GROUPS = ("all", "cls", "registers", "patches")


class Batches:
    """Three batches of different lengths, counted as they are asked for."""

    def __init__(self, vit: ViT) -> None:
        self.items = [noise_images(vit, num, seed=num) for num in (3, 2, 1)]
        self.asked = 0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Batch]:
        for images in self.items:
            self.asked += 1
            yield Batch(images, None, torch.arange(len(images)))


def hooks_of(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_states_of_every_batch(teacher: ViT) -> None:
    batches = Batches(teacher)
    trajectories = Trajectories(teacher, batches)
    assert len(trajectories) == 3
    for _ in range(2):  # it can be iterated again
        num_seen = 0
        for states, output, batch in trajectories:
            with torch.no_grad():
                a_0, context = teacher.embed(batch.images)
                expected = teacher.unroll(a_0, context)
                assert torch.equal(output, teacher(batch.images))
            assert len(states) == 5
            assert all(torch.equal(a, b) for a, b in zip(states, expected))
            assert not any(s.requires_grad for s in [*states, output])
            num_seen += len(batch.images)
        assert num_seen == 6
    assert sum(hooks_of(teacher.model)) == 0


def test_never_more_than_one_batch(teacher: ViT) -> None:
    """While batch n + 1 is fetched, no state of batch n is alive and no later batch has been asked for."""
    alive: list[weakref.ref] = []
    source = Batches(teacher)

    class Checked(Batches):
        def __iter__(self) -> Iterator[Batch]:
            for n, batch in enumerate(source):
                gc.collect()
                assert source.asked == n + 1
                assert not [r for r in alive if r() is not None]
                yield batch

    for states, _output, _batch in Trajectories(teacher, Checked(teacher)):
        alive[:] = [weakref.ref(s) for s in states]
        assert all(r() is not None for r in alive)
    assert source.asked == 3


def test_precision(teacher: ViT) -> None:
    full = [s.clone() for s in next(iter(Trajectories(teacher, Batches(teacher))))[0]]
    half = next(iter(Trajectories(teacher, Batches(teacher), precision="bf16")))[0]
    assert all(s.dtype == torch.float32 for s in full)
    for a, b in zip(full[1:], half[1:]):
        assert not torch.equal(a, b.float())
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.float().flatten(), dim=0) > 0.99
    assert all(p.dtype == torch.float32 for p in teacher.model.parameters())
    with pytest.raises(ValueError, match="fp32, bf16"):
        Trajectories(teacher, Batches(teacher), precision="fp7")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("layer", range(5))
@torch.no_grad()
def test_perturbation(teacher: ViT, layer: int, group: str) -> None:
    images = noise_images(teacher)
    states, output = teacher.record(images)
    where = {"all": slice(0, 7), "cls": slice(0, 1), "registers": slice(1, 3), "patches": slice(3, 7)}[group]
    change = torch.randn(3, where.stop - where.start, 48)
    moved = states[layer].clone()
    moved[:, where] += change
    by_hand = [moved]
    for block in list(teacher.blocks)[layer:]:
        by_hand.append(block(by_hand[-1]))
    with perturb(teacher, layer, change, group):
        found, changed_output = teacher.record(images)
    assert all(torch.equal(a, b) for a, b in zip(found, states[:layer]))
    assert all(torch.equal(a, b) for a, b in zip(found[layer:], by_hand))
    assert torch.equal(changed_output, teacher.finish(by_hand[-1]))
    assert sum(hooks_of(teacher.model)) == 0
    assert torch.equal(teacher(images), output)


@torch.no_grad()
def test_perturbation_by_a_function_sees_its_group_alone(teacher: ViT) -> None:
    images = noise_images(teacher)
    states, _ = teacher.record(images)
    seen: list[Tensor] = []

    def double(part_btd: Tensor) -> Tensor:
        seen.append(part_btd)
        return part_btd

    with perturb(teacher, 2, double, "registers"):
        found, _ = teacher.record(images)
    assert len(seen) == 1
    assert torch.equal(seen[0], states[2][:, 1:3])
    assert torch.equal(found[2][:, 1:3], 2 * states[2][:, 1:3])
    assert torch.equal(found[2][:, 3:], states[2][:, 3:])


@torch.no_grad()
def test_perturbations_of_several_layers_and_an_open_recording(teacher: ViT) -> None:
    images = noise_images(teacher)
    with recording(teacher) as states:
        teacher(images)
        plain = list(states)
        with perturb(teacher, 0, torch.ones(48)), perturb(teacher, 4, torch.ones(48), "cls"):
            teacher(images)
            moved = list(states)
        teacher(images)
        again = list(states)
    assert torch.equal(moved[0], plain[0] + 1)
    by_hand = teacher.blocks[3](moved[3])
    assert torch.equal(moved[4][:, 0], by_hand[:, 0] + 1)
    assert torch.equal(moved[4][:, 1:], by_hand[:, 1:])
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


@torch.no_grad()
def test_perturbing_a_rotary_model_keeps_its_arguments(rotary: ViT) -> None:
    images = noise_images(rotary)
    _, context = rotary.embed(images)
    states, _ = rotary.record(images)
    for layer in (0, 2, 4):
        with perturb(rotary, layer, torch.ones(48)):
            found, _ = rotary.record(images)
        expected = rotary.unroll(states[layer] + 1, context, layer)
        assert all(torch.equal(a, b) for a, b in zip(found[layer:], expected))


@torch.no_grad()
def test_replaced_block(teacher: ViT) -> None:
    images = noise_images(teacher)
    states, output = teacher.record(images)
    for layer in (1, 4):
        with replace_block(teacher, layer, nn.Identity()):
            found, _ = teacher.record(images)
        assert torch.equal(found[layer], states[layer - 1])
    assert torch.equal(teacher(images), output)


INTERVENTIONS: dict[str, Callable[[ViT], AbstractContextManager[None]]] = {
    **{f"perturb {g} at {n}": lambda v, g=g, n=n: perturb(v, n, torch.ones(48), g) for g in GROUPS for n in (0, 2, 4)},
    "swap": lambda v: swap_blocks(v, 1, 3),
    "swap ends": lambda v: swap_blocks(v, 1, 4),
    "replace first": lambda v: replace_block(v, 1, nn.Identity()),
    "replace last": lambda v: replace_block(v, 4, nn.Identity()),
}


class Broken(nn.Module):
    def forward(self, *_args: object, **_kwargs: object) -> Tensor:
        raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("how", INTERVENTIONS)
@pytest.mark.parametrize("fails", ["not", "inside", "in the forward pass"])
@torch.no_grad()
def test_exact_restoration(teacher: ViT, how: str, fails: str, snapshot) -> None:
    images = noise_images(teacher)
    (*_, last), output = teacher.record(images)
    weights = snapshot(teacher.model)
    modules, hooks = list(teacher.model.named_modules()), hooks_of(teacher.model)
    keys = list(teacher.model.state_dict())

    def intervene() -> None:
        with INTERVENTIONS[how](teacher):
            assert not torch.equal(teacher.record(images)[0][-1], last)
            if fails == "inside":
                raise KeyError
            if fails == "in the forward pass":
                with replace_block(teacher, 2, Broken()):
                    teacher.record(images)

    if fails == "not":
        intervene()
    else:
        with pytest.raises(KeyError if fails == "inside" else RuntimeError):
            intervene()
    assert torch.equal(teacher(images), output)
    assert same_tensors(teacher.model.state_dict(), weights)
    assert list(teacher.model.state_dict()) == keys
    assert [(n, id(m)) for n, m in teacher.model.named_modules()] == [(n, id(m)) for n, m in modules]
    assert hooks_of(teacher.model) == hooks
    assert not teacher.model.training


@pytest.mark.parametrize("layer", [-1, 5])
def test_layers_out_of_range(teacher: ViT, layer: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.4"), perturb(teacher, layer, torch.ones(48)):
        pass
    with pytest.raises(ValueError, match=r"1\.\.4"), replace_block(teacher, layer, nn.Identity()):
        pass
    with pytest.raises(ValueError, match=r"1\.\.4"):
        swap_blocks(teacher, 0, 2)
    with pytest.raises(ValueError, match="choose from"), perturb(teacher, 1, torch.ones(48), "head"):
        pass
    assert sum(hooks_of(teacher.model)) == 0


def test_perturbing_an_absent_group_is_an_error() -> None:
    vit = tiny_timm("vit_base_patch16_siglip_224", depth=2)
    with pytest.raises(ValueError, match="cls"), perturb(vit, 1, torch.ones(48), "cls"):
        pass


def test_gradients_pass_through_a_perturbation(teacher: ViT) -> None:
    change = torch.zeros(1, 4, 48, requires_grad=True)
    with perturb(teacher, 1, change, "patches"):
        teacher(noise_images(teacher)).sum().backward()
    assert change.grad is not None
    assert change.grad.abs().sum() > 0


def test_states_must_fit_the_groups() -> None:
    with pytest.raises(ValueError, match="do not fit 5 tokens"):
        check_states([torch.randn(2, 4, 6)] * 3, num_tokens=5)
    with pytest.raises(ValueError, match="at least two states"):
        check_states([torch.randn(2, 5, 6)], num_tokens=5)
    with pytest.raises(ValueError, match="no images"):
        check_states([torch.randn(0, 5, 6)] * 3, num_layers=2)


def test_layers_are_pooled_in_float32() -> None:
    groups = TokenGroups(cls=1, registers=2, patches=4)
    states = [torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)]
    found = pool_layers(states, groups)
    assert {name: x.shape for name, x in found.items()} == {"cls": (3, 3, 5), "patches": (3, 3, 5)}
    for layer, x_btd in enumerate(states[1:]):
        assert torch.equal(found["cls"][:, layer], x_btd[:, 0].float())
        assert torch.equal(found["patches"][:, layer], x_btd[:, 3:].float().mean(1))


class _Listed(nn.Module):
    """A block that returns its state in a list, as some libraries do."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor | list[Tensor]) -> list[Tensor]:
        return [self.block(x[0] if isinstance(x, list) else x)]


def test_a_perturbed_block_returns_a_list_where_it_did() -> None:
    vit = tiny_timm()
    vit.model.blocks = nn.Sequential(*(_Listed(block) for block in vit.blocks))
    vit.model.norm = nn.Sequential(_First(), vit.model.norm)
    images = noise_images(vit)
    with torch.no_grad():
        expected = vit.model.forward_features(images)
        with perturb(vit, 1, torch.zeros(vit.dim)):
            assert torch.equal(vit.model.forward_features(images), expected)
        with perturb(vit, 1, torch.ones(vit.dim)):
            assert not torch.allclose(vit.model.forward_features(images), expected)


class _First(nn.Module):
    def forward(self, x: list[Tensor]) -> Tensor:
        return x[0]


def test_a_call_of_the_model_between_batches_leaves_the_states_alone(teacher: ViT) -> None:
    for states, _, batch in Trajectories(teacher, Batches(teacher)):
        before = list(states)
        with torch.no_grad():
            teacher(noise_images(teacher, 1, seed=9))
        assert len(states) == 5 and all(a is b for a, b in zip(states, before))
        assert states[0].shape[0] == len(batch.images)
