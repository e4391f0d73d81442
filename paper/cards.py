"""The paper's claims as cards: one claim, its teachers as points, and a verdict over makes of teachers.

    python paper/cards.py

writes results/claims.json (every row and every card), a figure for each card, and the pages of the site.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from claims import Claims, evaluate
from figures import BLUE, GREEN, GREY, ORANGE, PALETTE, VERMILION, pyplot
from over_teachers import Evidence, holm, mean_over_makes, trend_within_makes
from sweep import Json, as_json, read_config, write_json
from teacher_points import TRAINED, UNTRAINED, points_of

CARDS: list[Json] = yaml.safe_load((Path(__file__).parent / "cards.yaml").read_text())
LARGEST_P = 0.05
"""Largest p-value, after Holm's correction, of a verdict."""
_TEXTS = ("name", "title", "place", "says", "axis", "note", "why", "changes", "command")


class CardVerdict(StrEnum):
    """What the teachers together say of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDETERMINED = "undetermined"
    NOT_COMPARABLE = "not comparable"
    NOT_TESTED = "not tested"


def make_cards(rows: Sequence[Json], specs: Sequence[Json] = CARDS) -> list[Json]:
    """The cards of `specs`, with their verdicts corrected for the number of cards that a test could decide."""
    cards = [_undecided(spec, rows) for spec in specs]
    open_cards = [(card, spec) for card, spec in zip(cards, specs, strict=True) if "verdict" not in spec]
    found = [_evidence(card, spec) for card, spec in open_cards]
    # A card with too few makes could have been tested, so it counts among those corrected for.
    adjusted = holm([1.0 if one is None else one.p for one in found])
    for (card, spec), one, p in zip(open_cards, found, adjusted, strict=True):
        card["verdict"] = _verdict(one, p)
        if one is not None:
            shown = _back_from_log(one) if spec.get("log") else one
            card["evidence"] = {"value": shown.value, "lower": shown.lower, "upper": shown.upper, "p": one.p, "holm": p}
    return cards


def _undecided(spec: Json, rows: Sequence[Json]) -> Json:
    card: Json = {name: spec.get(name, "").strip() for name in _TEXTS}
    card |= {"above": spec.get("above"), "below": spec.get("below")}
    card |= {"trend": spec.get("trend", False), "log": spec.get("log", False)}
    card["tests"] = spec.get("tests", TRAINED)
    card["points"] = [one for source in spec["points"] for one in points_of(source, rows)]
    for one in card["points"]:
        if "only" in spec and one["make"] not in spec["only"]:
            one["kind"] = "not a test"
    card["evidence"] = None
    card["verdict"] = CardVerdict(spec["verdict"]) if "verdict" in spec else CardVerdict.UNDETERMINED
    card["figure"] = f"paper/results/cards/{spec['name']}.png" if card["points"] else ""
    return card


def makes_of(card: Json) -> dict[str, list[Json]]:
    """Make -> the teachers that the claim is tested on."""
    makes: dict[str, list[Json]] = defaultdict(list)
    for one in card["points"]:
        if one["kind"] == card["tests"]:
            makes[one["make"]].append(one)
    return dict(makes)


def _evidence(card: Json, spec: Json) -> Evidence | None:
    above, below = card["above"], card["below"]
    makes = makes_of(card).values()
    if card["trend"]:
        pairs = [[(one["p"], one["value"]) for one in teachers] for teachers in makes]
        return trend_within_makes(pairs, above, below)
    if spec.get("log"):
        above, below = (math.log(bound) if bound is not None else None for bound in (above, below))
        return mean_over_makes([[math.log(one["value"]) for one in teachers] for teachers in makes], above, below)
    return mean_over_makes([[one["value"] for one in teachers] for teachers in makes], above, below)


def _back_from_log(found: Evidence) -> Evidence:
    return replace(found, value=math.exp(found.value), lower=math.exp(found.lower), upper=math.exp(found.upper))


def _verdict(found: Evidence | None, adjusted: float) -> CardVerdict:
    if found is None or adjusted >= LARGEST_P:
        return CardVerdict.UNDETERMINED
    return CardVerdict.HOLDS if found.p_for < found.p_against else CardVerdict.FAILS


def num_on_side(card: Json) -> int:
    """How many makes have their mean, or their trend, on the claim's side."""
    count = 0
    for teachers in makes_of(card).values():
        values = [one["value"] for one in teachers]
        value = sum(values) / len(values)
        if card["trend"]:
            value = _slope([one["p"] for one in teachers], values)
        above = -math.inf if card["above"] is None else card["above"]
        below = math.inf if card["below"] is None else card["below"]
        count += above < value < below
    return count


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


# The figure

_MARKERS = {TRAINED: ("o", BLUE), UNTRAINED: ("o", ORANGE), "published": ("D", VERMILION), "not a test": ("x", GREY)}
_OTHER_MARKER = ("s", GREEN)


def draw(card: Json) -> Any:
    """A card's teachers: over stochastic depth, or a line of points for each make, with the interval below."""
    plt = pyplot()
    makes = list(dict.fromkeys(one["make"] for one in card["points"]))
    if card["trend"]:
        figure, axes = plt.subplots(figsize=(6.4, 2.6))
        for colour, marker, make in zip(PALETTE[1:], "osD", makes):
            own = [one for one in card["points"] if one["make"] == make]
            x, y = [one["p"] for one in own], [one["value"] for one in own]
            axes.plot(x, y, marker, color=colour, label=f"{make} ({len(own)} teachers)", markersize=5, alpha=0.8)
        axes.set(xlabel="stochastic depth p of the teacher", ylabel=card["axis"])
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return figure

    found = card["evidence"]
    figure, axes = plt.subplots(figsize=(6.4, 0.75 + 0.27 * (len(makes) + (found is not None))))
    _shade_claimed(axes, card)
    kinds = list(dict.fromkeys(one["kind"] for one in card["points"]))
    for kind in kinds:
        marker, colour = _MARKERS.get(kind, _OTHER_MARKER)
        own = [one for one in card["points"] if one["kind"] == kind]
        x, y = [one["value"] for one in own], [makes.index(one["make"]) for one in own]
        face = colour if kind != UNTRAINED else "none"
        axes.plot(x, y, marker, color=colour, markerfacecolor=face, label=kind, markersize=6, alpha=0.8)
    names = list(makes)
    if found is not None:
        row = len(makes)
        ends = [[found["value"] - found["lower"]], [found["upper"] - found["value"]]]
        axes.errorbar([found["value"]], [row], xerr=ends, fmt="|", color="black", capsize=3, markersize=8)
        names.append("mean of makes, 95 %")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    if card["log"]:
        axes.set_xscale("log")
    axes.set_xlabel(card["axis"])
    if kinds != [TRAINED]:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _shade_claimed(axes: Any, card: Json) -> None:
    """The side of the bounds that the paper claims, in grey."""
    values = [one["value"] for one in card["points"]]
    bounds = [bound for bound in (card["above"], card["below"]) if bound is not None]
    ends = [] if card["evidence"] is None else [card["evidence"]["lower"], card["evidence"]["upper"]]
    low, high = min([*values, *bounds, *ends]), max([*values, *bounds, *ends])
    if card["log"]:
        low, high = low / 2, high * 2
    else:
        margin = 0.06 * (high - low)
        low, high = low - margin, high + margin
    left = low if card["above"] is None else card["above"]
    right = high if card["below"] is None else card["below"]
    axes.axvspan(left, right, color="#EEEEEE", linewidth=0, zorder=0)
    for bound in bounds:
        axes.axvline(bound, color=GREY, linewidth=0.8, zorder=1)
    axes.set_xlim(low, high)


def main(config: Claims) -> Json:
    from claims_page import cards_page, experiments_page

    found = evaluate(config)
    found["cards"] = as_json(make_cards(found["claims"]))
    folder = Path(config.results)
    write_json(folder / "claims.json", found)
    for card in found["cards"]:
        if card["figure"]:
            Path(card["figure"]).parent.mkdir(exist_ok=True)
            figure = draw(card)
            figure.savefig(card["figure"], dpi=120)
            pyplot().close(figure)
    (folder / "experiments.md").write_text(experiments_page(folder))
    if config.page is not None:
        Path(config.page).write_text(cards_page(found))
    print(", ".join(f"{num} {verdict}" for verdict, num in found["counts"].items()))
    return found


if __name__ == "__main__":
    main(read_config(Claims))
