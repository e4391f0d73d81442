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
from raptor.dynamics.modes import ModesResult
from raptor.dynamics.rank import RankResult
from raptor.dynamics.stability import StabilityResult, contraction, phase_spans
from raptor.phases.cut import Phases
from raptor.phases.partitions import num_partitions, sample_partitions
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
        # One NaN would spread through the matrix product to every column, so such columns are put back afterwards.
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
    # JSON has no NaN.
    known: list[float | None] = []
    for number in (value, lower, upper):
        known.append(float(number) if np.isfinite(number) else None)
    return ImageEstimate(known[0], known[1], known[2], num_images)


def _direction(direction: DirectionResult, phases: Phases | None) -> Estimates:
    """Norm, gamma and speed of each group, the order of the groups, and the speed against the phases."""
    if direction.values is None:
        return {}
    resampled = _Resampled(direction.values)
    found: dict[str, Array] = {}
    # The claims about the order of groups compare gamma over the inner layers, mean speed and late variance.
    arrival: dict[str, Array] = {}
    mean_speed: dict[str, Array] = {}
    late_variance: dict[str, Array] = {}
    # Each quantity is taken from the averaged curve: the mean of the images' own extremes would lie above it.
    for i, g in enumerate(direction.norm):
        curves = resampled.means[:, :, i]  # (1 + R, 4, L+1)
        norm = curves[:, 0]
        gamma = curves[:, 1]
        speed = curves[:, 2, 1:]
        variance = curves[:, 3, 1:] - speed**2
        num_steps = speed.shape[1]
        third = max(1, num_steps // 3)
        last_quarter = num_steps - max(1, num_steps // 4)
        # The first layer is alike for all images in some groups, and the last is 1 by definition.
        arrival[g] = gamma[:, 1:-1].mean(1)
        mean_speed[g] = speed.mean(1)
        late_variance[g] = variance[:, third:].mean(1)
        found[f"norm.ratio.{g}"] = norm[:, -1] / norm[:, 0]
        found[f"norm.smallest_step.{g}"] = (norm[:, 1:] / norm[:, :-1]).min(1)
        found[f"gamma.before_last.{g}"] = gamma[:, -2]
        # An S-shaped gamma rises most in the middle: the number is negative where the last step rises more.
        rise = np.diff(gamma, axis=1)
        found[f"gamma.inner_rise.{g}"] = rise[:, :-1].max(1) - rise[:, -1]
        before_late = rise[:, : max(1, num_steps - third)]
        found[f"gamma.late_acceleration.{g}"] = rise[:, -third:].mean(1) - before_late.mean(1)
        found[f"speed.mean.{g}"] = mean_speed[g]
        # The first step is fast in every model, so the late turn is also compared with the later steps alone.
        late_peak = speed[:, last_quarter:].max(1)
        found[f"speed.late_turn.{g}"] = late_peak - speed[:, :last_quarter].max(1, initial=0.0)
        found[f"speed.late_turn_after_first.{g}"] = late_peak - speed[:, 1:last_quarter].max(1, initial=0.0)
        found[f"speed_variance.late.{g}"] = late_variance[g]
    if "patches" in arrival and "cls" in arrival:
        found["gamma.patches_minus_cls"] = arrival["patches"] - arrival["cls"]
    if "registers" in arrival:
        others = [g for g in ("patches", "cls") if g in arrival]
        # The claim is that registers are first and slowest: the nearest other group decides it.
        for name, values, extreme in (
            ("gamma.registers_minus_earliest_other", arrival, np.max),
            ("speed.registers_minus_slowest_other", mean_speed, np.min),
            ("speed_variance.registers_minus_least_other", late_variance, np.min),
        ):
            found[name] = values["registers"] - extreme([values[g] for g in others], axis=0)
    if phases is not None and 1 < len(phases) < phases.num_layers:
        speed = resampled.means[:, 2, list(direction.norm).index("all"), 1:]
        share = between_share(speed, phases.lengths)
        # Any cut into k parts explains some variance: the share counts only above the mean over all other cuts.
        random_shares = [between_share(speed, other) for other in _other_partitions(phases)]
        found["speed.jump_at_boundaries"] = boundary_jump(speed, phases.lengths)
        found["speed.between_phases"] = share
        found["speed.between_phases_minus_random"] = share - np.mean(random_shares, axis=0)
    return resampled.estimates(found)


def boundary_jump(speed: Array, lengths: Sequence[int]) -> Array:
    """Mean change of the speed `(R, L)` from the last step of a phase to the next, minus the mean elsewhere."""
    # Speeds may rise or fall where a phase begins: either is a jump.
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
        steps = toward.means[:, i]
        third = max(1, steps.shape[1] // 3)
        found[f"gathering.alignment_late_rise.{g}"] = alignment.estimate(curve[:, -1] - curve[:, -1 - third])
        found[f"gathering.toward_late.{g}"] = toward.estimate(steps[:, -third:].mean(1))
    return found


def _stability(stability: StabilityResult, phases: Phases | None) -> Estimates:
    if stability.angles is None or stability.paths is None:
        return {}
    last = _Resampled(stability.angles)
    paths = _Resampled(stability.paths)
    layers = np.array(stability.layers, dtype=float)
    late = slice(-max(2, len(layers) // 3), None)
    num_blocks = paths.means.shape[-1] - 1
    spans = [] if phases is None else phase_spans(stability, phases.lengths)
    found: Estimates = {}
    for i, g in enumerate(stability.groups):
        # A line through two points always fits.
        if len(layers) > 2:
            # The first target is all tokens, as in the paper.
            log_angle = np.log(last.means[:, 0, i, 0])
            slope, r2 = _line(layers, log_angle)
            late_slope, _ = _line(layers[late], log_angle[:, late])
            found[f"sensitivity.slope.{g}"] = last.estimate(slope)
            found[f"sensitivity.r2.{g}"] = last.estimate(r2)
            found[f"sensitivity.late_slope.{g}"] = last.estimate(late_slope)
        # A path injected late has no room to bend back, so only injections in the first half of depth count.
        log_ratios = []
        for place, layer in enumerate(stability.layers):
            if layer <= num_blocks // 2:
                # Ratios are averaged as logarithms: halving and doubling cancel.
                log_ratios.append(np.log(paths.means[:, i, place, -1] / paths.means[:, i, place, layer]))
        kept_angle = np.full(len(paths.means), np.nan)
        if log_ratios:
            kept_angle = np.exp(np.mean(log_ratios, axis=0))
        found[f"path.kept_angle.{g}"] = paths.estimate(kept_angle)
        rates = []
        for place, first, end in spans:
            rate = contraction(paths.means[:, i, place, first : end + 1])
            found[f"attraction.layers_{first}_{end}.{g}"] = paths.estimate(rate)
            rates.append(rate)
        if len(rates) > 1:
            least = np.min(rates[:-1], axis=0)
            found[f"attraction.last_minus_least_before.{g}"] = paths.estimate(rates[-1] - least)
    return found


def _line(x: Array, y: Array) -> tuple[Array, Array]:
    """Slope and R2 of the least-squares line through `(R, n)` values."""
    centred = x - x.mean()
    spread = y - y.mean(1, keepdims=True)
    slope = spread @ centred / (centred @ centred)
    with np.errstate(divide="ignore", invalid="ignore"):
        return slope, slope**2 * (centred @ centred) / (spread**2).sum(1)


def _rank(rank: RankResult) -> Estimates:
    if rank.values is None:
        return {}
    resampled = _Resampled(rank.values)
    third = max(1, rank.values.shape[3] // 3)
    found: dict[str, Array] = {}
    for i, g in enumerate(list(rank.stable_rank)[: rank.values.shape[2]]):
        for j, name in enumerate(("stable", "effective")):
            curve = resampled.means[:, j, i]
            late = curve[:, -third:].mean(1)
            found[f"rank.{name}_late.{g}"] = late
            found[f"rank.{name}_late_over_early.{g}"] = late / curve[:, :third].mean(1)
        coherence = resampled.means[:, 2, i]
        # -1 is the least that a cosine can be: with one step there is nothing before the late ones.
        earlier_peak = coherence[:, :-third].max(1, initial=-1.0)
        found[f"rank.coherence_late_peak.{g}"] = coherence[:, -third:].max(1) - earlier_peak
    return resampled.estimates(found)


def _modes(modes: ModesResult) -> Estimates:
    """Numbers of the eigenvalues (at the paper's ratio, pooled, at rank 10) and of the singular values."""
    # "all" tokens are nearly the patches and would blur the order of the groups.
    named = {name: group for name, group in modes.groups.items() if name != "all" or len(modes.groups) == 1}
    groups = list(named)
    parts = list(named.values())
    found: Estimates = {}
    ratios = []
    per_image = []
    folds = []
    fits = []
    # Values of single images are not saved: a result that was read from its file has none of them.
    for part in parts:
        if part.ratio is not None:
            ratios.append(part.ratio)
            if part.ratio.values is not None:
                per_image.append(part.ratio.values)
            if part.ratio.folds is not None:
                folds.append(part.ratio.folds)
        if part.fits is not None:
            fits.append(part.fits)
    if len(per_image) == len(parts):
        resampled = _Resampled(np.stack(per_image, 1))
        found |= _compared("dmd.ratio", groups, resampled.means, resampled.estimate)
        if len(folds) == len(parts):
            num_images = parts[0].pooled.reconstruction_error.num_images

            def estimate_pooled(quantity: Array) -> ImageEstimate:
                # There is one pooled fit, which images cannot be drawn for cheaply: a jackknife over its parts instead.
                lower, upper = jackknife_interval(quantity[0], quantity[1:])
                return _estimate(quantity[0], lower, upper, num_images)

            whole = np.array([[ratio.pooled[name] for name in NUMBERS] for ratio in ratios])
            with_folds = np.concatenate([whole[None], np.stack(folds, 1)])
            found |= _compared("dmd.pooled", groups, with_folds, estimate_pooled)
    if len(fits) == len(parts):
        resampled = _Resampled(np.stack([eigenvalue_numbers(fit.eigenvalues) for fit in fits], 1))
        found |= _compared("dmd.rank10", groups, resampled.means, resampled.estimate)
        # exp of the entropy of the shares counts singular values; a slow decay gives a large number.
        shares = [fit.singular_values / fit.singular_values.sum(1, keepdims=True) for fit in fits]
        resampled = _Resampled(np.exp(stats.entropy(np.stack(shares, 1), axis=-1)))
        for i, g in enumerate(groups):
            found[f"dmd.singular.{g}"] = resampled.estimate(resampled.means[:, i])
        for g, name, extreme in (("cls", "largest", np.max), ("patches", "least", np.min)):
            difference = _minus_others(resampled.means, groups, g, extreme)
            if difference is not None:
                found[f"dmd.singular.{g}_minus_{name}_other"] = resampled.estimate(difference)
    return found


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


class BlockContrast:
    """Layer-layer similarity of each image (cls and mean patch).

    Three numbers: its mean within phases, its mean over all pairs of layers, and its mean within phases minus its mean
    across them.
    """

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
        found: Estimates = {}
        for q, name in enumerate(("within_minus_across", "within_phases", "all_pairs")):
            found[f"similarity.{name}"] = resampled.estimate(resampled.means[:, q])
        return found
