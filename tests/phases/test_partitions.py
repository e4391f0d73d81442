"""Random partitions: uniform, distinct, and as many as there are."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chisquare

from raptor.phases.partitions import num_partitions, random_phases, sample_partitions


def all_partitions(num_layers: int, k: int, min_length: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), k - 1)
    lengths = [tuple(np.diff([0, *cut, num_layers]).tolist()) for cut in cuts]
    return [p for p in lengths if min(p) >= min_length]


@pytest.mark.parametrize(("num_layers", "k", "min_length"), [(8, 3, 1), (12, 3, 2), (7, 2, 1), (10, 4, 2)])
def test_random_phases_are_uniform(num_layers: int, k: int, min_length: int) -> None:
    every = all_partitions(num_layers, k, min_length)
    assert num_partitions(num_layers, k, min_length) == len(every)
    counts = Counter(random_phases(num_layers, k, min_length, seed).lengths for seed in range(100 * len(every)))
    assert set(counts) <= set(every)
    assert chisquare([counts[p] for p in every]).pvalue > 1e-4


def test_random_phases_edge_cases() -> None:
    assert random_phases(5, 1).lengths == (5,)
    assert random_phases(5, 5).lengths == (1, 1, 1, 1, 1)
    assert random_phases(12, 4, seed=3) == random_phases(12, 4, seed=3)


def test_sample_partitions_without_replacement() -> None:
    others = sample_partitions(12, 2, 10, exclude=[(7, 5), (1, 2, 9), (3, 4)])  # two of them are no such partitions
    assert {p.lengths for p in others} == {(n, 12 - n) for n in range(1, 12)} - {(7, 5)}
    assert [p.lengths for p in others] == [p.lengths for p in sample_partitions(12, 2, 10, exclude=[(7, 5)])]
    with pytest.raises(ValueError, match="count must be 0 to 10"):
        sample_partitions(12, 2, 11, exclude=[(7, 5)])
    many = sample_partitions(60, 8, 500, seed=1)
    assert len(set(many)) == 500
    assert all(p.num_layers == 60 and p.k == 8 for p in many)


def test_sample_partitions_first_draw_is_uniform() -> None:
    every = [p for p in all_partitions(8, 3, 1) if p != (2, 3, 3)]
    counts = Counter(sample_partitions(8, 3, 4, seed=s, exclude=[(2, 3, 3)])[0].lengths for s in range(1500))
    assert set(counts) <= set(every)
    assert chisquare([counts[p] for p in every]).pvalue > 1e-4


@pytest.mark.parametrize("bad", [{"k": 4, "min_length": 2}, {"k": 0}])
def test_phases_without_room_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="at least"):
        random_phases(7, **bad)
