"""Repetition and extrapolation against blocks run by hand."""

from __future__ import annotations

import json

import pytest
import torch
from intervened import angle_by_hand, chained
from tiny_models import noise_images, shake

from raptor.dynamics.repetition import (
    Extrapolation,
    Repetition,
    measure_extrapolation,
    measure_repetition,
    repetition_plan,
)
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.vit.view import ViT

NUM = 6


def test_repetition_equals_blocks_run_by_hand(teacher: ViT) -> None:
    images = noise_images(teacher, NUM)
    found = measure_repetition(teacher, images, (1, 3))
    assert found.counts == [[0, 1, 2], [2, 3, 4, 6]]
    clean = chained(teacher, images, [1, 2, 3, 4])
    by_hand = {
        (0, 0): [2, 3, 4],
        (0, 2): [1, 1, 2, 3, 4],
        (1, 2): [1, 2, 3],
        (1, 4): [1, 2, 3, 4, 4],
        (1, 6): [1, 2, 3, 4, 2, 3, 4],
    }
    for (phase, count), layers in by_hand.items():
        expected = angle_by_hand(chained(teacher, images, layers), clean)
        assert found.turn(phase, count) == pytest.approx(expected.item(), rel=1e-4)
    assert found.turn(0, 1) < 1e-5 and found.turn(1, 3) < 1e-5
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert Repetition.from_dict(saved).to_dict() == saved


@pytest.mark.parametrize("conditioning", ["table", "mlp", "none"])
def test_extrapolation_runs_the_last_tied_block_at_deeper_depths(teacher: ViT, conditioning: str) -> None:
    surrogate = make_surrogate(teacher, (2, 2), conditioning=conditioning)
    shake(shared_blocks(surrogate), size=0.05)
    images = noise_images(teacher, NUM)
    found = measure_extrapolation(surrogate, images, num_extra=3)
    tied = shared_blocks(surrogate)[-1]
    with torch.no_grad():
        states, _ = surrogate.record(images)
        x = states[-1]
        for m in range(1, 4):
            # a table of the layers 3..4 has no row 5: it holds the row of 4
            depth = 4 if conditioning == "table" else 4 + m
            now = tied(x, torch.tensor(float(depth)))
            expected = angle_by_hand(now, x)
            assert found.speed["all"].mean[m - 1] == pytest.approx(expected.item(), rel=1e-3)
            assert found.angle["all"].mean[m] == pytest.approx(angle_by_hand(now, states[-1]).item(), rel=1e-3)
            assert found.norm["all"].mean[m] == pytest.approx(now.norm(dim=-1).mean().item(), rel=1e-5)
            x = now
    assert found.layers == [4, 5, 6, 7] and "extrapolation" in found.finding()
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert Extrapolation.from_dict(saved).to_dict() == saved


def test_a_plan_repeats_the_last_blocks_of_a_teacher_and_the_last_step_of_a_surrogate(teacher: ViT) -> None:
    blocks = {count: [b for b, _ in repetition_plan(teacher, (2, 4), count)] for count in (2, 3, 4, 6)}
    assert blocks == {2: [2, 3], 3: [2, 3, 4], 4: [2, 3, 4, 4], 6: [2, 3, 4, 2, 3, 4]}
    surrogate = make_surrogate(teacher, (1, 3))
    # Seven further steps are one block and two rounds of the phase, never a block of the phase before.
    assert [b for b, _ in repetition_plan(teacher, (2, 4), 10)] == [2, 3, 4, 4, 2, 3, 4, 2, 3, 4]
    assert [b for b, _ in repetition_plan(surrogate, (2, 4), 6)] == [2, 3, 4, 4, 4, 4]
