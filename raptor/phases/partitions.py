"""Random partitions of depth, which a cut is compared with: uniform over all contiguous phases of a given number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import comb

import numpy as np

from raptor.phases.cut import Phases, check_counts

_LISTED = 10_000  # so many partitions are written out before some are drawn


def num_partitions(num_layers: int, k: int, min_length: int = 1) -> int:
    """The number of ways to cut L layers into k phases of at least `min_length`."""
    check_counts(num_layers, k, min_length)
    return comb(num_layers - k * (min_length - 1) - 1, k - 1)


def random_phases(num_layers: int, k: int, min_length: int = 1, seed: int = 0) -> Phases:
    """One contiguous partition, uniform over the compositions of L into k parts of at least `min_length`."""
    check_counts(num_layers, k, min_length)
    # Phases of at least 1 among fewer layers; then each gets the rest of its least length.
    rest = min_length - 1
    drawn = _draw(np.random.default_rng(seed), num_layers - k * rest, k)
    return Phases(tuple(n + rest for n in drawn.lengths), method="random")


def sample_partitions(
    num_layers: int,
    k: int,
    count: int,
    seed: int = 0,
    exclude: Iterable[Sequence[int]] = (),
) -> list[Phases]:
    """`count` distinct partitions drawn uniformly without replacement, none of them in `exclude`."""
    excluded = set()
    for lengths in exclude:
        phases = Phases.from_lengths(lengths)
        if phases.num_layers == num_layers and phases.k == k:
            excluded.add(phases)
    total = num_partitions(num_layers, k)
    if not 0 <= count <= total - len(excluded):
        raise ValueError(f"count must be 0 to {total - len(excluded)}, the partitions there are, got {count}")
    rng = np.random.default_rng(seed)
    # Where few are left, drawing until a new one comes could take for ever.
    if total <= max(_LISTED, 2 * (count + len(excluded))):
        left = []
        for cuts in combinations(range(1, num_layers), k - 1):
            phases = _cut_at(cuts, num_layers)
            if phases not in excluded:
                left.append(phases)
        return [left[i] for i in rng.choice(len(left), count, replace=False)]
    drawn: dict[Phases, None] = {}  # a set that keeps the order
    # So many partitions are left that a drawn one is nearly always new.
    while len(drawn) < count:
        phases = _draw(rng, num_layers, k)
        if phases not in excluded:
            drawn[phases] = None
    return list(drawn)


def _draw(rng: np.random.Generator, num_layers: int, k: int) -> Phases:
    """k - 1 of the L - 1 places between two layers, each choice as likely as any other."""
    cuts: list[int] = []
    if k > 1:
        cuts = sorted((rng.choice(num_layers - 1, k - 1, replace=False) + 1).tolist())
    return _cut_at(cuts, num_layers)


def _cut_at(cuts: Sequence[int], num_layers: int) -> Phases:
    return Phases(tuple(np.diff([0, *cuts, num_layers]).tolist()), method="random")
