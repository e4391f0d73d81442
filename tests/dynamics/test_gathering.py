"""Tokens and their mean direction, against brute force token by token."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from raptor.dynamics.gathering import Gathering, GatheringResult, toward
from raptor.dynamics.states import unit
from raptor.vit.view import TokenGroups

GROUPS = TokenGroups(cls=1, registers=0, patches=5)


def by_hand(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Alignment of the rows of `x`, and how far the step to `y` goes toward their mean direction."""
    x, y = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, y))
    mean = x.mean(0) / np.linalg.norm(x.mean(0))
    aligned, turned = [], []
    for before, after in zip(x, y):
        aligned.append(before @ mean)
        wanted = mean - (mean @ before) * before
        turned.append((after - before) @ wanted / np.linalg.norm(after - before) / np.linalg.norm(wanted))
    return float(np.mean(aligned)), float(np.mean(turned))


def test_gathering_equals_brute_force_over_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(4, 6, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    measure = Gathering(GROUPS)
    measure.update([a[:3] for a in states])
    measure.update([a[3:] for a in states])
    result = measure.result()
    assert set(result.alignment) == {"all", "patches"}  # one cls has no mean direction
    for l in range(2):
        expected = [by_hand(states[l][b, 1:].numpy(), states[l + 1][b, 1:].numpy()) for b in range(4)]
        assert result.alignment["patches"].mean[l] == pytest.approx(np.mean([a for a, _ in expected]))
        assert result.toward["patches"].mean[l] == pytest.approx(np.mean([t for _, t in expected]))
    assert result.alignments is not None and result.alignments.shape == (4, 2, 3)
    saved = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert GatheringResult.from_dict(saved).to_dict() == saved


def test_tokens_on_their_way_to_a_target_turn_toward_it() -> None:
    start = unit(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    target = unit(start.mean(1))
    near = unit(start + 1e-4 * (target[:, None] - start))
    torch.testing.assert_close(toward(start, near, target), torch.ones(2, dtype=torch.float64), atol=1e-3, rtol=0)
    away = unit(start - 1e-4 * (target[:, None] - start))
    torch.testing.assert_close(toward(start, away, target), -torch.ones(2, dtype=torch.float64), atol=1e-3, rtol=0)
    assert toward(start, start, target).abs().max() == 0  # no movement


def test_only_so_many_images_are_measured() -> None:
    states = [torch.randn(6, 6, 8) for _ in range(3)]
    measure = Gathering(GROUPS, num_keep=2, num_images=6)
    measure.update(states)
    assert measure.result().alignment["all"].num_images == 2
    alone = Gathering(TokenGroups(cls=0, registers=0, patches=1))
    alone.update([torch.randn(2, 1, 4) for _ in range(2)])
    assert alone.result().alignment == {}
