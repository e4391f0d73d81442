"""Dynamics along depth: direction, rank, modes, basins and stability of a ViT's states, and interventions on them."""

from __future__ import annotations

from raptor.dynamics.attraction import PhaseAttraction, measure_attraction
from raptor.dynamics.basins import Basins, BasinsResult
from raptor.dynamics.direction import Direction, DirectionResult
from raptor.dynamics.findings import find
from raptor.dynamics.gathering import Gathering, GatheringResult
from raptor.dynamics.interventions import (
    Extrapolation,
    Repetition,
    Swaps,
    measure_extrapolation,
    measure_repetition,
    measure_swaps,
)
from raptor.dynamics.measure import DynamicsResult, measure_dynamics
from raptor.dynamics.modes import DMD, BatchedDMD, fit_dmd, rank_sweep
from raptor.dynamics.rank import Rank, RankResult
from raptor.dynamics.spectra import Modes, ModesResult, PooledDMD
from raptor.dynamics.stability import Stability, StabilityResult
from raptor.dynamics.states import group_means
from raptor.streaming import QUANTILES, ImageMoments, Spread, jsonable

__all__ = [
    "DMD",
    "QUANTILES",
    "Basins",
    "BasinsResult",
    "BatchedDMD",
    "Direction",
    "DirectionResult",
    "DynamicsResult",
    "Extrapolation",
    "Gathering",
    "GatheringResult",
    "ImageMoments",
    "Modes",
    "ModesResult",
    "PhaseAttraction",
    "PooledDMD",
    "Rank",
    "RankResult",
    "Repetition",
    "Spread",
    "Stability",
    "StabilityResult",
    "Swaps",
    "find",
    "fit_dmd",
    "group_means",
    "jsonable",
    "measure_attraction",
    "measure_dynamics",
    "measure_extrapolation",
    "measure_repetition",
    "measure_swaps",
    "rank_sweep",
]
