"""Attraction within a phase: a state perturbed where the phase begins, followed to its end beside the clean one.

The angle between the two shrinks by `rate` a step, in the mean over the steps of the phase; below 1 the phase attracts.
With the paper's perturbation, whose size does not grow with the state, growing norms are part of a rate below 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raptor.dynamics.stability import StabilityResult
from raptor.phases import Phases
from raptor.streaming import Record


@dataclass
class PhaseAttraction(Record):
    """One phase, from the state at layer `first` to that at layer `last`.

    angle: by group, mean angle in radians at layers first..last. rate: by group, its mean factor per step.
    """

    first: int
    last: int
    angle: dict[str, list[float]]
    rate: dict[str, float]


def contraction(path: np.ndarray) -> np.ndarray:
    """Mean factor per step along paths of angles `(..., n+1)`: the n-th root of the last over the first."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (path[..., -1] / path[..., 0]) ** (1 / (path.shape[-1] - 1))


def phase_spans(stability: StabilityResult, phases: Sequence[int]) -> list[tuple[int, int, int]]:
    """Position among the injection layers, first and last layer of each phase whose start was perturbed."""
    ends = np.cumsum(phases).tolist()
    spans = zip([0, *ends[:-1]], ends)
    return [(stability.layers.index(first), first, last) for first, last in spans if first in stability.layers]


def measure_attraction(stability: StabilityResult, phases: Sequence[int]) -> list[PhaseAttraction]:
    """Of each phase, with all tokens perturbed at the smallest size."""
    lengths = Phases.from_lengths(phases).lengths
    found = []
    for place, first, last in phase_spans(stability, lengths):
        path_gl = stability.path[0, :, 0, place, first : last + 1]
        rates = contraction(path_gl)
        found.append(
            PhaseAttraction(
                first,
                last,
                {g: path_gl[i].tolist() for i, g in enumerate(stability.groups)},
                {g: float(rates[i]) for i, g in enumerate(stability.groups)},
            )
        )
    return found
