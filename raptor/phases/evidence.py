"""How sure a cut of depth is, and what it is worth beside matrices without phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from raptor.phases.cut import ChosenK, Phases, choose_k, find_phases, most_cuts, smooth_matrix, within_and_across
from raptor.phases.similarity import Blocks
from raptor.streaming import Array, Record

NUM_RESAMPLES = 200  # of images, and of orders of the layers
TWIN_MARGIN = 1.25
_ROUNDING = 1e-6  # mean cosines are sums of float32 products
_ENDS = (0.025, 0.975)  # of intervals of 95 %


@dataclass
class CutEvidence(Record):
    """How sure a cut into k phases is, and what it is worth.

    The contrast is the mean similarity within phases less the mean across them. `shuffled` is the contrast of a matrix
    whose layers are in random order (mean, and its 95th percentile), `smooth` that of a matrix with the same mean
    similarity at each distance between layers, `twin` that of the untrained twin. None where it is not known.

    Attributes:
        boundaries: 95 % interval of each boundary over resampled images.
        stability: share of resamples with this very boundary.
        interval: 95 % interval of the contrast.
    """

    boundaries: list[tuple[int, int]] = field(default_factory=list)
    stability: list[float] = field(default_factory=list)
    contrast: float | None = None
    interval: tuple[float, float] | None = None
    shuffled: float | None = None
    shuffled_upper: float | None = None
    smooth: float | None = None
    twin: float | None = None


def no_structure(k: int, cut: CutEvidence, similarity: Array) -> str:
    """Why a suggested cut of `similarity` into `k` phases is no finding; empty where it is one.

    Distances must be more than rounding: the tokens of an untrained DINOv2, with a LayerScale of 1e-5, hardly move. The
    contrast must be above that of a shuffled matrix (95th percentile) and above `TWIN_MARGIN` times that of the
    untrained twin where it was measured; its lower end counts. A second random model differs from the first by less
    than that margin.
    """
    largest = float((1 - similarity).max())
    if largest < _ROUNDING:
        return f"all layers are alike up to rounding (the largest distance is {largest:.0e})"
    if k == 1:
        return "all layers are alike"
    if cut.contrast is None:
        return f"the gains of further cuts do not level off before k={k}, where every layer is a phase"
    lowest = cut.contrast if cut.interval is None else cut.interval[0]
    found = f"at k={k} no more phase structure than {{}} (contrast at least {lowest:.3f}; {{}} {{:.3f}})"
    if cut.shuffled_upper is not None and lowest <= cut.shuffled_upper:
        return found.format("a shuffled matrix", "95 % of shuffled ones are below", cut.shuffled_upper)
    if cut.twin is not None and lowest <= TWIN_MARGIN * cut.twin:
        return found.format("its untrained twin", f"{TWIN_MARGIN} times the twin's is", TWIN_MARGIN * cut.twin)
    return ""


@dataclass
class Evidence:
    """What cuts are compared with: resamples over images, and matrices without phases. See `CutEvidence`."""

    matrix: Array
    blocks: Blocks | None
    twin: Array | None
    min_length: int

    def __post_init__(self) -> None:
        num = len(self.matrix)
        enough = self.blocks is not None and len(self.blocks.sizes) > 1
        self.resampled = self.blocks.resampled(NUM_RESAMPLES) if enough and self.blocks else np.empty((0, num, num))
        rng = np.random.default_rng(0)
        orders = [rng.permutation(num) for _ in range(NUM_RESAMPLES)]
        self.shuffled = np.stack([self.matrix[np.ix_(order, order)] for order in orders])
        self.smooth = smooth_matrix(self.matrix)

    def of(
        self, phases: Phases, method: str = "maxcut", score: str = "weighted", min_length: int | None = None
    ) -> CutEvidence:
        def cut(matrix: Array) -> Phases:
            return find_phases(matrix, phases.k, method, score, min_length)

        found = CutEvidence(contrast=_contrast(self.matrix, phases), smooth=_contrast(self.smooth, cut(self.smooth)))
        if self.twin is not None:
            found.twin = _contrast(self.twin, cut(self.twin))
        if len(self.resampled):
            self._add_intervals(found, phases, [cut(m) for m in self.resampled])
        if found.contrast is not None:
            contrasts = [_contrast(m, cut(m)) for m in self.shuffled]
            null = [contrast for contrast in contrasts if contrast is not None]
            if null:
                found.shuffled = float(np.mean(null))
                found.shuffled_upper = float(np.quantile(null, 0.95))
        return found

    def _add_intervals(self, found: CutEvidence, phases: Phases, recut: Sequence[Phases]) -> None:
        """The intervals of the boundaries and of the contrast of `phases`; `recut` are the cuts of the resamples."""
        edges_rb = np.array([one.boundaries for one in recut]).reshape(len(recut), phases.k - 1)
        # The nearest of the resampled layers: a boundary lies between two layers.
        lower_b, upper_b = np.quantile(edges_rb, _ENDS, axis=0, method="nearest")
        found.boundaries = [(int(lower), int(upper)) for lower, upper in zip(lower_b, upper_b)]
        found.stability = (edges_rb == np.array(phases.boundaries)).mean(0).tolist()
        if found.contrast is not None:
            lower, upper = np.quantile([_contrast(m, phases) for m in self.resampled], _ENDS)
            found.interval = (float(lower), float(upper))

    def choose(self, matrix: Array) -> ChosenK:
        """The k that `matrix` suggests, of those that every matrix of its size has room for."""
        return choose_k(matrix, most_cuts(len(matrix), self.min_length), self.min_length)

    def k_shares(self) -> dict[int, float]:
        """The share of resamples that suggest each k."""
        ks = [self.choose(m).k for m in self.resampled]
        return {k: ks.count(k) / len(ks) for k in sorted(set(ks))}

    def null_gains(self) -> dict[str, list[float]]:
        nulls = {"shuffled": self.shuffled[:20], "smooth": self.smooth[None]}
        if self.twin is not None:
            nulls["twin"] = self.twin[None]
        found = {}
        for name, matrices in nulls.items():
            rows = [self.choose(m).gains for m in matrices]
            num_cuts = min(len(gains) for gains in rows)  # of those that all of them reach
            found[name] = np.mean([gains[:num_cuts] for gains in rows], axis=0).tolist()
        return found


def _contrast(matrix: Array, phases: Phases) -> float | None:
    within, across = within_and_across(matrix, phases)
    return None if within is None or across is None else within - across
