"""One line for each claim about depth as a dynamical system, with the numbers that decide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from raptor.dynamics.basins import BasinsResult
from raptor.dynamics.measure import DynamicsResult
from raptor.dynamics.stability import StabilityResult
from raptor.phases.cut import Phases

_ARRIVED = 0.9


def find(result: DynamicsResult, phases: Sequence[int] | None = None) -> list[str]:
    """One line per finding about one model; `phases` are where speeds are compared."""
    direction = result.direction
    norm = direction.norm["all"].mean
    arrived: dict[str, int] = {}
    mean_speed: dict[str, float] = {}
    fastest: dict[str, int] = {}
    for g, speed in direction.speed.items():
        if g != "all":
            arrived[g] = arrival(direction.gamma[g].mean)
            mean_speed[g] = float(speed.mean.mean())
            fastest[g] = int(np.argmax(speed.mean)) + 1
    lines = [
        f"norm: {norm[0]:.3g} at layer 0, {norm[-1]:.3g} at layer {len(norm) - 1}; "
        f"it grows in {np.sum(np.diff(norm) > 0)} of {len(norm) - 1} steps",
        f"direction: within a cosine of {_ARRIVED} of the last state from {_listed(arrived, 'layer {}')} on",
        f"speed, mean over depth: {_listed(mean_speed, '{:.3f} rad')}; fastest step: {_listed(fastest)}",
    ]
    # With one phase no step crosses a boundary.
    if phases is not None and len(phases) > 1:
        lines.append(boundary_finding(direction.speed["all"].mean, phases))
    if result.stability is not None:
        lines.append(_stability_finding(result.stability))
    if result.attraction:
        rates = {}
        for phase in result.attraction:
            by_group = {g: rate for g, rate in phase.rate.items() if g != "all"}
            rates[f"layers {phase.first} to {phase.last}"] = _listed(by_group, "{:.2f}")
        lines.append(f"attraction, factor of a perturbation's angle per step within a phase: {_listed(rates, '({})')}")
    if result.gathering is not None and "patches" in result.gathering.alignment:
        alignment = result.gathering.alignment["patches"].mean
        toward = result.gathering.toward["patches"].mean
        lowest = int(np.argmin(alignment))
        between = ""
        # At an end it would repeat a number of this line.
        if lowest not in (0, len(alignment) - 1):
            between = f"lowest {alignment[lowest]:.2f} at layer {lowest}, "
        lines.append(
            f"patches and their mean direction: mean cosine {alignment[0]:.2f} at layer 0, {between}"
            f"{alignment[-1]:.2f} at the last; "
            f"their updates turn toward it in {int(np.sum(toward > 0))} of {len(toward)} steps"
        )
    rank = result.rank
    # The ranks of cls are over images, which cannot be compared with ranks over the tokens of one image.
    ranked = "patches" if "patches" in rank.stable_rank else "all"
    stable = rank.stable_rank[ranked].mean
    effective = rank.effective_rank[ranked].mean
    peaks = {g: int(np.argmax(spread.mean)) + 1 for g, spread in rank.coherence.items() if g != "all"}
    lines.append(
        f"updates of {ranked}: stable rank {stable[0]:.1f} to {stable[-1]:.1f}, effective rank {effective[0]:.1f} to "
        f"{effective[-1]:.1f}; coherence peaks at step {_listed(peaks)}"
    )
    radius: dict[str, float] = {}
    median: dict[str, float] = {}
    for g, group in result.modes.groups.items():
        if g != "all":
            radius[g] = float(group.spectral_radius.mean)
            median[g] = float(group.median_modulus.mean)
    lines.append(
        f"modes, mean over images: spectral radius {_listed(radius, '{:.3f}')}; "
        f"median modulus {_listed(median, '{:.3f}')}"
    )
    if result.basins is not None:
        lines.append(_basin_finding(result.basins))
    return lines


def arrival(gamma: np.ndarray) -> int:
    """The layer from which gamma stays at `_ARRIVED` or above."""
    # A direction may come near and leave again: only the last layer below counts.
    below = np.flatnonzero(gamma < _ARRIVED)
    if not len(below):
        return 0
    return int(below[-1]) + 1


def boundary_finding(speed: np.ndarray, phases: Sequence[int]) -> str:
    """Speed of the first step of each later phase against all other steps."""
    phases = Phases.from_lengths(phases)
    first = list(phases.boundaries)  # index of the step that begins the next phase
    others = np.delete(speed, first)
    return (
        f"phases {phases}: {speed[first].mean():.3f} rad in the first step of a later phase, {others.mean():.3f} in "
        f"the others ({speed[first].mean() / others.mean():.2f} times)"
    )


def _stability_finding(stability: StabilityResult) -> str:
    """Growth of the smallest perturbation of each single group, measured on the group itself."""
    slope = stability.log_slope
    angle = stability.angle_per_eps.mean
    slopes: dict[str, float] = {}
    ends: dict[str, str] = {}
    for m, g in enumerate(stability.groups):
        # "all" would repeat what the groups say, unless it is the only one.
        if g not in stability.targets or (g == "all" and len(stability.groups) > 1):
            continue
        t = stability.targets.index(g)
        slopes[g] = float(slope[t, m, 0])
        ends[g] = f"{angle[t, m, 0, 0]:.2f} to {angle[t, m, 0, -1]:.2f}"
    return (
        f"sensitivity (angle / eps, eps {stability.eps[0]:g}) from the first injection layer to the last: "
        f"{_listed(ends)}; slope of its log per layer: {_listed(slopes, '{:+.3f}')}"
    )


def _basin_finding(basins: BasinsResult) -> str:
    accuracy: dict[str, str] = {}
    scatter: dict[str, str] = {}
    for g, group in basins.groups.items():
        accuracy[g] = f"{group.accuracy[0]:.0%} to {group.accuracy[-1]:.0%}"
        # Tokens that do not depend on the image, as cls at layer 0, have no scatter.
        layers = np.flatnonzero(np.isfinite(group.scatter_ratio))
        if len(layers):
            first, last = group.scatter_ratio[layers[[0, -1]]]
            scatter[g] = f"{first:.2f} to {last:.2f}"
            if layers[0]:
                scatter[g] += f" (from layer {layers[0]})"
    return (
        f"basins of {len(basins.classes)} classes: nearest class mean {_listed(accuracy)}; "
        f"between/within scatter {_listed(scatter)}"
    )


def _listed(values: Mapping[str, object], form: str = "{}") -> str:
    return ", ".join(f"{name} {form.format(value)}" for name, value in values.items())
