"""The figure of a certificate: R2, relative error and cosine over depth, by token group, beside the null models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raptor.fidelity.certificate import Certificate
from raptor.fidelity.error_curves import Array, Curves
from raptor.phases import Phases
from raptor.report.style import GROUP_COLOURS, GROUP_MARKERS, data_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# dashes and markers say again what colours say
_GROUP_STYLES = {group: (colour, GROUP_MARKERS[group]) for group, colour in GROUP_COLOURS.items()}
NULL_STYLES = {
    "identity": ("#999999", ":"),
    "mean": ("#CC79A7", "-."),
    "tied": ("#8C6D31", "--"),
    "linear": ("#56B4E9", (0, (5, 1, 1, 1, 1, 1))),
}
PANELS = (
    ("r2", "$R^2$", "R² of the states"),
    ("relative", r"$E\|a_l-\tilde a_l\|_F\;/\;E\|a_l\|_F$", "Relative error"),
    ("cosine", "cosine, mean over tokens", "Cosine"),
)
_FLOOR = {
    "r2": -1.0,
    "cosine": -0.25,
}  # curves below are cut off, so that a diverging null model does not rule the scale
_CEILING = {"relative": 2.0}


def figure_certificate(certificate: Certificate) -> Figure:
    """Three panels over the layers 1..L: the surrogate by token group with 95 % bands, null models over all tokens."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(12, 4.2), layout=ConstrainedLayoutEngine(w_pad=0.12))
    for axes, (metric, label, title) in zip(figure.subplots(1, 3), PANELS):
        _draw_nulls(axes, certificate, metric)
        _draw_groups(axes, certificate, metric)
        _draw_phases(axes, certificate.phases)
        _set_limits(axes, certificate, metric)
        axes.set(title=title, xlabel="layer $l$", ylabel=label)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i].startswith("null"))
    figure.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="outside lower center", ncols=8, frameon=False
    )
    which = data_title(certificate.data, certificate.split)
    images = f"{certificate.curves.num_images:,} images of {which} at {certificate.image_size} px"
    trained = certificate.judged.training
    words = [] if trained is None else [str(trained)]
    words = ["undertrained", *words] if certificate.judged.undertrained else words
    lines = [f"{certificate.surrogate}: {images}", _bound(certificate), ": ".join(words)]
    figure.suptitle("\n".join(filter(None, lines)), fontsize="medium")
    return figure


def _bound(certificate: Certificate) -> str:
    """The relative error that holds at every layer: of all tokens, and of each token group where it is larger."""
    found = {group: eps.value for group, eps in certificate.eps["relative"].items() if eps.value is not None}
    if "all" not in found:
        return ""
    larger = [f"{group} {value:.3f}" for group, value in found.items() if round(value, 3) > round(found["all"], 3)]
    of_groups = f" over all tokens ({', '.join(larger)})" if larger else ""
    return f"relative error at most {found['all']:.3f}{of_groups} at every layer"


def _finite(parts: list[Array]) -> Array:
    values = np.concatenate(parts)
    return values[np.isfinite(values)]


def _layers(curves: Curves) -> Array:
    return np.arange(1, curves.num_layers + 1, dtype=np.float64)


def _draw_groups(axes: Axes, certificate: Certificate, metric: str) -> None:
    curves = certificate.curves
    ends = certificate.intervals.get(metric)
    for group in curves.groups:
        colour, marker = _GROUP_STYLES[group]
        name = "all tokens" if group == "all" else group
        axes.plot(
            _layers(curves),
            getattr(curves, metric)[group],
            color=colour,
            marker=marker,
            markersize=4,
            label=name,
            zorder=3,
        )
        if ends is not None and np.isfinite(ends[group]).all():
            axes.fill_between(_layers(curves), *ends[group], color=colour, alpha=0.15, linewidth=0)


def _draw_nulls(axes: Axes, certificate: Certificate, metric: str) -> None:
    for name, curves in certificate.nulls.items():
        colour, dashes = NULL_STYLES[name]
        values = getattr(curves, metric)["all"]
        axes.plot(
            _layers(curves), values, color=colour, linestyle=dashes, linewidth=1.6, label=f"null: {name}", zorder=2
        )


def _draw_phases(axes: Axes, phases: Phases) -> None:
    """A vertical line between the last layer of a phase and the first of the next."""
    for end in phases.boundaries:
        axes.axvline(end + 0.5, color="#BBBBBB", linewidth=1, zorder=1)


def _clip_note(curves: Curves, metric: str, below: list[str], above: list[str]) -> str:
    """Which groups of the surrogate leave the axis, and how far."""
    lowest = [f"{group} to {np.nanmin(getattr(curves, metric)[group]):.3g}" for group in below]
    highest = [f"{group} to {np.nanmax(getattr(curves, metric)[group]):.3g}" for group in above]
    return f"off the axis: {', '.join(lowest + highest)}" if lowest + highest else ""


def _set_limits(axes: Axes, certificate: Certificate, metric: str) -> None:
    """The scale of the values within `_FLOOR` and `_CEILING`; what lies beyond is cut off, with a note."""
    from matplotlib.ticker import MaxNLocator

    own = _finite([getattr(certificate.curves, metric)[group] for group in certificate.curves.groups])
    drawn = _finite([own, *(getattr(null, metric)["all"] for null in certificate.nulls.values())])
    low = max(drawn.min(initial=0), _FLOOR.get(metric, -np.inf))
    high = min(drawn.max(initial=0 if metric == "relative" else 1), _CEILING.get(metric, np.inf))
    below = [g for g in certificate.curves.groups if np.nanmin(getattr(certificate.curves, metric)[g]) < low]
    above = [g for g in certificate.curves.groups if np.nanmax(getattr(certificate.curves, metric)[g]) > high]
    note = _clip_note(certificate.curves, metric, below, above)
    if note:
        axes.text(
            0.02,
            0.02 if below else 0.98,
            note,
            transform=axes.transAxes,
            fontsize=7,
            color="#555555",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            va="bottom" if below else "top",
            zorder=5,
        )
    margin = 0.05 * (high - low)
    axes.set_ylim(low - (margin if low < 0 else 0), high + margin)
    axes.set_xlim(0.5, certificate.curves.num_layers + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#EEEEEE", zorder=0)
