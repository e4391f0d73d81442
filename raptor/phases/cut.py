"""Where depth is cut: contiguous phases from a layer-layer similarity matrix.

`find_phases` cuts by max-cut, which is hierarchical, or by a dynamic programme, which is exact for an additive score.
`choose_k` says how many phases the gains of max-cut suggest.

Layers are numbered 1..L, as the states `a_1..a_L` they produce. Phases are numbered 0..k-1, so that a phase number
indexes a list of blocks. Ties (to rounding) go to the later boundary.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import PlainValidator

from raptor.streaming import Array, Record, decode
from raptor.vit.view import ViT

_METHODS = ("maxcut", "dp", "function")
_SCORES = ("weighted", "mean", "cut")


# Phases ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phases(Record, Sequence[int]):
    """Contiguous segments of the layers 1..L; as a sequence, their lengths. Equal when their lengths are.

    Attributes:
        lengths: of the phases, in the order of depth; they sum to L.
        scores: the gain of each cut, in cutting order (`maxcut`), the score of each phase (`dp`), the cost of each
            phase (`function`), or empty.
        representatives: of `function`, the block (1..L) that replaces the other blocks of its phase at the least cost.
    """

    lengths: tuple[int, ...]
    # Only lengths are compared: phases that were read from a file have nothing else.
    scores: tuple[float, ...] = field(default=(), compare=False)
    method: str = field(default="given", compare=False)
    representatives: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"phase lengths must be one or more positive integers, got {list(self.lengths)}")

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> Phases:
        """The phases of these lengths, which may be `Phases` already."""
        if isinstance(lengths, Phases):
            return lengths
        return cls(tuple(map(operator.index, lengths)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        return self.lengths[index]

    @property
    def num_layers(self) -> int:
        return sum(self.lengths)

    @property
    def k(self) -> int:
        return len(self.lengths)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The k-1 layers after which a new phase begins: `(7,)` for 7 | 5."""
        return tuple(accumulate(self.lengths[:-1]))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last layer of each phase, both included: `[(1, 7), (8, 12)]` for 7 | 5."""
        edges = [0, *self.boundaries, self.num_layers]
        return [(start + 1, end) for start, end in pairwise(edges)]

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
        return " | ".join(map(str, self.lengths))


PhaseLengths = Annotated[Phases, PlainValidator(lambda saved: Phases(decode(tuple[int, ...], saved)))]
"""Phases that JSON holds as their lengths only."""


def check_phases(vit: ViT, phases: Sequence[int]) -> Phases:
    """`phases` as `Phases`; raises where they are not phases of the layers of `vit`."""
    found = Phases.from_lengths(phases)
    if found.num_layers != vit.num_layers:
        raise ValueError(f"phases {list(found)} do not sum to the {vit.num_layers} blocks of {vit.name}: change one")
    return found


def within_and_across(matrix: ArrayLike, phases: Sequence[int]) -> tuple[float | None, float | None]:
    """Mean of an (L, L) similarity over pairs of different layers of one phase, and over pairs of different phases.

    None where there is no such pair.
    """
    matrix = np.asarray(matrix)
    same = Phases.from_lengths(phases).same_phase()
    means: list[float | None] = []
    for values in (matrix[same & ~np.eye(len(same), dtype=bool)], matrix[~same]):
        means.append(float(np.mean(values)) if values.size else None)
    return means[0], means[1]


# Cutting --------------------------------------------------------------------------------------------------------------


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
        min_length: length of the shortest phase allowed; by default 1 for `maxcut` and 2 for `dp`, whose scores reward
            tiny phases.
    """
    matrix = _check_similarity(similarity)
    min_length = shortest_phase(method, min_length)
    check_counts(len(matrix), k, min_length)
    if score not in _SCORES:
        raise ValueError(f"unknown score {score!r}: choose from {', '.join(_SCORES)}")
    if method == "function":
        raise ValueError("method function cuts replacement costs, not a similarity: use cut_by_function")
    if method == "dp":
        score_se = _segment_scores(matrix, score, min_length)
        edges = best_partition(score_se, k, _tie_tolerance(matrix))
        scores = tuple(float(score_se[start, end]) for start, end in pairwise(edges))
        return Phases(tuple(np.diff(edges).tolist()), scores, "dp")
    edges, gains = _max_cut(matrix, k, min_length)
    phases = Phases(tuple(np.diff(edges).tolist()), gains, "maxcut")
    if phases.k < k:
        raise ValueError(
            f"max-cut stops at {phases}: no phase can be cut again with min_length={min_length}; "
            f"lower k={k} or min_length, or use method='dp'"
        )
    return phases


def _max_cut(matrix: Array, k: int, min_length: int) -> tuple[list[int], tuple[float, ...]]:
    """Edges 0..L of at most k segments, and the gain of each cut in cutting order."""
    prefix = _prefix_sums(1.0 - matrix)
    tolerance = _tie_tolerance(matrix)
    edges = [0, len(matrix)]
    gains: list[float] = []
    # For the first edge of each segment: where the segment is best cut, and what that gains.
    best = {0: _best_cut(prefix, 0, len(matrix), min_length, tolerance)}
    while len(edges) - 1 < k:
        top = max(gain for _, gain in best.values())
        if top == -np.inf:
            break
        # Of equal gains the later segment, so that ties go to the later boundary here too.
        start = max(start for start, (_, gain) in best.items() if gain >= top - tolerance)
        cut, gain = best[start]
        end = edges[edges.index(start) + 1]
        gains.append(gain)
        edges = sorted([*edges, cut])
        # Only the segment that was cut changes: the best cuts of all others still hold.
        best[start] = _best_cut(prefix, start, cut, min_length, tolerance)
        best[cut] = _best_cut(prefix, cut, end, min_length, tolerance)
    return edges, tuple(gains)


def _best_cut(prefix: Array, start: int, end: int, min_length: int, tolerance: float) -> tuple[int, float]:
    """The cut of layers start+1..end with the largest total distance across it; gain -inf when none is allowed."""
    cuts = np.arange(start + min_length, end - min_length + 1)
    if len(cuts) == 0:
        return start, -np.inf
    # Four corners of the prefix sums give the total distance between start..cut and cut..end at once.
    across = prefix[cuts, end] - prefix[start, end] - prefix[cuts, cuts] + prefix[start, cuts]
    last = int(np.flatnonzero(across >= across.max() - tolerance)[-1])
    return int(cuts[last]), float(across[last])


def best_partition(score_se: Array, k: int, tolerance: float) -> list[int]:
    """Edges 0..L of the k segments with the largest sum of scores, by dynamic programming.

    score_se: (L+1, L+1), the score of the segment of layers s+1..e; -inf where it is not allowed.
    """
    num_layers = len(score_se) - 1
    # best[e] after j rounds is the best total of layers 1..e in j segments; a pointer says where the last one starts.
    best = score_se[0]
    pointers = []
    for _ in range(k - 1):
        total_se = best[:, None] + score_se
        # Of totals within rounding the largest start is taken, which is the later boundary.
        threshold = total_se.max(axis=0) - tolerance
        last = num_layers - np.argmax((total_se >= threshold)[::-1], axis=0)
        pointers.append(last)
        best = total_se[last, np.arange(num_layers + 1)]
    edges = [num_layers]
    for last in reversed(pointers):
        edges.insert(0, int(last[edges[0]]))
    return [0, *edges]


def _segment_scores(matrix: Array, score: str, min_length: int) -> Array:
    """(L+1, L+1): the score of the segment of layers s+1..e, -inf where it is shorter than `min_length`."""
    prefix = _prefix_sums(matrix)
    diagonal = np.diagonal(prefix)
    within_se = diagonal[None, :] - prefix - prefix.T + diagonal[:, None]
    edges = np.arange(len(matrix) + 1)
    length_se = edges[None, :] - edges[:, None]
    # Segments that end before they start are left out below; 1 keeps their division defined.
    n = np.maximum(length_se, 1).astype(float)
    scores = {"weighted": within_se / n, "mean": within_se / n**2, "cut": within_se - n**2}
    return np.where(length_se >= min_length, scores[score], -np.inf)


def _prefix_sums(matrix: Array) -> Array:
    """(L+1, L+1): entry i, j is the sum of the first i rows and j columns."""
    return np.pad(matrix.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))


def _tie_tolerance(matrix: Array) -> float:
    """Two totals closer than the rounding of the prefix sums are a tie."""
    return 1e-14 * len(matrix) ** 2 * max(1.0, float(np.abs(matrix).max()))


# How many phases ------------------------------------------------------------------------------------------------------


class ChosenK(NamedTuple):
    k: int
    gains: tuple[float, ...]  # gains[i] is what the cut from i+1 to i+2 phases adds


def choose_k(similarity: ArrayLike, max_k: int | None = None, min_length: int = 1, min_share: float = 0.1) -> ChosenK:
    """Choose k from the gains of max-cut: the smallest k whose next cut gains less than `min_share` of the first cut.

    With non-negative distances the gains never rise, so every further cut gains less too. When every gain reaches the
    share, k is the largest found (`max_k`, or where `min_length` stops the cutting). Layers that are all alike (no
    gain at all) give k = 1.
    """
    matrix = _check_similarity(similarity)
    if max_k is None:
        max_k = len(matrix) // max(min_length, 1)
    check_counts(len(matrix), max_k, min_length)
    _, gains = _max_cut(matrix, max_k, min_length)
    if not gains or gains[0] <= _tie_tolerance(matrix):
        return ChosenK(1, gains)
    # The first small gain decides, because gains never rise: all later ones are smaller still.
    for num_cuts, gain in enumerate(gains):
        if gain < min_share * gains[0]:
            return ChosenK(num_cuts + 1, gains)
    return ChosenK(len(gains) + 1, gains)


# What can be cut ------------------------------------------------------------------------------------------------------


def shortest_phase(method: str, min_length: int | None = None) -> int:
    """The given `min_length`, or the method's own where it is None."""
    if method not in _METHODS:
        raise ValueError(f"unknown method {method!r}: choose from {', '.join(_METHODS)}")
    if min_length is None:
        # The scores of dp are sums per layer of a phase, which phases of a single layer would maximise.
        min_length = 2 if method == "dp" else 1
    return min_length


def check_counts(num_layers: int, k: int, min_length: int) -> None:
    """Raise unless L layers can be cut into k phases of at least `min_length`."""
    if min_length < 1:
        raise ValueError(f"min_length must be at least 1, got {min_length}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if min_length > num_layers:
        raise ValueError(
            f"a phase of at least {min_length} layers does not fit into {num_layers}: give a smaller min_length"
        )
    if k > num_layers // min_length:
        raise ValueError(
            f"k={k} phases of at least {min_length} layers need {k * min_length} layers, but there are {num_layers}: "
            "give a smaller --k"
        )


def _check_similarity(similarity: ArrayLike) -> Array:
    if hasattr(similarity, "detach"):
        similarity = similarity.detach().cpu().double()
    matrix = np.asarray(similarity, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(f"similarity must be a square L x L matrix over a_1..a_L, got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise ValueError("similarity has NaN or infinite entries: measure it again on finite states")
    # Means of float32 cosines differ from their transpose by rounding, and no more.
    if np.abs(matrix - matrix.T).max() > 1e-5 * max(1.0, float(np.abs(matrix).max())):
        raise ValueError("similarity must be symmetric: pass the layer-layer matrix, or average it with its transpose")
    return (matrix + matrix.T) / 2
