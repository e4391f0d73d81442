"""Effects of an intervention: angles by group and agreement, against the definition, image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import noise_images

from raptor.dynamics.effects import Effects, clean_batches, run_blocks
from raptor.vit.view import ViT


def test_run_blocks_in_order_is_the_model(teacher: ViT) -> None:
    images = noise_images(teacher, 3)
    with torch.no_grad():
        states, context = next(iter(clean_batches(teacher, images)))
        expected, _ = teacher.record(images)
        plan = [(layer, layer) for layer in range(2, teacher.num_layers + 1)]
        last = run_blocks(teacher, states[1], context, plan)
    torch.testing.assert_close(last, expected[-1], rtol=1e-5, atol=1e-5)


def test_clean_batches_cover_every_image_once(teacher: ViT) -> None:
    with torch.no_grad():
        sizes = [len(states[0]) for states, _ in clean_batches(teacher, noise_images(teacher, 35))]
    assert sizes == [32, 3]


def test_angles_and_agreement_by_definition(teacher: ViT) -> None:
    """Two batches, two interventions: arccos of the cosine per token, mean over the group, then over images."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, dim = teacher.groups.num_tokens, teacher.dim
    clean, changed = torch.randn(2, 5, num_tokens, dim, generator=generator)
    other = torch.randn(5, num_tokens, dim, generator=generator)
    effects = Effects(teacher, predict=lambda state: state[:, 0])
    for rows in (slice(0, 3), slice(3, 5)):
        effects.clean(clean[rows])
        effects.add(changed[rows])
        effects.add(other[rows])
        effects.end()
    turns, agreement = effects.result()
    for i, state in enumerate((changed, other)):
        angle_bt = torch.nn.functional.cosine_similarity(clean.double(), state.double(), dim=-1).arccos()
        for name, tokens in (("all", angle_bt), ("cls", angle_bt[:, : teacher.groups.cls])):
            assert turns[name].mean[i] == pytest.approx(float(tokens.mean()), rel=1e-5)
    kept = [float((clean[:, 0].argmax(1) == state[:, 0].argmax(1)).float().mean()) for state in (changed, other)]
    assert agreement is not None
    np.testing.assert_allclose(agreement.mean, kept, atol=1e-6)


def test_without_a_head_there_is_no_agreement(teacher: ViT) -> None:
    teacher.num_classes = 0
    effects = Effects(teacher)
    state = torch.randn(2, teacher.groups.num_tokens, teacher.dim)
    effects.clean(state)
    effects.add(2 * state)
    effects.end()
    turns, agreement = effects.result()
    assert agreement is None
    assert turns["all"].mean[0] == pytest.approx(0, abs=1e-3)  # a longer state has the same direction
