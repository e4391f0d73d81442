"""Norms, directional convergence and angular speed along depth.

Per token, then averaged over the tokens of a group: `|x_l|`, `gamma_l = <x̂_l, x̂_L>` and the angle `s_l` between
`x̂_l` and `x̂_(l+1)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raptor.dynamics.angles import as_float, chord_angle
from raptor.dynamics.groups import check_states, measured_groups
from raptor.dynamics.moments import ImageMoments, Spread, jsonable
from raptor.vit import TokenGroups


@dataclass
class DirectionResult:
    """By group: `norm` and `gamma` have `L+1` values (layers 0..L), `speed` has `L` (step l to l+1, at index l)."""

    norm: dict[str, Spread]
    gamma: dict[str, Spread]
    speed: dict[str, Spread]

    def to_dict(self) -> dict[str, Any]:
        return jsonable({"norm": self.norm, "gamma": self.gamma, "speed": self.speed})


Bounds = tuple[tuple[int, int], ...]


def direction_means(before_btd: Tensor, now_btd: Tensor, last_btd: Tensor, bounds: Bounds) -> Tensor:
    """Norm of `now`, its cosine with `last` and its angle from `before`, averaged over tokens: `(B, 3, groups)`.

    A pure function of one step, so that one compiled graph serves every layer. `bounds`: first token of each group,
    and the one after its last. Compiled, it reads each of the three states once; eager, it makes about eleven passes.
    """
    before, _ = _unit_and_norm(before_btd)
    now, norm_bt = _unit_and_norm(now_btd)
    last, _ = _unit_and_norm(last_btd)
    gamma_bt = (now * last).sum(-1)
    speed_bt = chord_angle((now - before).square().sum(-1).sqrt())
    values_b3t = torch.stack([norm_bt, gamma_bt, speed_bt], 1)
    return torch.stack([values_b3t[..., start:stop].mean(-1) for start, stop in bounds], -1)


def _unit_and_norm(state_btd: Tensor) -> tuple[Tensor, Tensor]:
    x_btd = as_float(state_btd)
    norm_bt = x_btd.square().sum(-1).sqrt()
    return x_btd / norm_bt.clamp_min(torch.finfo(x_btd.dtype).tiny)[..., None], norm_bt


class Direction:
    """Streaming norms, gamma and speed by token group.

    compile: fuse the work on one step into one kernel, for batches of the first one's shape. Compiling takes seconds:
    it pays on a GPU from some ten thousand images on.
    """

    def __init__(self, groups: TokenGroups, compile: bool = False) -> None:
        self.groups = groups
        self._spans = measured_groups(groups)
        self._bounds = tuple((span.start, span.stop) for span in self._spans.values())
        self._compiled = torch.compile(direction_means, dynamic=False) if compile else None
        self._batch_size: int | None = None
        self._moments = ImageMoments()

    @torch.no_grad()
    def update(self, states: Sequence[Tensor]) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`."""
        check_states(states, self.groups)
        self._batch_size = self._batch_size or len(states[0])
        same = len(states[0]) == self._batch_size
        means = self._compiled if self._compiled is not None and same else direction_means
        before = [states[0], *states[:-1]]  # the first has none: its speed of 0 is dropped in the end
        self._moments.update(torch.stack([means(*pair, states[-1], self._bounds) for pair in zip(before, states)], -1))

    def result(self) -> DirectionResult:
        spread = self._moments.result()  # (3, groups, L+1)
        norm, gamma, speed = ({name: spread[m, g] for g, name in enumerate(self._spans)} for m in range(3))
        return DirectionResult(norm, gamma, {name: part[1:] for name, part in speed.items()})
