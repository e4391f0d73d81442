"""Replacement of blocks against the model's own forward pass, and the cut against all partitions."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from tiny_models import noise_images, tiny_timm
from torch.nn import functional as F

from raptor import replace_block
from raptor.data.stream import Batch
from raptor.phases.function import branch_names, cut_by_function, measure_replacement
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT


def _trajectories(vit: ViT, num: int = 3) -> Trajectories:
    images = noise_images(vit, num)
    return Trajectories(vit, [Batch(images[:2], None, [0, 1]), Batch(images[2:], None, [2])])


def test_the_cost_is_the_divergence_of_a_model_with_the_block_replaced() -> None:
    vit = tiny_timm(depth=3, num_classes=5)
    images = noise_images(vit, 3)
    found = measure_replacement(vit, _trajectories(vit))
    with torch.no_grad():
        probability = vit(images).softmax(-1)
        for layer, other in ((1, 3), (2, 1), (3, 2)):
            with replace_block(vit, layer, vit.blocks[other - 1]):
                altered = vit(images)
            expected = F.kl_div(altered.log_softmax(-1), probability, reduction="batchmean")
            assert found.cost[layer - 1, other - 1] == pytest.approx(float(expected), rel=1e-4)
            agrees = (altered.argmax(-1) == probability.argmax(-1)).double().mean()
            assert found.agreement is not None
            assert found.agreement[layer - 1, other - 1] == pytest.approx(float(agrees))
    assert (np.diag(found.cost) == 0).all() and found.num_images == 3 and found.measure == "kl"


def test_without_a_head_the_cost_is_the_relative_error_of_the_last_state() -> None:
    vit = tiny_timm(depth=3, num_classes=0)
    images = noise_images(vit, 3)
    found = measure_replacement(vit, _trajectories(vit))
    with torch.no_grad():
        last = vit.record(images)[0][-1]
        with replace_block(vit, 2, vit.blocks[0]):
            altered = vit.record(images)[0][-1]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(altered, last)]
    assert found.measure == "error" and found.agreement is None
    assert found.cost[1, 0] == pytest.approx(np.mean(errors), rel=1e-5)


def test_only_one_branch_is_replaced_and_the_model_is_left_as_it_was() -> None:
    vit = tiny_timm(depth=3, num_classes=5)
    names = branch_names(vit.blocks[0])
    assert names["attention"] == ["norm1", "attn"] and names["mlp"] == ["norm2", "mlp"]
    images = noise_images(vit, 3)
    with torch.no_grad():
        before = vit(images)
        found = measure_replacement(vit, _trajectories(vit), part="mlp")
        assert torch.equal(vit(images), before)
        block, other = vit.blocks[1], vit.blocks[2]
        own = block.norm2, block.mlp
        block.norm2, block.mlp = other.norm2, other.mlp
        altered = vit(images)
        block.norm2, block.mlp = own
    expected = F.kl_div(altered.log_softmax(-1), before.softmax(-1), reduction="batchmean")
    assert found.cost[1, 2] == pytest.approx(float(expected), rel=1e-4)


def test_a_block_without_two_norms_has_no_parts() -> None:
    with pytest.raises(ValueError, match="cannot be told apart"):
        branch_names(torch.nn.Sequential(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize(("k", "shortest", "longest"), [(1, 1, 7), (2, 1, 7), (3, 2, 7), (4, 1, 3)])
def test_the_cut_is_the_best_of_all_partitions(k: int, shortest: int, longest: int) -> None:
    num_layers = 7
    cost = np.random.default_rng(k).random((num_layers, num_layers))
    np.fill_diagonal(cost, 0)
    best = np.inf
    for boundaries in combinations(range(1, num_layers), k - 1):
        edges = [0, *boundaries, num_layers]
        spans = list(pairwise(edges))
        if all(shortest <= stop - start <= longest for start, stop in spans):
            total = 0.0
            for start, stop in spans:
                total += min(sum(cost[row, m] for row in range(start, stop)) for m in range(start, stop))
            best = min(best, total)
    found = cut_by_function(cost, k, shortest, longest)
    assert found.cost == pytest.approx(best) and sum(found.lengths) == num_layers
    again = 0.0
    start = 0
    for length, representative in zip(found.lengths, found.representatives):
        assert start < representative <= start + length
        again += cost[start : start + length, representative - 1].sum()
        start += length
    assert again == pytest.approx(best)


def test_impossible_cuts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be cut into 3 phases"):
        cut_by_function(np.zeros((4, 4)), 3, min_length=2)
