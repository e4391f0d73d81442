"""Building blocks that the measures share: unit vectors, angles, group means, subsets of images, host factorisations.

Angles stay accurate for nearly parallel vectors. `arccos` of a float32 cosine cannot see angles below about 3e-4 rad;
from the distance between the unit vectors the relative error stays near 1e-5 at 1e-4 rad in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from raptor.streaming import Spread
from raptor.vit.groups import TokenGroups
from raptor.vit.trajectory import at_least_float32, float_type

Result = TypeVar("Result")
_HOST_SIZE = 1024


def unit(x: Tensor) -> Tensor:
    """`x / |x|` along the last axis, in float32 or better; a zero vector stays zero."""
    x = at_least_float32(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.clamp_min(torch.finfo(x.dtype).tiny)


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Angle in radians between `x` and `y` along the last axis, accurate at both ends of [0, pi]."""
    return unit_angle(unit(x), unit(y))


def unit_angle(x: Tensor, y: Tensor) -> Tensor:
    """`angle` of unit vectors, in Kahan's form: twice the arctangent of `|x - y| / |x + y|`."""
    return 2 * torch.atan2(torch.linalg.vector_norm(x - y, dim=-1), torch.linalg.vector_norm(x + y, dim=-1))


def measured_groups(groups: TokenGroups) -> dict[str, slice]:
    """Name and slice of `all` tokens, then of each group that is present."""
    return {"all": groups.slice("all"), **dict(groups.present())}


def mean_by_group(values_bt: Tensor, spans: dict[str, slice]) -> Tensor:
    """Mean over the tokens of each group, of values per token `(..., T)`: `(..., groups)`."""
    return torch.stack([values_bt[..., span].mean(-1) for span in spans.values()], -1)


def by_group(spread: Spread, names: Iterable[str]) -> dict[str, Spread]:
    """Group -> its part of a spread of values `(groups, ...)`."""
    return {name: spread[g] for g, name in enumerate(names)}


def group_means(states: Sequence[Tensor], groups: TokenGroups) -> dict[str, Tensor]:
    """Raw mean over the tokens of each group and of all, then normalised: `(B, L+1, D)` in float32 or better."""
    dtype = float_type(states[0])
    means: dict[str, Tensor] = {}
    total = torch.zeros(1, dtype=dtype, device=states[0].device)
    for name, span in groups.present():
        # Summed in float32 or better: in bf16 a mean over many tokens loses digits.
        mean_bld = torch.stack([a[:, span].mean(1, dtype=dtype) for a in states], 1)
        # The mean over all tokens comes from the means over the groups, so that the states are read once.
        total = total + mean_bld * (getattr(groups, name) / groups.num_tokens)
        means[name] = unit(mean_bld)
    return {"all": unit(total), **means}


class EvenSubset:
    """Chooses `num_keep` images spread evenly over `num_images`, or the first ones when the total is unknown.

    Only places decide, on the host, so choosing never waits for the device.
    """

    def __init__(self, num_keep: int, num_images: int | None = None) -> None:
        self.num_keep = num_keep
        self.num_images = num_images
        self.num_seen = 0

    def pick(self, batch_size: int, places: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Rows of a batch to keep, and their places in the stream; `places` of the batch are by default the next."""
        if places is None:
            places = range(self.num_seen, self.num_seen + batch_size)
        self.num_seen += batch_size
        rows: list[int] = []
        for row, image in enumerate(places):
            if self.num_images is None or self.num_images <= self.num_keep:
                is_kept = image < self.num_keep
            else:
                # Image i is kept where i * num_keep / num_images passes a whole number.
                is_kept = (image + 1) * self.num_keep // self.num_images > image * self.num_keep // self.num_images
                is_kept = is_kept and image < self.num_images
            if is_kept:
                rows.append(row)
        return rows, [places[row] for row in rows]


def take_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """`x[rows]` without waiting for the device."""
    if len(rows) == len(x):
        return x
    return x.index_select(0, torch.tensor(rows, dtype=torch.long).to(x.device, non_blocking=True))


def on_host_if_small(matrix: Tensor) -> Tensor:
    """`matrix` on the device that factorises it fastest: up to 1,024 rows the CPU, which handles several at once."""
    if matrix.shape[-1] > _HOST_SIZE:
        return matrix
    return matrix.cpu()


def parallel_map(function: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
    """`map` on as many threads as torch may use, each with one core for its own linear algebra.

    LAPACK factorises small matrices one by one on one core, and torch releases the GIL during each call.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return list(map(function, *arguments))
    try:
        with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            return list(pool.map(function, *arguments))
    finally:
        torch.set_num_threads(num_threads)


def eigenvalues(matrices: Tensor) -> Tensor:
    """Eigenvalues of symmetric matrices `(n, D, D)` on the host, ascending: `(n, D)`."""
    # Few large calls, because a thread that often takes the GIL delays the one that feeds a GPU.
    chunks = matrices.cpu().chunk(torch.get_num_threads())
    return torch.cat(parallel_map(torch.linalg.eigvalsh, chunks))
