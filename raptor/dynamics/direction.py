"""Norms, directional convergence and angular speed along depth.

Per token, then averaged over the tokens of a group: `|x_l|`, `gamma_l = <x̂_l, x̂_L>` and the angle `s_l` between
`x̂_l` and `x̂_(l+1)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raptor.dynamics.states import chord_angle, measured_groups, unit
from raptor.streaming import ImageMoments, Record, Spread
from raptor.vit.trajectory import at_least_float32, check_states
from raptor.vit.view import TokenGroups


@dataclass
class DirectionResult(Record):
    """By group: `norm` and `gamma` have `L+1` values (layers 0..L), `speed` has `L` (step l to l+1, at index l)."""

    norm: dict[str, Spread]
    gamma: dict[str, Spread]
    speed: dict[str, Spread]


Bounds = tuple[tuple[int, int], ...]


def _direction_means(state_btd: Tensor, before_btd: Tensor, last_btd: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """One step: means over tokens of the norm, the cosine with `last` and the angle from `before`; and the unit state.

    A pure function, so that one compiled graph serves every layer. `before` and `last` are unit states; `bounds` are
    the first token of each group and the one after its last. Means are `(B, 3, groups)`, the unit state `(B, T, D)` in
    float32 or better. Compiled it reads three states and writes one; in eager mode it makes eleven passes.
    """
    x_btd = at_least_float32(state_btd)
    norm_bt = torch.linalg.vector_norm(x_btd, dim=-1)
    now_btd = x_btd / norm_bt.clamp_min(torch.finfo(x_btd.dtype).tiny)[..., None]
    gamma_bt = torch.linalg.vecdot(now_btd, last_btd)
    speed_bt = chord_angle(torch.linalg.vector_norm(now_btd - before_btd, dim=-1))
    values_b3t = torch.stack([norm_bt, gamma_bt, speed_bt], 1)
    return torch.stack([values_b3t[..., start:stop].mean(-1) for start, stop in bounds], -1), now_btd


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
    def update(self, states: Sequence[Tensor]) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`."""
        check_states(states, num_tokens=self.groups.num_tokens)
        self._batch_size = self._batch_size or len(states[0])
        step = self._compiled if self._compiled is not None and len(states[0]) == self._batch_size else _direction_means
        last = unit(states[-1])
        now, means = unit(states[0]), []  # the first state has none before it: its speed of 0 is dropped at the end
        for state in states:
            mean_b3g, now = step(state, now, last, self._bounds)
            means.append(mean_b3g)
        self._moments.update(torch.stack(means, -1))

    def result(self) -> DirectionResult:
        spread = self._moments.result()  # (3, groups, L+1)
        norm, gamma, speed = ({name: spread[m, g] for g, name in enumerate(self._spans)} for m in range(3))
        return DirectionResult(norm, gamma, {name: part[1:] for name, part in speed.items()})
