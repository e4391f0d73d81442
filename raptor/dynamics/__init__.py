"""Dynamics along depth: direction, rank, modes, basins and stability of a ViT's states."""

from __future__ import annotations

from raptor.dynamics.basins import Basins, BasinsResult
from raptor.dynamics.direction import Direction, DirectionResult
from raptor.dynamics.groups import group_means
from raptor.dynamics.modes import DMD, BatchedDMD, fit_dmd, rank_sweep
from raptor.dynamics.moments import QUANTILES, ImageMoments, Spread, jsonable
from raptor.dynamics.rank import Rank, RankResult
from raptor.dynamics.spectra import Modes, ModesResult, PooledDMD
from raptor.dynamics.stability import Stability, StabilityResult

__all__ = [
    "DMD",
    "QUANTILES",
    "Basins",
    "BasinsResult",
    "BatchedDMD",
    "Direction",
    "DirectionResult",
    "ImageMoments",
    "Modes",
    "ModesResult",
    "PooledDMD",
    "Rank",
    "RankResult",
    "Spread",
    "Stability",
    "StabilityResult",
    "fit_dmd",
    "group_means",
    "jsonable",
    "rank_sweep",
]
