"""Angles that stay accurate for nearly parallel vectors.

`arccos` of a float32 cosine cannot see angles below about 3e-4 rad. Angles are computed here from the chord between
the unit vectors, whose relative error stays near 1e-5 at 1e-4 rad in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_float(x: Tensor) -> Tensor:
    """`x` in float32, or float64 if it already is."""
    return x if x.dtype == torch.float64 else x.float()


def unit(x: Tensor) -> Tensor:
    """`x / |x|` along the last axis, in float32 or better; a zero vector stays zero."""
    x = as_float(x)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def chord_angle(chord: Tensor) -> Tensor:
    """Angle between unit vectors at distance `chord`."""
    return 2 * torch.asin((chord / 2).clamp(max=1))


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Angle in radians between `x` and `y` along the last axis, accurate at both ends of [0, pi]."""
    return unit_angle(unit(x), unit(y))


def unit_angle(x: Tensor, y: Tensor) -> Tensor:
    """`angle` of unit vectors, in Kahan's form: twice the arctangent of `|x - y| / |x + y|`."""
    return 2 * torch.atan2(torch.linalg.vector_norm(x - y, dim=-1), torch.linalg.vector_norm(x + y, dim=-1))
