"""Depth as a dynamical system: what is measured along depth, teacher and surrogate over each other.

Perturbations are in `stability.py`, modes in `modes.py`, class basins in `basins.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.dynamics.tangents import TangentsFile
from raptor.report.basins import figure_basins, figure_paths
from raptor.report.charts import (
    BLOCK,
    GROUPS,
    SHOWN_ON_PAPER,
    STATE,
    Axis,
    Chart,
    Figure,
    Section,
    Series,
    along_depth,
    group_control,
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
from raptor.report.stability import (
    evenly_spaced,
    figure_attraction,
    figure_perturbed_path,
    figure_sensitivity,
    perturbed,
    perturbed_paths,
    sensitivity,
)
from raptor.report.style import data_title, save_figure
from raptor.report.tangents import TANGENT_FIGURES, tangent_charts
from raptor.streaming import Spread

LEAD = (
    "Read depth as time. Solid lines are the teacher, dashed ones the surrogate, bands the phases. "
    "Choose one token group to see its spread over images (middle half)."
)
_OVER_IMAGES = "of one image's tokens; cls: of all images"

Sides = dict[str, DynamicsResult]


@dataclass(frozen=True)
class Panel:
    """A quantity along depth: how it is called, its unit, and what to look for.

    steps: whether it belongs to blocks 1..L rather than to states 0..L.
    """

    title: str
    y: Axis
    caption: str
    pick: Callable[[DynamicsResult], dict[str, Spread]]
    steps: bool = False
    note: str = ""


PANELS = {
    "norm": Panel(
        "Norm",
        Axis("mean token norm |x|", log=True),
        "Look for growth, and for groups that grow faster.",
        lambda found: found.direction.norm,
    ),
    "gamma": Panel(
        "Directional convergence",
        Axis("γ: cosine with the last state"),
        "Look for an S-shape, and for the group that arrives first.",
        lambda found: found.direction.gamma,
    ),
    "speed": Panel(
        "Angular speed",
        Axis("turn in one block (rad)", from_zero=True),
        "Look for jumps where a phase ends, and a late turn of cls.",
        lambda found: found.direction.speed,
        steps=True,
    ),
    "speed-variance": Panel(
        "Variance of the angular speed",
        Axis("variance over tokens and images (rad²)", log=True),
        "Look for steps at which all tokens turn alike (low) or each on its own (high).",
        lambda found: {group: Spread(parts.total) for group, parts in found.direction.speed_variance.items()},
        steps=True,
    ),
    "stable-rank": Panel(
        "Stable rank of updates",
        Axis("stable rank", log=True),
        "Look for a fall: fewer and fewer directions shared by all tokens.",
        lambda found: found.rank.stable_rank,
        steps=True,
        note=_OVER_IMAGES,
    ),
    "effective-rank": Panel(
        "Effective rank of updates",
        Axis("effective rank", log=True),
        "The same with small directions counted too.",
        lambda found: found.rank.effective_rank,
        steps=True,
        note=_OVER_IMAGES,
    ),
    "coherence": Panel(
        "Coherence of updates",
        Axis("mean cosine with the mean update", range=(0, 1)),
        "1 means all tokens move as one. Look for a late peak.",
        lambda found: found.rank.coherence,
        steps=True,
        note=_OVER_IMAGES,
    ),
}
_ON_PAGE = ("norm", "gamma", "speed", "stable-rank", "effective-rank", "coherence")


def dynamics(results: Results) -> Section:
    section = Section("dynamics", "Dynamics", "Depth as a dynamical system", LEAD)
    measured = results.dynamics
    if measured is None:
        section.hint = "raptor dynamics"
        section.hint_reason = results.notes.get("dynamics", "")
        return section
    sides = measured.sides()
    phases = measured.phases or results.phase_lengths
    found = [group for group in GROUPS if any(group in side.direction.norm for side in sides.values())]
    section.controls = [group_control(found)]
    section.charts = [panel(name, sides, phases) for name in _ON_PAGE]
    stability = perturbed(sides)
    if stability:
        section.charts.append(sensitivity(stability, phases))
        section.charts.append(perturbed_paths(stability, phases, evenly_spaced(stability)))
    section.charts += [eigenvalues(sides), spectrum(sides), reconstruction(sides, phases), rank_sweep(sides)]
    section.html = _measured(measured) + _findings(sides)
    if results.tangents is not None:
        section.charts += tangent_charts(results.tangents)
        lines = results.tangents.findings + results.tangents.notes
        summary = f"In words: stability beside an untrained twin, {results.tangents.images}"
        section.html += f"<details><summary>{escape(summary)}</summary>{bullet_list(lines)}</details>"
    missing = [] if "teacher" in stability else ["stability"]
    if measured.surrogate is None:
        missing.append("the surrogate")
    if missing:
        section.hint = "raptor dynamics"
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
    first = 1 if about.steps else 0
    series = []
    for side, found in sides.items():
        spreads = about.pick(found)
        for group in GROUPS:
            if group in spreads:
                series.append(along_depth(group, side, spreads[group], first))
    return Chart(
        id=f"dynamics-{name}",
        kind="lines",
        title=about.title,
        caption=about.caption,
        series=series,
        x=BLOCK if about.steps else STATE,
        y=about.y,
        phases=phases,
        offset=0.5 if about.steps else 0,
    )


def figure_panel(name: str, measured: DynamicsFile) -> Figure:
    """On paper: one of `PANELS`."""
    about = PANELS[name]
    title = f"{about.title}\n({about.note})" if about.note else about.title
    chart = panel(name, measured.sides(), measured.phases)
    return Figure([[chart.only(tokens=SHOWN_ON_PAPER, title=title)]])


def _figure_speed_variance(measured: DynamicsFile) -> Figure | None:
    return figure_panel("speed-variance", measured) if measured.teacher.direction.speed_variance else None


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


def save_figures(
    measured: DynamicsFile,
    interventions: InterventionsFile | None,
    folder: str | Path,
    tangents: TangentsFile | None = None,
) -> list[str]:
    """Write every figure whose data is there, as PNG and SVG; returns their names.

    Figures of an earlier result are removed; figures of interventions and tangents only where there are new results,
    because their files stay.
    """
    figures: dict[str, Figure | None] = {}
    names = ", ".join(side.model.name for side in measured.sides().values())
    for name, describe in FIGURES.items():
        num = measured.teacher.num_stability_images if name in _OF_PERTURBED else measured.num_images
        figures[name] = _with_images(describe(measured), measured, num, f"{names}; ")
    if interventions is not None:
        for name, describe_changed in INTERVENTION_FIGURES.items():
            figures[name] = _with_images(describe_changed(interventions), interventions, interventions.num_images)
    if tangents is not None:
        for name, describe_tangents in TANGENT_FIGURES.items():
            figures[name] = _with_images(describe_tangents(tangents), tangents, tangents.num_images)
    for name, figure in figures.items():
        path = Path(folder) / name
        if figure is not None:
            save_figure(draw(figure), path)
            continue
        for kind in ("png", "svg"):
            path.with_name(f"{name}.{kind}").unlink(missing_ok=True)
    return [name for name, figure in figures.items() if figure is not None]


def _with_images(
    figure: Figure | None,
    result: DynamicsFile | InterventionsFile | TangentsFile,
    num_images: int | None,
    names: str = "",
) -> Figure | None:
    """The figure with the models and images it was measured on."""
    if figure is None:
        return None
    images = f"{names}{num_images} images of {data_title(result.data, result.split)}"
    return replace(figure, source=images)
