"""One line for each claim about depth as a dynamical system, with the numbers that decide it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raptor.dynamics.basins import BasinsResult
from raptor.dynamics.direction import DirectionResult
from raptor.dynamics.measure import DynamicsResult
from raptor.dynamics.rank import RankResult
from raptor.dynamics.spectra import ModesResult
from raptor.dynamics.stability import StabilityResult
from raptor.phases import Phases

_ARRIVED = 0.9


def find(result: DynamicsResult, phases: Sequence[int] | None = None) -> list[str]:
    """One line per finding about one model; `phases` are where speeds are compared."""
    lines = _direction_findings(result.direction, phases)
    if result.stability is not None:
        lines += _stability_findings(result.stability)
    lines += [*_attraction_findings(result), *_gathering_findings(result)]
    lines += _rank_findings(result.rank) + _mode_findings(result.modes)
    return lines + (_basin_findings(result.basins) if result.basins is not None else [])


def _direction_findings(direction: DirectionResult, phases: Sequence[int] | None) -> list[str]:
    norm, gamma, speed = direction.norm["all"].mean, direction.gamma, direction.speed
    groups = [name for name in speed if name != "all"]
    arrived = {g: arrival(gamma[g].mean) for g in groups}
    mean_speed = {g: float(speed[g].mean.mean()) for g in groups}
    lines = [
        f"norm: {norm[0]:.3g} at layer 0, {norm[-1]:.3g} at layer {len(norm) - 1}; "
        f"it grows in {np.sum(np.diff(norm) > 0)} of {len(norm) - 1} steps",
        f"direction: within a cosine of {_ARRIVED} of the last state from {_listed(arrived, 'layer {}')} on",
        f"speed, mean over depth: {_listed(mean_speed, '{:.3f} rad')}; "
        + "fastest step: "
        + _listed({g: int(np.argmax(speed[g].mean)) + 1 for g in groups}, "{}"),
    ]
    if phases is not None and len(phases) > 1:
        lines.append(boundary_finding(speed["all"].mean, phases))
    return lines


def arrival(gamma: np.ndarray) -> int:
    """The layer from which gamma stays at `_ARRIVED` or above."""
    below = np.flatnonzero(gamma < _ARRIVED)
    return int(below[-1]) + 1 if len(below) else 0


def boundary_finding(speed: np.ndarray, phases: Sequence[int]) -> str:
    """Speed of the first step of each later phase against all other steps."""
    phases = Phases.from_lengths(phases)
    first = list(phases.boundaries)  # index of the step that begins the next phase
    others = np.delete(speed, first)
    return (
        f"phases {phases}: {speed[first].mean():.3f} rad in the first step of a later phase, {others.mean():.3f} in "
        f"the others ({speed[first].mean() / others.mean():.2f} times)"
    )


def _stability_findings(stability: StabilityResult) -> list[str]:
    """Only one group is perturbed, and measured on itself, at the smallest size."""
    slope, angle = stability.log_slope(), stability.angle_per_eps.mean
    own = [
        (g, stability.targets.index(g), stability.groups.index(g))
        for g in stability.groups
        if g in stability.targets and (g != "all" or len(stability.groups) == 1)
    ]
    slopes = {g: float(slope[t, m, 0]) for g, t, m in own}
    ends = {g: f"{angle[t, m, 0, 0]:.2f} to {angle[t, m, 0, -1]:.2f}" for g, t, m in own}
    return [
        f"sensitivity (angle / eps, eps {stability.eps[0]:g}) from the first injection layer to the last: "
        f"{_listed(ends, '{}')}; slope of its log per layer: {_listed(slopes, '{:+.3f}')}"
    ]


def _attraction_findings(result: DynamicsResult) -> list[str]:
    if not result.attraction:
        return []
    rates = {
        f"layers {phase.first} to {phase.last}": _listed({g: r for g, r in phase.rate.items() if g != "all"}, "{:.2f}")
        for phase in result.attraction
    }
    return [f"attraction, factor of a perturbation's angle per step within a phase: {_listed(rates, '({})')}"]


def _gathering_findings(result: DynamicsResult) -> list[str]:
    if result.gathering is None or "patches" not in result.gathering.alignment:
        return []
    aligned = result.gathering.alignment["patches"].mean
    towards = result.gathering.toward["patches"].mean
    lowest = int(np.argmin(aligned))
    between = "" if lowest in (0, len(aligned) - 1) else f"lowest {aligned[lowest]:.2f} at layer {lowest}, "
    return [
        f"patches and their mean direction: mean cosine {aligned[0]:.2f} at layer 0, {between}{aligned[-1]:.2f} at the "
        "last; "
        f"their updates turn toward it in {int(np.sum(towards > 0))} of {len(towards)} steps"
    ]


def _rank_findings(rank: RankResult) -> list[str]:
    name = "patches" if "patches" in rank.stable_rank else "all"
    stable, effective = rank.stable_rank[name].mean, rank.effective_rank[name].mean
    peaks = {g: int(np.argmax(s.mean)) + 1 for g, s in rank.coherence.items() if g != "all"}
    return [
        f"updates of {name}: stable rank {stable[0]:.1f} to {stable[-1]:.1f}, effective rank {effective[0]:.1f} to "
        f"{effective[-1]:.1f}; coherence peaks at step {_listed(peaks, '{}')}"
    ]


def _mode_findings(modes: ModesResult) -> list[str]:
    groups = {name: group for name, group in modes.groups.items() if name != "all"}
    radius = {g: float(m.spectral_radius.mean) for g, m in groups.items()}
    median = {g: float(m.median_modulus.mean) for g, m in groups.items()}
    return [
        f"modes, mean over images: spectral radius {_listed(radius, '{:.3f}')}; "
        f"median modulus {_listed(median, '{:.3f}')}"
    ]


def _basin_findings(basins: BasinsResult) -> list[str]:
    ends = {g: f"{b.accuracy[0]:.0%} to {b.accuracy[-1]:.0%}" for g, b in basins.groups.items()}
    ratio = {}
    for name, group in basins.groups.items():
        layers = np.flatnonzero(np.isfinite(group.scatter_ratio))  # tokens that do not depend on the image have none
        if len(layers):
            since = f" (from layer {layers[0]})" if layers[0] else ""
            ratio[name] = f"{group.scatter_ratio[layers[0]]:.2f} to {group.scatter_ratio[layers[-1]]:.2f}{since}"
    return [
        f"basins of {len(basins.classes)} classes: nearest class mean {_listed(ends, '{}')}; "
        f"between/within scatter {_listed(ratio, '{}')}"
    ]


def _listed(values: dict[str, object] | dict[str, int] | dict[str, float] | dict[str, str], form: str) -> str:
    return ", ".join(f"{name} {form.format(value)}" for name, value in values.items())
