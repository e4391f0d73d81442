"""Stability beside an untrained twin: growth of small turns, Lyapunov exponents, fixed points and transplants."""

from __future__ import annotations

from collections.abc import Callable

from raptor.dynamics.tangents import TangentsFile
from raptor.report.charts import (
    BLOCK,
    EVERY,
    GROUP_NAMES,
    SHOWN_ON_PAPER,
    STATE,
    Axis,
    Chart,
    Control,
    Figure,
    Series,
    with_band,
)
from raptor.streaming import Spread

_STYLES = {"teacher": "teacher", "surrogate": "surrogate", "twin": "null"}
_NAMES = {"teacher": "", "surrogate": ", surrogate", "twin": ", untrained twin"}
_ON_PAPER = ("all",)


def _curve(base: str, side: str, x: list[int], spread: Spread, colour: str, **when: list[str]) -> Series:
    """A curve with its band over images: solid for the teacher, dashed for the surrogate, dotted for the twin."""
    line = Series(
        f"{base}{_NAMES[side]}", x, spread.mean, colour=colour, side=_STYLES[side], base=base, when=when, plain=True
    )
    return with_band(line, spread)


def _of_group(group: str, side: str, x: list[int], spread: Spread, **when: list[str]) -> Series:
    """A curve of one token group; `every group` shows all of them."""
    return _curve(GROUP_NAMES.get(group, group), side, x, spread, group, tokens=[group, EVERY], **when)


def jacobian_growth(measured: TangentsFile) -> Chart:
    """Growth of a small turn in each step, in the worst direction and in random ones."""
    series: list[Series] = []
    for side, found in measured.sides().items():
        for direction, growth in (("worst", found.jacobians.step), ("random", found.jacobians.step_random)):
            for group, spread in growth.items():
                layers = list(range(1, len(spread.mean) + 1))
                series.append(_of_group(group, side, layers, spread, direction=[direction]))
    return Chart(
        id="tangents-jacobian",
        kind="lines",
        title="Growth of a small turn",
        caption="The largest singular value of each block on directions. Below 1, a block contracts.",
        series=series,
        x=BLOCK,
        y=Axis("growth in one block", log=True),
        controls=[Control("direction", "Direction", [("worst", "worst"), ("random", "random")], "worst")],
        phases=measured.phases,
        offset=0.5,
        level=1,
    )


def figure_jacobian(measured: TangentsFile) -> Figure:
    """On paper: all tokens, worst and random directions."""
    chart = jacobian_growth(measured).only(tokens=_ON_PAPER)
    worst = chart.only(direction="worst", title="Worst direction")
    random = chart.only(direction="random", title="Random directions")
    return Figure([[worst, random]], "Growth of a small turn, all tokens", (4.3, 3.4))


def lyapunov_spectrum(measured: TangentsFile) -> Chart:
    """The leading finite-time Lyapunov exponents of each phase."""
    num_phases = len(measured.teacher.lyapunov.phases)
    series: list[Series] = []
    for side, found in measured.sides().items():
        for group, exponents in found.lyapunov.exponents.items():
            for phase in range(num_phases):
                spread = exponents[phase]
                numbers = list(range(1, len(spread.mean) + 1))
                series.append(_of_group(group, side, numbers, spread, phase=[str(phase + 1)]))
    options = [(str(phase), f"phase {phase}") for phase in range(1, num_phases + 1)]
    return Chart(
        id="tangents-lyapunov",
        kind="lines",
        title="Lyapunov exponents",
        caption="Above 0 neighbouring states part, below 0 they meet. Look for phases below the untrained twin.",
        series=series,
        x=Axis("exponent", integer=True),
        y=Axis("nats per step"),
        controls=[Control("phase", "Phase", options, "1")],
        level=0,
    )


def figure_lyapunov(measured: TangentsFile) -> Figure:
    """On paper: all tokens, a panel for each phase."""
    chart = lyapunov_spectrum(measured).only(tokens=_ON_PAPER)
    phases = range(1, len(measured.teacher.lyapunov.phases) + 1)
    panels = [chart.only(phase=str(phase), title=f"Phase {phase}") for phase in phases]
    return Figure([panels], "Lyapunov exponents, all tokens", (3.2, 3.3), same_y=True)


def fixed_points(measured: TangentsFile) -> Chart | None:
    """Turn per step of each tied block past its phase; a teacher has no tied block."""
    series: list[Series] = []
    for side, found in measured.sides().items():
        if found.fixed_points is None:
            continue
        for continuation in found.fixed_points.continuations:
            if continuation.depth == "held":
                steps = list(range(1, len(continuation.turn.mean) + 1))
                colour = f"palette-{continuation.phase - 1}"
                series.append(_curve(f"phase {continuation.phase}", side, steps, continuation.turn, colour))
    if not series:
        return None
    return Chart(
        id="tangents-fixed-points",
        kind="lines",
        title="Tied blocks that run on",
        caption="The state after the final norm. A block settles if it falls much faster than its untrained twin.",
        series=series,
        x=Axis("steps past the end of the phase", integer=True),
        y=Axis("turn in one step (rad)", log=True),
    )


def figure_fixed_points(measured: TangentsFile) -> Figure | None:
    chart = fixed_points(measured)
    return None if chart is None else Figure([[chart]])


def transplants(measured: TangentsFile) -> Chart | None:
    """How often the donor's class comes out, by layer, group and share of tokens; and with random states instead."""
    series: list[Series] = []
    shares: list[float] = []
    for side, found in measured.sides().items():
        if found.transplants is None:
            continue
        shares = sorted({share for _, share in found.transplants.parts})
        for row, (group, share) in enumerate(found.transplants.parts):
            # A single token is replaced whole, whatever the share of the other groups.
            is_single = sum(name == group for name, _ in found.transplants.parts) == 1
            shown = [f"{one:g}" for one in shares] if is_single else [f"{share:g}"]
            for given, outcome in (("donor", found.transplants.donor), ("random", found.transplants.random_donor)):
                mean = Spread(outcome.mean[row])
                series.append(_of_group(group, side, found.transplants.layers, mean, share=shown, given=[given]))
    if not series:
        return None
    return Chart(
        id="tangents-transplants",
        kind="lines",
        title="Tokens of another image",
        caption="Share of pairs with the donor's class. Look for a part that is ignored, and one that takes over.",
        series=series,
        x=STATE,
        y=Axis("donor's class comes out", range=(0, 1)),
        controls=[
            Control("share", "Share of tokens", [(f"{share:g}", f"{share:.0%}") for share in shares], "0.5"),
            Control("given", "Replaced by", [("donor", "the donor's"), ("random", "random, as far away")], "donor"),
        ],
        phases=measured.phases,
    )


def figure_transplants(measured: TangentsFile) -> Figure | None:
    """On paper: half of the tokens of each group, the donor's and random ones."""
    chart = transplants(measured)
    if chart is None:
        return None
    half = chart.only(share="0.5", tokens=SHOWN_ON_PAPER)
    panels = [half.only(given="donor", title="The donor's"), half.only(given="random", title="Random, as far away")]
    return Figure([panels], "Half of the tokens of a group replaced (cls whole)", (4.3, 3.4), same_y=True)


def tangent_charts(measured: TangentsFile) -> list[Chart]:
    """The charts of the page."""
    charts = [jacobian_growth(measured), lyapunov_spectrum(measured), fixed_points(measured), transplants(measured)]
    return [chart for chart in charts if chart is not None]


TANGENT_FIGURES: dict[str, Callable[[TangentsFile], Figure | None]] = {
    "tangents-jacobian": figure_jacobian,
    "tangents-lyapunov": figure_lyapunov,
    "tangents-fixed-points": figure_fixed_points,
    "tangents-transplants": figure_transplants,
}
