"""Dynamics along depth: direction, rank, modes, basins and stability of a ViT's states, and interventions on them.

`measure_dynamics` takes the measures of the paper in one pass. Others are called on their own: `measure_jacobians`,
`measure_lyapunov` and `measure_fixed_points` for stability beyond random directions, `measure_transplants` for
attraction between images.
"""

from raptor.dynamics.basins import Basins
from raptor.dynamics.direction import Direction, Gathering
from raptor.dynamics.dmd import NUMBERS, PooledDMD, eigenvalue_numbers, fit_dmd
from raptor.dynamics.fixed_points import measure_fixed_points
from raptor.dynamics.jacobian import measure_jacobians
from raptor.dynamics.lyapunov import measure_lyapunov
from raptor.dynamics.measure import measure_dynamics
from raptor.dynamics.modes import Modes
from raptor.dynamics.rank import Rank
from raptor.dynamics.repetition import measure_extrapolation, measure_repetition
from raptor.dynamics.stability import Stability, contraction, measure_attraction, phase_spans
from raptor.dynamics.swaps import measure_swaps
from raptor.dynamics.transplants import measure_transplants

__all__ = [
    "NUMBERS",
    "Basins",
    "Direction",
    "Gathering",
    "Modes",
    "PooledDMD",
    "Rank",
    "Stability",
    "contraction",
    "eigenvalue_numbers",
    "fit_dmd",
    "measure_attraction",
    "measure_dynamics",
    "measure_extrapolation",
    "measure_fixed_points",
    "measure_jacobians",
    "measure_lyapunov",
    "measure_repetition",
    "measure_swaps",
    "measure_transplants",
    "phase_spans",
]
