"""Phases run shorter and longer, and a surrogate run past its last layer.

As for swaps, the model's own blocks run from the clean state where the intervention begins, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from raptor.devices import full_precision
from raptor.dynamics.effects import Effects, Predict, clean_batches, run_blocks
from raptor.dynamics.states import angle, by_group, mean_by_group
from raptor.phases.cut import check_phases
from raptor.streaming import ImageMoments, Record, Spread
from raptor.surrogate.surrogate import Step, surrogate_spec
from raptor.vit.calls import first_tensor
from raptor.vit.trajectory import at_least_float32
from raptor.vit.view import ViT

_PAST_THE_LAST = {
    "table": "the table holds its last row",
    "mlp": "the MLP is evaluated at depths past the last",
    "none": "the block knows no depth",
}


@dataclass
class Repetition(Record):
    """Each phase run n-1, n, n+1 and 2n times, the phases after it as usual.

    A teacher's phase is run n + m times by running its last m blocks once more; a surrogate's by repeating its last
    step, at that step's depth. n - 1 leaves out the last.
    counts: by phase. angle: by phase and group, the turn of the last state, `(counts,)`. agreement: by phase, or None.
    """

    phases: list[int]
    counts: list[list[int]]
    angle: list[dict[str, Spread]]
    agreement: list[Spread] | None
    num_images: int

    def turn(self, phase: int, count: int, group: str = "all") -> float:
        """The mean turn of the last state when `phase` (0..k-1) runs `count` times."""
        return float(self.angle[phase][group].mean[self.counts[phase].index(count)])

    def finding(self) -> str:
        extra = []
        fewer = []
        twice = []
        kept = []
        for j, n in enumerate(self.phases):
            extra.append(self.turn(j, n + 1))
            fewer.append(self.turn(j, n - 1))
            twice.append(self.turn(j, 2 * n))
            if self.agreement is not None:
                kept.append(self.agreement[j].mean[self.counts[j].index(2 * n)])
        text = f"One step more turns the last state by {_range(extra)} rad, one fewer by {_range(fewer)}"
        text += f", twice as many by {_range(twice)}; phase {int(np.argmax(twice)) + 1} bears it least"
        if kept:
            text += f". With a phase doubled {_range(kept, '.0%')} of predictions stay"
        return text + "."


def measure_repetition(vit: ViT, images: Tensor, phases: Sequence[int], predict: Predict | None = None) -> Repetition:
    """Run each phase n-1, n, n+1 and 2n times on `images`."""
    phases = check_phases(vit, phases)
    counts = []
    effects = []
    for n in phases:
        # A set, because for a phase of one block n + 1 is 2 n.
        counts.append(sorted({n - 1, n, n + 1, 2 * n}))
        effects.append(Effects(vit, predict))
    with full_precision(vit.device):
        for states, context in clean_batches(vit, images):
            for j, (first, last) in enumerate(phases.spans):
                effects[j].clean(states[-1])
                for count in counts[j]:
                    left_btd = run_blocks(vit, states[first - 1], context, repetition_plan(vit, (first, last), count))
                    effects[j].add(vit.unroll(left_btd, context, start=last)[-1])
                effects[j].end()
    angles = []
    agreements = []
    for of_phase in effects:
        turns, stays = of_phase.result()
        angles.append(turns)
        if stays is not None:
            agreements.append(stays)
    return Repetition(list(phases), counts, angles, agreements or None, len(images))


def repetition_plan(vit: ViT, span: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """Blocks of a phase (first and last layer) when it runs `count` times."""
    first, last = span
    num = last - first + 1
    layers = list(range(first, min(last, first + count - 1) + 1))
    num_again = max(0, count - num)
    # A teacher has no step that repeats: its last blocks in their order come nearest to one.
    if vit.phases is None:
        # More further steps than the phase has blocks go round it again, not into the phase before.
        layers += range(last - num_again % num + 1, last + 1)
        layers += list(range(first, last + 1)) * (num_again // num)
    else:
        layers += [last] * num_again
    return list(zip(layers, layers))


@dataclass
class Extrapolation(Record):
    """A surrogate run past its last layer L with its last tied block: everything here is extrapolation.

    layers: L..L+extra. By group: norm and angle to `a_L` at each of them; speed of each step, `(extra,)`.
    agreement: with the prediction at L, or None. conditioning: what the depth does past L.
    """

    layers: list[int]
    norm: dict[str, Spread]
    angle: dict[str, Spread]
    speed: dict[str, Spread]
    agreement: Spread | None
    conditioning: str
    num_images: int

    def __post_init__(self) -> None:
        # A null in JSON becomes a number without axes, which would fail only where it is drawn.
        for spread in (*self.norm.values(), *self.angle.values(), *self.speed.values()):
            if spread.mean.ndim != 1:
                raise ValueError("Input should have a value per layer")

    def finding(self) -> str:
        speed = self.speed["all"].mean
        norm = self.norm["all"].mean
        settling = "turns faster"
        if speed[-1] < speed[0] / 2:
            settling = "settles"
        elif speed[-1] < 2 * speed[0]:
            settling = "keeps turning"
        text = f"Past layer {self.layers[0]} the state {settling}: {speed[0]:.3f} rad at the first extra step, "
        text += f"{speed[-1]:.3f} at layer {self.layers[-1]}, {self.angle['all'].mean[-1]:.2f} rad away in all, "
        text += f"norm x{norm[-1] / norm[0]:.2f}"
        if self.agreement is not None:
            text += f"; {self.agreement.mean[-1]:.0%} of predictions stay"
        return text + " (extrapolation)."


def measure_extrapolation(
    vit: ViT, images: Tensor, num_extra: int | None = None, predict: Predict | None = None
) -> Extrapolation:
    """Run a surrogate `num_extra` steps past its L layers (by default L more) on `images`."""
    spec = surrogate_spec(vit)
    if num_extra is None:
        num_extra = vit.num_layers
    if num_extra < 1:
        raise ValueError(f"extrapolation needs at least one extra step, got {num_extra}")
    last = vit.blocks[-1]
    assert isinstance(last, Step)
    layers = list(range(vit.num_layers, vit.num_layers + num_extra + 1))
    # A step for each further depth: the block is the same, and its conditioning depends on the depth.
    steps = [Step(last.tied, layer).to(vit.device) for layer in layers[1:]]
    effects = Effects(vit, predict)
    norms = ImageMoments()
    speeds = ImageMoments()
    with full_precision(vit.device):
        for states, context in clean_batches(vit, images):
            args, kwargs = context.calls[-1]
            # The arguments of the last call hold for the further steps too: positions do not change with depth.
            path = [states[-1]]
            for step in steps:
                path.append(first_tensor(step(path[-1], *args, **kwargs)))
            effects.clean(path[0])  # layer L itself is the first entry: turn 0, every prediction kept
            norm_bg = []
            for state_btd in path:
                effects.add(state_btd)
                norm_bt = torch.linalg.vector_norm(at_least_float32(state_btd), dim=-1)
                norm_bg.append(mean_by_group(norm_bt, effects.spans))
            effects.end()
            speed_bg = []
            for before_btd, now_btd in pairwise(path):
                speed_bg.append(mean_by_group(angle(now_btd, before_btd), effects.spans))
            norms.update(torch.stack(norm_bg, -1))
            speeds.update(torch.stack(speed_bg, -1))
    conditioning = _PAST_THE_LAST[spec.conditioning]
    if spec.adapters:
        conditioning += "; the adapters are those of the last depth"
    turns, stays = effects.result()
    return Extrapolation(
        layers=layers,
        norm=by_group(norms.result(), effects.spans),
        angle=turns,
        speed=by_group(speeds.result(), effects.spans),
        agreement=stays,
        conditioning=conditioning,
        num_images=len(images),
    )


def _range(values: Sequence[float], form: str = ".2f") -> str:
    low = format(min(values), form)
    high = format(max(values), form)
    if low == high:
        return low
    return f"{low} to {high}"
