"""Figures of depth as a dynamical system, one function a panel (the paper's Figures 6 to 10).

Every function takes what dynamics.json holds. Colours are token groups, solid lines the teacher, dashed ones the
surrogate, bands the middle half of the images, thin vertical lines the ends of phases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from raptor.report.style import CLASS_COLOURS, GROUP_COLOURS, phase_lines, save_figure, use_style, whole_numbers

SIDES = {"teacher": "-", "surrogate": (0, (4, 2))}
GROUPS = ("cls", "registers", "patches")
SMALL = (4.6, 3.4)

Measured = dict[str, Any]


def figure_norm(measured: Measured) -> Any:
    return _over_states(measured, "norm", "Norm", "mean token norm $\\|x_l\\|$", log=True)


def figure_gamma(measured: Measured) -> Any:
    return _over_states(measured, "gamma", "Directional convergence", "$\\gamma_l$: cosine with the last state")


def figure_speed(measured: Measured) -> Any:
    return _over_steps(measured, "direction", "speed", "Angular speed", "turn in one block (rad)")


def figure_stable_rank(measured: Measured) -> Any:
    return _over_images(_over_steps(measured, "rank", "stable_rank", "Stable rank of updates", "stable rank", log=True))


def figure_effective_rank(measured: Measured) -> Any:
    figure = _over_steps(measured, "rank", "effective_rank", "Effective rank of updates", "effective rank", log=True)
    return _over_images(figure)


def figure_coherence(measured: Measured) -> Any:
    return _over_images(
        _over_steps(measured, "rank", "coherence", "Coherence of updates", "mean cosine with the mean update")
    )


def figure_paths(measured: Measured) -> Any:
    """Mean path of each class on two principal components, one column a group, one row a model."""
    plt = use_style()
    sides = [(side, m) for side, m, _ in _sides(measured) if m["basins"]]
    groups = _groups({side: m["basins"]["groups"] for side, m in sides})
    figure, axes = plt.subplots(len(sides), len(groups), figsize=(3.2 * len(groups), 3.1 * len(sides)), squeeze=False)
    names = measured.get("class_names") or {}
    for row, (side, model) in zip(axes, sides):
        basins = model["basins"]
        for ax, group in zip(row, groups):
            for i, label in enumerate(basins["classes"]):
                path = np.array(basins["groups"][group]["class_paths"][i])
                colour = CLASS_COLOURS[i % len(CLASS_COLOURS)]
                name = names.get(str(label), f"class {label}")
                ax.plot(path[:, 0], path[:, 1], color=colour, label=name, marker=".", linewidth=1.2, zorder=2)
                ax.plot(*path[0, :2], "o", color="white", markeredgecolor=colour, markersize=5, zorder=3)
                ax.plot(*path[-1, :2], "*", color=colour, markersize=10, markeredgecolor="white", zorder=4)
                ends = list(accumulate(measured["phases"] or []))[:-1]
                ax.plot(path[ends, 0], path[ends, 1], "|", color="black", markersize=7, linestyle="none", zorder=3)
            share = basins["groups"][group]["explained"]
            ax.set(xlabel=f"PC 1 ({share[0]:.0%} of variance)", ylabel=f"PC 2 ({share[1]:.0%})")
            ax.set_title(group if len(sides) == 1 else f"{group}, {side}")
    figure.suptitle("Class paths through depth (circle: layer 0, star: last layer, bars: phase ends)", fontsize=10)
    _legend(figure, axes[0, 0])
    return figure


def figure_basins(measured: Measured) -> Any:
    """Nearest-class-mean accuracy and between/within scatter over depth."""
    plt = use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
    for side, model, dashes in _sides(measured):
        for group, values in (model["basins"] or {"groups": {}})["groups"].items():
            style = dict(color=GROUP_COLOURS[group], linestyle=dashes, label=_label(group, side, measured))
            left.plot(100 * np.array(values["accuracy"]), **style)
            right.plot(np.array(values["scatter_ratio"], dtype=float), **style)
        if model["basins"]:
            left.axhline(100 * model["basins"]["chance"], color="#777777", linestyle=":", linewidth=1)
    left.set(title="Nearest class mean (dotted: chance)", ylabel="images in their own class (%)")
    right.set(title="Class scatter", ylabel="between / within")
    for ax in (left, right):
        _states_axis(ax, measured)
    _legend(figure, left)
    return figure


def figure_perturbed_path(measured: Measured, eps_index: int | None = None) -> Any:
    """How far a perturbed path is from the clean one, from each of a few injection layers to the end."""
    plt = use_style()
    sides = [(side, m["stability"], dashes) for side, m, dashes in _sides(measured) if m["stability"]]
    first = sides[0][1]
    groups = [g for g in GROUPS if g in first["groups"]]
    e = len(first["eps"]) // 2 if eps_index is None else eps_index
    num = len(first["layers"])
    chosen = sorted({round(q * (num - 1)) for q in (0, 0.25, 0.5, 0.75)})
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(chosen)))
    figure, axes = plt.subplots(1, len(groups), figsize=(3.2 * len(groups), 3.3), sharey=True, squeeze=False)
    for ax, group in zip(axes[0], groups):
        for side, stability, dashes in sides:
            target, g = stability["targets"].index("all"), stability["groups"].index(group)
            for colour, i in zip(colours, chosen):
                layer = stability["layers"][i]
                path = np.array(stability["path"][target][g][e][i], dtype=float)
                label = f"perturbed at layer {layer}" + _suffix(side, measured)
                ax.plot(path, color=colour, linestyle=dashes, label=label)
                ax.plot(layer, path[layer], "o", color=colour, markersize=4)
        ax.set(title=group, yscale="log", ylabel="angle to the clean path (rad)" if group == groups[0] else "")
        _plain_log_ticks(ax)
        _states_axis(ax, measured)
    figure.suptitle(f"Perturbed paths, all tokens moved by {first['eps'][e]:g} of their norm", fontsize=10)
    _legend(figure, axes[0, 0])
    return figure


def figure_sensitivity(measured: Measured, eps_index: int = 0) -> Any:
    """Angle at the last layer over eps, against the injection layer: all tokens perturbed, and each group alone."""
    plt = use_style()
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.4), sharey=True)
    eps = 0.0
    for side, model, dashes in _sides(measured):
        stability = model["stability"]
        if not stability:
            continue
        eps = stability["eps"][eps_index]
        for group in (g for g in GROUPS if g in stability["groups"]):
            g = stability["groups"].index(group)
            for ax, target in zip(axes, ("all", group)):
                t = stability["targets"].index(target)
                at = (t, g, eps_index)
                spread = {
                    "mean": np.array(stability["angle_per_eps"]["mean"], dtype=float)[at],
                    "quantiles": {
                        name: np.array(values, dtype=float)[at]
                        for name, values in (stability["angle_per_eps"]["quantiles"] or {}).items()
                    },
                }
                _draw(ax, stability["layers"], spread, group, side, dashes, measured)
    axes[0].set(title="All tokens perturbed", ylabel=f"angle at the last layer / $\\epsilon$ ($\\epsilon$ = {eps:g})")
    axes[1].set(title="The group alone perturbed")
    for ax in axes:
        ax.set_yscale("log")
        _plain_log_ticks(ax)
        _states_axis(ax, measured, "layer of the perturbation")
        ax.yaxis.set_tick_params(labelleft=True)
    _legend(figure, axes[0])
    return figure


def figure_eigenvalues(measured: Measured) -> Any:
    """DMD eigenvalues on the unit circle: small points one fit an image, large ones the fit pooled over all."""
    plt = use_style()
    sides = [(side, m["modes"]) for side, m, _ in _sides(measured)]
    groups = [g for g in GROUPS if g in sides[0][1]]
    figure, axes = plt.subplots(
        len(sides), len(groups), figsize=(3.1 * len(groups), 3.2 * len(sides)), squeeze=False, sharex=True, sharey=True
    )
    turn = np.linspace(0, 2 * np.pi, 400)
    everything = [_points(m[g]["eigenvalues"] + [m[g]["pooled"]["eigenvalues"]]) for _, m in sides for g in groups]
    limit = 1.06 * max(1, *(np.abs(np.array(points)).max() for points in everything))
    for row, (side, modes) in zip(axes, sides):
        for ax, group in zip(row, groups):
            ax.plot(np.cos(turn), np.sin(turn), color="#999999", linewidth=1, zorder=1)
            fitted = _points(modes[group]["eigenvalues"])
            pooled = _points([modes[group]["pooled"]["eigenvalues"]])
            colour = GROUP_COLOURS[group]
            ax.plot(*fitted, ".", color=colour, markersize=3, alpha=0.35, markeredgewidth=0, label="one fit an image")
            ax.plot(*pooled, "D", color="white", markeredgecolor=colour, markersize=5, label="one fit for all images")
            radius = modes[group]["spectral_radius"]["mean"]
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


def figure_singular_values(measured: Measured) -> Any:
    """Singular values of the trajectories of group means, over the largest."""
    plt = use_style()
    figure, ax = plt.subplots(figsize=SMALL)
    for side, model, dashes in _sides(measured):
        for group in (g for g in GROUPS if g in model["modes"]):
            values = np.array(model["modes"][group]["singular_values"]["mean"])
            index = np.arange(1, len(values) + 1)
            label = _label(group, side, measured)
            ax.plot(index, values / values[0], color=GROUP_COLOURS[group], linestyle=dashes, marker=".", label=label)
    ax.set(
        title="Singular spectrum of the trajectory", yscale="log", xlabel="index", ylabel="$\\sigma_i\\,/\\,\\sigma_1$"
    )
    whole_numbers(ax)
    ax.grid(axis="y")
    _legend(figure, ax)
    return figure


def figure_rank_sweep(measured: Measured) -> Any:
    """What the rank of the DMD decides: reconstruction error and median modulus against it."""
    plt = use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
    for side, model, dashes in _sides(measured):
        for group in (g for g in GROUPS if g in model["modes"]):
            sweep = model["modes"][group]["sweep"]
            ranks = [int(r) for r in sweep]
            error = [np.mean(sweep[r]["reconstruction_error"]["mean"][1:]) for r in sweep]
            modulus = [sweep[r]["median_modulus"]["mean"] for r in sweep]
            style = dict(color=GROUP_COLOURS[group], linestyle=dashes, marker=".", label=_label(group, side, measured))
            left.plot(ranks, error, **style)
            right.plot(ranks, modulus, **style)
    left.set(title="Reconstruction error", ylabel="relative error, mean over layers", ylim=(0, None))
    right.set(title="Median modulus", ylabel="median $|\\lambda|$")
    for ax in (left, right):
        ax.set_xlabel("DMD rank")
        whole_numbers(ax)
        ax.grid(axis="y")
    _legend(figure, left)
    return figure


FIGURES: dict[str, tuple[str, Callable[[Measured], Any]]] = {
    "dynamics-paths": ("basins", figure_paths),
    "dynamics-gamma": ("direction", figure_gamma),
    "dynamics-norm": ("direction", figure_norm),
    "dynamics-perturbed-path": ("stability", figure_perturbed_path),
    "dynamics-sensitivity": ("stability", figure_sensitivity),
    "dynamics-speed": ("direction", figure_speed),
    "dynamics-stable-rank": ("rank", figure_stable_rank),
    "dynamics-effective-rank": ("rank", figure_effective_rank),
    "dynamics-coherence": ("rank", figure_coherence),
    "dynamics-eigenvalues": ("modes", figure_eigenvalues),
    "dynamics-singular-values": ("modes", figure_singular_values),
    "dynamics-rank-sweep": ("modes", figure_rank_sweep),
    "dynamics-basins": ("basins", figure_basins),
}


def save_figures(measured: Measured, interventions: dict[str, Any] | None, folder: str | Path) -> list[str]:
    """Write every figure whose data is there, as PNG and SVG; gives their names."""
    from raptor.report.figures_interventions import INTERVENTION_FIGURES

    folder, names = Path(folder), []
    for name, (measure, draw) in FIGURES.items():
        if measured["teacher"].get(measure):
            save_figure(draw(measured), folder / name)
            names.append(name)
    for name, (part, draw) in INTERVENTION_FIGURES.items():
        if interventions and any((interventions[side] or {}).get(part) for side in SIDES):
            save_figure(draw(interventions), folder / name)
            names.append(name)
    return names


def _over_states(measured: Measured, name: str, title: str, label: str, log: bool = False) -> Any:
    plt = use_style()
    figure, ax = plt.subplots(figsize=SMALL)
    for side, model, dashes in _sides(measured):
        for group in (g for g in GROUPS if g in model["direction"][name]):
            spread = model["direction"][name][group]
            _draw(ax, range(len(spread["mean"])), spread, group, side, dashes, measured)
    ax.set(title=title, ylabel=label, yscale="log" if log else "linear")
    if log:
        _plain_log_ticks(ax)
    _states_axis(ax, measured)
    _legend(figure, ax)
    return figure


def _over_steps(measured: Measured, measure: str, name: str, title: str, label: str, log: bool = False) -> Any:
    plt = use_style()
    figure, ax = plt.subplots(figsize=SMALL)
    for side, model, dashes in _sides(measured):
        for group in (g for g in GROUPS if g in model[measure][name]):
            spread = model[measure][name][group]
            _draw(ax, range(1, len(spread["mean"]) + 1), spread, group, side, dashes, measured)
    ax.set(title=title, ylabel=label, yscale="log" if log else "linear", xlabel="block $l$ (from $x_{l-1}$ to $x_l$)")
    if log:
        _plain_log_ticks(ax)
    phase_lines(ax, _boundaries(measured))
    whole_numbers(ax)
    ax.grid(axis="y")
    _legend(figure, ax)
    return figure


def _draw(
    ax: Any, layers: Sequence[int], spread: dict[str, Any], group: str, side: str, dashes: Any, measured: Measured
) -> None:
    """A curve and the band of the middle half of the images."""
    colour, x = GROUP_COLOURS[group], np.array(layers)
    y = np.array(spread["mean"], dtype=float)
    ax.plot(x, y, color=colour, linestyle=dashes, label=_label(group, side, measured), zorder=3)
    quantiles = spread.get("quantiles") or {}
    if "q25" in quantiles:
        low, high = (np.array(quantiles[q], dtype=float) for q in ("q25", "q75"))
        ax.fill_between(x, low, high, color=colour, alpha=0.18 if side == "teacher" else 0.08, linewidth=0, zorder=2)


def _over_images(figure: Any) -> Any:
    """Says what the rows of the update matrices are."""
    figure.axes[0].set_title(figure.axes[0].get_title() + "\n(of one image's tokens; cls: of all images)")
    return figure


def _states_axis(ax: Any, measured: Measured, label: str = "layer $l$") -> None:
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


def _sides(measured: Measured) -> list[tuple[str, dict[str, Any], Any]]:
    return [(side, measured[side], dashes) for side, dashes in SIDES.items() if measured.get(side)]


def _groups(found: dict[str, dict[str, Any]]) -> list[str]:
    return [g for g in GROUPS if any(g in groups for groups in found.values())]


def _boundaries(measured: Measured) -> list[int]:
    return list(accumulate(measured.get("phases") or []))[:-1]


def _suffix(side: str, measured: Measured) -> str:
    return f", {side}" if measured.get("surrogate") else ""


def _label(group: str, side: str, measured: Measured) -> str:
    return group + _suffix(side, measured)


def _points(eigenvalues: Any) -> tuple[list[float], list[float]]:
    """Real and imaginary parts of the finite ones among nested [real, imaginary] pairs."""
    pairs = [pair for fit in eigenvalues for pair in fit if pair[0] is not None]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def _legend(figure: Any, ax: Any) -> None:
    """The legend of `ax` under the whole figure, where it covers nothing."""
    handles, labels = ax.get_legend_handles_labels()
    columns = 3 if len(labels) % 3 == 0 else min(len(labels), 5)
    half = len(labels) // 2
    if len(labels) in (4, 6, 8) and labels[half].endswith("surrogate"):
        columns = half  # one row a model
        order = [i for pair in zip(range(half), range(half, 2 * half)) for i in pair]
        handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.6)
