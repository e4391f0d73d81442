"""The authors' published layer-layer matrix of DINOv2 ViT-B/14 with registers as a witness beside our own numbers.

It holds the mean cosine distance between the outputs of blocks 1..12 (mean of cls and mean patch, 10,000 ImageNet
images), rounded to two decimals. Its last column gives gamma, and so the turn of the last block; cutting it gives the
paper's Table 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import acos
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from raptor.phases import find_phases, smooth_matrix, within_and_across
from raptor.provenance import Provenance
from raptor.run import ResultFile

TABLE_3 = {2: [7, 5], 3: [7, 3, 2], 4: [4, 3, 3, 2]}
_ROUNDING = 0.005
NUM_IMAGES = 10_000


@dataclass
class Witness(ResultFile):
    """What follows from the matrix.

    Attributes:
        gamma: cosine of the state after block l with the last one, l = 1..L.
        last_turn: angle of the last block in radians, of vectors with that mean cosine.
        last_turn_ends: the same at the ends of the rounding of the matrix.
        phases: by k, the lengths that max-cut gives.
        above_smooth: by k, similarity within phases minus across, minus that of a smooth matrix (`smooth_matrix`).
    """

    FILE: ClassVar[str] = "authors-vitb.json"

    gamma: list[float]
    last_turn: float
    last_turn_ends: tuple[float, float]
    phases: dict[int, list[int]]
    above_smooth: dict[int, float] = field(default_factory=dict)
    model: str = "DINOv2 ViT-B/14 with registers"
    num_images: int = NUM_IMAGES
    provenance: Provenance = field(default_factory=Provenance)

    def rows_of_table_3(self) -> int:
        """How many rows of Table 3 the cuts reproduce."""
        return sum(self.phases[k] == lengths for k, lengths in TABLE_3.items())


def witness(distance: ArrayLike) -> Witness:
    """The witness of an `(L, L)` matrix of mean cosine distances."""
    d = np.asarray(distance, dtype=np.float64)
    if d.ndim != 2 or d.shape[0] != d.shape[1]:
        raise ValueError(f"the matrix of distances must be square, got {d.shape}: give the authors' CSV file")
    before = float(1 - d[-2, -1])
    return Witness(
        gamma=(1 - d[:, -1]).round(6).tolist(),
        last_turn=acos(before),
        last_turn_ends=(acos(before + _ROUNDING), acos(before - _ROUNDING)),
        phases={k: list(find_phases(1 - d, k).lengths) for k in TABLE_3},
        above_smooth={k: _contrast(1 - d, k) - _contrast(smooth_matrix(1 - d), k) for k in TABLE_3},
    )


def _contrast(similarity: np.ndarray, k: int) -> float:
    within, across = within_and_across(similarity, find_phases(similarity, k).lengths)
    assert within is not None and across is not None
    return within - across


def read_witness(path: str | Path) -> Witness:
    """The witness of a CSV file."""
    try:
        return witness(np.loadtxt(path, delimiter=","))
    except OSError:
        raise ValueError(f"no {path}: give the authors' matrix as a CSV file") from None
