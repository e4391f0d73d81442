"""Whether tokens turn toward their mean direction: for the patches (or registers) of one image, layer by layer.

The mean direction `m_l` of a group is the normalised mean of its unit states. `alignment` is the mean cosine of the
tokens with it. `toward` is the mean cosine of a token's update `x̂_(l+1) - x̂_l` with the direction in which it would
have to turn to reach `m_l`: that of `m_l` without its part along `x̂_l`. Positive values mean that tokens gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raptor.devices import Ranks
from raptor.dynamics.states import EvenSubset, measured_groups, places_of, take_rows, unit
from raptor.streaming import NOT_SAVED, ImageMoments, Record, Spread, reduce_all
from raptor.vit.trajectory import check_states
from raptor.vit.view import TokenGroups

GATHERING_IMAGES = 256


@dataclass
class GatheringResult(Record):
    """By group of two tokens or more: `alignment` has `L+1` values, `toward` has `L` (step l to l+1, at index l).

    alignments, towards: `(N, groups, L+1)` and `(N, groups, L)` of single images, for bootstraps; not saved.
    """

    alignment: dict[str, Spread]
    toward: dict[str, Spread]
    alignments: np.ndarray | None = field(default=None, metadata=NOT_SAVED)
    towards: np.ndarray | None = field(default=None, metadata=NOT_SAVED)


def _mean_direction(x_btd: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cosine of unit states `(B, T, D)` with their mean direction, `(B,)`, and that direction, `(B, D)`."""
    mean_bd = x_btd.mean(1)
    # The mean of the cosines with the mean direction is the length of the mean.
    return torch.linalg.vector_norm(mean_bd, dim=-1), unit(mean_bd)


def toward(before_btd: Tensor, after_btd: Tensor, target_bd: Tensor) -> Tensor:
    """Mean cosine `(B,)` of the updates of unit states with the direction from each state to `target` on the sphere.

    A token that does not move, or that already points to the target, counts as 0.
    """
    update_btd = after_btd - before_btd
    cosine_bt = torch.linalg.vecdot(before_btd, target_bd[:, None])
    wanted_btd = target_bd[:, None] - cosine_bt[..., None] * before_btd
    return torch.linalg.vecdot(unit(update_btd), unit(wanted_btd)).mean(1)


class Gathering:
    """Streaming alignment of tokens with their mean direction, on at most `num_keep` images spread over the set."""

    def __init__(self, groups: TokenGroups, num_keep: int = GATHERING_IMAGES, num_images: int | None = None) -> None:
        self.groups = groups
        self._subset = EvenSubset(num_keep, num_images)
        self._spans = {name: s for name, s in measured_groups(groups).items() if s.stop - s.start > 1}
        self._alignment, self._toward = ImageMoments(), ImageMoments()

    @torch.no_grad()
    def update(self, states: Sequence[Tensor], places: Sequence[int] | None = None) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`, of the images at `places` of the stream."""
        check_states(states, num_tokens=self.groups.num_tokens)
        rows = self._subset.pick(len(states[0]), places)
        if not rows or not self._spans:
            return
        aligned, turned = [], []
        before = None
        targets: list[Tensor] = []
        for state in states:
            now = unit(take_rows(state, rows))
            parts = [now[:, span] for span in self._spans.values()]
            if before is not None:
                turned.append(torch.stack([toward(*pair) for pair in zip(before, parts, targets)], 1))
            found = [_mean_direction(part) for part in parts]
            aligned.append(torch.stack([cosine_b for cosine_b, _ in found], 1))
            before, targets = parts, [target for _, target in found]
        self._alignment.update(torch.stack(aligned, -1), places_of(rows, places))
        self._toward.update(torch.stack(turned, -1), places_of(rows, places))

    def reduce(self, ranks: Ranks) -> None:
        reduce_all(ranks, self._alignment, self._toward)

    def result(self) -> GatheringResult:
        if not self._spans:
            return GatheringResult({}, {})
        aligned, turned = self._alignment.result(), self._toward.result()
        return GatheringResult(
            {name: aligned[i] for i, name in enumerate(self._spans)},
            {name: turned[i] for i, name in enumerate(self._spans)},
            self._alignment.kept(),
            self._toward.kept(),
        )
