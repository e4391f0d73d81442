"""Norms, gamma and speed against known motions; tokens and their mean direction against brute force."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from raptor.dynamics.direction import Direction, Gathering, GatheringResult, toward
from raptor.dynamics.states import unit
from raptor.vit.groups import TokenGroups


def rotation_states(theta: float, num_steps: int, groups: TokenGroups, batch: int, dim: int) -> list[torch.Tensor]:
    """Every token turns by `theta` a step in its own plane; token norms grow by 1.5 a step."""
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(batch, groups.num_tokens, dim, 2, generator=generator)).Q
    u, v = basis[..., 0], basis[..., 1]
    return [1.5**l * (np.cos(l * theta) * u + np.sin(l * theta) * v) for l in range(num_steps + 1)]


def test_rotation_has_constant_speed() -> None:
    groups, theta, num_steps = TokenGroups(cls=1, registers=2, patches=6), 0.1, 5
    measure = Direction(groups)
    states = rotation_states(theta, num_steps, groups, 7, 16)
    measure.update([a[:4] for a in states])
    measure.update([a[4:] for a in states])
    result = measure.result()
    layers = np.arange(num_steps + 1)
    assert set(result.speed) == {"all", "cls", "registers", "patches"}
    for name in result.speed:
        np.testing.assert_allclose(result.speed[name].mean, np.full(num_steps, theta), rtol=1e-5)
        np.testing.assert_allclose(result.gamma[name].mean, np.cos((num_steps - layers) * theta), atol=1e-6)
        np.testing.assert_allclose(result.norm[name].mean, 1.5**layers, rtol=1e-6)
        assert result.speed[name].num_images == 7
    json.dumps(result.to_dict(), allow_nan=False)


def test_groups_and_spread_match_brute_force() -> None:
    groups = TokenGroups(cls=1, registers=0, patches=4)
    generator = torch.Generator().manual_seed(2)
    states = [torch.randn(9, 5, 8, generator=generator) for _ in range(4)]
    measure = Direction(groups)
    measure.update([a[:5] for a in states])
    measure.update([a[5:] for a in states])
    result = measure.result()
    x = torch.stack(states, 1).double().numpy()  # (B, L+1, T, D)
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    per_image = np.arccos((unit[:, 1:] * unit[:, :-1]).sum(-1))[:, :, 1:].mean(-1)
    speed = result.speed["patches"]
    np.testing.assert_allclose(speed.mean, per_image.mean(0), rtol=1e-5)
    np.testing.assert_allclose(speed.std, per_image.std(0), rtol=1e-4)
    np.testing.assert_allclose(
        speed.quantiles, np.quantile(per_image, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0), rtol=1e-5
    )
    assert "registers" not in result.speed


def test_the_variance_of_the_speed_is_that_over_all_tokens() -> None:
    groups = TokenGroups(cls=1, registers=0, patches=4)
    states = [torch.randn(9, 5, 8, generator=torch.Generator().manual_seed(l)) for l in range(4)]
    measure = Direction(groups)
    measure.update(states)
    x = unit(torch.stack(states).double())
    speed = torch.arccos((x[1:] * x[:-1]).sum(-1).clamp(-1, 1))[..., groups.slice("patches")]
    variance = measure.result().speed_variance["patches"]
    whole = speed.flatten(1).var(1, correction=0)
    np.testing.assert_allclose(variance["tokens"] + variance["images"], whole, rtol=1e-3)
    np.testing.assert_allclose(variance["tokens"], speed.var(2, correction=0).mean(1), rtol=1e-3)


def test_bf16_states_are_measured_in_float32() -> None:
    groups = TokenGroups(cls=0, registers=0, patches=3)
    states = [a.bfloat16() for a in rotation_states(0.05, 3, groups, 4, 32)]
    exact = [a.double() for a in states]
    low, high = Direction(groups), Direction(groups)
    low.update(states)
    high.update(exact)
    np.testing.assert_allclose(low.result().speed["all"].mean, high.result().speed["all"].mean, rtol=1e-5)


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
