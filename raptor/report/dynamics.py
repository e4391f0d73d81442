"""Depth as a dynamical system: what is measured along depth, teacher and surrogate over each other.

Modes are in `modes.py`, class basins in `basins.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.dynamics.stability import StabilityResult
from raptor.report.basins import figure_basins, figure_paths
from raptor.report.charts import (
    EVERY,
    GROUP_NAMES,
    GROUPS,
    SHOWN_ON_PAPER,
    Axis,
    Chart,
    Control,
    Figure,
    Section,
    Series,
    along_depth,
    finite_values,
    group_control,
    number,
    of_group,
    with_band,
)
from raptor.report.interventions import INTERVENTION_FIGURES
from raptor.report.markup import bullet_list, paragraph
from raptor.report.modes import (
    eigenvalues,
    figure_eigenvalues,
    figure_rank_sweep,
    figure_singular_values,
    rank_sweep,
    reconstruction,
    spectrum,
)
from raptor.report.paper import draw
from raptor.report.results import Results
from raptor.report.style import data_title, save_figure
from raptor.streaming import Spread

LEAD = (
    "Read depth as time. Solid lines are the teacher, dashed ones the surrogate, bands the phases. "
    "Choose one token group to see its spread over images (middle half)."
)
STATE, BLOCK = Axis("layer l", integer=True), Axis("block l (from state l−1 to l)", integer=True)
_MAX_PATHS = 8  # perturbed paths on the page for one choice of the controls
_PATHS_ON_PAPER = (0, 0.25, 0.5, 0.75)  # from which layers, as shares of depth
_OVER_IMAGES = "of one image's tokens; cls: of all images"

Sides = dict[str, DynamicsResult]


@dataclass(frozen=True)
class Panel:
    """A quantity along depth: how it is called, what it is counted in, and what to look for.

    steps: whether it belongs to blocks 1..L rather than to states 0..L.
    """

    title: str
    unit: str
    caption: str
    pick: Callable[[DynamicsResult], dict[str, Spread]]
    y: Axis
    steps: bool = False
    note: str = ""


PANELS = {
    "norm": Panel(
        "Norm",
        "mean token norm |x|",
        "Look for growth, and for groups that grow faster.",
        lambda found: found.direction.norm,
        Axis(log=True),
    ),
    "gamma": Panel(
        "Directional convergence",
        "γ: cosine with the last state",
        "Look for an S-shape, and for the group that arrives first.",
        lambda found: found.direction.gamma,
        Axis(),
    ),
    "speed": Panel(
        "Angular speed",
        "turn in one block (rad)",
        "Look for jumps where a phase ends, and a late turn of cls.",
        lambda found: found.direction.speed,
        Axis(from_zero=True),
        steps=True,
    ),
    "speed-variance": Panel(
        "Variance of the angular speed",
        "variance over tokens and images (rad²)",
        "Look for steps at which all tokens turn alike (low) or each on its own (high).",
        lambda found: {group: Spread(parts.total) for group, parts in found.direction.speed_variance.items()},
        Axis(log=True),
        steps=True,
    ),
    "stable-rank": Panel(
        "Stable rank of updates",
        "stable rank",
        "Look for a fall: fewer and fewer directions shared by all tokens.",
        lambda found: found.rank.stable_rank,
        Axis(log=True),
        steps=True,
        note=_OVER_IMAGES,
    ),
    "effective-rank": Panel(
        "Effective rank of updates",
        "effective rank",
        "The same with small directions counted too.",
        lambda found: found.rank.effective_rank,
        Axis(log=True),
        steps=True,
        note=_OVER_IMAGES,
    ),
    "coherence": Panel(
        "Coherence of updates",
        "mean cosine with the mean update",
        "1 means all tokens move as one. Look for a late peak.",
        lambda found: found.rank.coherence,
        Axis(range=(0, 1)),
        steps=True,
        note=_OVER_IMAGES,
    ),
}
_ON_PAGE = ("norm", "gamma", "speed", "stable-rank", "effective-rank", "coherence")


def dynamics(results: Results) -> Section:
    section = Section("dynamics", "Dynamics", "Depth as a dynamical system", LEAD)
    measured = results.dynamics
    if measured is None:
        section.hint, section.hint_reason = results.adds("dynamics"), results.notes.get("dynamics", "")
        return section
    sides = measured.sides()
    phases = measured.phases or results.phase_lengths
    found = [group for group in GROUPS if any(group in side.direction.norm for side in sides.values())]
    section.controls = [group_control(found)]
    section.charts = [panel(name, sides, phases) for name in _ON_PAGE]
    stability = _perturbed(sides)
    if stability:
        section.charts.append(sensitivity(stability, phases))
        section.charts.append(perturbed_paths(stability, phases, _evenly_spaced(stability)))
    section.charts += [eigenvalues(sides), spectrum(sides), reconstruction(sides, phases), rank_sweep(sides)]
    section.html = _measured(measured) + _findings(sides)
    missing = [] if "teacher" in stability else ["stability"]
    if measured.surrogate is None:
        missing.append("the surrogate")
    if missing:
        section.hint = results.adds("dynamics")
        section.hint_reason = f"Not measured: {', '.join(missing)}."
    return section


def _measured(measured: DynamicsFile) -> str:
    """The models and the images, and a warning where these are very few."""
    names = " and ".join(side.model.name for side in measured.sides().values())
    few = f" {measured.few_images.capitalize()}." if measured.few_images else ""
    return paragraph(f"{names}, {measured.images}.{few}", "caption")


def _findings(sides: Sides) -> str:
    """The findings of each side in words, folded away."""
    html = ""
    for side, found in sides.items():
        lines = found.findings + found.notes
        if lines:
            html += f"<details><summary>In words: the {side}</summary>{bullet_list(lines)}</details>"
    return html


def panel(name: str, sides: Sides, phases: list[int] | None) -> Chart:
    """One of `PANELS`, every token group of every side."""
    about = PANELS[name]
    series = []
    words = []
    for side, found in sides.items():
        spreads = about.pick(found)
        for group in GROUPS:
            if group in spreads:
                curve = along_depth(group, side, spreads[group], first=1 if about.steps else 0)
                series.append(curve)
                words += _ends(curve)
    return Chart(
        id=f"dynamics-{name}",
        kind="lines",
        title=about.title,
        caption=about.caption,
        alt=f"{about.title} along depth: {'; '.join(words)}.",
        series=series,
        x=BLOCK if about.steps else STATE,
        y=replace(about.y, label=about.unit),
        phases=phases,
        offset=0.5 if about.steps else 0,
    )


def _ends(curve: Series) -> list[str]:
    values = finite_values(curve.y)
    return [f"{curve.name} from {number(values[0])} to {number(values[-1])}"] if values else []


def figure_panel(name: str, measured: DynamicsFile) -> Figure:
    """On paper: one of `PANELS`."""
    about = PANELS[name]
    title = f"{about.title}\n({about.note})" if about.note else about.title
    chart = panel(name, measured.sides(), measured.phases)
    return Figure([[chart.only(tokens=SHOWN_ON_PAPER, title=title)]])


def _figure_speed_variance(measured: DynamicsFile) -> Figure | None:
    return figure_panel("speed-variance", measured) if measured.teacher.direction.speed_variance else None


# Perturbations --------------------------------------------------------------------------------------------------------


def _perturbed(sides: Sides) -> dict[str, StabilityResult]:
    return {side: found.stability for side, found in sides.items() if found.stability is not None}


def _size_controls(measured: StabilityResult) -> list[Control]:
    eps, targets = measured.eps, measured.targets
    sizes = [(str(i), f"{size:g}") for i, size in enumerate(eps)]
    return [
        Control("target", "Perturb", [(target, GROUP_NAMES.get(target, target)) for target in targets], targets[0]),
        Control("eps", "Size ε", sizes, str(len(eps) // 2)),
    ]


def sensitivity(found: dict[str, StabilityResult], phases: list[int] | None) -> Chart:
    """Angle at the last layer over the size of a perturbation, against the layer where it enters."""
    series: list[Series] = []
    for side, measured in found.items():
        for t, target in enumerate(measured.targets):
            for g, group in enumerate(measured.groups):
                for e in range(len(measured.eps)):
                    spread = measured.angle_per_eps[t, g, e]
                    line = of_group(group, side, measured.layers, spread.mean, target=[target], eps=[str(e)])
                    series.append(with_band(line, spread))
    first = next(iter(found.values()))
    look = "a straight fall means the same contraction at every layer."
    size = "a share of the token's norm" if first.kind == "relative" else "times a Gaussian"
    slope = float(first.log_slope()[0, first.groups.index("all"), len(first.eps) // 2])
    return Chart(
        id="sensitivity",
        kind="lines",
        title="Sensitivity",
        caption=f"ε is {size}; {look}",
        alt="Final angle over size of the perturbation, by the layer it enters; its logarithm changes by "
        f"{number(slope)} per layer over all tokens.",
        series=series,
        x=Axis("layer of the perturbation", integer=True),
        y=Axis("angle at the last layer / ε (rad)", log=True),
        controls=_size_controls(first),
        phases=phases,
    )


def figure_sensitivity(measured: DynamicsFile) -> Figure | None:
    """On paper, at the smallest size: all tokens perturbed, and only the group that is followed."""
    found = _perturbed(measured.sides())
    if "teacher" not in found:
        return None
    chart = sensitivity(found, measured.phases).only(eps="0", tokens=SHOWN_ON_PAPER)
    every = chart.only(target="all", title=f"All tokens perturbed (ε = {found['teacher'].eps[0]:g})")
    own = [series for series in chart.series if series.when["target"] == series.when["tokens"][:1]]
    alone = replace(chart, series=own, title="Only the group perturbed")
    return Figure([[every, alone]], size=(4.3, 3.4), same_y=True)


def _evenly_spaced(found: dict[str, StabilityResult]) -> list[int]:
    """The layers of injection that the page shows."""
    layers = next(iter(found.values())).layers
    return layers[:: -(-len(layers) // _MAX_PATHS)]


def perturbed_paths(found: dict[str, StabilityResult], phases: list[int] | None, layers: list[int]) -> Chart:
    """Angle between perturbed and clean path, from each of `layers` on."""
    series: list[Series] = []
    for side, measured in found.items():
        for t, target in enumerate(measured.targets):
            for g, group in enumerate(measured.groups):
                tokens = [group, EVERY] if group == "all" else [group]
                for e in range(len(measured.eps)):
                    when = {"target": [target], "eps": [str(e)], "tokens": tokens}
                    for layer in layers:
                        i = measured.layers.index(layer)
                        path = _path(measured.path[t, g, e, i], measured.layers, i, side)
                        series.append(replace(path, when=when))
    first = next(iter(found.values()))
    return Chart(
        id="perturbed-paths",
        kind="lines",
        title="Perturbed paths",
        caption="Look for paths that bend back: depth forgets what was added.",
        alt="Angle between the perturbed and the clean path at every layer, for several layers of injection.",
        series=series,
        x=STATE,
        y=Axis("angle to the clean path (rad)", log=True),
        controls=_size_controls(first),
        phases=phases,
    )


def _path(angles: np.ndarray, layers: list[int], i: int, side: str) -> Series:
    base = f"from layer {layers[i]}"
    name = f"{base}, surrogate" if side == "surrogate" else base
    colour = f"ramp-{i / max(len(layers) - 1, 1):.3f}"
    return Series(name, list(range(len(angles))), angles, colour=colour, side=side, base=base)


def figure_perturbed_path(measured: DynamicsFile) -> Figure | None:
    """On paper, at the middle size: one panel a token group, from four layers of injection."""
    found = _perturbed(measured.sides())
    if "teacher" not in found:
        return None
    first = found["teacher"]
    middle = len(first.eps) // 2
    last = len(first.layers) - 1
    layers = sorted({first.layers[round(share * last)] for share in _PATHS_ON_PAPER})
    chart = perturbed_paths(found, measured.phases, layers).only(target="all", eps=str(middle))
    size = "of their norm" if first.kind == "relative" else "times a standard normal vector"
    title = f"Perturbed paths, all tokens moved by {first.eps[middle]:g} {size}"
    groups = [group for group in SHOWN_ON_PAPER if group in first.groups]
    return Figure([[chart.only(tokens=group, title=group) for group in groups]], title, (3.2, 3.3), same_y=True)


def figure_attraction(measured: DynamicsFile) -> Figure | None:
    """On paper: angle between perturbed and clean states inside each phase, perturbed where the phase begins."""
    if not measured.teacher.attraction:
        return None
    groups = [group for group in SHOWN_ON_PAPER if group in measured.teacher.attraction[0].angle]
    title = "Attraction within phases (numbers: factor per step)"
    return Figure([[_attraction(group, measured) for group in groups]], title, (3.2, 3.3), same_y=True)


def _attraction(group: str, measured: DynamicsFile) -> Chart:
    series: list[Series] = []
    for side, found in measured.sides().items():
        for phase in found.attraction:
            layers = list(range(phase.first, phase.last + 1))
            curve = Series(side, layers, phase.angle[group], colour=group, side=side)
            if side == "teacher":
                curve.text = [""] * len(layers)
                curve.text[len(layers) // 2] = f"×{phase.rate[group]:.2f}"
            series.append(curve)
    return Chart(
        id=f"attraction-{group}",
        kind="lines",
        title=group,
        caption="Below 1 the phase attracts: what was added shrinks at every step.",
        alt=f"Angle to the clean path of {group} tokens, from the first state of each phase to its last.",
        series=series,
        x=STATE,
        y=Axis("angle to the clean path (rad)", log=True),
        phases=measured.phases,
    )


# Gathering ------------------------------------------------------------------------------------------------------------


def figure_gathering(measured: DynamicsFile) -> Figure | None:
    """On paper: mean cosine of an image's tokens with their mean direction, and of their updates with the way to it."""
    if measured.teacher.gathering is None:
        return None
    tokens: list[Series] = []
    updates: list[Series] = []
    for side, found in measured.sides().items():
        if found.gathering is not None:
            for group in SHOWN_ON_PAPER:
                if group in found.gathering.alignment:
                    tokens.append(along_depth(group, side, found.gathering.alignment[group], first=0))
                    updates.append(along_depth(group, side, found.gathering.toward[group], first=1))
    left = Chart(
        id="gathering-tokens",
        kind="lines",
        title="Tokens and their mean direction",
        caption="Look for a rise: the tokens of an image come to point the same way.",
        alt="Mean cosine of an image's tokens with their mean direction, along depth.",
        series=tokens,
        x=STATE,
        y=Axis("mean cosine"),
        phases=measured.phases,
    )
    right = replace(
        left,
        id="gathering-updates",
        title="Updates toward the mean direction",
        caption="Above 0, tokens gather.",
        alt="Mean cosine of updates with the way toward the mean direction, along depth.",
        series=updates,
        x=BLOCK,
        offset=0.5,
        level=0,
    )
    return Figure([[left, right]], size=(4.3, 3.4))


# Files ----------------------------------------------------------------------------------------------------------------

FIGURES: dict[str, Callable[[DynamicsFile], Figure | None]] = {
    "dynamics-paths": figure_paths,
    "dynamics-gamma": partial(figure_panel, "gamma"),
    "dynamics-norm": partial(figure_panel, "norm"),
    "dynamics-perturbed-path": figure_perturbed_path,
    "dynamics-sensitivity": figure_sensitivity,
    "dynamics-speed": partial(figure_panel, "speed"),
    "dynamics-speed-variance": _figure_speed_variance,
    "dynamics-attraction": figure_attraction,
    "dynamics-gathering": figure_gathering,
    "dynamics-stable-rank": partial(figure_panel, "stable-rank"),
    "dynamics-effective-rank": partial(figure_panel, "effective-rank"),
    "dynamics-coherence": partial(figure_panel, "coherence"),
    "dynamics-eigenvalues": figure_eigenvalues,
    "dynamics-singular-values": figure_singular_values,
    "dynamics-rank-sweep": figure_rank_sweep,
    "dynamics-basins": figure_basins,
}
_OF_PERTURBED = ("dynamics-perturbed-path", "dynamics-sensitivity", "dynamics-attraction")


def save_figures(measured: DynamicsFile, interventions: InterventionsFile | None, folder: str | Path) -> list[str]:
    """Write every figure whose data is there, as PNG and SVG; returns their names.

    Figures of an earlier result are removed; those of interventions only where there are new ones, because their file
    stays.
    """
    figures: dict[str, Figure | None] = {}
    names = ", ".join(side.model.name for side in measured.sides().values())
    for name, describe in FIGURES.items():
        num = measured.teacher.num_stability_images if name in _OF_PERTURBED else measured.num_images
        figures[name] = _with_images(describe(measured), measured, num, f"{names}; ")
    if interventions is not None:
        for name, describe_changed in INTERVENTION_FIGURES.items():
            figures[name] = _with_images(describe_changed(interventions), interventions, interventions.num_images)
    for name, figure in figures.items():
        path = Path(folder) / name
        if figure is not None:
            save_figure(draw(figure), path)
            continue
        for kind in ("png", "svg"):
            path.with_name(f"{name}.{kind}").unlink(missing_ok=True)
    return [name for name, figure in figures.items() if figure is not None]


def _with_images(
    figure: Figure | None, result: DynamicsFile | InterventionsFile, num_images: int | None, names: str = ""
) -> Figure | None:
    """The figure with the models and images it was measured on."""
    if figure is None:
        return None
    images = f"{names}{num_images} images of {data_title(result.data, result.split)}"
    return replace(figure, source=images)
