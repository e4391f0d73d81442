"""Norms, directional convergence and angular speed along depth.

Per token, then averaged over the tokens of a group: `|x_l|`, `gamma_l = <x̂_l, x̂_L>` and the angle `s_l` between
`x̂_l` and `x̂_(l+1)`. The variance of the speed over tokens and images has two parts: within images and between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raptor.devices import Ranks
from raptor.dynamics.states import chord_angle, measured_groups, unit
from raptor.streaming import NOT_SAVED, ImageMoments, Record, Spread
from raptor.vit.trajectory import at_least_float32, check_states
from raptor.vit.view import TokenGroups


@dataclass
class SpeedVariance(Record):
    """Variance of the angular speed in rad^2, `L` values each; the two parts add up to that over all tokens.

    tokens: within an image, mean over images. images: of the images' mean speeds.
    """

    tokens: np.ndarray
    images: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.tokens + self.images


@dataclass
class DirectionResult(Record):
    """By group: `norm` and `gamma` have `L+1` values (layers 0..L), `speed` has `L` (step l to l+1, at index l).

    values: `(N, 4, groups, L+1)`, norm, gamma, speed and squared speed of single images (the speeds from index 1 on),
    for bootstraps; not saved.
    """

    norm: dict[str, Spread]
    gamma: dict[str, Spread]
    speed: dict[str, Spread]
    speed_variance: dict[str, SpeedVariance] = field(default_factory=dict)
    values: np.ndarray | None = field(default=None, metadata=NOT_SAVED)


Bounds = tuple[tuple[int, int], ...]


def _direction_means(state_btd: Tensor, before_btd: Tensor, last_btd: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """One step: means over tokens of the norm, the cosine with `last`, the angle from `before` and its square; and the
    unit state.

    A pure function, so that one compiled graph serves every layer. `before` and `last` are unit states; `bounds` are
    the first token of each group and the one after its last. Means are `(B, 4, groups)`, the unit state `(B, T, D)` in
    float32 or better. Compiled it reads three states and writes one; in eager mode it makes eleven passes.
    """
    x_btd = at_least_float32(state_btd)
    norm_bt = torch.linalg.vector_norm(x_btd, dim=-1)
    now_btd = x_btd / norm_bt.clamp_min(torch.finfo(x_btd.dtype).tiny)[..., None]
    gamma_bt = torch.linalg.vecdot(now_btd, last_btd)
    speed_bt = chord_angle(torch.linalg.vector_norm(now_btd - before_btd, dim=-1))
    values_b4t = torch.stack([norm_bt, gamma_bt, speed_bt, speed_bt.square()], 1)
    return torch.stack([values_b4t[..., start:stop].mean(-1) for start, stop in bounds], -1), now_btd


class Direction:
    """Streaming norms, gamma and speed by token group.

    compile: fuse the work on one step into one kernel, for batches of the first one's shape. Compiling takes seconds:
    it pays on a GPU from some ten thousand images on.
    """

    def __init__(self, groups: TokenGroups, compile: bool = False) -> None:
        self.groups = groups
        self._spans = measured_groups(groups)
        self._bounds = tuple((span.start, span.stop) for span in self._spans.values())
        self._compiled = torch.compile(_direction_means, dynamic=False) if compile else None
        self._batch_size: int | None = None
        self._moments = ImageMoments()

    @torch.no_grad()
    def update(self, states: Sequence[Tensor], places: Sequence[int] | None = None) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`, of the images at `places` of the stream."""
        check_states(states, num_tokens=self.groups.num_tokens)
        self._batch_size = self._batch_size or len(states[0])
        step = self._compiled if self._compiled is not None and len(states[0]) == self._batch_size else _direction_means
        last = unit(states[-1])
        now, means = unit(states[0]), []  # the first state has none before it: its speed of 0 is dropped at the end
        for state in states:
            mean_b4g, now = step(state, now, last, self._bounds)
            means.append(mean_b4g)
        self._moments.update(torch.stack(means, -1), places)

    def reduce(self, ranks: Ranks) -> None:
        self._moments.reduce(ranks)

    def result(self) -> DirectionResult:
        spread = self._moments.result()  # (4, groups, L+1)
        norm, gamma, speed, squared = ({name: spread[m, g] for g, name in enumerate(self._spans)} for m in range(4))
        speed = {name: part[1:] for name, part in speed.items()}
        variance = {name: _variance(speed[name], squared[name].mean[1:]) for name in self._spans}
        return DirectionResult(norm, gamma, speed, variance, self._moments.kept())


def _variance(speed: Spread, mean_square: np.ndarray) -> SpeedVariance:
    """From the images' mean speeds and the mean of the squared speeds."""
    assert speed.std is not None
    images = speed.std**2
    return SpeedVariance(np.maximum(mean_square - speed.mean**2 - images, 0.0), images)
