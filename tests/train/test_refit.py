"""A refitted norm and head against the same training written out with torch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_certified import image_batches, tiny_vit
from torch import Tensor
from torch.nn import functional as F

from raptor.certificate.follow import follow
from raptor.certificate.heads import Head, resolve_head
from raptor.certificate.refit import after_blocks
from raptor.surrogate.surrogate import make_surrogate
from raptor.train.refit import fit_head
from raptor.vit.view import ViT


class Stream:
    """The batches of a list, one after another."""

    def __init__(self) -> None:
        self._batches = [batch.images for batch in image_batches(0)][:2]
        self.batch_size = len(self._batches[0])

    def batch(self, step: int, stage: str) -> Tensor:
        assert stage == "head"
        return self._batches[step % len(self._batches)]


@pytest.fixture(scope="module")
def pair() -> tuple[ViT, ViT]:
    teacher = tiny_vit(num_classes=3)
    return make_surrogate(teacher, (2, 3), conditioning="none", copy="last"), teacher


def _state(vit: ViT) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in vit.model.state_dict().items()}


def test_as_written_out_with_torch(pair: tuple[ViT, ViT]) -> None:
    surrogate, teacher = pair
    head, _ = resolve_head(teacher)
    before = _state(surrogate), _state(teacher)
    num_steps = 4
    refitted, losses = fit_head(surrogate, teacher, Stream(), head, lr=1e-2, num_steps=num_steps)

    model = copy.deepcopy(surrogate.model).requires_grad_(False)
    trained = [*model.norm.parameters(), *model.head.parameters()]
    for parameter in trained:
        parameter.requires_grad_()
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    expected = []
    for step in range(num_steps):
        images = Stream().batch(step, "head")
        # One step of warm-up, then a cosine to a hundredth at the last of the three that are left.
        rate = 1.0 if step == 0 else 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / 3))
        optimizer.param_groups[0]["lr"] = 1e-2 * rate
        with torch.no_grad():
            target = teacher.model(images).log_softmax(-1)
        p = target.exp()
        loss = (p * (target - model(images).log_softmax(-1))).sum(-1).mean()
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0]
    named = dict(model.named_parameters())
    assert set(refitted.tensors) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    for name, tensor in refitted.tensors.items():
        torch.testing.assert_close(tensor, named[name].detach(), rtol=1e-4, atol=1e-5)
    images = Stream().batch(0, "head")
    with torch.no_grad():
        state_btd = surrogate.record(images)[0][-1]
        torch.testing.assert_close(refitted.logits(surrogate, state_btd), model(images), rtol=1e-4, atol=1e-4)
    # Neither model is changed, and nothing asks for gradients afterwards.
    for vit, saved in zip(pair, before):
        for name, tensor in vit.model.state_dict().items():
            assert torch.equal(tensor, saved[name])
    assert not any(tensor.requires_grad for tensor in refitted.tensors.values())


def test_gradients_of_a_program_neither_enter_nor_are_lost(pair: tuple[ViT, ViT]) -> None:
    surrogate, teacher = pair
    head, _ = resolve_head(teacher)
    wanted, _ = fit_head(surrogate, teacher, Stream(), head, lr=1e-2, num_steps=2)
    own = after_blocks(surrogate, head)
    try:
        for parameter in own.values():
            parameter.requires_grad_()
            parameter.grad = torch.full_like(parameter, 3.0)
        found, _ = fit_head(surrogate, teacher, Stream(), head, lr=1e-2, num_steps=2)
        for name, parameter in own.items():
            assert torch.equal(found.tensors[name], wanted.tensors[name])
            assert parameter.requires_grad and parameter.grad is not None and float(parameter.grad.mean()) == 3
    finally:
        for parameter in own.values():
            parameter.grad = None
            parameter.requires_grad_(False)


def test_a_ridge_head_is_refitted_with_the_norm_before_it() -> None:
    teacher = tiny_vit()
    surrogate = make_surrogate(teacher, (2, 3), conditioning="none", copy="last")
    head, _ = resolve_head(teacher, image_batches(0))
    assert head is not None and head.source == "ridge"
    assert set(after_blocks(surrogate, head)) == {"norm.weight", "norm.bias"}
    refitted, losses = fit_head(surrogate, teacher, Stream(), head, lr=1e-2, num_steps=20)
    assert losses[-1] < losses[0]
    found = follow(surrogate, teacher, image_batches(1), head, "fp32", refitted=refitted)
    predictions = found.predictions(0, 0)
    images = torch.cat([batch.images for batch in image_batches(1)])
    labels = torch.cat([batch.labels for batch in image_batches(1)])
    with torch.no_grad():
        state_btd = surrogate.record(images)[0][-1]
        norm = copy.deepcopy(surrogate.norm)
        norm.weight.copy_(refitted.tensors["norm.weight"])
        norm.bias.copy_(refitted.tensors["norm.bias"])
        x_btd = norm(state_btd)
        pooled = torch.cat([x_btd[:, 0], x_btd[:, surrogate.groups.slice("patches")].mean(1)], dim=1)
        own = F.linear(pooled, refitted.linear.weight, refitted.linear.bias).argmax(-1)
        of_teacher = head.linear(teacher.features(teacher.record(images)[0][-1])).argmax(-1)
    assert predictions["refitted_agreement"].value == pytest.approx((own == of_teacher).double().mean().item())
    assert predictions["refitted_accuracy"].value == pytest.approx((own == labels).double().mean().item())
    # The columns of the untouched head are what they are without a refitted one.
    plain = follow(surrogate, teacher, image_batches(1), head, "fp32").predictions(0, 0)
    assert {name: predictions[name] for name in plain} == plain


def test_a_rate_that_is_too_large_is_refused_and_the_model_is_whole(pair: tuple[ViT, ViT]) -> None:
    surrogate, teacher = pair
    before = _state(surrogate)
    head, _ = resolve_head(teacher)
    with pytest.raises(ValueError, match="is not finite: give a smaller --lr"):
        fit_head(surrogate, teacher, Stream(), head, lr=1e30, num_steps=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in surrogate.model.state_dict().items())


def test_a_head_by_seconds_trains_at_least_one_step(pair: tuple[ViT, ViT]) -> None:
    surrogate, teacher = pair
    head = Head("own", teacher.num_classes)
    _, losses = fit_head(surrogate, teacher, Stream(), head, lr=1e-3, seconds=1e-9)
    assert len(losses) == 1
