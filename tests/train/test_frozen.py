"""A teacher's folded blocks in bf16 against its own in fp32; where they and our kernels are used, and where not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tiny_models import noise_images
from tiny_run import tiny_teacher
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from raptor.certificate.measure import certify
from raptor.data.stream import Batch
from raptor.phases.cut import Phases
from raptor.probes.features import normed_tokens
from raptor.surrogate.fast import attend
from raptor.surrogate.kernels import attention
from raptor.surrogate.surrogate import make_surrogate
from raptor.train import frozen
from raptor.train.frozen import FrozenBlock, frozen_blocks
from raptor.train.losses import Targets
from raptor.train.step import DistillStep
from raptor.vit.view import ViT

WEIGHTS = {"cls": 0.45, "registers": 0.10, "patches": 0.45}


def step_of(teacher: ViT, student: ViT | None = None, sizes: Sequence[int] = (), **options: Any) -> DistillStep:
    student = student or make_surrogate(teacher, (2, 2))
    phases = Phases.from_lengths((2, 2))
    ones_lt = torch.ones(teacher.num_layers, teacher.groups.num_tokens)
    targets = Targets.of(teacher, phases, ones_lt, stage2_weights=WEIGHTS, sizes=sizes)
    return DistillStep(teacher, student, targets, **{"half_teacher": True, **options})


def loss_of(step: DistillStep, images: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return step(images.bfloat16(), "stage2")[0]


@pytest.mark.parametrize("layer_scale", [None, 0.3])
@torch.no_grad()
def test_its_targets_are_as_near_as_those_of_its_own_blocks(monkeypatch: Any, layer_scale: float | None) -> None:
    teacher = tiny_teacher(init_values=layer_scale)
    images = noise_images(teacher)
    exact = teacher.record(images)[0]
    step = step_of(teacher)
    assert all(type(block) is FrozenBlock for block in step._teacher[0].blocks)
    ours = step.teacher_states(images.bfloat16())[0]
    monkeypatch.setattr(frozen, "frozen_blocks", lambda teacher: [])
    half = step_of(teacher).teacher_states(images.bfloat16())[0]
    for state, theirs, true in zip(ours[1:], half[1:], exact[1:], strict=True):
        assert state.dtype == torch.bfloat16
        assert 0 < (state.float() - true).norm() < 1.5 * (theirs.float() - true).norm()


def test_a_teacher_with_a_block_of_another_make_trains_as_before(monkeypatch: Any) -> None:
    """One such block, also the last, or one that is hooked into, and all stay."""
    unusual = tiny_teacher(qk_norm=True)
    hooked = tiny_teacher()
    mixed = tiny_teacher()
    hooked.blocks[1].register_forward_hook(lambda *_: None)
    mixed.blocks[3].mlp.act = nn.GELU(approximate="tanh")  # type: ignore[union-attr]
    for teacher in (unusual, hooked, mixed):
        assert frozen_blocks(teacher) == []
        step = step_of(teacher)
        images = noise_images(teacher)
        assert [type(block) for block in step._teacher[0].blocks] == [type(block) for block in teacher.blocks]
        loss = loss_of(step, images)
        with monkeypatch.context() as patched:
            patched.setattr(frozen, "frozen_blocks", lambda teacher: [])
            assert torch.equal(loss, loss_of(step_of(teacher), images))


def test_nothing_of_it_is_trained() -> None:
    step = step_of(tiny_teacher())
    assert {id(p) for p in step.parameters()} == {id(p) for p in step.shared_blocks.parameters()}


@pytest.fixture
def calls(monkeypatch: Any) -> Iterator[list[str]]:
    """The names of what is called; our kernels are taken everywhere, with torch's attention for them."""
    seen: list[str] = []

    def kernel(qkv_btf: Tensor, num_heads: int) -> tuple[Tensor, None]:
        seen.append("kernel")
        return attend(qkv_btf, num_heads, kernel=False), None

    def linear_gelu(x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor) -> Tensor:
        seen.append("linear_gelu")
        return torch.nn.functional.gelu(torch.nn.functional.linear(x_btd, weight_fd, bias_f))

    monkeypatch.setattr(attention, "attention", kernel)
    monkeypatch.setattr(frozen, "linear_gelu", linear_gelu)
    monkeypatch.setattr(attention, "takes_kernel", lambda *_: True)
    yield seen


@pytest.mark.parametrize("block", ["teacher", "paper"])
def test_what_is_measured_runs_the_models_as_they_are(calls: list[str], block: str) -> None:
    """States, probes' features and a certificate of models that a step was built on, against those before it."""
    teacher = tiny_teacher()
    student = make_surrogate(teacher, (2, 2), block=block)
    images = noise_images(teacher, num=8)

    def measured() -> list[Tensor]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            states = [state for vit in (teacher, student) for state in vit.record(images)[0]]
        tokens = [normed_tokens(vit, images, 4, "bf16") for vit in (teacher, student)]
        batch = Batch(images, None, torch.arange(len(images)))
        found = certify(student, teacher, [batch], precision="bf16", bootstrap=2)
        return [*states, *tokens, torch.from_numpy(found.curves.absolute["all"])]

    before = measured()
    step = step_of(teacher, student)
    loss_of(step, images).backward()
    assert set(calls) == {"kernel", "linear_gelu"} and calls.count("kernel") == 8  # four layers of each
    calls.clear()
    assert all(torch.equal(a, b) for a, b in zip(before, measured(), strict=True))
    assert calls == []


@torch.no_grad()
def test_the_kernel_is_chosen_for_each_number_of_tokens(monkeypatch: Any, calls: list[str]) -> None:
    monkeypatch.setattr(attention, "takes_kernel", lambda device, num, heads, dim: (num, heads, dim) == (12, 2, 16))
    teacher = tiny_teacher()
    step = step_of(teacher, sizes=(32,))  # 19 tokens
    for size, expected in ((24, 8), (32, 0)):
        loss_of(step, torch.zeros(2, 3, size, size))
        assert calls.count("kernel") == expected
        calls.clear()
    in_fp32 = step_of(teacher, half_teacher=False)
    assert all(block.kernel_tokens == () for block in in_fp32._blocks)


def test_compiled_blocks_take_the_kernel_too(monkeypatch: Any) -> None:
    """In as many graphs as they are without it. The kernel here gives twice the attention, so that it is noticed."""
    monkeypatch.setattr(attention, "attention", lambda qkv, num_heads: (2 * attend(qkv, num_heads, kernel=False), None))
    teacher = tiny_teacher()
    plain_compile = torch.compile
    images = noise_images(teacher)
    losses = []
    frames = []
    for kernel in (True, False):
        counter = CompileCounter()
        monkeypatch.setattr(attention, "takes_kernel", lambda *_, kernel=kernel: kernel)
        monkeypatch.setattr(torch, "compile", lambda f, c=counter, **options: plain_compile(f, backend=c, **options))
        torch._dynamo.reset()
        loss = loss_of(step_of(teacher, compile_blocks=True), images)
        torch.testing.assert_close(loss, loss_of(step_of(teacher), images), rtol=1e-3, atol=0)
        losses.append(float(loss))
        frames.append(counter.frame_count)
    assert losses[0] != pytest.approx(losses[1], rel=0.01) and frames[0] == frames[1] > 0
