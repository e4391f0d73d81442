"""Direction along depth: norms, convergence and speed of tokens, and whether they turn toward their mean.

Per token, then averaged over the tokens of a group: the norm `|x_l|`, `gamma_l = <x̂_l, x̂_L>` and the angle `s_l`
between `x̂_l` and `x̂_(l+1)`. The variance of the speed over tokens and images has two parts: within images and between
them.

Gathering, for the patches (or registers) of one image: the mean direction `m_l` of a group is the normalised mean of
its unit states. `alignment` is the mean cosine of the tokens with it. `toward` is the mean cosine of a token's update
`x̂_(l+1) - x̂_l` with the direction in which it would have to turn to reach `m_l`: `m_l` without its part along `x̂_l`.
Positive values mean that tokens gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raptor.devices import Ranks
from raptor.dynamics.states import EvenSubset, by_group, mean_by_group, measured_groups, take_rows, unit
from raptor.streaming import Array, ImageMoments, NotSaved, Record, Spread, reduce_all
from raptor.vit.groups import TokenGroups
from raptor.vit.trajectory import at_least_float32, check_states

GATHERING_IMAGES = 256


@dataclass
class DirectionResult(Record):
    """By group: `norm` and `gamma` have `L+1` values (layers 0..L), `speed` has `L` (step l to l+1, at index l).

    speed_variance: of the speed in rad^2, `L` values each; its two parts add up to the variance over all tokens.
      `tokens`: within an image, mean over images. `images`: of the images' mean speeds.
    values: `(N, 4, groups, L+1)`, norm, gamma, speed and squared speed of single images (the speeds from index 1 on),
      for bootstraps; not saved.
    """

    norm: dict[str, Spread]
    gamma: dict[str, Spread]
    speed: dict[str, Spread]
    speed_variance: dict[str, dict[str, Array]] = field(default_factory=dict)
    values: NotSaved[np.ndarray | None] = None


class Direction:
    """Streaming norms, gamma and speed by token group."""

    def __init__(self, groups: TokenGroups) -> None:
        self.groups = groups
        self._spans = measured_groups(groups)
        self._moments = ImageMoments()

    @torch.no_grad()
    def update(self, states: Sequence[Tensor], places: Sequence[int] | None = None) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`, of the images at `places` of the stream."""
        check_states(states, num_tokens=self.groups.num_tokens)
        last_btd = unit(states[-1])
        # No state comes before the first one. Its speed of 0 is dropped in the result.
        before_btd = unit(states[0])
        means = []
        for state_btd in states:
            x_btd = at_least_float32(state_btd)
            norm_bt = torch.linalg.vector_norm(x_btd, dim=-1)
            now_btd = x_btd / norm_bt.clamp_min(torch.finfo(x_btd.dtype).tiny)[..., None]
            gamma_bt = torch.linalg.vecdot(now_btd, last_btd)
            # From the distance of the unit states: an arccos of the cosine loses half the digits of a small angle.
            chord_bt = torch.linalg.vector_norm(now_btd - before_btd, dim=-1)
            speed_bt = 2 * torch.asin((chord_bt / 2).clamp(max=1))
            values_b4t = torch.stack([norm_bt, gamma_bt, speed_bt, speed_bt.square()], 1)
            means.append(mean_by_group(values_b4t, self._spans))
            before_btd = now_btd
        self._moments.update(torch.stack(means, -1), places)

    def reduce(self, ranks: Ranks) -> None:
        self._moments.reduce(ranks)

    def result(self) -> DirectionResult:
        spread = self._moments.result()  # (4, groups, L+1)
        speed = by_group(spread[2][:, 1:], self._spans)
        squares = by_group(spread[3][:, 1:], self._spans)
        variance: dict[str, dict[str, Array]] = {}
        for name, own in speed.items():
            assert own.std is not None
            between = own.std**2
            # The mean of the variances within images is what is left of the variance over all tokens. Rounding may
            # leave it just below 0.
            within = squares[name].mean - own.mean**2 - between
            variance[name] = {"tokens": np.maximum(within, 0.0), "images": between}
        norm = by_group(spread[0], self._spans)
        gamma = by_group(spread[1], self._spans)
        return DirectionResult(norm, gamma, speed, variance, self._moments.kept())


@dataclass
class GatheringResult(Record):
    """By group of two tokens or more: `alignment` has `L+1` values, `toward` has `L` (step l to l+1, at index l).

    alignments, towards: `(N, groups, L+1)` and `(N, groups, L)` of single images, for bootstraps; not saved.
    """

    alignment: dict[str, Spread]
    toward: dict[str, Spread]
    alignments: NotSaved[np.ndarray | None] = None
    towards: NotSaved[np.ndarray | None] = None


class Gathering:
    """Streaming alignment of tokens with their mean direction, on at most `num_keep` images spread over the set."""

    def __init__(self, groups: TokenGroups, num_keep: int = GATHERING_IMAGES, num_images: int | None = None) -> None:
        self.groups = groups
        self._subset = EvenSubset(num_keep, num_images)
        self._spans: dict[str, slice] = {}
        for name, span in measured_groups(groups).items():
            if span.stop - span.start > 1:  # a single token is its own mean
                self._spans[name] = span
        self._alignment = ImageMoments()
        self._toward = ImageMoments()

    @torch.no_grad()
    def update(self, states: Sequence[Tensor], places: Sequence[int] | None = None) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`, of the images at `places` of the stream."""
        check_states(states, num_tokens=self.groups.num_tokens)
        rows, kept_places = self._subset.pick(len(states[0]), places)
        if not rows or not self._spans:
            return
        unit_states = [unit(take_rows(state, rows)) for state in states]
        alignment_bgl = []
        toward_bgl = []
        for span in self._spans.values():
            alignment_bl = []
            toward_bl = []
            for l, x_btd in enumerate(unit_states):
                mean_bd = x_btd[:, span].mean(1)
                # The mean of the cosines with the mean direction is the length of the mean.
                alignment_bl.append(torch.linalg.vector_norm(mean_bd, dim=-1))
                if l + 1 < len(unit_states):
                    toward_bl.append(toward(x_btd[:, span], unit_states[l + 1][:, span], unit(mean_bd)))
            alignment_bgl.append(torch.stack(alignment_bl, -1))
            toward_bgl.append(torch.stack(toward_bl, -1))
        self._alignment.update(torch.stack(alignment_bgl, 1), kept_places)
        self._toward.update(torch.stack(toward_bgl, 1), kept_places)

    def reduce(self, ranks: Ranks) -> None:
        reduce_all(ranks, self._alignment, self._toward)

    def result(self) -> GatheringResult:
        if not self._spans:
            return GatheringResult({}, {})
        return GatheringResult(
            alignment=by_group(self._alignment.result(), self._spans),
            toward=by_group(self._toward.result(), self._spans),
            alignments=self._alignment.kept(),
            towards=self._toward.kept(),
        )


def toward(before_btd: Tensor, after_btd: Tensor, target_bd: Tensor) -> Tensor:
    """Mean cosine `(B,)` of the updates of unit states with the direction from each state to `target` on the sphere.

    A token that does not move, or that already points to the target, counts as 0.
    """
    update_btd = after_btd - before_btd
    cosine_bt = torch.linalg.vecdot(before_btd, target_bd[:, None])
    wanted_btd = target_bd[:, None] - cosine_bt[..., None] * before_btd
    return torch.linalg.vecdot(unit(update_btd), unit(wanted_btd)).mean(1)
