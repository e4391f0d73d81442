"""Figures of depth as a dynamical system, one function per panel (the paper's Figures 6 to 10).

Every function takes the object of dynamics.json. Colours are token groups, solid lines the teacher, dashed ones the
surrogate, bands the middle half of the images, thin vertical lines the ends of phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.phases import Phases
from raptor.report.style import (
    CLASS_COLOURS,
    GROUP_COLOURS,
    data_title,
    phase_lines,
    save_figure,
    use_style,
    whole_numbers,
)
from raptor.streaming import Spread

_DASHES: dict[str, Any] = {"teacher": "-", "surrogate": (0, (4, 2))}
GROUPS = ("cls", "registers", "patches")
SMALL = (4.6, 3.4)

Pick = Callable[[DynamicsResult], Mapping[str, Spread]]


def figure_norm(measured: DynamicsFile) -> Any:
    return _over_states(measured, lambda m: m.direction.norm, "Norm", "mean token norm $\\|x_l\\|$", log=True)


def figure_gamma(measured: DynamicsFile) -> Any:
    return _over_states(
        measured, lambda m: m.direction.gamma, "Directional convergence", "$\\gamma_l$: cosine with the last state"
    )


def figure_speed(measured: DynamicsFile) -> Any:
    return _over_steps(measured, lambda m: m.direction.speed, "Angular speed", "turn in one block (rad)")


def figure_speed_variance(measured: DynamicsFile) -> Any:
    """Variance of the speed over tokens and images, step by step."""

    def pick(model: DynamicsResult) -> dict[str, Spread]:
        return {group: Spread(found.total) for group, found in model.direction.speed_variance.items()}

    label = "variance over tokens and images (rad$^2$)"
    return _over_steps(measured, pick, "Variance of the angular speed", label, log=True)


def figure_gathering(measured: DynamicsFile) -> Any:
    """Mean cosine of an image's tokens with their mean direction, and of their updates with the way toward it."""
    plt = use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
    for side, model in measured.sides().items():
        for group in (g for g in GROUPS if model.gathering is not None and g in model.gathering.alignment):
            assert model.gathering is not None
            alignment, toward = model.gathering.alignment[group], model.gathering.toward[group]
            _draw(left, range(len(alignment.mean)), alignment, group, side, measured)
            _draw(right, range(1, len(toward.mean) + 1), toward, group, side, measured)
    right.axhline(0, color="#777777", linestyle=":", linewidth=1)
    left.set(title="Tokens and their mean direction", ylabel="mean cosine")
    right.set(title="Updates toward the mean direction", ylabel="mean cosine")
    _states_axis(left, measured)
    right.set_xlabel("block $l$ (from $x_{l-1}$ to $x_l$)")
    phase_lines(right, _boundaries(measured))
    whole_numbers(right)
    right.grid(axis="y")
    _legend(figure, left)
    return figure


def figure_attraction(measured: DynamicsFile) -> Any:
    """Angle between perturbed and clean states inside each phase, perturbed where the phase begins."""
    plt = use_style()
    sides = measured.sides()
    groups = [g for g in GROUPS if g in measured.teacher.attraction[0].angle]
    figure, axes = plt.subplots(1, len(groups), figsize=(3.2 * len(groups), 3.3), sharey=True, squeeze=False)
    for ax, group in zip(axes[0], groups):
        for side, model in sides.items():
            for phase in model.attraction:
                layers, label = range(phase.first, phase.last + 1), _suffix(side, measured).removeprefix(", ")
                style: dict[str, Any] = dict(color=GROUP_COLOURS[group], linestyle=_DASHES[side], marker=".")
                ax.plot(layers, phase.angle[group], label=label or None, **style)
                middle = (phase.first + phase.last) / 2
                if side == "teacher":
                    ax.text(middle, max(phase.angle[group]), f"×{phase.rate[group]:.2f}", ha="center", va="bottom")
        ax.set(title=group, yscale="log", ylabel="angle to the clean path (rad)" if group == groups[0] else "")
        _plain_log_ticks(ax)
        ax.margins(y=0.12)
        _states_axis(ax, measured)
    figure.suptitle("Attraction within phases (numbers: factor per step)", fontsize=10)
    return figure


def figure_stable_rank(measured: DynamicsFile) -> Any:
    figure = _over_steps(measured, lambda m: m.rank.stable_rank, "Stable rank of updates", "stable rank", log=True)
    return _over_images(figure)


def figure_effective_rank(measured: DynamicsFile) -> Any:
    title, label = "Effective rank of updates", "effective rank"
    figure = _over_steps(measured, lambda m: m.rank.effective_rank, title, label, log=True)
    return _over_images(figure)


def figure_coherence(measured: DynamicsFile) -> Any:
    title, label = "Coherence of updates", "mean cosine with the mean update"
    return _over_images(_over_steps(measured, lambda m: m.rank.coherence, title, label))


def figure_paths(measured: DynamicsFile) -> Any:
    """Mean path of each class on two principal components, one column per group, one row per model."""
    plt = use_style()
    sides = [(side, m.basins) for side, m in measured.sides().items() if m.basins is not None]
    groups = [g for g in GROUPS if any(g in basins.groups for _, basins in sides)]
    figure, axes = plt.subplots(len(sides), len(groups), figsize=(3.2 * len(groups), 3.1 * len(sides)), squeeze=False)
    names, ends = measured.class_names or {}, _boundaries(measured)
    for row, (side, basins) in zip(axes, sides):
        for ax, group in zip(row, groups):
            for i, label in enumerate(basins.classes):
                path = basins.groups[group].class_paths[i]
                colour = CLASS_COLOURS[i % len(CLASS_COLOURS)]
                name = names.get(str(label), f"class {label}")
                ax.plot(path[:, 0], path[:, 1], color=colour, label=name, marker=".", linewidth=1.2, zorder=2)
                ax.plot(*path[0, :2], "o", color="white", markeredgecolor=colour, markersize=5, zorder=3)
                ax.plot(*path[-1, :2], "*", color=colour, markersize=10, markeredgecolor="white", zorder=4)
                ax.plot(path[ends, 0], path[ends, 1], "|", color="black", markersize=7, linestyle="none", zorder=3)
            share = basins.groups[group].explained
            ax.set(xlabel=f"PC 1 ({share[0]:.0%} of variance)", ylabel=f"PC 2 ({share[1]:.0%})")
            ax.set_title(group if len(sides) == 1 else f"{group}, {side}")
    figure.suptitle("Class paths through depth (circle: layer 0, star: last layer, bars: phase ends)", fontsize=10)
    _legend(figure, axes[0, 0])
    return figure


def figure_basins(measured: DynamicsFile) -> Any:
    """Nearest-class-mean accuracy and between/within scatter over depth."""
    plt = use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
    for side, model in measured.sides().items():
        if model.basins is None:
            continue
        for group, values in model.basins.groups.items():
            style: dict[str, Any] = dict(color=GROUP_COLOURS[group], linestyle=_DASHES[side])
            left.plot(100 * values.accuracy, label=_label(group, side, measured), **style)
            right.plot(values.scatter_ratio, label=_label(group, side, measured), **style)
        left.axhline(100 * model.basins.chance, color="#777777", linestyle=":", linewidth=1)
    left.set(title="Nearest class mean (dotted: chance)", ylabel="images in their own class (%)")
    right.set(title="Class scatter", ylabel="between / within")
    for ax in (left, right):
        _states_axis(ax, measured)
    _legend(figure, left)
    return figure


def figure_perturbed_path(measured: DynamicsFile, eps_index: int | None = None) -> Any:
    """How far a perturbed path is from the clean one, from each of a few injection layers to the end."""
    plt = use_style()
    sides = {side: m.stability for side, m in measured.sides().items() if m.stability is not None}
    first = next(iter(sides.values()))
    groups = [g for g in GROUPS if g in first.groups]
    e = len(first.eps) // 2 if eps_index is None else eps_index
    num = len(first.layers)
    chosen = sorted({round(q * (num - 1)) for q in (0, 0.25, 0.5, 0.75)})
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(chosen)))
    figure, axes = plt.subplots(1, len(groups), figsize=(3.2 * len(groups), 3.3), sharey=True, squeeze=False)
    for ax, group in zip(axes[0], groups):
        for side, stability in sides.items():
            target, g = stability.targets.index("all"), stability.groups.index(group)
            for colour, i in zip(colours, chosen):
                layer, path = stability.layers[i], stability.path[target, g, e, i]
                label = f"perturbed at layer {layer}" + _suffix(side, measured)
                ax.plot(path, color=colour, linestyle=_DASHES[side], label=label)
                ax.plot(layer, path[layer], "o", color=colour, markersize=4)
        ax.set(title=group, yscale="log", ylabel="angle to the clean path (rad)" if group == groups[0] else "")
        _plain_log_ticks(ax)
        _states_axis(ax, measured)
    size = "of their norm" if first.kind == "relative" else "times a standard normal vector"
    figure.suptitle(f"Perturbed paths, all tokens moved by {first.eps[e]:g} {size}", fontsize=10)
    _legend(figure, axes[0, 0])
    return figure


def figure_sensitivity(measured: DynamicsFile, eps_index: int = 0) -> Any:
    """Angle at the last layer over eps, against the injection layer: all tokens perturbed, and only one group."""
    plt = use_style()
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.4), sharey=True)
    eps = 0.0
    for side, model in measured.sides().items():
        stability = model.stability
        if stability is None:
            continue
        eps = stability.eps[eps_index]
        for group in (g for g in GROUPS if g in stability.groups):
            g = stability.groups.index(group)
            for ax, target in zip(axes, ("all", group)):
                spread = stability.angle_per_eps[stability.targets.index(target), g, eps_index]
                _draw(ax, stability.layers, spread, group, side, measured)
    axes[0].set(title="All tokens perturbed", ylabel=f"angle at the last layer / $\\epsilon$ ($\\epsilon$ = {eps:g})")
    axes[1].set(title="Only the group perturbed")
    for ax in axes:
        ax.set_yscale("log")
        _plain_log_ticks(ax)
        _states_axis(ax, measured, "layer of the perturbation")
        ax.yaxis.set_tick_params(labelleft=True)
    _legend(figure, axes[0])
    return figure


def figure_eigenvalues(measured: DynamicsFile) -> Any:
    """DMD eigenvalues on the unit circle: small points are one fit per image, large ones the fit pooled over all."""
    plt = use_style()
    sides = [(side, m.modes.groups) for side, m in measured.sides().items()]
    groups = [g for g in GROUPS if g in sides[0][1]]
    figure, axes = plt.subplots(
        len(sides), len(groups), figsize=(3.1 * len(groups), 3.2 * len(sides)), squeeze=False, sharex=True, sharey=True
    )
    turn = np.linspace(0, 2 * np.pi, 400)
    drawn = [values for _, m in sides for g in groups for values in (m[g].eigenvalues, m[g].pooled.eigenvalues)]
    limit = 1.06 * max(1, *(np.abs(np.array(_points(values))).max(initial=0) for values in drawn))
    for row, (side, modes) in zip(axes, sides):
        for ax, group in zip(row, groups):
            ax.plot(np.cos(turn), np.sin(turn), color="#999999", linewidth=1, zorder=1)
            fitted, pooled = _points(modes[group].eigenvalues), _points(modes[group].pooled.eigenvalues)
            colour = GROUP_COLOURS[group]
            ax.plot(*fitted, ".", color=colour, markersize=3, alpha=0.35, markeredgewidth=0, label="one fit per image")
            ax.plot(*pooled, "D", color="white", markeredgecolor=colour, markersize=5, label="one fit for all images")
            radius = modes[group].spectral_radius.mean
            ax.set(title=f"{_label(group, side, measured)}\nmean spectral radius {radius:.3f}", aspect="equal")
            ax.set(xlim=(-limit, limit), ylim=(-limit, limit))
            ax.axhline(0, color="#EEEEEE", zorder=0)
            ax.axvline(0, color="#EEEEEE", zorder=0)
    for ax in axes[-1]:
        ax.set_xlabel("Re $\\lambda$")
    for ax in axes[:, 0]:
        ax.set_ylabel("Im $\\lambda$")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=2)
    for handle in legend.legend_handles:
        handle.set(color="#555555", alpha=1, markersize=6)
    legend.legend_handles[1].set_markerfacecolor("white")
    return figure


def figure_singular_values(measured: DynamicsFile) -> Any:
    """Singular values of the trajectories of group means, over the largest."""
    plt = use_style()
    figure, ax = plt.subplots(figsize=SMALL)
    for side, model in measured.sides().items():
        for group in (g for g in GROUPS if g in model.modes.groups):
            values = model.modes.groups[group].singular_values.mean
            index = np.arange(1, len(values) + 1)
            style: dict[str, Any] = dict(color=GROUP_COLOURS[group], linestyle=_DASHES[side], marker=".")
            ax.plot(index, values / values[0], label=_label(group, side, measured), **style)
    ax.set(
        title="Singular spectrum of the trajectory", yscale="log", xlabel="index", ylabel="$\\sigma_i\\,/\\,\\sigma_1$"
    )
    whole_numbers(ax)
    ax.grid(axis="y")
    _legend(figure, ax)
    return figure


def figure_rank_sweep(measured: DynamicsFile) -> Any:
    """What the rank of the DMD decides: reconstruction error and median modulus against it."""
    plt = use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
    for side, model in measured.sides().items():
        for group in (g for g in GROUPS if g in model.modes.groups):
            sweep = model.modes.groups[group].sweep
            error = [np.mean(fit.reconstruction_error.mean[1:]) for fit in sweep.values()]
            modulus = [fit.median_modulus.mean for fit in sweep.values()]
            style: dict[str, Any] = dict(color=GROUP_COLOURS[group], linestyle=_DASHES[side], marker=".")
            left.plot(list(sweep), error, label=_label(group, side, measured), **style)
            right.plot(list(sweep), modulus, label=_label(group, side, measured), **style)
    left.set(title="Reconstruction error", ylabel="relative error, mean over layers", ylim=(0, None))
    right.set(title="Median modulus", ylabel="median $|\\lambda|$")
    for ax in (left, right):
        ax.set_xlabel("DMD rank")
        whole_numbers(ax)
        ax.grid(axis="y")
    _legend(figure, left)
    return figure


FIGURES: dict[str, tuple[str, Callable[[DynamicsFile], Any]]] = {
    "dynamics-paths": ("basins", figure_paths),
    "dynamics-gamma": ("direction", figure_gamma),
    "dynamics-norm": ("direction", figure_norm),
    "dynamics-perturbed-path": ("stability", figure_perturbed_path),
    "dynamics-sensitivity": ("stability", figure_sensitivity),
    "dynamics-speed": ("direction", figure_speed),
    "dynamics-speed-variance": ("estimates", figure_speed_variance),
    "dynamics-attraction": ("attraction", figure_attraction),
    "dynamics-gathering": ("gathering", figure_gathering),
    "dynamics-stable-rank": ("rank", figure_stable_rank),
    "dynamics-effective-rank": ("rank", figure_effective_rank),
    "dynamics-coherence": ("rank", figure_coherence),
    "dynamics-eigenvalues": ("modes", figure_eigenvalues),
    "dynamics-singular-values": ("modes", figure_singular_values),
    "dynamics-rank-sweep": ("modes", figure_rank_sweep),
    "dynamics-basins": ("basins", figure_basins),
}


def save_figures(measured: DynamicsFile, interventions: InterventionsFile | None, folder: str | Path) -> list[str]:
    """Write every figure whose data is there, as PNG and SVG; returns their names.

    Those of an earlier result are removed; of interventions only where there are new ones, because their file stays.
    """
    from raptor.report.figures_interventions import INTERVENTION_FIGURES

    folder, names = Path(folder), []
    for name, (measure, draw) in FIGURES.items():
        if getattr(measured.teacher, measure):  # None or empty where it was not measured
            perturbed = measured.teacher.num_stability_images if measure in ("stability", "attraction") else None
            _save(draw(measured), folder / name, measured, perturbed)
            names.append(name)
    for name, (part, draw_changed) in INTERVENTION_FIGURES.items():
        if interventions and any(getattr(side, part) is not None for side in interventions.sides().values()):
            _save(draw_changed(interventions), folder / name, interventions)
            names.append(name)
    for name in {*FIGURES, *(INTERVENTION_FIGURES if interventions else ())} - {*names}:
        for kind in ("png", "svg"):
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    return names


def _save(figure: Any, path: Path, result: DynamicsFile | InterventionsFile, num_perturbed: int | None = None) -> None:
    """Write a figure with what it was measured on above it: all images, or only those that were perturbed."""
    names = ", ".join(side.model.name for side in result.sides().values()) if isinstance(result, DynamicsFile) else ""
    num = result.num_images if num_perturbed is None else num_perturbed
    images = f"{num} images of {data_title(result.data, result.split)}"
    title = figure.get_suptitle()
    text = "\n".join(filter(None, [title, f"{names}; {images}" if names else images]))
    figure.suptitle(text, fontsize=10 if title else "x-small", color="black" if title else "grey")
    save_figure(figure, path)


def _over_states(measured: DynamicsFile, pick: Pick, title: str, label: str, log: bool = False) -> Any:
    plt = use_style()
    figure, ax = plt.subplots(figsize=SMALL)
    for side, model in measured.sides().items():
        for group in (g for g in GROUPS if g in pick(model)):
            spread = pick(model)[group]
            _draw(ax, range(len(spread.mean)), spread, group, side, measured)
    ax.set(title=title, ylabel=label, yscale="log" if log else "linear")
    if log:
        _plain_log_ticks(ax)
    _states_axis(ax, measured)
    _legend(figure, ax)
    return figure


def _over_steps(measured: DynamicsFile, pick: Pick, title: str, label: str, log: bool = False) -> Any:
    plt = use_style()
    figure, ax = plt.subplots(figsize=SMALL)
    for side, model in measured.sides().items():
        for group in (g for g in GROUPS if g in pick(model)):
            spread = pick(model)[group]
            _draw(ax, range(1, len(spread.mean) + 1), spread, group, side, measured)
    ax.set(title=title, ylabel=label, yscale="log" if log else "linear", xlabel="block $l$ (from $x_{l-1}$ to $x_l$)")
    if log:
        _plain_log_ticks(ax)
    phase_lines(ax, _boundaries(measured))
    whole_numbers(ax)
    ax.grid(axis="y")
    _legend(figure, ax)
    return figure


def _draw(ax: Any, layers: Sequence[int], spread: Spread, group: str, side: str, measured: DynamicsFile) -> None:
    """A curve and the band of the middle half of the images."""
    colour, x = GROUP_COLOURS[group], np.array(layers)
    ax.plot(x, spread.mean, color=colour, linestyle=_DASHES[side], label=_label(group, side, measured), zorder=3)
    low, high = spread.quantile(0.25), spread.quantile(0.75)
    if low is not None:
        ax.fill_between(x, low, high, color=colour, alpha=0.18 if side == "teacher" else 0.08, linewidth=0, zorder=2)


def _over_images(figure: Any) -> Any:
    """Says what the rows of the update matrices are."""
    figure.axes[0].set_title(figure.axes[0].get_title() + "\n(of one image's tokens; cls: of all images)")
    return figure


def _states_axis(ax: Any, measured: DynamicsFile, label: str = "layer $l$") -> None:
    ax.set_xlabel(label)
    phase_lines(ax, _boundaries(measured), offset=0)
    whole_numbers(ax)
    ax.grid(axis="y")


def _plain_log_ticks(ax: Any) -> None:
    """Numbers such as 2, 5 and 10 on a logarithmic axis that spans little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _boundaries(measured: DynamicsFile) -> list[int]:
    return list(Phases.from_lengths(measured.phases).boundaries) if measured.phases else []


def _suffix(side: str, measured: DynamicsFile) -> str:
    return f", {side}" if measured.surrogate else ""


def _label(group: str, side: str, measured: DynamicsFile) -> str:
    return group + _suffix(side, measured)


def _points(eigenvalues: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Real and imaginary parts of the finite ones among complex eigenvalues."""
    finite = eigenvalues[np.isfinite(eigenvalues.real)]
    return finite.real, finite.imag


def _legend(figure: Any, ax: Any) -> None:
    """The legend of `ax` under the whole figure, where it covers nothing."""
    handles, labels = ax.get_legend_handles_labels()
    columns = 3 if len(labels) % 3 == 0 else min(len(labels), 5)
    half = len(labels) // 2
    if len(labels) in (4, 6, 8) and labels[half].endswith("surrogate"):
        columns = half  # one row per model
        order = [i for pair in zip(range(half), range(half, 2 * half)) for i in pair]
        handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.6)
    while columns > 1 and legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        columns = (columns + 1) // 2
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.6)
