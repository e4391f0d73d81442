"""Fixed points of tied blocks: each phase's block is repeated past its n_j steps.

The block is iterated from the state that ends its phase, with the depth's row held at the last one of the phase, and
with the depth continuing where the conditioning extends past it (the paper's depth MLP). A path is judged by the turn
per step of the state after the final norm, which is what a head reads:

- `settled`: the turn dies out, at least twice as much as on the same path of the untrained twin. The residual stream of
  any ViT grows, so its direction turns ever less without any attractor: the twin shows how much of that there is.
- `periodic`: the state keeps turning and returns to where it was some steps before.
- `diverging`: the turn grows, or the state is not finite.
- `drifting`: none of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from raptor.data.stream import Batch
from raptor.devices import full_precision
from raptor.dynamics.states import unit, unit_angle
from raptor.phases.cut import Phases
from raptor.streaming import ImageMoments, Record, Spread
from raptor.surrogate.surrogate import Step, surrogate_spec
from raptor.vit.calls import first_tensor
from raptor.vit.trajectory import at_least_float32
from raptor.vit.view import ViT

KINDS = ("settled", "periodic", "drifting", "diverging")
_SETTLED = 0.1  # of the first turn, below which the last turns count as settled
_STILL = 1e-4  # radians a step, below which a turn may be rounding
_RETURNED = 0.1  # of a step's turn, by which a returning state may miss its earlier place
_GROWN = 2.0  # times the first turn, above which the last turns count as diverging


@dataclass
class PhaseContinuation(Record):
    """One phase, its block iterated on with the depth `held` or `continuing`.

    turn: `(num_extra,)`, mean angle over all tokens between successive states after the final norm. norm:
    `(num_extra + 1,)`, mean norm of the tokens before the final norm, from the end of the phase on. decay: the turn of
    the last quarter of the steps over that of the first step. share: of the images, by kind.
    """

    phase: int
    depth: str
    turn: Spread
    norm: Spread
    decay: Spread
    share: dict[str, float]


@dataclass
class FixedPointsResult(Record):
    """Every phase's block iterated `num_extra` steps past its end; `has_twin`: settling was judged against a twin."""

    phases: list[int]
    num_extra: int
    has_twin: bool
    continuations: list[PhaseContinuation]
    num_images: int

    def of(self, phase: int, depth: str = "held") -> PhaseContinuation:
        """The continuation of a phase (1..k)."""
        return next(c for c in self.continuations if (c.phase, c.depth) == (phase, depth))


def measure_fixed_points(
    surrogate: ViT,
    batches: Iterable[Batch],
    *,
    num_extra: int = 32,
    twin: FixedPointsResult | None = None,
) -> FixedPointsResult:
    """Iterate each tied block of a surrogate past its phase and say whether it settles.

    Args:
        batches: such as `raptor.data.iterate(...)`; memory grows with their size, not with their number.
        num_extra: steps past the end of each phase, at least 8. Periods up to half of it are found.
        twin: the result for an untrained surrogate with the same phases. Without it a path is called settled by its own
            turn alone.
    """
    spec = surrogate_spec(surrogate)
    phases = list(spec.phases)
    spans = Phases.from_lengths(phases).spans
    if num_extra < 8:
        raise ValueError(f"at least eight further steps are needed to judge a path, got {num_extra}")
    if twin is not None and twin.phases != phases:
        raise ValueError(f"the untrained twin has the phases {twin.phases}, the surrogate {phases}")
    # A table has no rows past the last depth, and without conditioning there is no depth to continue.
    depths = ["held"]
    if spec.conditioning == "mlp":
        depths.append("continuing")
    continuations: dict[tuple[int, str], Continuation] = {}
    for phase in range(1, len(phases) + 1):
        for depth in depths:
            decay = None
            if twin is not None:
                decay = float(twin.of(phase, depth).decay.mean)
            continuations[phase, depth] = Continuation(num_extra, decay)
    with torch.no_grad(), full_precision(surrogate.device):
        for batch in batches:
            a_0, context = surrogate.embed(batch.images.to(surrogate.device))
            states = surrogate.unroll(a_0, context)
            for (phase, depth), continuation in continuations.items():
                _, last = spans[phase - 1]
                path = _further_states(surrogate, last, depth, num_extra, states[last], context.calls[last - 1])
                continuation.update(states[last], path, surrogate.norm)
    found = [continuation.result(phase, depth) for (phase, depth), continuation in continuations.items()]
    return FixedPointsResult(phases, num_extra, twin is not None, found, found[0].turn.num_images)


def _further_states(
    surrogate: ViT, last: int, depth: str, num_extra: int, state_btd: Tensor, call: tuple[tuple[Any, ...], Any]
) -> Iterator[Tensor]:
    """States of the block that produces layer `last`, applied again and again to the state at that layer."""
    # The tied weights at a depth of our choice, without a change of the surrogate itself.
    block = surrogate.blocks[last - 1]
    assert isinstance(block, Step)
    args, kwargs = call
    for extra in range(1, num_extra + 1):
        layer = last
        if depth == "continuing":
            layer += extra
        step = Step(block.tied, layer).to(surrogate.device)
        state_btd = first_tensor(step(state_btd, *args, **kwargs))
        yield state_btd


class Continuation:
    """Paths of one repeated map over batches of images; `twin_decay` is the mean decay of the untrained twin."""

    def __init__(self, num_extra: int, twin_decay: float | None = None) -> None:
        self.num_extra = num_extra
        self.num_late = num_extra // 4
        self.twin_decay = twin_decay
        self._turn = ImageMoments()
        self._norm = ImageMoments()
        self._decay = ImageMoments()
        self._counts = dict.fromkeys(KINDS, 0)

    def update(self, start_btd: Tensor, path: Iterable[Tensor], final_norm: Callable[[Tensor], Tensor]) -> None:
        """Add the paths of a batch: `num_extra` states `(B, T, D)` that follow `start`."""
        # The final norm comes first because its gains weight the coordinates: the head sees nothing else.
        states = []
        norms = []
        for state_btd in chain([start_btd], path):
            states.append(unit(final_norm(state_btd)))
            norms.append(torch.linalg.vector_norm(at_least_float32(state_btd), dim=-1).mean(1))
        turn_be = torch.stack([_turn(before, now) for before, now in pairwise(states)], 1)
        late_b = turn_be[:, -self.num_late :].mean(1)
        decay_b = late_b / turn_be[:, 0].clamp_min(torch.finfo(turn_be.dtype).tiny)
        self._turn.update(turn_be)
        self._norm.update(torch.stack(norms, 1))
        self._decay.update(decay_b)
        # A periodic path returns to its state of p steps before; the best p >= 2 decides, since p is not known.
        misses = []
        for period in range(2, self.num_extra // 2 + 1):
            # Only the late states: a path may take some steps to its cycle.
            late = range(len(states) - self.num_late, len(states))
            misses.append(torch.stack([_turn(states[t - period], states[t]) for t in late]).mean(0))
        miss_b = torch.stack(misses).amin(0)
        for late, decay, miss in zip(late_b.tolist(), decay_b.tolist(), miss_b.tolist()):
            self._counts[self._kind(late, decay, miss)] += 1

    def _kind(self, late: float, decay: float, miss: float) -> str:
        if not math.isfinite(late):
            return "diverging"
        # Where both turns are rounding, their ratio means nothing.
        if late < _STILL:
            return "settled"
        # A twin that diverges is not a control.
        limit = _SETTLED
        if self.twin_decay is not None and math.isfinite(self.twin_decay):
            limit = min(_SETTLED, self.twin_decay / 2)
        if decay < limit:
            return "settled"
        if miss < _RETURNED * late:
            return "periodic"
        if decay > _GROWN:
            return "diverging"
        return "drifting"

    def result(self, phase: int, depth: str) -> PhaseContinuation:
        turn = self._turn.result()
        share = {kind: count / turn.num_images for kind, count in self._counts.items()}
        return PhaseContinuation(phase, depth, turn, self._norm.result(), self._decay.result(), share)


def _turn(before_btd: Tensor, now_btd: Tensor) -> Tensor:
    """Mean angle `(B,)` over tokens between unit states."""
    return unit_angle(before_btd, now_btd).mean(1)
