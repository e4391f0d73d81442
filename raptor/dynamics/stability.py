"""Stability: perturb a state at layer l, follow it to the end, measure how far the path turns away.

A perturbation has a uniform direction. Its size is `eps` times each token's norm (`relative`), or it is the paper's
`eps u` with `u ~ N(0, I)` (`paper`). `d = 1 - <x̂_L', x̂_L>` is quadratic in eps, so `d / eps` depends on eps and is
reported with it; the main figure is `angle / eps`, which does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raptor.devices import ONE_PROCESS, Ranks
from raptor.dynamics.states import measured_groups, unit, unit_angle
from raptor.streaming import NOT_SAVED, ImageMoments, Record, Reservoir, Spread, jsonable
from raptor.vit.trajectory import at_least_float32, check_states
from raptor.vit.view import TokenGroups

EPS = (1e-3, 1e-2, 1e-1)
KINDS = ("relative", "paper")
_KEPT = 256  # images whose single paths are kept for bootstraps

_RunFrom = Callable[[int, Tensor], Sequence[Tensor]]


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
    path: np.ndarray
    num_block_calls: int
    noise_floor: np.ndarray
    angles: np.ndarray | None = field(default=None, metadata=NOT_SAVED)
    paths: np.ndarray | None = field(default=None, metadata=NOT_SAVED)

    def log_slope(self) -> np.ndarray:
        """Slope of log(angle / eps) against the injection layer, least squares: `(targets, groups, eps)`."""
        centred = np.array(self.layers) - np.mean(self.layers)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(self.angle_per_eps.mean) @ centred / (centred @ centred)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"log_slope": jsonable(self.log_slope())}


def perturbation(
    state_btd: Tensor, eps: float, span: slice, generator: torch.Generator, kind: str = "relative"
) -> Tensor:
    """What to add to `(B, T, D)` to perturb the tokens of `span`; zero elsewhere. The draw covers all tokens."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of perturbation {kind!r}: choose from {', '.join(KINDS)}")
    x_btd = at_least_float32(state_btd)
    noise = torch.randn(x_btd.shape, generator=generator, device=x_btd.device, dtype=x_btd.dtype)
    if kind == "relative":
        norm = torch.linalg.vector_norm(x_btd, dim=-1, keepdim=True)
        noise = noise * (norm / torch.linalg.vector_norm(noise, dim=-1, keepdim=True))
    mask = torch.zeros(x_btd.shape[1], 1, device=x_btd.device, dtype=x_btd.dtype)
    mask[span] = eps
    return noise * mask


def seeded_generator(device: torch.device, *key: int) -> torch.Generator:
    """A generator that depends only on the key."""
    state = np.random.SeedSequence(key).generate_state(2)
    return torch.Generator(device).manual_seed((int(state[0]) << 31) ^ int(state[1]))


def _path_angles(path: Sequence[Tensor], units: Sequence[Tensor], spans: Sequence[slice]) -> Tensor:
    """Angle and `1 - cos` between a path and unit states, averaged over each span's tokens: `(B, 2, spans, layers)`."""
    by_layer = []
    for perturbed, clean in zip(path, units, strict=True):
        angle_bt = unit_angle(unit(perturbed), clean)
        both_b2t = torch.stack([angle_bt, 2 * torch.sin(angle_bt / 2).square()], 1)
        by_layer.append(torch.stack([both_b2t[..., span].mean(-1) for span in spans], -1))
    return torch.stack(by_layer, -1)


class Stability:
    """Streaming sensitivity by injection layer, size and token group.

    targets: what is perturbed, `all` or group names; by default `all` and every group present.
    layers: injection layers, by default 0..L-1. Every (target, eps, layer) costs one pass from that layer.
    """

    def __init__(
        self,
        groups: TokenGroups,
        eps: Sequence[float] = EPS,
        targets: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        kind: str = "relative",
        seed: int = 0,
    ) -> None:
        self._spans = measured_groups(groups)
        self.groups = groups
        self.eps = sorted({float(e) for e in eps})  # claims rest on the smallest, which comes first
        self.targets = list(targets) if targets is not None else list(self._spans)
        self.layers = list(layers) if layers is not None else None
        self.kind = kind
        self.seed = seed
        self.num_batches = 0
        self.num_block_calls = 0
        self._check()
        self._last, self._path = ImageMoments(), ImageMoments(reservoir=0)
        self._paths = Reservoir(_KEPT)
        self._floor: Tensor | None = None

    def _check(self) -> None:
        absent = [name for name in self.targets if name not in self._spans]
        if absent:
            raise ValueError(f"cannot perturb {', '.join(absent)}: this model has {', '.join(self._spans)}")
        if not self.eps or min(self.eps) <= 0:
            raise ValueError(f"perturbation sizes must be positive, got {self.eps}")
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of perturbation {self.kind!r}: choose from {', '.join(KINDS)}")

    @torch.no_grad()
    def update(self, states: Sequence[Tensor], run_from: _RunFrom, ranks: Ranks = ONE_PROCESS) -> None:
        """Perturb a batch with every target, size and layer, and follow each path to the last layer.

        states: `a_0..a_L` in fp32, from the same code as `run_from`. run_from: layer l and a state `(B, T, D)` to the
        list of states l..L, the given one first. ranks: they share the paths; each gives the same batch, and has the
        response to all of them in the end.
        """
        check_states(states, num_tokens=self.groups.num_tokens)
        if self.layers is None:
            self.layers = list(range(len(states) - 1))
        if not all(0 <= layer < len(states) for layer in self.layers):
            raise ValueError(f"injection layers {self.layers} do not fit a model of {len(states) - 1} blocks")
        units = [unit(state) for state in states]
        if self._floor is None:
            first = at_least_float32(states[0])
            generator = seeded_generator(first.device, self.seed)
            ends = run_from(0, first + perturbation(first, torch.finfo(first.dtype).eps, slice(None), generator))[-1:]
            self._floor = _path_angles(ends, units[-1:], list(self._spans.values()))[:, 0].mean(0)[:, 0]
        both = self._respond(states, units, run_from, ranks)
        self._last.update(both[..., -1])
        self._path.update(both[:, 0])
        self._paths.add(both[:, 0, 0, :, 0].clone())
        self.num_block_calls = self.count_block_calls(len(states) - 1)
        self.num_batches += 1

    def count_block_calls(self, num_blocks: int) -> int:
        """Blocks run on perturbed states for each batch of a model of `num_blocks`."""
        layers = range(num_blocks) if self.layers is None else self.layers
        return sum(num_blocks - layer for layer in layers) * len(self.eps) * len(self.targets)

    def _respond(self, states: Sequence[Tensor], units: list[Tensor], run_from: _RunFrom, ranks: Ranks) -> Tensor:
        """Response of every image to each target, size and layer: `(B, 2, targets, groups, eps, layers, L+1)`.

        A rank follows its share of the paths; the others are 0 there, and the sum over ranks has all of them.
        """
        assert self.layers is not None
        shape = (len(states[0]), 2, len(self.targets), len(self._spans), len(self.eps), len(self.layers), len(states))
        both = torch.zeros(shape, dtype=units[0].dtype, device=units[0].device)
        for t, target in enumerate(self.targets):
            for e in range(len(self.eps)):
                for i, layer in enumerate(self.layers):
                    if (t + e + i) % ranks.size == ranks.rank:
                        both[:, :, t, :, e, i] = self._follow(states, units, run_from, target, e, layer)
        return ranks.add_(both)

    def _follow(
        self, states: Sequence[Tensor], units: list[Tensor], run_from: _RunFrom, target: str, eps_index: int, layer: int
    ) -> Tensor:
        """Angle and `1 - cos` along one perturbed path, NaN before `layer`: `(B, 2, groups, L+1)`."""
        state_btd = at_least_float32(states[layer])
        # The target is not in the key, so that every target gets the same directions.
        generator = seeded_generator(state_btd.device, self.seed, layer, eps_index, self.num_batches)
        added = perturbation(state_btd, self.eps[eps_index], self._spans[target], generator, self.kind)
        path = run_from(layer, state_btd + added)
        if len(path) != len(states) - layer:
            raise ValueError(f"run_from({layer}, ·) gave {len(path)} states, expected {len(states) - layer}")
        angles = _path_angles(path, units[layer:], list(self._spans.values()))
        return torch.nn.functional.pad(angles, (layer, 0), value=float("nan"))

    def result(self) -> StabilityResult:
        last = self._last.result()
        assert self.layers is not None and self._floor is not None
        per_eps = np.array(self.eps)[:, None]
        return StabilityResult(
            targets=self.targets,
            groups=list(self._spans),
            eps=self.eps,
            layers=self.layers,
            kind=self.kind,
            angle_per_eps=_divided(last[0], per_eps),
            d_per_eps=_divided(last[1], per_eps),
            path=self._path.result().mean,
            num_block_calls=self.num_block_calls,
            noise_floor=self._floor.cpu().numpy(),
            angles=self._last.kept()[:, 0],
            paths=self._paths.values().cpu().numpy().astype(np.float64),
        )


def _divided(spread: Spread, by: np.ndarray) -> Spread:
    std = None if spread.std is None else spread.std / by
    quantiles = None if spread.quantiles is None else spread.quantiles / by
    return Spread(spread.mean / by, std, quantiles, spread.num_images)
