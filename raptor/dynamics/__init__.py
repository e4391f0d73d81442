"""Dynamics along depth: direction, rank, modes, basins and stability of a ViT's states, and interventions on them.

`measure_dynamics` takes the measures of the paper in one pass. Others are called on their own: `measure_jacobians`,
`measure_lyapunov` and `measure_fixed_points` for stability beyond random directions, `measure_transplants` for
attraction between images.
"""

from __future__ import annotations

from raptor.dynamics.basins import Basins, BasinsResult
from raptor.dynamics.direction import Direction, DirectionResult, Gathering, GatheringResult
from raptor.dynamics.dmd import BatchedDMD, PooledDMD, fit_dmd
from raptor.dynamics.findings import find
from raptor.dynamics.fixed_points import FixedPointsResult, measure_fixed_points
from raptor.dynamics.jacobian import JacobianResult, measure_jacobians
from raptor.dynamics.lyapunov import LyapunovResult, measure_lyapunov
from raptor.dynamics.measure import DynamicsResult, measure_dynamics
from raptor.dynamics.modes import Modes, ModesResult
from raptor.dynamics.rank import Rank, RankResult
from raptor.dynamics.repetition import Extrapolation, Repetition, measure_extrapolation, measure_repetition
from raptor.dynamics.stability import PhaseAttraction, Stability, StabilityResult, measure_attraction
from raptor.dynamics.states import group_means
from raptor.dynamics.swaps import Swaps, measure_swaps
from raptor.dynamics.transplants import TransplantResult, measure_transplants
from raptor.streaming import QUANTILES, ImageMoments, Spread, jsonable

__all__ = [
    "QUANTILES",
    "Basins",
    "BasinsResult",
    "BatchedDMD",
    "Direction",
    "DirectionResult",
    "DynamicsResult",
    "Extrapolation",
    "FixedPointsResult",
    "Gathering",
    "GatheringResult",
    "ImageMoments",
    "JacobianResult",
    "LyapunovResult",
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
    "TransplantResult",
    "find",
    "fit_dmd",
    "group_means",
    "jsonable",
    "measure_attraction",
    "measure_dynamics",
    "measure_extrapolation",
    "measure_fixed_points",
    "measure_jacobians",
    "measure_lyapunov",
    "measure_repetition",
    "measure_swaps",
    "measure_transplants",
]
