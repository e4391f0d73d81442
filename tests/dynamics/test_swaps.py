"""Swaps against the model with its blocks exchanged."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from intervened import angle_by_hand
from tiny_models import noise_images

from raptor.dynamics.swaps import Swaps, measure_swaps
from raptor.streaming import Spread
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.trajectory import swap_blocks
from raptor.vit.view import ViT

NUM = 6


@pytest.mark.parametrize("name", ["teacher", "rotary"])
def test_swaps_equal_the_model_with_its_blocks_exchanged(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raptor.dynamics.effects.HARDLY_VARIED", 1.0)  # a random head may always say the same
    vit: ViT = request.getfixturevalue(name)
    images = noise_images(vit, NUM)
    swaps = measure_swaps(vit, images, (2, 2))
    assert swaps.pairs == [(1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
    each = []
    with torch.no_grad():
        states, logits = vit.record(images)
        for p, (i, j) in enumerate(swaps.pairs):
            with swap_blocks(vit, i, j):
                swapped, changed = vit.record(images)
            expected = angle_by_hand(swapped[-1], states[-1])
            each.append([angle_by_hand(a, b) for a, b in zip(swapped[-1], states[-1])])
            np.testing.assert_allclose(swaps.angle["all"].mean[p], expected, rtol=1e-4)
            kept = (changed.argmax(-1) == logits.argmax(-1)).float().mean()
            assert swaps.agreement is not None and swaps.agreement.mean[p] == pytest.approx(kept.item())
    # At distance 1 the pairs (1, 2) and (3, 4) are within, (2, 3) across; without block 1 only (3, 4) is within.
    turn = np.array(each)
    by_hand = [turn[3] - (turn[0] + turn[5]) / 2, turn[3] - turn[5]]
    np.testing.assert_allclose(swaps.matched_std["turn"], [d.std(ddof=1) for d in by_hand], rtol=1e-3)
    saved = json.loads(json.dumps(swaps.to_dict(), allow_nan=False))
    assert Swaps.from_dict(saved).to_dict() == saved


def test_autonomous_surrogate_bears_swaps_within_a_phase(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, (2, 2), conditioning="none")
    swaps = measure_swaps(surrogate, noise_images(teacher, NUM), (2, 2))
    turn = swaps.compare(swaps.angle["all"].mean)
    assert turn["within"] == 0 and turn["across"] > 0.01
    assert "0.00 rad within a phase" in swaps.finding()


@pytest.mark.parametrize(("lengths", "said"), [((3,), "within a phase"), ((1, 1, 1), "across phases")])
def test_a_kind_of_swap_that_does_not_exist_is_left_out(lengths: tuple[int, ...], said: str) -> None:
    values = np.array([0.1, 0.2, 0.3])
    spread = Spread(values, values, None, 1)
    swaps = Swaps([(1, 2), (1, 3), (2, 3)], list(lengths), {"all": spread}, spread, 1)
    assert swaps.finding() == f"Swapping two blocks turns the last state by 0.20 rad {said}; 20% of predictions stay."


def test_within_and_across_by_hand() -> None:
    """Blocks 1 2 | 3 4 5: pairs within are 12, 34, 45, 35; both kinds exist at distances 1 and 2."""
    pairs = [(i, j) for i in range(1, 6) for j in range(i + 1, 6)]
    values = np.array([10 * i + j for i, j in pairs], dtype=float)
    swaps = Swaps(pairs, [2, 3], {"all": Spread(values, values, None, 1)}, None, 1)
    compared = swaps.compare(values)
    assert compared["within"] == pytest.approx((12 + 34 + 45 + 35) / 4)
    assert compared["across"] == pytest.approx((13 + 14 + 15 + 23 + 24 + 25) / 6)
    assert compared["within_matched"] == pytest.approx(((12 + 34 + 45) / 3 + 35) / 2)
    assert compared["across_matched"] == pytest.approx((23 + (13 + 24) / 2) / 2)
    matrix = swaps.matrix(values)
    assert matrix[1, 3] == matrix[3, 1] == 24 and np.isnan(matrix[2, 2])
