"""The numbers that decide the paper's claims about depth, each with a 95 % interval over images.

Keys read `measure.quantity.group`. A curve is first averaged over the resampled images, then the quantity is taken from
it. Late means the last third of the layers, early the first third. Differences compare groups on the same images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from raptor.certificate.bootstrap import interval, jackknife_interval, resampled_means
from raptor.certificate.verdict import Estimate
from raptor.devices import Ranks, full_precision
from raptor.dynamics.direction import DirectionResult, GatheringResult
from raptor.dynamics.dmd import NUMBERS, eigenvalue_numbers
from raptor.dynamics.modes import GroupModes, ModesResult
from raptor.dynamics.rank import RankResult
from raptor.dynamics.stability import StabilityResult, contraction, phase_spans
from raptor.phases.cut import Phases, num_partitions, sample_partitions
from raptor.streaming import ImageMoments

Array = NDArray[np.float64]
Estimates = dict[str, "ImageEstimate"]
_NUM_RESAMPLES = 1000
_NUM_PARTITIONS = 1000  # contiguous partitions that the phases are compared with


@dataclass(frozen=True)
class ImageEstimate(Estimate):
    """A number over `num_images` images with the ends of its 95 % interval."""

    num_images: int = 0


def estimate_all(
    direction: DirectionResult,
    rank: RankResult,
    modes: ModesResult,
    gathering: GatheringResult,
    stability: StabilityResult | None,
    phases: Phases | None,
) -> Estimates:
    """Every number whose measure still holds single images; numbers about phases only where these are given."""
    found = _direction(direction, phases) | _rank(rank) | _modes(modes) | _gathering(gathering)
    if stability is not None:
        found |= _stability(stability, phases)
    return found


class _Resampled:
    """Means of per-image values `(N, ...)` over the images (first), and over images drawn with replacement: `means`."""

    def __init__(self, values: Array) -> None:
        self.num_images = len(values)
        flat = values.reshape(len(values), -1)
        drawn = resampled_means(np.nan_to_num(flat), _NUM_RESAMPLES)
        drawn[:, np.isnan(flat).any(0)] = np.nan
        self.means = np.concatenate([flat.mean(0, keepdims=True), drawn]).reshape(-1, *values.shape[1:])

    def estimate(self, quantity: Array) -> ImageEstimate:
        """From a quantity of each of `means`, `(1 + R,)`."""
        drawn = quantity[1:]
        lower, upper = interval(drawn[np.isfinite(drawn)])
        return _estimate(quantity[0], lower, upper, self.num_images)

    def estimates(self, quantities: dict[str, Array]) -> Estimates:
        return {name: self.estimate(quantity) for name, quantity in quantities.items()}


def _estimate(value: float, lower: float, upper: float, num_images: int) -> ImageEstimate:
    known = [float(v) if np.isfinite(v) else None for v in (value, lower, upper)]
    return ImageEstimate(known[0], known[1], known[2], num_images)


def _late(curve: Array) -> Array:
    return curve[:, -max(1, curve.shape[1] // 3) :]


def _early(curve: Array) -> Array:
    return curve[:, : max(1, curve.shape[1] // 3)]


def _before_late(curve: Array) -> Array:
    return curve[:, : -max(1, curve.shape[1] // 3)]


def _direction(direction: DirectionResult, phases: Phases | None) -> Estimates:
    if direction.values is None:
        return {}
    resampled = _Resampled(direction.values)
    found: dict[str, Array] = {}
    # Of each group: gamma over the inner layers, mean speed, and late variance of the speed.
    arrival: dict[str, Array] = {}
    mean_speed: dict[str, Array] = {}
    late_variance: dict[str, Array] = {}
    for i, g in enumerate(direction.norm):
        curves = resampled.means[:, :, i]  # (1 + R, 4, L+1)
        norm = curves[:, 0]
        gamma = curves[:, 1]
        speed = curves[:, 2, 1:]
        variance = curves[:, 3, 1:] - speed**2
        arrival[g] = gamma[:, 1:-1].mean(1)
        mean_speed[g] = speed.mean(1)
        late_variance[g] = variance[:, max(1, variance.shape[1] // 3) :].mean(1)
        found[f"norm.ratio.{g}"] = norm[:, -1] / norm[:, 0]
        found[f"norm.smallest_step.{g}"] = (norm[:, 1:] / norm[:, :-1]).min(1)
        found[f"gamma.before_last.{g}"] = gamma[:, -2]
        found[f"gamma.inner_rise.{g}"] = _inner_rise(gamma)
        found[f"gamma.late_acceleration.{g}"] = _late_acceleration(gamma)
        found[f"speed.mean.{g}"] = mean_speed[g]
        found[f"speed.late_turn.{g}"] = _late_turn(speed)
        found[f"speed.late_turn_after_first.{g}"] = _late_turn(speed, skip=1)
        found[f"speed_variance.late.{g}"] = late_variance[g]
    if "patches" in arrival and "cls" in arrival:
        found["gamma.patches_minus_cls"] = arrival["patches"] - arrival["cls"]
    if "registers" in arrival:
        others = [g for g in ("patches", "cls") if g in arrival]
        earliest = np.max([arrival[g] for g in others], axis=0)
        slowest = np.min([mean_speed[g] for g in others], axis=0)
        least = np.min([late_variance[g] for g in others], axis=0)
        found["gamma.registers_minus_earliest_other"] = arrival["registers"] - earliest
        found["speed.registers_minus_slowest_other"] = mean_speed["registers"] - slowest
        found["speed_variance.registers_minus_least_other"] = late_variance["registers"] - least
    if phases is not None and 1 < len(phases) < phases.num_layers:
        speed = resampled.means[:, 2, list(direction.norm).index("all"), 1:]
        share = between_share(speed, phases.lengths)
        random_shares = [between_share(speed, other) for other in _other_partitions(phases)]
        found["speed.jump_at_boundaries"] = boundary_jump(speed, phases.lengths)
        found["speed.between_phases"] = share
        found["speed.between_phases_minus_random"] = share - np.mean(random_shares, axis=0)
    return resampled.estimates(found)


def _inner_rise(gamma: Array) -> Array:
    """Largest rise of gamma in a step before the last one, minus that of the last: negative without an S-shape."""
    rise = np.diff(gamma, axis=1)
    return rise[:, :-1].max(1) - rise[:, -1]


def _late_acceleration(gamma: Array) -> Array:
    """Mean rise of gamma per step over the last third of the steps, minus that before."""
    rise = np.diff(gamma, axis=1)
    before = _before_late(rise) if rise.shape[1] > 1 else rise
    return _late(rise).mean(1) - before.mean(1)


def _late_turn(speed: Array, skip: int = 0) -> Array:
    """Largest speed in the last quarter of the steps minus the largest one before, without the first `skip` steps."""
    first = speed.shape[1] - max(1, speed.shape[1] // 4)
    return speed[:, first:].max(1) - speed[:, skip:first].max(1, initial=0.0)


def boundary_jump(speed: Array, lengths: Sequence[int]) -> Array:
    """Mean change of the speed `(R, L)` from the last step of a phase to the next, minus that between other steps."""
    change = np.abs(np.diff(speed, axis=1))
    at = np.array(Phases.from_lengths(lengths).boundaries) - 1
    return change[:, at].mean(1) - np.delete(change, at, axis=1).mean(1)


def between_share(speed: Array, lengths: Sequence[int]) -> Array:
    """Share of the variance of the speeds `(R, L)` over steps that lies between phases; 1 for constant ones in each."""
    starts = np.cumsum([0, *lengths[:-1]])
    means = np.add.reduceat(speed, starts, axis=1) / np.array(lengths)
    centre = speed.mean(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return ((means - centre) ** 2 @ np.array(lengths)) / ((speed - centre) ** 2).sum(1)


def _other_partitions(phases: Phases) -> list[tuple[int, ...]]:
    """The other contiguous partitions into as many phases, or a sample of them."""
    num_layers = phases.num_layers
    k = len(phases)
    if num_partitions(num_layers, k) > _NUM_PARTITIONS:
        return [p.lengths for p in sample_partitions(num_layers, k, _NUM_PARTITIONS, seed=0, exclude=[phases])]
    partitions = []
    for inner in combinations(range(1, num_layers), k - 1):
        lengths = tuple(np.diff([0, *inner, num_layers]).tolist())
        if lengths != phases.lengths:
            partitions.append(lengths)
    return partitions


def _gathering(gathering: GatheringResult) -> Estimates:
    if gathering.alignments is None or gathering.towards is None:
        return {}
    alignment = _Resampled(gathering.alignments)
    toward = _Resampled(gathering.towards)
    found: Estimates = {}
    for i, g in enumerate(gathering.alignment):
        curve = alignment.means[:, i]
        late = curve[:, -1 - max(1, (curve.shape[1] - 1) // 3)]
        found[f"gathering.alignment_late_rise.{g}"] = alignment.estimate(curve[:, -1] - late)
        found[f"gathering.alignment_last.{g}"] = alignment.estimate(curve[:, -1])
        found[f"gathering.toward_late.{g}"] = toward.estimate(_late(toward.means[:, i]).mean(1))
    return found


def _stability(stability: StabilityResult, phases: Phases | None) -> Estimates:
    if stability.angles is None or stability.paths is None:
        return {}
    last = _Resampled(stability.angles)
    paths = _Resampled(stability.paths)
    layers = np.array(stability.layers, dtype=float)
    spans = [] if phases is None else phase_spans(stability, phases.lengths)
    found: Estimates = {}
    for i, g in enumerate(stability.groups):
        # All tokens are perturbed, then (own_) the measured group alone.
        targets = {"": 0}
        if g in stability.targets[1:]:
            targets["own_"] = stability.targets.index(g)
        for prefix, target in targets.items():
            if len(layers) > 2:
                log_angle = np.log(last.means[:, target, i, 0])
                for name, quantity in _sensitivity(layers, log_angle).items():
                    found[f"sensitivity.{prefix}{name}.{g}"] = last.estimate(quantity)
        found[f"path.kept_angle.{g}"] = paths.estimate(_kept_angle(paths.means[:, i], stability.layers))
        rates = []
        for place, first, end in spans:
            rate = contraction(paths.means[:, i, place, first : end + 1])
            found[f"attraction.layers_{first}_{end}.{g}"] = paths.estimate(rate)
            rates.append(rate)
        if len(rates) > 1:
            least = np.min(rates[:-1], axis=0)
            found[f"attraction.last_minus_least_before.{g}"] = paths.estimate(rates[-1] - least)
    return found


def _sensitivity(layers: Array, log_angle: Array) -> dict[str, Array]:
    """Slope and R2 of the line through the log angles `(1 + R, n)` against the injection layer, and the late slope."""
    slope, r2 = _line(layers, log_angle)
    late = slice(-max(2, len(layers) // 3), None)
    late_slope, _ = _line(layers[late], log_angle[:, late])
    return {"slope": slope, "r2": r2, "late_slope": late_slope}


def _line(x: Array, y: Array) -> tuple[Array, Array]:
    """Slope and R2 of the least-squares line through `(R, n)` values."""
    centred = x - x.mean()
    spread = y - y.mean(1, keepdims=True)
    slope = spread @ centred / (centred @ centred)
    with np.errstate(divide="ignore", invalid="ignore"):
        return slope, slope**2 * (centred @ centred) / (spread**2).sum(1)


def _kept_angle(path: Array, layers: Sequence[int]) -> Array:
    """Angle at the end over that at the injection, geometric mean over injections in the first half of depth."""
    num_blocks = path.shape[-1] - 1
    log_ratios = [
        np.log(path[:, i, -1] / path[:, i, layer]) for i, layer in enumerate(layers) if layer <= num_blocks // 2
    ]
    if not log_ratios:
        return np.full(len(path), np.nan)
    return np.exp(np.mean(log_ratios, axis=0))


def _rank(rank: RankResult) -> Estimates:
    if rank.values is None:
        return {}
    resampled = _Resampled(rank.values)
    found: dict[str, Array] = {}
    for i, g in enumerate(list(rank.stable_rank)[: rank.values.shape[2]]):
        for j, name in enumerate(("stable", "effective")):
            curve = resampled.means[:, j, i]
            found[f"rank.{name}_late.{g}"] = _late(curve).mean(1)
            found[f"rank.{name}_late_over_early.{g}"] = _late(curve).mean(1) / _early(curve).mean(1)
        coherence = resampled.means[:, 2, i]
        found[f"rank.coherence_late_peak.{g}"] = _late(coherence).max(1) - _before_late(coherence).max(1, initial=-1.0)
        found[f"rank.coherence_last.{g}"] = coherence[:, -1]
    return resampled.estimates(found)


def _modes(modes: ModesResult) -> Estimates:
    named = {name: group for name, group in modes.groups.items() if name != "all" or len(modes.groups) == 1}
    groups = list(named)
    parts = list(named.values())
    per_image = [part.ratio.values for part in parts if part.ratio is not None and part.ratio.values is not None]
    fits = [part.fits for part in parts if part.fits is not None]
    found: Estimates = {}
    if len(per_image) == len(parts):
        found |= _mode_numbers("dmd.ratio", groups, per_image)
        found |= _pooled(groups, parts)
    if len(fits) == len(parts):
        found |= _mode_numbers("dmd.rank10", groups, [eigenvalue_numbers(fit.eigenvalues) for fit in fits])
        found |= _singular(groups, [fit.singular_values for fit in fits])
    return found


def _mode_numbers(prefix: str, groups: Sequence[str], values: Sequence[Array]) -> Estimates:
    """From the numbers `(N, 5)` of each group."""
    resampled = _Resampled(np.stack(values, 1))
    return _compared(prefix, groups, resampled.means, resampled.estimate)


def _compared(
    prefix: str, groups: Sequence[str], numbers: Array, estimate: Callable[[Array], ImageEstimate]
) -> Estimates:
    """The numbers `(R, G, 5)` of each group, and the differences that the paper's order of groups is about."""
    found: Estimates = {}
    for i, g in enumerate(groups):
        for j, name in enumerate(NUMBERS):
            found[f"{prefix}.{name}.{g}"] = estimate(numbers[:, i, j])
    for g, number, name, extreme in (
        ("cls", "distance", "distance_minus_least_other", np.min),
        ("patches", "weighted_angle", "angle_minus_widest_other", np.max),
        ("patches", "median_modulus", "modulus_minus_least_other", np.min),
    ):
        difference = _minus_others(numbers[:, :, NUMBERS.index(number)], groups, g, extreme)
        if difference is not None:
            found[f"{prefix}.{g}_{name}"] = estimate(difference)
    return found


def _minus_others(values: Array, groups: Sequence[str], group: str, extreme: Callable[..., Array]) -> Array | None:
    """The values `(R, G)` of `group` minus the least or largest of the other groups; None where one is missing."""
    others = [i for i, other in enumerate(groups) if other != group]
    if group not in groups or not others:
        return None
    return values[:, groups.index(group)] - extreme(values[:, others], axis=1)


def _pooled(groups: Sequence[str], parts: Sequence[GroupModes]) -> Estimates:
    """The numbers of the pooled fit; their interval is that of a jackknife over parts of the images."""
    ratios = [part.ratio for part in parts if part.ratio is not None]
    folds = [ratio.folds for ratio in ratios if ratio.folds is not None]
    if len(folds) < len(parts):
        return {}
    whole = np.array([[ratio.pooled[name] for name in NUMBERS] for ratio in ratios])
    num_images = parts[0].pooled.reconstruction_error.num_images

    def estimate(quantity: Array) -> ImageEstimate:
        lower, upper = jackknife_interval(quantity[0], quantity[1:])
        return _estimate(quantity[0], lower, upper, num_images)

    return _compared("dmd.pooled", groups, np.concatenate([whole[None], np.stack(folds, 1)]), estimate)


def _singular(groups: Sequence[str], singular_values: Sequence[Array]) -> Estimates:
    """Effective number of singular values, exp of the entropy of their shares: large for a slow decay."""
    shares = np.stack([values / values.sum(1, keepdims=True) for values in singular_values], 1)
    resampled = _Resampled(np.exp(stats.entropy(shares, axis=-1)))
    found = {f"dmd.singular.{g}": resampled.means[:, i] for i, g in enumerate(groups)}
    for g, name, extreme in (("cls", "largest", np.max), ("patches", "least", np.min)):
        difference = _minus_others(resampled.means, groups, g, extreme)
        if difference is not None:
            found[f"dmd.singular.{g}_minus_{name}_other"] = difference
    return resampled.estimates(found)


class BlockContrast:
    """Layer-layer similarity of each image (cls and mean patch): within phases, over all pairs of layers, and that
    within phases minus that across them."""

    def __init__(self, phases: Phases) -> None:
        layers = torch.tensor([phases.phase_of(layer) for layer in range(1, phases.num_layers + 1)])
        same = (layers[:, None] == layers).fill_diagonal_(False)
        other = layers[:, None] != layers
        pairs = same | other
        within = same / same.sum()
        across = other / other.sum()
        self._weight_qll = torch.stack([within - across, within, pairs / pairs.sum()])
        self._moments = ImageMoments()

    @torch.no_grad()
    def update(self, means: dict[str, Tensor], places: Sequence[int] | None = None) -> None:
        """Add unit group means `(B, L+1, D)` of the images at `places` of the stream."""
        pooled = [means[name][:, 1:] for name in ("cls", "patches") if name in means]
        with full_precision(pooled[0].device):
            cosine_bll = torch.stack([x @ x.mT for x in pooled]).mean(0)
        self._weight_qll = self._weight_qll.to(cosine_bll, non_blocking=True)
        self._moments.update(torch.einsum("bij,qij->bq", cosine_bll, self._weight_qll), places)

    def reduce(self, ranks: Ranks) -> None:
        self._moments.reduce(ranks)

    def result(self) -> Estimates:
        resampled = _Resampled(self._moments.kept())
        names = ("within_minus_across", "within_phases", "all_pairs")
        return resampled.estimates({f"similarity.{name}": resampled.means[:, q] for q, name in enumerate(names)})
