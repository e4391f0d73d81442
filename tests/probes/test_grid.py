"""The grid of heads against torch's own optimiser, and its schedule."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from raptor.probes.classify import classification_losses
from raptor.probes.grid import HeadGrid, grid_around, lr_factor


def test_grid_is_adamw_with_clipping_head_by_head() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(5, 7, generator=generator), torch.randn(5, generator=generator)
    lrs = [1e-3, 3e-2, 0.5]
    grid = HeadGrid((weight, bias), lrs, weight_decay=0.1)
    separate = [torch.nn.Linear(7, 5) for _ in lrs]
    for linear in separate:
        linear.load_state_dict({"weight": weight, "bias": bias})
    optimisers = [torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.1) for m, lr in zip(separate, lrs)]
    clipped = 0
    for step in range(40):
        x = torch.randn(16, 7, generator=generator) * (5 if step % 2 else 0.1)
        y = torch.randint(5, (16,), generator=generator)
        factor = lr_factor(step, 40)
        classification_losses(x, y, grid.weight, grid.bias).sum().backward()
        grid.step(factor)
        for linear, optimiser, lr in zip(separate, optimisers, lrs):
            optimiser.param_groups[0]["lr"] = lr * factor
            optimiser.zero_grad()
            F.cross_entropy(linear(x), y).backward()
            clipped += int(torch.nn.utils.clip_grad_norm_(linear.parameters(), 1.0) > 1)
            optimiser.step()
    assert 0 < clipped < 120, "both clipped and unclipped steps must occur"
    for g, linear in enumerate(separate):
        torch.testing.assert_close(grid.weight[g].detach(), linear.weight.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(grid.bias[g].detach(), linear.bias.detach(), rtol=1e-4, atol=1e-6)


def test_schedule_by_hand() -> None:
    assert lr_factor(0, 2000) == pytest.approx(0.01)
    assert lr_factor(49, 2000) == pytest.approx(0.5)
    assert lr_factor(99, 2000) == pytest.approx(1.0) and lr_factor(100, 2000) < 1
    assert lr_factor(1049, 2000) == pytest.approx(0.01 + 0.99 / 2)
    assert lr_factor(4, 50) == 1.0 and lr_factor(3, 50) == pytest.approx(0.8)  # 10 % of a short run
    assert all(lr_factor(num - 1, num) == pytest.approx(0.01) for num in (2, 7, 10, 33, 50, 2000))  # the last step


def test_grid_holds_the_tasks_own_rate() -> None:
    grid = grid_around(1e-3)
    assert len(grid) == 12 and any(math.isclose(lr, 1e-3) for lr in grid)
    assert all(math.isclose(b / a, 10 ** (1 / 3)) for a, b in pairwise(grid))
