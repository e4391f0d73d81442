"""What every measure takes from states: unit vectors, angles, token groups, a subset of the images.

Angles stay accurate for nearly parallel vectors. `arccos` of a float32 cosine cannot see angles below about 3e-4 rad;
from the distance between the unit vectors the relative error stays near 1e-5 at 1e-4 rad in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raptor.vit.trajectory import at_least_float32, float_type
from raptor.vit.view import TokenGroups


def unit(x: Tensor) -> Tensor:
    """`x / |x|` along the last axis, in float32 or better; a zero vector stays zero."""
    x = at_least_float32(x)
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


def measured_groups(groups: TokenGroups) -> dict[str, slice]:
    """Name and slice of `all` tokens, then of each group that is present."""
    return {"all": groups.slice("all"), **dict(groups.present())}


def group_means(states: Sequence[Tensor], groups: TokenGroups) -> dict[str, Tensor]:
    """Raw mean over the tokens of each group and of all, then normalised: `(B, L+1, D)` in float32 or better."""
    dtype = float_type(states[0])
    means = {name: torch.stack([a[:, s].mean(1, dtype=dtype) for a in states], 1) for name, s in groups.present()}
    total = sum(mean * (getattr(groups, name) / groups.num_tokens) for name, mean in means.items())
    assert isinstance(total, Tensor)
    return {name: unit(mean) for name, mean in {"all": total, **means}.items()}


class EvenSubset:
    """Chooses `num_keep` images spread evenly over `num_images`, or the first ones when the total is unknown.

    Only counts decide, on the host, so choosing never waits for the device.
    """

    def __init__(self, num_keep: int, num_images: int | None = None) -> None:
        if num_keep < 1:
            raise ValueError(f"at least one image must be kept, got {num_keep}")
        self.num_keep = num_keep
        self.num_images = num_images if num_images is not None and num_images > num_keep else None
        self.num_seen = 0
        self.num_kept = 0

    def pick(self, batch_size: int, places: Sequence[int] | None = None) -> list[int]:
        """Positions in a batch of the images to keep; `places`: of its images in the stream, by default the next."""
        places = range(self.num_seen, self.num_seen + batch_size) if places is None else places
        rows = [row for row, place in enumerate(places) if self._keeps(place)]
        rows = rows[: self.num_keep - self.num_kept]
        self.num_seen += batch_size
        self.num_kept += len(rows)
        return rows

    def _keeps(self, image: int) -> bool:
        if self.num_images is None:
            return image < self.num_keep
        return (image + 1) * self.num_keep // self.num_images > image * self.num_keep // self.num_images


def places_of(rows: Sequence[int], places: Sequence[int] | None) -> list[int] | None:
    """The places in the stream of some rows of a batch; None where those of the batch are not known."""
    return None if places is None else [places[row] for row in rows]


def take_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """`x[rows]` without waiting for the device."""
    if len(rows) == len(x):
        return x
    return x.index_select(0, torch.tensor(rows, dtype=torch.long).to(x.device, non_blocking=True))
