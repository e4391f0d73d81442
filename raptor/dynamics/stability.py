"""Stability: perturb a state at layer l, follow it to the end and measure how far the path turns away.

A perturbation has a uniform direction. Its size is `eps` times each token's norm (`relative`), or it is the paper's
`eps u` with `u ~ N(0, I)` (`paper`). `d = 1 - <x̂_L', x̂_L>` is quadratic in eps, so `d / eps` depends on eps and is
reported with it; the main figure is `angle / eps`, which does not.

Attraction within a phase: a state perturbed where the phase begins, followed to its end beside the clean one. The angle
between the two shrinks by `rate` a step, in the mean over the steps of the phase; below 1 the phase attracts. With the
paper's perturbation, whose size does not grow with the state, growing norms alone lower the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raptor.devices import ONE_PROCESS, Ranks
from raptor.dynamics.states import mean_by_group, measured_groups, unit, unit_angle
from raptor.phases.cut import Phases
from raptor.streaming import Array, ImageMoments, NotSaved, Record, Reservoir, Spread
from raptor.vit.groups import TokenGroups
from raptor.vit.trajectory import at_least_float32, check_states

EPS = (1e-3, 1e-2, 1e-1)
KINDS = ("relative", "paper")
_KEPT = 256  # images whose single paths are kept for bootstraps

_RunFrom = Callable[[int, Tensor], Sequence[Tensor]]
"""Injection layer l and a state `(B, T, D)` to the list of states l..L, the given one first."""


@dataclass
class StabilityResult(Record):
    """Responses to perturbations. Axes: target (what is perturbed), group (what is measured), eps, injection layer.

    angle_per_eps, d_per_eps: spreads of shape `(targets, groups, eps, layers)`, at the last layer.
    path: mean angle in radians at every layer, `(targets, groups, eps, layers, L+1)`, NaN before the injection.
      Its entry at the injection layer itself is the size of the perturbation as an angle.
    num_block_calls: blocks run on perturbed states, per batch; divided by L, the forward passes it costs (one more
      pass, of the first batch, is for the noise floor).
    noise_floor: `(groups,)`, angle at the last layer when the first state moves by one unit of rounding; angles that
      are not far above it mean nothing.
    log_slope: `(targets, groups, eps)`, slope of log(angle / eps) against the injection layer, least squares.
    angles: `(N, targets, groups, eps, layers)`, angle at the last layer of single images; not saved.
    paths: `(N, groups, layers, L+1)`, paths of single images under the first target and size; not saved.
    """

    targets: list[str]
    groups: list[str]
    eps: list[float]
    layers: list[int]
    kind: str
    angle_per_eps: Spread
    d_per_eps: Spread
    path: Array
    num_block_calls: int
    noise_floor: Array
    log_slope: Array
    angles: NotSaved[np.ndarray | None] = None
    paths: NotSaved[np.ndarray | None] = None


class Stability:
    """Streaming sensitivity by what is perturbed (all tokens and every group), size, and layer 0..L-1.

    Every target, size and layer costs one pass from that layer.
    """

    def __init__(self, groups: TokenGroups, eps: Sequence[float] = EPS, kind: str = "relative", seed: int = 0) -> None:
        self.groups = groups
        # Claims rest on the smallest size, which comes first.
        self.eps = sorted({float(e) for e in eps})
        self.kind = kind
        self.seed = seed
        self._spans = measured_groups(groups)
        if not self.eps or min(self.eps) <= 0:
            raise ValueError(f"perturbation sizes must be positive, got {self.eps}")
        if kind not in KINDS:
            raise ValueError(f"unknown kind of perturbation {kind!r}: choose from {', '.join(KINDS)}")
        self.num_batches = 0
        self.num_block_calls = 0
        self._last = ImageMoments()
        self._path = ImageMoments(reservoir=0)
        self._paths = Reservoir(_KEPT)
        self._floor: Tensor | None = None

    @torch.no_grad()
    def update(self, states: Sequence[Tensor], run_from: _RunFrom, ranks: Ranks = ONE_PROCESS) -> None:
        """Perturb a batch with every target, size and layer, and follow each path to the last layer.

        states: `a_0..a_L` in fp32, from the same code as `run_from`. ranks: they share the paths; each gives the same
        batch, and has the response to all of them in the end.
        """
        check_states(states, num_tokens=self.groups.num_tokens)
        self.layers = list(range(len(states) - 1))
        units = [unit(state) for state in states]
        if self._floor is None:
            # Turns no larger than what one unit of rounding in the first state causes are not due to the perturbation.
            first_btd = at_least_float32(states[0])
            generator = seeded_generator(first_btd.device, self.seed)
            rounding = perturbation(first_btd, torch.finfo(first_btd.dtype).eps, slice(None), generator)
            end = run_from(0, first_btd + rounding)[-1]
            self._floor = _path_angles([end], [units[-1]], self._spans)[:, 0].mean(0)[:, 0]
        # Response of every image to each target, size and layer: (B, 2, targets, groups, eps, layers, L+1).
        num_groups = len(self._spans)
        shape = (len(states[0]), 2, num_groups, num_groups, len(self.eps), len(self.layers), len(states))
        both = torch.zeros(shape, dtype=units[0].dtype, device=units[0].device)
        for t, target in enumerate(self._spans):
            for e in range(len(self.eps)):
                for layer in self.layers:
                    # A rank leaves 0 where another one follows the path, so the sum over ranks has every path.
                    if (t + e + layer) % ranks.size == ranks.rank:
                        both[:, :, t, :, e, layer] = self._follow(states, units, run_from, target, e, layer)
        both = ranks.add_(both)
        self._last.update(both[..., -1])
        self._path.update(both[:, 0])
        # A view would keep the responses to all targets and sizes alive.
        self._paths.add(both[:, 0, 0, :, 0].clone())
        self.num_block_calls = self.count_block_calls(len(self.layers))
        self.num_batches += 1

    def count_block_calls(self, num_blocks: int) -> int:
        """Blocks run on perturbed states for each batch of a model of `num_blocks`."""
        return num_blocks * (num_blocks + 1) // 2 * len(self.eps) * len(self._spans)

    def _follow(
        self, states: Sequence[Tensor], units: list[Tensor], run_from: _RunFrom, target: str, eps_index: int, layer: int
    ) -> Tensor:
        """Angle and `1 - cos` along one perturbed path, NaN before `layer`: `(B, 2, groups, L+1)`."""
        state_btd = at_least_float32(states[layer])
        # The target is not in the key, so that every target gets the same directions.
        generator = seeded_generator(state_btd.device, self.seed, layer, eps_index, self.num_batches)
        added = perturbation(state_btd, self.eps[eps_index], self._spans[target], generator, self.kind)
        angles = _path_angles(run_from(layer, state_btd + added), units[layer:], self._spans)
        return torch.nn.functional.pad(angles, (layer, 0), value=float("nan"))

    def result(self) -> StabilityResult:
        last = self._last.result()
        assert self._floor is not None
        per_eps = []
        for spread in (last[0], last[1]):
            assert spread.std is not None and spread.quantiles is not None
            eps = np.array(self.eps)[:, None]
            per_eps.append(Spread(spread.mean / eps, spread.std / eps, spread.quantiles / eps, spread.num_images))
        centred = np.array(self.layers) - np.mean(self.layers)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_slope = np.log(per_eps[0].mean) @ centred / (centred @ centred)
        return StabilityResult(
            targets=list(self._spans),
            groups=list(self._spans),
            eps=self.eps,
            layers=self.layers,
            kind=self.kind,
            angle_per_eps=per_eps[0],
            d_per_eps=per_eps[1],
            path=self._path.result().mean,
            num_block_calls=self.num_block_calls,
            noise_floor=self._floor.cpu().numpy(),
            log_slope=log_slope,
            angles=self._last.kept()[:, 0],
            paths=self._paths.values().cpu().numpy().astype(np.float64),
        )


def perturbation(
    state_btd: Tensor, eps: float, span: slice, generator: torch.Generator, kind: str = "relative"
) -> Tensor:
    """The perturbation `(B, T, D)` of the tokens of `span`, zero elsewhere."""
    x_btd = at_least_float32(state_btd)
    # Drawn for all tokens, so that a token gets the same direction whatever else is perturbed.
    noise = torch.randn(x_btd.shape, generator=generator, device=x_btd.device, dtype=x_btd.dtype)
    if kind == "relative":
        norm = torch.linalg.vector_norm(x_btd, dim=-1, keepdim=True)
        noise = noise * (norm / torch.linalg.vector_norm(noise, dim=-1, keepdim=True))
    mask = torch.zeros(x_btd.shape[1], 1, device=x_btd.device, dtype=x_btd.dtype)
    mask[span] = eps
    return noise * mask


def seeded_generator(device: torch.device, *key: int) -> torch.Generator:
    """A generator that depends only on the key."""
    # Neighbouring keys as plain seeds would give related streams; a SeedSequence mixes them.
    state = np.random.SeedSequence(key).generate_state(2)
    return torch.Generator(device).manual_seed((int(state[0]) << 31) ^ int(state[1]))


def _path_angles(path: Sequence[Tensor], units: Sequence[Tensor], spans: dict[str, slice]) -> Tensor:
    """Angle and `1 - cos` between a path and unit states, averaged over each group: `(B, 2, groups, layers)`."""
    by_layer = []
    for perturbed, clean in zip(path, units, strict=True):
        angle_bt = unit_angle(unit(perturbed), clean)
        # 1 - cos from the angle: the difference itself would cancel to 0 for small angles.
        both_b2t = torch.stack([angle_bt, 2 * torch.sin(angle_bt / 2).square()], 1)
        by_layer.append(mean_by_group(both_b2t, spans))
    return torch.stack(by_layer, -1)


@dataclass
class PhaseAttraction(Record):
    """One phase, from the state at layer `first` to that at layer `last`.

    angle: by group, mean angle in radians at layers first..last. rate: by group, its mean factor per step.
    """

    first: int
    last: int
    angle: dict[str, list[float]]
    rate: dict[str, float]


def measure_attraction(stability: StabilityResult, phases: Sequence[int]) -> list[PhaseAttraction]:
    """The attraction of each phase, with all tokens perturbed at the smallest size."""
    attraction = []
    # One size is enough: the angle is linear in it, as angle / eps shows.
    for place, first, last in phase_spans(stability, Phases.from_lengths(phases).lengths):
        path_gl = stability.path[0, :, 0, place, first : last + 1]
        angle = dict(zip(stability.groups, path_gl.tolist()))
        rate = dict(zip(stability.groups, contraction(path_gl).tolist()))
        attraction.append(PhaseAttraction(first, last, angle, rate))
    return attraction


def phase_spans(stability: StabilityResult, phases: Sequence[int]) -> list[tuple[int, int, int]]:
    """Position among the injection layers, first and last layer of each phase whose start was perturbed."""
    spans = []
    first = 0
    for length in phases:
        last = first + length
        if first in stability.layers:
            spans.append((stability.layers.index(first), first, last))
        first = last
    return spans


def contraction(path: np.ndarray) -> np.ndarray:
    """Mean factor per step along paths of angles `(..., n+1)`: the n-th root of the last over the first."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (path[..., -1] / path[..., 0]) ** (1 / (path.shape[-1] - 1))
