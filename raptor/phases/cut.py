"""Where depth is cut: contiguous phases from a layer-layer similarity matrix.

Layers are numbered 1..L, as the states `a_1..a_L` they produce. Phases are numbered 0..k-1, so that a phase number
indexes a list of blocks. Ties (to rounding) go to the later boundary.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from math import comb
from typing import Annotated, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import PlainValidator

from raptor.streaming import Array, Record, decode
from raptor.vit.view import ViT

_ROUNDING = 1e-6  # mean cosines are sums of float32 products
_METHODS = ("maxcut", "dp")
_SCORES = ("weighted", "mean", "cut")


@dataclass(frozen=True)
class Phases(Record, Sequence[int]):
    """Contiguous segments of the layers 1..L; as a sequence, their lengths.

    `lengths` sum to L. `scores` are the gain of each successive cut (`maxcut`, k-1 of them, in cutting order), the
    score of each phase (`dp`, k of them), or empty. Two partitions are equal when their lengths are.
    """

    lengths: tuple[int, ...]
    scores: tuple[float, ...] = field(default=(), compare=False)
    method: str = field(default="given", compare=False)

    def __post_init__(self) -> None:
        if not self.lengths or any(n < 1 for n in self.lengths):
            raise ValueError(f"phase lengths must be one or more positive integers, got {list(self.lengths)}")

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> Phases:
        """The phases of these lengths, which may be `Phases` already."""
        return lengths if isinstance(lengths, Phases) else cls(tuple(operator.index(n) for n in lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.lengths[index]

    @property
    def num_layers(self) -> int:
        return sum(self.lengths)

    @property
    def k(self) -> int:
        return len(self.lengths)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The k-1 layers after which a new phase begins: `(7,)` for 7 | 5. Neither 0 nor L is one."""
        return tuple(accumulate(self.lengths[:-1]))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last layer of each phase, both included: `[(1, 7), (8, 12)]` for 7 | 5."""
        ends = list(accumulate(self.lengths))
        return [(end - length + 1, end) for length, end in zip(self.lengths, ends)]

    def start(self, phase: int) -> int:
        """The l of the state `a_l` that enters this phase; the phase makes `a_(l+1)` first. `start(0)` is 0."""
        if not 0 <= phase < self.k:
            raise ValueError(f"phase must be 0 to {self.k - 1}, got {phase}")
        return sum(self.lengths[:phase])

    def phase_of(self, layer: int) -> int:
        """The phase (0..k-1) that makes `a_layer`, for a layer of 1..L."""
        if not 1 <= layer <= self.num_layers:
            raise ValueError(f"layer must be 1 to {self.num_layers}, got {layer}")
        return sum(layer > boundary for boundary in self.boundaries)

    def same_phase(self) -> NDArray[np.bool_]:
        """(L, L): whether two layers are in one phase."""
        phase_l = np.repeat(np.arange(self.k), self.lengths)
        return phase_l[:, None] == phase_l[None, :]

    def __str__(self) -> str:
        return " | ".join(str(n) for n in self.lengths)


PhaseLengths = Annotated[Phases, PlainValidator(lambda saved: Phases(decode(tuple[int, ...], saved)))]
"""Phases that JSON holds as their lengths only."""


class ChosenK(NamedTuple):
    k: int
    gains: tuple[float, ...]  # gains[i] is what the cut from i+1 to i+2 phases adds


def most_cuts(num_layers: int, min_length: int) -> int:
    """The largest k that max-cut reaches whatever the similarity is: a phase of 2 `min_length` - 1 cannot be cut."""
    return -(-num_layers // (2 * min_length - 1))


def check_phases(vit: ViT, phases: Sequence[int]) -> Phases:
    """`phases` as `Phases`; raises where they are not phases of the layers of `vit`."""
    found = Phases.from_lengths(phases)
    if found.num_layers != vit.num_layers:
        raise ValueError(f"phases {list(found)} do not sum to the {vit.num_layers} blocks of {vit.name}: change one")
    return found


def smooth_matrix(matrix: ArrayLike) -> Array:
    """The (L, L) matrix without boundaries that has the same mean at each distance between layers."""
    m = np.asarray(matrix, dtype=np.float64)
    num = len(m)
    distance = np.abs(np.arange(num)[:, None] - np.arange(num))
    return np.array([np.diagonal(m, n).mean() for n in range(num)])[distance]


def within_and_across(matrix: ArrayLike, phases: Sequence[int]) -> tuple[float | None, float | None]:
    """Mean of an (L, L) similarity over pairs of different layers of one phase, and over pairs of different phases.

    None where there is no such pair.
    """
    matrix = np.asarray(matrix)
    same = Phases.from_lengths(phases).same_phase()
    within = matrix[same & ~np.eye(len(same), dtype=bool)]
    across = matrix[~same]
    return (
        float(np.mean(within)) if within.size else None,
        float(np.mean(across)) if across.size else None,
    )


def find_phases(
    similarity: ArrayLike, k: int, method: str = "maxcut", score: str = "weighted", min_length: int | None = None
) -> Phases:
    """Cut the layers into k phases.

    Args:
        similarity: (L, L) similarity (not distance) over `a_1..a_L`, numpy or torch; `a_0` must not be in it.
        method: `maxcut` cuts where the total distance `1 - similarity` across the cut is largest, then again the
            segment with the largest gain, so phases nest as k grows. `dp` is the exact best sum of phase scores.
        score: for `dp` only. With `sum` the segment's similarity sum and n its length: `weighted` is `sum / n`,
            `mean` is `sum / n^2` (the paper's printed one, which rewards tiny phases), `cut` is `sum - n^2`.
        min_length: no phase is shorter; by default 1 for `maxcut` and 2 for `dp`, whose scores reward tiny phases.
    """
    matrix = _check_similarity(similarity)
    min_length = shortest_phase(method, min_length)
    _check_counts(len(matrix), k, min_length)
    if score not in _SCORES:
        raise ValueError(f"unknown score {score!r}: choose from {', '.join(_SCORES)}")
    if method == "dp":
        return _dynamic_programme(matrix, k, score, min_length)
    edges, gains = _max_cut(matrix, k, min_length)
    if len(edges) - 1 < k:
        found = " | ".join(str(n) for n in np.diff(edges))
        raise ValueError(
            f"max-cut stops at {found}: no phase can be cut again with min_length={min_length}; "
            f"lower k={k} or min_length, or use method='dp'"
        )
    return Phases(tuple(int(n) for n in np.diff(edges)), gains, "maxcut")


def shortest_phase(method: str, min_length: int | None) -> int:
    """The `min_length` that is meant: the given one, or the method's own."""
    if method not in _METHODS:
        raise ValueError(f"unknown method {method!r}: choose from {', '.join(_METHODS)}")
    return min_length if min_length is not None else (2 if method == "dp" else 1)


def choose_k(similarity: ArrayLike, max_k: int | None = None, min_length: int = 1, min_share: float = 0.1) -> ChosenK:
    """Choose k from the gains of max-cut: the smallest k whose next cut gains less than `min_share` of the first cut.

    With non-negative distances the gains never rise, so every further cut gains less too. When no gain falls below
    the share, k is the largest reached (`max_k`, or where `min_length` stops the cutting). Layers that are all alike
    (no gain at all) give k = 1.
    """
    matrix = _check_similarity(similarity)
    max_k = len(matrix) // max(min_length, 1) if max_k is None else max_k
    _check_counts(len(matrix), max_k, min_length)
    edges, gains = _max_cut(matrix, max_k, min_length)
    if not gains or gains[0] <= _tie_tolerance(matrix):
        return ChosenK(1, gains)
    small = [i for i, gain in enumerate(gains) if gain < min_share * gains[0]]
    return ChosenK(small[0] + 1 if small else len(edges) - 1, gains)


def num_partitions(num_layers: int, k: int, min_length: int = 1) -> int:
    """How many ways there are to cut L layers into k phases of at least `min_length`."""
    _check_counts(num_layers, k, min_length)
    return comb(num_layers - k * min_length + k - 1, k - 1)


def random_phases(num_layers: int, k: int, min_length: int = 1, seed: int = 0) -> Phases:
    """One contiguous partition, uniform over the compositions of L into k parts of at least `min_length`."""
    _check_counts(num_layers, k, min_length)
    return _draw(np.random.default_rng(seed), num_layers, k, min_length)


def sample_partitions(
    num_layers: int,
    k: int,
    count: int,
    seed: int = 0,
    exclude: Iterable[Sequence[int]] = (),
) -> list[Phases]:
    """`count` distinct partitions drawn uniformly without replacement, none of them in `exclude`."""
    excluded = {Phases.from_lengths(p) for p in exclude}
    excluded = {p for p in excluded if p.num_layers == num_layers and p.k == k}
    total = num_partitions(num_layers, k)
    if not 0 <= count <= total - len(excluded):
        raise ValueError(f"count must be 0 to {total - len(excluded)}, the partitions there are, got {count}")
    rng = np.random.default_rng(seed)
    if total <= max(10_000, 2 * (count + len(excluded))):
        every = [_from_bars(bars, num_layers, k, 1) for bars in combinations(range(num_layers - 1), k - 1)]
        left = [p for p in every if p not in excluded]
        return [left[i] for i in rng.choice(len(left), count, replace=False)]
    drawn: dict[Phases, None] = {}
    while len(drawn) < count:
        phases = _draw(rng, num_layers, k, 1)
        if phases not in excluded:
            drawn[phases] = None
    return list(drawn)


def _draw(rng: np.random.Generator, num_layers: int, k: int, min_length: int) -> Phases:
    bars = rng.choice(num_layers - k * min_length + k - 1, k - 1, replace=False) if k > 1 else ()
    return _from_bars(sorted(int(b) for b in bars), num_layers, k, min_length)


def _from_bars(bars: Sequence[int], num_layers: int, k: int, min_length: int) -> Phases:
    """Stars and bars: k-1 bars among the places left once every phase has its `min_length` layers."""
    places = num_layers - k * min_length + k - 1
    edges = [-1, *bars, places]
    return Phases(tuple(b - a - 1 + min_length for a, b in pairwise(edges)), method="random")


def _max_cut(matrix: Array, k: int, min_length: int) -> tuple[list[int], tuple[float, ...]]:
    """Edges 0..L of at most k segments, and the gain of each cut in cutting order."""
    prefix = _prefix_sums(1.0 - matrix)
    tolerance = _tie_tolerance(matrix)
    edges, gains = [0, len(matrix)], []
    best = {0: _best_cut(prefix, 0, len(matrix), min_length, tolerance)}
    while len(edges) - 1 < k:
        top = max(gain for _, gain in best.values())
        if top == -np.inf:
            break
        start = max(s for s, (_, gain) in best.items() if gain >= top - tolerance)
        cut, gain = best[start]
        end = edges[edges.index(start) + 1]
        gains.append(gain)
        edges = sorted([*edges, cut])
        best[start] = _best_cut(prefix, start, cut, min_length, tolerance)
        best[cut] = _best_cut(prefix, cut, end, min_length, tolerance)
    return edges, tuple(gains)


def _best_cut(prefix: Array, start: int, end: int, min_length: int, tolerance: float) -> tuple[int, float]:
    """The cut of layers start+1..end with the largest total distance across it; gain -inf when none is allowed."""
    cuts = np.arange(start + min_length, end - min_length + 1)
    if len(cuts) == 0:
        return start, -np.inf
    across = prefix[cuts, end] - prefix[start, end] - prefix[cuts, cuts] + prefix[start, cuts]
    last = int(np.flatnonzero(across >= across.max() - tolerance)[-1])
    return int(cuts[last]), float(across[last])


def _dynamic_programme(matrix: Array, k: int, score: str, min_length: int) -> Phases:
    """best[e] after j rounds is the best total score of layers 1..e in j phases; back-pointers recover the cuts."""
    num_layers, tolerance = len(matrix), _tie_tolerance(matrix)
    score_se = _segment_scores(matrix, score, min_length)
    best, pointers = score_se[0], []
    for _ in range(k - 1):
        total_se = best[:, None] + score_se
        threshold = total_se.max(axis=0) - tolerance
        last = num_layers - np.argmax((total_se >= threshold)[::-1], axis=0)
        pointers.append(last)
        best = total_se[last, np.arange(num_layers + 1)]
    edges = [num_layers]
    for last in reversed(pointers):
        edges.append(int(last[edges[-1]]))
    edges = [0, *reversed(edges)]
    scores = tuple(float(score_se[s, e]) for s, e in pairwise(edges))
    return Phases(tuple(e - s for s, e in pairwise(edges)), scores, "dp")


def _segment_scores(matrix: Array, score: str, min_length: int) -> Array:
    """(L+1, L+1): the score of the segment of layers s+1..e, -inf where it is shorter than `min_length`."""
    prefix = _prefix_sums(matrix)
    diagonal = np.diagonal(prefix)
    within_se = diagonal[None, :] - prefix - prefix.T + diagonal[:, None]
    length_se = np.arange(len(prefix))[None, :] - np.arange(len(prefix))[:, None]
    n = np.maximum(length_se, 1).astype(float)
    scores = {"weighted": within_se / n, "mean": within_se / n**2, "cut": within_se - n**2}
    return np.where(length_se >= min_length, scores[score], -np.inf)


def _prefix_sums(matrix: Array) -> Array:
    """(L+1, L+1): entry i, j is the sum of the first i rows and j columns."""
    return np.pad(matrix.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))


def _tie_tolerance(matrix: Array) -> float:
    """Two totals closer than the rounding of the prefix sums are a tie."""
    return 1e-14 * len(matrix) ** 2 * max(1.0, float(np.abs(matrix).max()))


def _check_similarity(similarity: ArrayLike) -> Array:
    if hasattr(similarity, "detach"):
        similarity = similarity.detach().cpu().double()
    matrix = np.asarray(similarity, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(f"similarity must be a square L x L matrix over a_1..a_L, got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise ValueError("similarity has NaN or infinite entries: measure it again on finite states")
    if np.abs(matrix - matrix.T).max() > 1e-5 * max(1.0, float(np.abs(matrix).max())):
        raise ValueError("similarity must be symmetric: pass the layer-layer matrix, or average it with its transpose")
    return (matrix + matrix.T) / 2


def _check_counts(num_layers: int, k: int, min_length: int) -> None:
    if min_length < 1:
        raise ValueError(f"min_length must be at least 1, got {min_length}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if min_length > num_layers:
        raise ValueError(
            f"a phase of at least {min_length} layers does not fit into {num_layers}: give a smaller --min_length"
        )
    if k > num_layers // min_length:
        raise ValueError(
            f"k={k} phases of at least {min_length} layers need {k * min_length} layers, but there are {num_layers}: "
            "give a smaller --k"
        )
