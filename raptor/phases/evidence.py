"""How sure a cut of depth is, and what it is worth beside matrices without phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from raptor.phases.cut import Phases, choose_k, find_phases, within_and_across
from raptor.phases.similarity import Blocks
from raptor.streaming import Array, Record

NUM_RESAMPLES = 200  # of images, and of orders of the layers
TWIN_MARGIN = 1.25
_ROUNDING = 1e-6  # mean cosines are sums of float32 products
_NUM_GAINS = 20  # shuffled matrices whose gains are averaged
_ENDS = (0.025, 0.975)  # of intervals of 95 %


@dataclass
class CutEvidence(Record):
    """How sure a cut into k phases is, and what it is worth.

    The contrast is the mean similarity within phases less the mean across them. None where it is not known.

    Attributes:
        boundaries: 95 % interval of each boundary over resampled images.
        stability: for each boundary, the share of resamples that have the same one.
        interval: 95 % interval of the contrast.
        shuffled: mean contrast of the matrix with its layers in random order.
        shuffled_upper: 95th percentile of the contrast of shuffled matrices.
        smooth: contrast of a matrix with the same mean similarity at each distance between layers.
        twin: contrast of the untrained twin.
        cost: of a cut by function, the sum over blocks of being replaced by the representative of their phase.
        random_cost: mean of that cost over partitions into as many phases.
    """

    boundaries: list[tuple[int, int]] = field(default_factory=list)
    stability: list[float] = field(default_factory=list)
    contrast: float | None = None
    interval: tuple[float, float] | None = None
    shuffled: float | None = None
    shuffled_upper: float | None = None
    smooth: float | None = None
    twin: float | None = None
    cost: float | None = None
    random_cost: float | None = None

    @property
    def lowest(self) -> float | None:
        """The lower end of the contrast's interval; without images to resample, the contrast itself."""
        if self.interval is None:
            return self.contrast
        return self.interval[0]


def no_structure(k: int, cut: CutEvidence, similarity: Array) -> str:
    """Why a suggested cut of `similarity` into `k` phases is no finding; empty where it is one.

    Distances must be more than rounding: the tokens of an untrained DINOv2, with a LayerScale of 1e-5, hardly move. The
    lower end of the contrast must be above the 95th percentile of shuffled matrices, and above `TWIN_MARGIN` times the
    contrast of the untrained twin where it was measured. A second random model differs from the first by less than that
    margin.
    """
    largest = float((1 - similarity).max())
    if largest < _ROUNDING:
        return f"all layers are alike up to rounding (the largest distance is {largest:.0e})"
    if k == 1:
        return "all layers are alike"
    lowest = cut.lowest
    if lowest is None:
        return f"the gains of further cuts do not level off before k={k}, where every layer is a phase"
    found = f"at k={k} no more phase structure than {{}} (contrast at least {lowest:.3f}; {{}} {{:.3f}})"
    if cut.shuffled_upper is not None and lowest <= cut.shuffled_upper:
        return found.format("a shuffled matrix", "95 % of shuffled ones are below", cut.shuffled_upper)
    if cut.twin is not None and lowest <= TWIN_MARGIN * cut.twin:
        return found.format("its untrained twin", f"{TWIN_MARGIN} times the twin's is", TWIN_MARGIN * cut.twin)
    return ""


class Evidence:
    """What cuts of one matrix are compared with: resamples over images, and matrices without phases."""

    def __init__(self, matrix: Array, blocks: Blocks | None = None, twin: Array | None = None) -> None:
        self.matrix = matrix
        num = len(matrix)
        self.resampled = np.empty((0, num, num))
        if blocks is not None and len(blocks.sizes) > 1:
            self.resampled = blocks.resampled(NUM_RESAMPLES)
        rng = np.random.default_rng(0)
        shuffled = []
        for _ in range(NUM_RESAMPLES):
            order = rng.permutation(num)
            shuffled.append(matrix[np.ix_(order, order)])
        self.nulls = {"shuffled": np.stack(shuffled), "smooth": smooth_matrix(matrix)[None]}
        if twin is not None:
            self.nulls["twin"] = twin[None]

    def of(self, phases: Phases) -> CutEvidence:
        """The evidence of `phases`, which are of max-cut or of the dynamic programme."""
        contrasts: dict[str, list[float]] = {}
        for name, matrices in self.nulls.items():
            contrasts[name] = []
            for matrix in matrices:
                # Cut anew, because boundaries that follow the noise give some contrast in any matrix.
                contrast = _contrast(matrix, find_phases(matrix, phases.k, phases.method))
                # A cut into single layers has no pairs within a phase, and so no contrast.
                if contrast is not None:
                    contrasts[name].append(contrast)
        found = CutEvidence(
            contrast=_contrast(self.matrix, phases),
            smooth=next(iter(contrasts["smooth"]), None),
            twin=next(iter(contrasts.get("twin", [])), None),
        )
        if len(self.resampled):
            recut = [find_phases(matrix, phases.k, phases.method) for matrix in self.resampled]
            found.boundaries, found.stability = boundary_intervals(phases, recut)
        if found.contrast is not None and len(self.resampled):
            # Of the same phases: how sure their contrast is, not how good the best cut of each resample is.
            same = np.array([_contrast(matrix, phases) for matrix in self.resampled], dtype=np.float64)
            lower, upper = np.quantile(same, _ENDS)
            found.interval = (float(lower), float(upper))
        if found.contrast is not None and contrasts["shuffled"]:
            found.shuffled = float(np.mean(contrasts["shuffled"]))
            found.shuffled_upper = float(np.quantile(contrasts["shuffled"], 0.95))
        return found

    def k_shares(self) -> dict[int, float]:
        """The share of resamples that suggest each k."""
        ks = [choose_k(matrix).k for matrix in self.resampled]
        return {k: ks.count(k) / len(ks) for k in sorted(set(ks))}

    def null_gains(self) -> dict[str, list[float]]:
        """The mean gain of each further cut, for each kind of matrix without phases."""
        found = {}
        for name, matrices in self.nulls.items():
            rows = [choose_k(matrix).gains for matrix in matrices[:_NUM_GAINS]]
            found[name] = np.mean(rows, axis=0).tolist()
        return found


def boundary_intervals(phases: Phases, recut: Sequence[Phases]) -> tuple[list[tuple[int, int]], list[float]]:
    """The 95 % interval of each boundary of `phases` over the cuts of resamples, and the share that have the same."""
    edges_rb = np.array([one.boundaries for one in recut]).reshape(len(recut), phases.k - 1)
    # A boundary lies between two layers, so the ends are boundaries of resamples, not values between them.
    lower_b, upper_b = np.quantile(edges_rb, _ENDS, axis=0, method="nearest")
    intervals = [(int(lower), int(upper)) for lower, upper in zip(lower_b, upper_b)]
    return intervals, (edges_rb == np.array(phases.boundaries)).mean(0).tolist()


def smooth_matrix(matrix: ArrayLike) -> Array:
    """The (L, L) matrix without boundaries that has the same mean at each distance between layers."""
    m = np.asarray(matrix, dtype=np.float64)
    num = len(m)
    # Neighbours are alike in any network with skip connections: boundaries must show beyond that.
    distance = np.abs(np.arange(num)[:, None] - np.arange(num))
    return np.array([np.diagonal(m, n).mean() for n in range(num)])[distance]


def _contrast(matrix: Array, phases: Phases) -> float | None:
    within, across = within_and_across(matrix, phases)
    if within is None or across is None:
        return None
    return within - across
