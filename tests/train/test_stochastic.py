"""Whole-block stochastic depth: which samples are dropped, what a dropped one gives, rescaling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raptor.train.stochastic import StochasticDepth


class Shift(nn.Module):
    """A block whose update is one, whatever comes in."""

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd + 1


def kept_counts(p: float, depth: int = 6, batch: int = 50, num_steps: int = 100, **options: Any) -> Tensor:
    """How many samples each block kept over many steps, (L,), counted from what comes out of it."""
    blocks = nn.Sequential(*(Shift() for _ in range(depth))).train()
    dropped = StochasticDepth(blocks, p, batch, rescale=False, seed=0, **options)
    counts = torch.zeros(depth)
    for step in range(num_steps):
        dropped.draw(step)
        x = torch.zeros(batch, 2, 3)
        for i, block in enumerate(blocks):
            out = block(x)
            assert set((out - x).flatten().tolist()) <= {0.0, 1.0}
            assert torch.equal(out - x, (out - x)[:, :1, :1].expand_as(x))  # whole samples, all tokens
            counts[i] += (out - x)[:, 0, 0].sum()
            x = out
    return counts


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_every_depth_drops_with_the_same_probability_the_first_included(p):
    num = 5000
    counts = kept_counts(p)
    spread = math.sqrt(num * p * (1 - p))
    assert (counts - num * (1 - p)).abs().max() <= 4 * spread


def test_blocks_samples_and_steps_are_dropped_independently():
    blocks = nn.Sequential(*(Shift() for _ in range(4))).train()
    dropped = StochasticDepth(blocks, 0.5, 64, rescale=False, seed=3)
    rows = []
    for step in range(60):
        dropped.draw(step)
        rows.append(torch.stack([block.keep.flatten() for block in blocks]).float())  # type: ignore[operator, union-attr]
    keep_slb = torch.stack(rows)
    for a, b in (
        (keep_slb[:, 0], keep_slb[:, 1]),
        (keep_slb[:, 0], keep_slb[:, 3]),
        (keep_slb[1:, 0], keep_slb[:-1, 0]),
    ):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(a.numel())
    dropped.draw(7)
    again = torch.stack([block.keep.flatten() for block in blocks]).float()  # type: ignore[operator, union-attr]
    assert torch.equal(again, keep_slb[7])
    StochasticDepth(other := nn.Sequential(Shift()), 0.5, 64, rescale=False, seed=4).draw(7)
    assert not torch.equal(other[0].keep.flatten().float(), keep_slb[7, 0])  # type: ignore[operator, union-attr]


class Wild(nn.Module):
    """A block that gives NaN."""

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd * float("nan")


def test_a_dropped_samples_output_is_its_input_exactly():
    for block in (nn.Linear(5, 5), Wild()):
        blocks = nn.Sequential(block).train()
        dropped = StochasticDepth(blocks, 0.5, 40, rescale=False, seed=0)
        dropped.draw(0)
        x = torch.randn(40, 3, 5)
        keep = blocks[0].keep.flatten().bool()  # type: ignore[union-attr, operator]
        out = blocks(x)
        assert 0 < keep.sum() < 40
        assert torch.equal(out[~keep], x[~keep])
        assert torch.equal(out[keep].nan_to_num(), block(x)[keep].nan_to_num())


def test_a_dropped_sample_has_no_gradient_through_the_block():
    linear = nn.Linear(5, 5)
    blocks = nn.Sequential(linear).train()
    dropped = StochasticDepth(blocks, 0.5, 10, rescale=False, seed=0)
    dropped.draw(0)
    keep = blocks[0].keep.flatten().bool()  # type: ignore[union-attr, operator]
    x = torch.randn(10, 2, 5, requires_grad=True)
    blocks(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad[~keep], torch.ones_like(x[~keep]))
    assert linear.bias.grad is not None and linear.bias.grad[0] == keep.sum() * 2


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_rescaling_divides_kept_updates_by_the_keep_probability(p):
    blocks = nn.Sequential(Shift()).train()
    StochasticDepth(blocks, p, 400, rescale=True, seed=0).draw(0)
    update = (blocks(torch.zeros(400, 1, 1)) - 0).flatten()
    kept = update[update != 0]
    assert 0 < len(kept) < 400
    assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - p)))


def test_eval_mode_and_removal_give_the_plain_blocks():
    plain = [nn.Linear(4, 4), nn.Linear(4, 4)]
    blocks = nn.Sequential(*plain).train()
    dropped = StochasticDepth(blocks, 0.9, 6, rescale=True, seed=0)
    dropped.draw(0)
    x = torch.randn(2, 3, 4)  # another batch than in training
    expected = plain[1](plain[0](x))
    assert torch.equal(blocks.eval()(x), expected)
    dropped.remove()
    assert list(blocks) == plain
    assert torch.equal(blocks.train()(x), expected)


def test_each_rank_has_its_rows_of_the_masks_of_the_whole_batch():
    def masks(rows: slice) -> Tensor:
        blocks = nn.Sequential(*(Shift() for _ in range(3))).train()
        StochasticDepth(blocks, 0.5, 8, rescale=False, seed=1, rows=rows).draw(4)
        return torch.stack([block.keep.flatten() for block in blocks])  # type: ignore[operator, union-attr]

    whole = masks(slice(None))
    first = masks(slice(0, 4))
    second = masks(slice(4, 8))
    assert whole.shape == (3, 8) and torch.equal(torch.cat([first, second], dim=1), whole)
