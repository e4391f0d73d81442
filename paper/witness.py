"""The authors' published layer-layer matrix of DINOv2 ViT-B/14 with registers as a witness beside our own numbers.

It holds the mean cosine distance between the outputs of blocks 1..12 (mean of cls and mean patch, 10,000 ImageNet
images), rounded to two decimals. Its last column gives gamma, and so the turn of the last block; cutting it gives the
paper's Table 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import acos
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from sweep import Json, read_config, write_json

from raptor import find_phases, smooth_matrix, within_and_across

_ROUNDING = 0.005  # the authors' file has two decimals
NUM_IMAGES = 10_000


@dataclass(kw_only=True)
class Witness:
    """What follows from the authors' matrix: gamma, the turn of the last block, and the phases."""

    csv: str  # the authors' matrix of distances
    out: str = "docs/results/dynamics/authors-vitb.json"  # the file to write


def main(config: Witness) -> Json:
    found = witness(np.loadtxt(config.csv, delimiter=","))
    write_json(Path(config.out), found)
    return found


def witness(distance: ArrayLike) -> Json:
    """What follows from an `(L, L)` matrix of mean cosine distances."""
    d = np.asarray(distance, dtype=np.float64)
    if d.ndim != 2 or d.shape[0] != d.shape[1]:
        raise ValueError(f"the matrix of distances must be square, got {d.shape}: give the authors' CSV file")
    similarity = 1 - d
    before = float(similarity[-2, -1])
    phases = {}
    above_smooth = {}
    for k in (2, 3, 4):
        phases[str(k)] = list(find_phases(similarity, k).lengths)
        above_smooth[str(k)] = contrast(similarity, k) - contrast(smooth_matrix(similarity), k)
    return {
        "gamma": similarity[:, -1].round(6).tolist(),
        "last_turn": acos(before),
        "last_turn_ends": [acos(before + _ROUNDING), acos(before - _ROUNDING)],
        "phases": phases,
        "above_smooth": above_smooth,
        "model": "DINOv2 ViT-B/14 with registers",
        "num_images": NUM_IMAGES,
    }


def contrast(similarity: np.ndarray, k: int) -> float:
    """Similarity within the matrix's own max-cut phases minus across them."""
    within, across = within_and_across(similarity, find_phases(similarity, k).lengths)
    assert within is not None and across is not None
    return within - across


if __name__ == "__main__":
    main(read_config(Witness))
