"""Replacement of blocks against the model's own forward pass, and the cut against all partitions."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import noise_images, tiny_timm
from torch import Tensor
from torch.nn import functional as F

from raptor import replace_block
from raptor.data.stream import Batch
from raptor.phases import function as module
from raptor.phases.cut import Phases
from raptor.phases.function import (
    Replacement,
    branch_names,
    cut_by_function,
    function_evidence,
    measure_replacement,
    parts_of,
    with_representatives,
)
from raptor.phases.partitions import sample_partitions
from raptor.progress import Progress
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.view import ViT


def _batches(vit: ViT, num: int = 3) -> list[Batch]:
    images = noise_images(vit, num)
    return [Batch(images[:2], None, [0, 1]), Batch(images[2:], None, [2])]


def _total(cost: np.ndarray, edges: list[int]) -> float:
    """The cost of a partition by the definition: the best representative of each phase replaces all its blocks."""
    total = 0.0
    for start, stop in pairwise(edges):
        total += min(sum(cost[row, m] for row in range(start, stop)) for m in range(start, stop))
    return total


def _partitions(num_layers: int, k: int) -> list[list[int]]:
    return [[0, *cuts, num_layers] for cuts in combinations(range(1, num_layers), k - 1)]


def test_the_cost_is_the_divergence_of_a_model_with_the_block_replaced() -> None:
    vit = tiny_timm(depth=3, num_classes=5)
    images = noise_images(vit, 3)
    found = measure_replacement(vit, _batches(vit))["block"]
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
    found = measure_replacement(vit, _batches(vit))["block"]
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
        found = measure_replacement(vit, _batches(vit), ["mlp"])["mlp"]
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
    cost = np.random.default_rng(k).random((7, 7))
    np.fill_diagonal(cost, 0)
    allowed = [edges for edges in _partitions(7, k) if all(shortest <= b - a <= longest for a, b in pairwise(edges))]
    best = min(allowed, key=lambda edges: _total(cost, edges))
    found = cut_by_function(cost, k, shortest, longest)
    assert found.lengths == tuple(np.diff(best)) and sum(found.scores) == pytest.approx(_total(cost, best))
    for (first, last), representative, score in zip(found.spans, found.representatives, found.scores):
        assert first <= representative <= last
        assert cost[first - 1 : last, representative - 1].sum() == pytest.approx(score)


def test_by_hand_one_block_stands_for_its_phase() -> None:
    """Blocks 1 and 2 do the same, and so do 3 and 4; block 4 replaces 3 at the lower cost."""
    cost = np.array([[0.0, 0.0, 5, 5], [0.0, 0.0, 5, 5], [5, 5, 0.0, 0.1], [5, 5, 0.4, 0.0]])
    found = cut_by_function(cost, 2)
    assert found.lengths == (2, 2) and found.scores == pytest.approx((0.0, 0.1))
    assert found.representatives == (1, 4)  # of two equal ones the earlier block
    assert found.method == "function"
    given = with_representatives(cost, Phases((3, 1)))
    assert given.scores == pytest.approx((5.0, 0.0)) and given.representatives == (1, 4)


def test_ties_go_to_the_later_boundary() -> None:
    assert cut_by_function(np.zeros((4, 4)), 2).lengths == (3, 1)
    assert cut_by_function(np.zeros((4, 4)), 3).lengths == (2, 1, 1)
    assert cut_by_function(np.zeros((5, 5)), 2, max_length=3).lengths == (3, 2)


def test_the_mean_cost_is_that_of_all_partitions() -> None:
    cost = np.random.default_rng(0).random((6, 6))
    expected = np.mean([_total(cost, edges) for edges in _partitions(6, 3)])
    found = function_evidence(Replacement(cost, None, "error", 1), Phases((2, 2, 2)))
    assert found.random_cost == pytest.approx(expected) and found.boundaries == []


def test_of_many_partitions_a_thousand_are_drawn() -> None:
    """24 blocks have 33,649 partitions into 6 phases."""
    cost = np.random.default_rng(0).random((24, 24))
    drawn = [[0, *phases.boundaries, 24] for phases in sample_partitions(24, 6, 1000)]
    found = function_evidence(Replacement(cost, None, "error", 1), Phases((4,) * 6))
    assert found.random_cost == pytest.approx(np.mean([_total(cost, edges) for edges in drawn]))


def test_resamples_are_means_of_drawn_images() -> None:
    image_cost = np.array([[[0.0, 1.0], [2.0, 0.0]], [[0.0, 5.0], [3.0, 0.0]]])
    found = Replacement(image_cost.mean(0), None, "error", 2, image_cost).resampled()
    draws = np.random.default_rng(0).multinomial(2, [0.5, 0.5], size=200)
    assert len(found) == 200
    for resample, (num_first, num_second) in zip(found, draws):
        np.testing.assert_allclose(resample, (num_first * image_cost[0] + num_second * image_cost[1]) / 2)


def test_two_images_can_be_drawn_again() -> None:
    """Both are cut 2 | 2; one image cannot say how sure that is."""
    sharp = 1 - Phases((2, 2)).same_phase().astype(float)
    for num_images, boundaries in ((1, []), (2, [(2, 2)])):
        image_cost = np.stack([sharp] * num_images)
        found = function_evidence(Replacement(sharp, None, "error", num_images, image_cost), Phases((2, 2)))
        assert found.boundaries == boundaries


def test_the_progress_ends_at_its_total(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Progress] = []

    class Kept(Progress):
        def __enter__(self) -> Progress:
            bars.append(super().__enter__())
            return bars[0]

    monkeypatch.setattr(module, "Progress", Kept)
    vit = tiny_timm(depth=3, num_classes=0)
    measure_replacement(vit, _batches(vit), ["block", "mlp"])
    assert bars[0].done == bars[0].total == 24  # of two batches, two parts and six pairs


def test_a_block_gets_the_arguments_of_its_place() -> None:
    """Block n multiplies by n and adds the shift of its place, so the last block gives 3 (2 x + 10) + 30."""

    def unroll(x: Tensor, context: SimpleNamespace, start: int) -> list[Tensor]:
        assert start == 1
        return [x, 3 * x + context.calls[1][1]["shift"]]

    vit = SimpleNamespace(blocks=[lambda x, shift, n=n: n * x + shift for n in (1, 2)], unroll=unroll)
    context = SimpleNamespace(calls=[((), {"shift": 10}), ((), {"shift": 30})])
    found = module._run_replaced(vit, torch.tensor([1.0]), context, 1, 2, "block")
    assert found.tolist() == [3 * (2 * 1 + 10) + 30]


def test_boundaries_that_every_image_has_are_certain() -> None:
    vit = tiny_timm(depth=4, num_classes=5)
    measured = measure_replacement(vit, _batches(vit))["block"]
    sharp = np.ones((4, 4)) - np.eye(4)
    sharp[:2, :2] = sharp[2:, 2:] = 0
    images = sharp * np.array([1.0, 2.0, 3.0])[:, None, None]
    measured.cost, measured.image_cost = images.mean(0), images
    found = function_evidence(measured, cut_by_function(measured.cost, 2))
    assert found.boundaries == [(2, 2)] and found.stability == [1.0] and found.cost == 0
    # In 1 | 3 and in 3 | 1 one block costs 2 on average, in 2 | 2 none does.
    assert found.random_cost == pytest.approx((2 + 0 + 2) / 3)


def test_a_surrogate_has_only_whole_blocks_to_replace() -> None:
    vit = tiny_timm(depth=3, num_classes=5)
    assert parts_of(vit) == (("block", "attention", "mlp"), "")
    parts, reason = parts_of(make_surrogate(vit, [2, 1]))
    assert parts == ("block",) and "cannot be told apart" in reason


def test_impossible_cuts_are_refused() -> None:
    with pytest.raises(ValueError, match="k=3 phases of at least 2 layers need 6"):
        cut_by_function(np.zeros((4, 4)), 3, min_length=2)
    with pytest.raises(ValueError, match="2 phases of at most 3 blocks are fewer than 7"):
        cut_by_function(np.zeros((7, 7)), 2, max_length=3)


def test_an_output_that_is_not_finite_names_the_blocks() -> None:
    vit = tiny_timm(depth=3, num_classes=5)
    with torch.no_grad():
        vit.blocks[2].mlp.fc2.bias.fill_(float("inf"))
    with pytest.raises(ValueError, match="with block 1 replaced by block 2 gives an output that is not finite"):
        measure_replacement(vit, _batches(vit))
