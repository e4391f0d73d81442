"""A teacher's folded blocks in bf16 against its own in fp32."""

from __future__ import annotations

import pytest
import torch
from tiny_models import noise_images
from tiny_run import tiny_teacher

from raptor.phases import Phases
from raptor.surrogate import gelu
from raptor.surrogate.surrogate import make_surrogate
from raptor.train import frozen
from raptor.train.step import DistillStep


def step_of(teacher):
    ones = torch.ones(teacher.num_layers, teacher.groups.num_tokens)
    return DistillStep(teacher, make_surrogate(teacher, (2, 2)), Phases.from_lengths((2, 2)), ones, half_teacher=True)


@pytest.mark.parametrize("epilogue", [False, True])
@pytest.mark.parametrize("layer_scale", [None, 0.3])
@torch.no_grad()
def test_its_targets_are_as_near_as_those_of_the_half_copy(monkeypatch, layer_scale, epilogue):
    teacher = tiny_teacher(init_values=layer_scale)
    images = noise_images(teacher)
    exact = teacher.record(images)[0]
    half = step_of(teacher).teacher_states(images.bfloat16())[0]
    monkeypatch.setattr(frozen, "FREEZE", True)
    monkeypatch.setattr(gelu, "EPILOGUE", epilogue)
    step = step_of(teacher)
    assert all(type(block) is frozen.FrozenBlock for block in step._teacher_blocks)
    ours = step.teacher_states(images.bfloat16())[0]
    for state, theirs, true in zip(ours[1:], half[1:], exact[1:]):
        assert state.dtype == torch.bfloat16
        assert 0 < (state.float() - true).norm() < 1.5 * (theirs.float() - true).norm()


def test_blocks_of_another_make_stay(monkeypatch):
    monkeypatch.setattr(frozen, "FREEZE", True)
    teacher = tiny_teacher(qk_norm=True)
    assert frozen.frozen_blocks(teacher) is None
    step = step_of(teacher)
    assert [type(block) for block in step._teacher_blocks] == [type(block) for block in teacher.blocks]
    assert {id(p) for p in step.parameters()} == {id(p) for p in step.shared_blocks.parameters()}
