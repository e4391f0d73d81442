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


def token_directions(states: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token: norms `(B, L+1, T)`, gamma `(B, L+1, T)` and speeds `(B, L, T)`."""
    norms, gammas, chords = [], [], []
    last, _ = _unit_and_norm(states[-1])
    before: Tensor | None = None
    for state in states:
        now, norm = _unit_and_norm(state)
        norms.append(norm)
        gammas.append(torch.linalg.vecdot(now, last))
        if before is not None:
            chords.append(torch.linalg.vector_norm(now - before, dim=-1))
        before = now
    return torch.stack(norms, 1), torch.stack(gammas, 1), chord_angle(torch.stack(chords, 1))


def _unit_and_norm(state_btd: Tensor) -> tuple[Tensor, Tensor]:
    x_btd = as_float(state_btd)
    norm_bt = torch.linalg.vector_norm(x_btd, dim=-1)
    return x_btd / norm_bt.clamp_min(torch.finfo(x_btd.dtype).tiny)[..., None], norm_bt


class Direction:
    """Streaming norms, gamma and speed by token group."""

    def __init__(self, groups: TokenGroups) -> None:
        self.groups = groups
        self._spans = measured_groups(groups)
        self._norm, self._gamma, self._speed = ImageMoments(), ImageMoments(), ImageMoments()

    @torch.no_grad()
    def update(self, states: Sequence[Tensor]) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`."""
        check_states(states, self.groups)
        for moments, values_blt in zip((self._norm, self._gamma, self._speed), token_directions(states)):
            moments.update(torch.stack([values_blt[..., span].mean(-1) for span in self._spans.values()], 1))

    def result(self) -> DirectionResult:
        spreads = [moments.result() for moments in (self._norm, self._gamma, self._speed)]
        return DirectionResult(*({name: spread[i] for i, name in enumerate(self._spans)} for spread in spreads))
