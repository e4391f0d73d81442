"""Stability beside an untrained twin: growth of small turns, Lyapunov exponents, fixed points and transplants."""

from __future__ import annotations

from raptor.dynamics.tangents import TangentsFile
from raptor.report.charts import EVERY, GROUP_NAMES, Chart, Control, Series, described, with_band
from raptor.streaming import Spread

_NAMES = {"teacher": "", "surrogate": ", surrogate", "twin": ", untrained twin"}


def tangent_charts(measured: TangentsFile) -> list[Chart]:
    """Every chart of tangents.json; a teacher has no tied block, and some models have no head to transplant for."""
    charts = []
    for describe in (jacobian_growth, lyapunov_spectrum, fixed_points, transplants):
        chart = describe(measured)
        if chart.series:
            charts.append(chart)
    return charts


def _curve(base: str, side: str, x: list[int], spread: Spread, colour: str, **when: list[str]) -> Series:
    """A curve with its band over images: solid for the teacher, dashed for the surrogate, dotted for the twin."""
    name = f"{base}{_NAMES[side]}"
    line = Series(name, x, spread.mean, colour=colour, side=side, base=base, when=when, plain=True)
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
    options = [("worst", "worst"), ("random", "random")]
    chooser = Control("direction", "Direction", options, "worst")
    return described("tangents-jacobian", series, controls=[chooser], phases=measured.phases)


def lyapunov_spectrum(measured: TangentsFile) -> Chart:
    """The leading finite-time Lyapunov exponents of each phase."""
    num_phases = len(measured.teacher.lyapunov.phases)
    series: list[Series] = []
    for side, found in measured.sides().items():
        for group, exponents in found.lyapunov.exponents.items():
            # The twin has the phases of the other sides, so that one chooser serves all.
            for phase in range(num_phases):
                spread = exponents[phase]
                numbers = list(range(1, len(spread.mean) + 1))
                series.append(_of_group(group, side, numbers, spread, phase=[str(phase + 1)]))
    options = [(str(phase), f"phase {phase}") for phase in range(1, num_phases + 1)]
    return described("tangents-lyapunov", series, controls=[Control("phase", "Phase", options, "1")])


def fixed_points(measured: TangentsFile) -> Chart:
    """Turn per step of each tied block past its phase."""
    series: list[Series] = []
    for side, found in measured.sides().items():
        if found.fixed_points is None:
            continue
        for continuation in found.fixed_points.continuations:
            # Only the paper's depth MLP continues, so only the held depth compares kinds of surrogates.
            if continuation.depth == "held":
                steps = list(range(1, len(continuation.turn.mean) + 1))
                colour = f"palette-{continuation.phase - 1}"
                series.append(_curve(f"phase {continuation.phase}", side, steps, continuation.turn, colour))
    return described("tangents-fixed-points", series)


def transplants(measured: TangentsFile) -> Chart:
    """How often the donor's class comes out, by layer, group and share of tokens; and with random states instead."""
    series: list[Series] = []
    shares: list[float] = []  # the same on every side
    for side, found in measured.sides().items():
        if found.transplants is None:
            continue
        shares = sorted({share for _, share in found.transplants.parts})
        groups = [group for group, _ in found.transplants.parts]
        for row, (group, share) in enumerate(found.transplants.parts):
            shown = [f"{share:g}"]
            if groups.count(group) == 1:
                # A single token is replaced whole, whatever the share of the other groups.
                shown = [f"{one:g}" for one in shares]
            for given, outcome in (("donor", found.transplants.donor), ("random", found.transplants.random_donor)):
                mean = Spread(outcome.mean[row])
                series.append(_of_group(group, side, found.transplants.layers, mean, share=shown, given=[given]))
    given_options = [("donor", "the donor's tokens"), ("random", "random ones, as far away")]
    controls = [
        Control("share", "Share of tokens", [(f"{share:g}", f"{share:.0%}") for share in shares], "0.5"),
        Control("given", "Replaced by", given_options, "donor"),
    ]
    return described("tangents-transplants", series, controls=controls, phases=measured.phases)
