"""Cuts against Table 3, brute force and ties by hand."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_matrices import DISTANCE, TABLE_3, striped

from raptor.phases.cut import (
    Phases,
    check_phases,
    choose_k,
    find_phases,
    within_and_across,
)


def random_similarity(num_layers: int, seed: int) -> np.ndarray:
    half = np.random.default_rng(seed).random((num_layers, num_layers))
    return (half + half.T) / 2


def all_partitions(num_layers: int, k: int, min_length: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), k - 1)
    lengths = [tuple(np.diff([0, *cut, num_layers]).tolist()) for cut in cuts]
    return [p for p in lengths if min(p) >= min_length]


def score_by_hand(similarity: np.ndarray, lengths: tuple[int, ...], score: str) -> list[float]:
    scores, start = [], 0
    for n in lengths:
        total = similarity[start : start + n, start : start + n].sum()
        scores.append({"weighted": total / n, "mean": total / n**2, "cut": total - n**2}[score])
        start += n
    return scores


@pytest.mark.parametrize("min_length", [1, 2])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_maxcut_gives_table_3(k: int, min_length: int) -> None:
    assert find_phases(1 - DISTANCE, k, min_length=min_length).lengths == TABLE_3[k]


@pytest.mark.parametrize(
    ("score", "min_length", "expected"),
    [
        ("mean", 1, {2: (11, 1), 3: (10, 1, 1), 4: (9, 1, 1, 1)}),
        ("mean", 2, {2: (2, 10), 3: (2, 2, 8), 4: (2, 2, 2, 6)}),
        ("weighted", 2, {2: (7, 5), 4: (4, 3, 3, 2)}),  # k = 3 is an exact tie
        ("cut", 2, {2: (7, 5), 3: (5, 4, 3), 4: (4, 3, 3, 2)}),
    ],
)
def test_dp_on_the_published_matrix(score: str, min_length: int, expected: dict[int, tuple[int, ...]]) -> None:
    for k, lengths in expected.items():
        assert find_phases(1 - DISTANCE, k, "dp", score, min_length).lengths == lengths


def test_maxcut_scores_are_the_distances_across_each_cut() -> None:
    scores = find_phases(1 - DISTANCE, 3).scores
    assert scores == pytest.approx([DISTANCE[:7, 7:].sum(), DISTANCE[7:10, 10:].sum()])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1), st.sampled_from(["weighted", "mean", "cut"]))
def test_dp_equals_brute_force(num_layers: int, seed: int, score: str) -> None:
    similarity = random_similarity(num_layers, seed)
    for min_length in range(1, num_layers + 1):
        for k in range(1, num_layers // min_length + 1):
            candidates = all_partitions(num_layers, k, min_length)
            totals = [sum(score_by_hand(similarity, p, score)) for p in candidates]
            found = find_phases(similarity, k, "dp", score, min_length)
            assert sum(found.scores) == pytest.approx(max(totals), abs=1e-9)
            assert found.scores == pytest.approx(score_by_hand(similarity, found.lengths, score), abs=1e-9)
            runner_up = sorted(totals)[-2] if len(totals) > 1 else -np.inf
            if max(totals) - runner_up > 1e-9:
                assert found.lengths == candidates[int(np.argmax(totals))]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_maxcut_phases_nest_and_each_cut_is_the_best(num_layers: int, seed: int, min_length: int) -> None:
    similarity = random_similarity(num_layers, seed)
    gains = choose_k(similarity, min_length=min_length).gains if num_layers >= min_length else ()
    outer = find_phases(similarity, 1, min_length=min_length) if num_layers >= min_length else None
    for k in range(2, len(gains) + 2):
        assert outer is not None
        inner = find_phases(similarity, k, min_length=min_length)
        assert set(outer.boundaries) < set(inner.boundaries)
        edges = [0, *outer.boundaries, num_layers]
        across = [
            (1 - similarity[s:c, c:e]).sum()
            for s, e in pairwise(edges)
            for c in range(s + min_length, e - min_length + 1)
        ]
        assert inner.scores[-1] == pytest.approx(max(across), abs=1e-9)
        assert inner.scores == pytest.approx(gains[: k - 1])
        outer = inner


def test_block_matrix_is_cut_at_its_blocks() -> None:
    sizes = (4, 2, 6, 3)
    label = np.repeat(np.arange(4), sizes)
    depth = np.arange(15) * 1e-3
    similarity = np.where(label[:, None] == label, 0.9, 0.1 * label.max() - 0.05 * abs(label[:, None] - label))
    similarity = similarity - np.abs(depth[:, None] - depth)
    assert find_phases(similarity, 4).lengths == sizes
    assert find_phases(similarity, 4, "dp").lengths == sizes
    assert find_phases(similarity, 4, "dp", "cut").lengths == sizes
    assert choose_k(similarity, min_share=0.05).k == 4


def test_torch_input_is_accepted() -> None:
    assert find_phases(torch.tensor(1 - DISTANCE, dtype=torch.float32), 4).lengths == (4, 3, 3, 2)


def test_phases_object() -> None:
    phases = find_phases(1 - DISTANCE, 3)
    assert str(phases) == "7 | 3 | 2"
    assert phases.boundaries == (7, 10)
    assert phases.spans == [(1, 7), (8, 10), (11, 12)]
    assert [phases.phase_of(layer) for layer in (1, 7, 8, 10, 11, 12)] == [0, 0, 1, 1, 2, 2]
    assert (phases.k, phases.num_layers, phases.method) == (3, 12, "maxcut")
    again = Phases.from_dict(phases.to_dict())
    assert (again, again.scores, again.method) == (phases, phases.scores, "maxcut")
    assert Phases.from_lengths([7, 3, 2]) == phases
    for wrong in (0, 13):
        with pytest.raises(ValueError, match="layer must be 1 to 12"):
            phases.phase_of(wrong)
    with pytest.raises(ValueError, match="positive"):
        Phases.from_lengths([3, 0])


def test_choose_k_on_the_published_matrix() -> None:
    chosen = choose_k(1 - DISTANCE)
    cuts = [DISTANCE[:7, 7:], DISTANCE[7:10, 10:], DISTANCE[:4, 4:7]]
    assert chosen.gains[:3] == pytest.approx([cut.sum() for cut in cuts])
    assert chosen.k == 4  # the fourth cut gains 3 % of the first
    assert choose_k(1 - DISTANCE, max_k=3).k == 3
    assert choose_k(1 - DISTANCE, min_share=0.2).k == 2
    assert choose_k(np.ones((6, 6))).k == 1


def test_choose_k_goes_down_to_single_layers() -> None:
    """Of four different layers the middle cut has 4 pairs across it, and each half has one pair."""
    assert choose_k(np.eye(4)) == (4, (4.0, 1.0, 1.0))


def test_phases_of_a_model_have_all_of_its_blocks() -> None:
    vit = SimpleNamespace(num_layers=4, name="tiny")
    assert check_phases(vit, [3, 1]) == Phases((3, 1))
    with pytest.raises(ValueError, match=r"phases \[3, 2\] do not sum to the 4 blocks of tiny"):
        check_phases(vit, [3, 2])


@pytest.mark.parametrize("scale", [1, 100])
def test_an_asymmetry_of_rounding_is_averaged(scale: float) -> None:
    """1e-5 of the largest entry, and not more."""
    matrix = scale * np.eye(4)
    matrix[0, 1] = scale * 1e-5
    assert find_phases(matrix, 4).lengths == (1, 1, 1, 1)
    matrix[0, 1] *= 1.1
    with pytest.raises(ValueError, match="symmetric"):
        find_phases(matrix, 4)


def test_a_layer_alone_is_a_phase_for_maxcut_but_not_by_default_for_dp() -> None:
    similarity = np.eye(6)
    similarity[:5, :5] = 1.0  # the last layer is like no other
    assert find_phases(similarity, 2).lengths == (5, 1) and choose_k(similarity).k == 2
    assert find_phases(similarity, 2, min_length=2).lengths == (4, 2)
    assert find_phases(similarity, 2, "dp").lengths == (4, 2)
    assert find_phases(similarity, 2, "dp", min_length=1).lengths == (5, 1)


@pytest.mark.parametrize(
    ("similarity", "options", "message"),
    [
        (np.ones((3, 4)), {"k": 1}, "square"),
        (np.ones(4), {"k": 1}, "square"),
        (np.zeros((0, 0)), {"k": 1}, "square"),
        (np.triu(np.ones((4, 4))), {"k": 2}, "symmetric"),
        (np.full((4, 4), np.nan), {"k": 2}, "NaN"),
        (np.full((4, 4), np.inf), {"k": 2}, "NaN"),
        (np.eye(5), {"k": 3, "method": "dp"}, "need 6 layers, but there are 5"),
        (np.eye(5), {"k": 6, "min_length": 1}, "need 6 layers"),
        (np.eye(5), {"k": 0}, "k must be at least 1"),
        (np.eye(5), {"k": 2, "min_length": 0}, "min_length must be at least 1"),
        (np.eye(5), {"k": 2, "method": "greedy"}, "unknown method 'greedy'"),
        (np.eye(5), {"k": 2, "method": "dp", "score": "sum"}, "unknown score 'sum'"),
    ],
)
def test_bad_input_is_one_clear_line(similarity: np.ndarray, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        find_phases(similarity, **options)
    assert "\n" not in str(error.value)


def test_maxcut_that_cannot_go_on_says_so() -> None:
    similarity = np.kron(np.eye(2), np.ones((3, 3)))  # the first cut leaves 3 | 3, which min_length 2 cannot cut
    with pytest.raises(ValueError, match=r"max-cut stops at 3 \| 3"):
        find_phases(similarity, 3, min_length=2)
    assert find_phases(similarity, 3, "dp").k == 3


def test_within_and_across_by_hand():
    matrix = [[1, 0.9, 0.1, 0.2], [0.9, 1, 0.3, 0.4], [0.1, 0.3, 1, 0.7], [0.2, 0.4, 0.7, 1]]
    within, across = within_and_across(matrix, [2, 2])
    assert within == pytest.approx((0.9 + 0.7) / 2) and across == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) / 4)
    assert within_and_across(np.eye(3), [1, 1, 1])[0] is None
    assert within_and_across(np.eye(3), [3])[1] is None


def test_phases_are_the_sequence_of_their_lengths() -> None:
    phases = Phases.from_lengths([3, 1, 2])
    assert list(phases) == [3, 1, 2] and len(phases) == phases.k == 3 and phases[-1] == 2 and phases[1:] == (1, 2)
    assert Phases.from_lengths(phases) is phases
    expected = [[phases.phase_of(i) == phases.phase_of(j) for j in range(1, 7)] for i in range(1, 7)]
    np.testing.assert_array_equal(phases.same_phase(), expected)


@pytest.mark.parametrize(
    ("similarity", "k", "lengths"),
    [
        # a b a b: the distance across a cut after layer 1, 2 or 3 is 2 each.
        (striped(0, 1, 0, 1), 2, (3, 1)),
        # Four different layers: the middle cut has 4 across, then both halves gain 1.
        (striped(0, 1, 2, 3), 3, (2, 1, 1)),
    ],
)
def test_ties_of_max_cut_go_to_the_later_boundary(similarity: np.ndarray, k: int, lengths: tuple[int, ...]) -> None:
    assert find_phases(similarity, k).lengths == lengths


@pytest.mark.parametrize("scale", [1, 10])
@pytest.mark.parametrize(("more", "lengths"), [(1.5e-13, (3, 1)), (1.7e-13, (1, 3))])
def test_totals_tie_within_the_rounding_of_their_sums(scale: float, more: float, lengths: tuple[int, ...]) -> None:
    """Cuts of a b a b after layers 1 and 3 tie. Sums over 16 entries may be wrong by 1e-14 of the largest for each."""
    similarity = scale * striped(0, 1, 0, 1)
    similarity[0, 1] = similarity[1, 0] = -scale * more  # only the cut after layer 1 is between these two
    assert find_phases(similarity, 2).lengths == lengths


def test_ties_of_the_dynamic_programme_go_to_the_later_boundary() -> None:
    """Of four different layers each phase scores its own diagonal over its length: 1 whatever the length."""
    assert find_phases(striped(0, 1, 2, 3), 2, "dp", min_length=1).lengths == (3, 1)
    assert find_phases(striped(0, 1, 2, 3), 3, "dp", min_length=1).lengths == (2, 1, 1)
