"""`raptor dynamics` with the numbers that the claims about depth rest on, each with a 95 % interval over images.

Keys read `measure.quantity.group`. A curve is first averaged over the resampled images, then the quantity is taken from
it. Late means the last third of the layers, early the first third. Differences compare groups on the same images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from sweep import Json, read_config, write_json

from raptor import Phases, num_partitions, open_vit, sample_partitions
from raptor.commands import dynamics
from raptor.dynamics import NUMBERS, PooledDMD, contraction, eigenvalue_numbers, fit_dmd, phase_spans

Array = NDArray[np.float64]
Estimates = dict[str, Json]
Quantities = dict[str, Array]
"""What is taken from averaged curves, `(1 + R,)` each: of all images, then of each resample."""
SIMILARITIES = ("similarity.within_minus_across", "similarity.within_phases", "similarity.all_pairs")
_NUM_RESAMPLES = 1000
_NUM_PARTITIONS = 1000  # contiguous partitions that the phases are compared with
_NUM_FOLDS = 8  # parts of the images whose left-out fits give the interval of a pooled fit
_LEVEL = 0.95
_ENDS = ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2)


@dataclass(kw_only=True)
class DepthNumbers:
    """`raptor dynamics` on a model; the numbers behind the claims stand in its dynamics.json under `estimates`."""

    model: str  # the model
    data: list[str]  # the images
    out: str  # folder for dynamics.json and the figures
    weights: str | None = None  # a local weight file for the model
    pretrained: bool = True  # false measures the same model untrained
    layer_scale: float | None = None  # what LayerScale starts from in an untrained model
    size: int | None = None  # side of the images; by default the model's own
    num_images: int = 1024  # images that are measured
    sample_images: int = 64  # images of the costly parts: ranks of updates and perturbations
    num_classes: int = 5  # classes whose basins are measured
    stability: bool = True  # also follow perturbed states
    k: int = 3  # phases, by max-cut
    phases: list[int] | None = None  # phase lengths instead
    seed: int = 0  # of the perturbations, and of the weights of an untrained model
    batch_size: int = 32  # images per batch
    num_workers: int | None = None  # processes that decode images
    device: str = "auto"  # auto, cpu or cuda


def main(config: DepthNumbers) -> Json:
    given = vars(config).copy()
    model: Any = given.pop("model")
    layer_scale = given.pop("layer_scale")
    if layer_scale is not None:
        # The command has no such option, so the untrained model is opened here.
        del given["pretrained"], given["weights"]
        torch.manual_seed(config.seed)
        model = open_vit(model, pretrained=False, layer_scale=layer_scale, size=given.pop("size"))
    # The perturbations are the paper's own, whose size does not follow the state's norm.
    done: Any = dynamics(model, **given, eps=[1e-3], perturbation="paper", interventions=False)  # type: ignore[operator]
    path = done.folder / "dynamics.json"
    saved = json.loads(path.read_text())
    cut = Phases.from_lengths(done.measured.phases)
    for side, found in done.measured.sides().items():
        saved[side]["estimates"] = estimate_all(found, cut)
    write_json(path, saved)
    return saved


def estimate_all(found: Any, phases: Phases | None) -> Estimates:
    """Every number of a result of `measure_dynamics`; numbers about phases only where these are given."""
    # With one phase nothing lies across phases, with phases of one block nothing within.
    cut = phases
    if phases is not None and not 1 < len(phases) < phases.num_layers:
        cut = None
    gathering = found.gathering
    stability = found.stability
    # Values of single images, and what is taken from their means.
    parts: list[tuple[Array, Callable[[Array], Quantities]]] = [
        (found.direction.values, partial(_direction, list(found.direction.norm), cut)),
        (found.rank.values, partial(_rank, list(found.rank.stable_rank))),
    ]
    if gathering.alignments is not None:  # else every group has one token
        parts.append((gathering.alignments, partial(_alignment, list(gathering.alignment))))
        parts.append((gathering.towards, partial(_toward, list(gathering.toward))))
    if stability is not None:
        parts.append((stability.angles, partial(_sensitivity, stability)))
        parts.append((stability.paths, partial(_paths, stability, phases)))
    if cut is not None:
        parts.append((similarity_of_images(found.modes, cut), _similarity))

    # "all" tokens are nearly the patches and would blur the order of the groups.
    modes = dict(found.modes.groups)
    if len(modes) > 1:
        del modes["all"]
    groups = list(modes)
    at_ratio = []
    at_rank = []
    spectra = []
    for group in modes.values():
        at_ratio.append(eigenvalue_numbers(fit_dmd(group.trajectories, group.ratio.rank).eigenvalues))
        fit = fit_dmd(group.trajectories, group.rank)
        at_rank.append(eigenvalue_numbers(fit.eigenvalues))
        # exp of the entropy of the shares counts singular values; a slow decay gives a large number.
        spectra.append(np.exp(stats.entropy(fit.singular_values, axis=-1)))
    parts.append((np.stack(at_ratio, 1), partial(_eigenvalues, "dmd.ratio", groups)))
    parts.append((np.stack(at_rank, 1), partial(_eigenvalues, "dmd.rank10", groups)))
    parts.append((np.stack(spectra, 1), partial(_spectra, groups)))

    estimates: Estimates = {}
    for values, quantities in parts:
        for name, quantity in quantities(resampled_means(values)).items():
            drawn = quantity[1:][np.isfinite(quantity[1:])]
            lower, upper = np.quantile(drawn, _ENDS) if len(drawn) else (np.nan, np.nan)
            estimates[name] = _estimate(quantity[0], lower, upper, len(values))
    return estimates | _pooled(modes)


def resampled_means(values: Array) -> Array:
    """Means of values of single images `(N, ...)`: over the images (first), and over images drawn with replacement."""
    num_images = len(values)
    flat = values.reshape(num_images, -1)
    rng = np.random.default_rng(0)
    rows = [flat.mean(0)]
    for _ in range(_NUM_RESAMPLES):
        # Counts of each image, so that a resample is a product.
        counts = np.bincount(rng.integers(num_images, size=num_images), minlength=num_images)
        rows.append(counts @ np.nan_to_num(flat) / num_images)
    means = np.stack(rows)
    # One NaN would spread through the product to every column.
    means[1:, np.isnan(flat).any(0)] = np.nan
    if num_images == 1:
        means[1:] = np.nan  # all resamples of one image are the same, which says nothing about others
    return means.reshape(-1, *values.shape[1:])


def _estimate(value: float, lower: float, upper: float, num_images: int) -> Json:
    known: Json = {"num_images": num_images}
    for name, number in (("value", value), ("lower", lower), ("upper", upper)):
        # JSON has no NaN.
        known[name] = float(number) if np.isfinite(number) else None
    return known


# Quantities by name, from resampled means


def _direction(groups: list[str], phases: Phases | None, means: Array) -> Quantities:
    """Norm, gamma and speed of each group, the order of the groups, and the speed against the phases."""
    found: dict[str, Array] = {}
    # The claims about the order of groups compare gamma over the inner layers, mean speed and late variance.
    arrival: dict[str, Array] = {}
    mean_speed: dict[str, Array] = {}
    late_variance: dict[str, Array] = {}
    # Each quantity is taken from the averaged curve: the mean of the images' own extremes would lie above it.
    for i, g in enumerate(groups):
        curves = means[:, :, i]  # (1 + R, 4, L+1)
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
    if phases is not None:
        speed = means[:, 2, groups.index("all"), 1:]
        share = between_share(speed, phases.lengths)
        # Any cut into k parts explains some variance: the share counts only above the mean over all other cuts.
        random_shares = [between_share(speed, other) for other in _other_partitions(phases)]
        found["speed.jump_at_boundaries"] = boundary_jump(speed, phases.lengths)
        found["speed.between_phases"] = share
        found["speed.between_phases_minus_random"] = share - np.mean(random_shares, axis=0)
    return found


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


def _alignment(groups: list[str], means: Array) -> Quantities:
    third = max(1, (means.shape[-1] - 1) // 3)
    late_rise = means[..., -1] - means[..., -1 - third]
    return {f"gathering.alignment_late_rise.{g}": late_rise[:, i] for i, g in enumerate(groups)}


def _toward(groups: list[str], means: Array) -> Quantities:
    third = max(1, means.shape[-1] // 3)
    return {f"gathering.toward_late.{g}": means[:, i, -third:].mean(1) for i, g in enumerate(groups)}


def _sensitivity(stability: Any, means: Array) -> Quantities:
    layers = np.array(stability.layers, dtype=float)
    late = slice(-max(2, len(layers) // 3), None)
    found: Quantities = {}
    # A line through two points always fits.
    if len(layers) <= 2:
        return found
    for i, g in enumerate(stability.groups):
        # The first target is all tokens, as in the paper.
        log_angle = np.log(means[:, 0, i, 0])
        found[f"sensitivity.slope.{g}"], found[f"sensitivity.r2.{g}"] = _line(layers, log_angle)
        found[f"sensitivity.late_slope.{g}"], _ = _line(layers[late], log_angle[:, late])
    return found


def _line(x: Array, y: Array) -> tuple[Array, Array]:
    """Slope and R2 of the least-squares line through `(R, n)` values."""
    centred = x - x.mean()
    spread = y - y.mean(1, keepdims=True)
    slope = spread @ centred / (centred @ centred)
    with np.errstate(divide="ignore", invalid="ignore"):
        return slope, slope**2 * (centred @ centred) / (spread**2).sum(1)


def _paths(stability: Any, phases: Phases | None, means: Array) -> Quantities:
    """How much of a perturbation's angle is left at the end, and by what factor each phase changes it per step."""
    num_blocks = means.shape[-1] - 1
    found: Quantities = {}
    for i, g in enumerate(stability.groups):
        # A path injected late has no room to bend back, so only injections in the first half of depth count.
        log_ratios = []
        for place, layer in enumerate(stability.layers):
            if layer <= num_blocks // 2:
                # Ratios are averaged as logarithms: halving and doubling cancel.
                log_ratios.append(np.log(means[:, i, place, -1] / means[:, i, place, layer]))
        found[f"path.kept_angle.{g}"] = np.full(len(means), np.nan)
        if log_ratios:
            found[f"path.kept_angle.{g}"] = np.exp(np.mean(log_ratios, axis=0))
        rates = []
        for place, first, end in [] if phases is None else phase_spans(stability, phases.lengths):
            rates.append(contraction(means[:, i, place, first : end + 1]))
            found[f"attraction.layers_{first}_{end}.{g}"] = rates[-1]
        if len(rates) > 1:
            found[f"attraction.last_minus_least_before.{g}"] = rates[-1] - np.min(rates[:-1], axis=0)
    return found


def _rank(groups: list[str], means: Array) -> Quantities:
    third = max(1, means.shape[3] // 3)
    found: Quantities = {}
    # The values are of the groups with several tokens, which come first.
    for i, g in enumerate(groups[: means.shape[2]]):
        for j, name in enumerate(("stable", "effective")):
            curve = means[:, j, i]
            late = curve[:, -third:].mean(1)
            found[f"rank.{name}_late.{g}"] = late
            found[f"rank.{name}_late_over_early.{g}"] = late / curve[:, :third].mean(1)
        coherence = means[:, 2, i]
        # -1 is the least that a cosine can be: with one step there is nothing before the late ones.
        earlier_peak = coherence[:, :-third].max(1, initial=-1.0)
        found[f"rank.coherence_late_peak.{g}"] = coherence[:, -third:].max(1) - earlier_peak
    return found


def _eigenvalues(prefix: str, groups: list[str], numbers: Array) -> Quantities:
    """The numbers `(R, G, 5)` of each group, and the differences that the paper's order of groups is about."""
    found: Quantities = {}
    for i, g in enumerate(groups):
        for j, name in enumerate(NUMBERS):
            found[f"{prefix}.{name}.{g}"] = numbers[:, i, j]
    for g, number, name, extreme in (
        ("cls", "distance", "distance_minus_least_other", np.min),
        ("patches", "weighted_angle", "angle_minus_widest_other", np.max),
        ("patches", "median_modulus", "modulus_minus_least_other", np.min),
    ):
        found |= _minus_others(f"{prefix}.{g}_{name}", numbers[:, :, NUMBERS.index(number)], groups, g, extreme)
    return found


def _spectra(groups: list[str], means: Array) -> Quantities:
    found = {f"dmd.singular.{g}": means[:, i] for i, g in enumerate(groups)}
    found |= _minus_others("dmd.singular.cls_minus_largest_other", means, groups, "cls", np.max)
    return found | _minus_others("dmd.singular.patches_minus_least_other", means, groups, "patches", np.min)


def _minus_others(name: str, values: Array, groups: list[str], group: str, extreme: Callable[..., Array]) -> Quantities:
    """The values `(R, G)` of `group` minus the least or largest of the other groups; none where one is missing."""
    others = [i for i, other in enumerate(groups) if other != group]
    if group not in groups or not others:
        return {}
    return {name: values[:, groups.index(group)] - extreme(values[:, others], axis=1)}


def similarity_of_images(modes: Any, phases: Phases) -> Array:
    """The `SIMILARITIES` of layers (cls and mean patch) of each image, `(N, 3)`."""
    cosines = []
    for name in ("cls", "patches"):
        if name in modes.groups:
            x_nld = modes.groups[name].trajectories[:, 1:].double().numpy()
            cosines.append(x_nld @ x_nld.swapaxes(1, 2))
    cosine_nll = np.mean(cosines, axis=0)
    same = phases.same_phase()
    pairs = ~np.eye(len(same), dtype=bool)
    within_n = cosine_nll[:, same & pairs].mean(1)
    return np.stack([within_n - cosine_nll[:, ~same].mean(1), within_n, cosine_nll[:, pairs].mean(1)], 1)


def _similarity(means: Array) -> Quantities:
    return dict(zip(SIMILARITIES, means.T))


# Pooled fits


def _pooled(modes: Json) -> Estimates:
    """The numbers of one fit to all images, which images cannot be drawn for cheaply: a jackknife over its parts."""
    groups = list(modes)
    num_images = modes[groups[0]].pooled.reconstruction_error.num_images
    if num_images < 2:
        return {}
    numbers = []
    for group in modes.values():
        whole = np.array([[group.ratio.pooled[name] for name in NUMBERS]])
        numbers.append(np.concatenate([whole, _left_out(group.trajectories, group.ratio.rank)]))
    found: Estimates = {}
    for name, quantity in _eigenvalues("dmd.pooled", groups, np.stack(numbers, 1)).items():
        lower, upper = jackknife_interval(quantity[0], quantity[1:])
        found[name] = _estimate(quantity[0], lower, upper, num_images)
    return found


def _left_out(x_nld: Any, rank: int) -> Array:
    """Numbers of pooled fits without each part of the trajectories, `(parts, 5)`; none of fewer than two of them."""
    num = len(x_nld)
    numbers = np.empty((0, len(NUMBERS)))
    if num < 2:
        return numbers
    # Every eighth trajectory is a part: images that follow each other may be alike, and a block of them would bias it.
    parts = np.arange(num) % min(_NUM_FOLDS, num)
    for left_out in np.unique(parts):
        pooled = PooledDMD()
        pooled.update(x_nld[parts != left_out])
        numbers = np.concatenate([numbers, eigenvalue_numbers(pooled.fit(rank).eigenvalues)[None]])
    return numbers


def jackknife_interval(value: float, left_out: Array) -> tuple[float, float]:
    """The interval of a value by Student's t, from the values without each of several equal parts of the images."""
    num = len(left_out)
    error = np.sqrt((num - 1) / num * ((left_out - left_out.mean()) ** 2).sum())
    # The parts are few, and the normal quantile would make the interval too narrow.
    half = stats.t.ppf(_ENDS[1], num - 1) * error
    return value - half, value + half


if __name__ == "__main__":
    main(read_config(DepthNumbers))
