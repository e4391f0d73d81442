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
from statistics import covariance, fmean
from typing import Any

import yaml
from claims import Claims, evaluate
from figures import BLUE, GREEN, GREY, ORANGE, VERMILION, pyplot
from over_teachers import Evidence, holm, mean_over_makes, trend_within_makes
from sweep import Json, as_json, column, read_config, where, write_json
from teacher_points import TRAINED, UNTRAINED, points_of
from verdict import bounds_of

CARDS: list[Json] = yaml.safe_load((Path(__file__).parent / "cards.yaml").read_text())
LARGEST_P = 0.05  # largest p-value, after Holm's correction, of a verdict
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
    open_cards = []
    found: list[Evidence | None] = []
    for card, spec in zip(cards, specs, strict=True):
        if "verdict" not in spec:
            open_cards.append(card)
            found.append(_evidence(card))
    # A card with too few makes could have been tested, so it counts among those corrected for.
    adjusted = holm([1.0 if one is None else one.p for one in found])
    for card, one, p in zip(open_cards, found, adjusted, strict=True):
        if one is None:
            continue
        if p < LARGEST_P:
            card["verdict"] = CardVerdict.HOLDS if one.p_for < one.p_against else CardVerdict.FAILS
        if card["log"]:
            one = replace(one, value=math.exp(one.value), lower=math.exp(one.lower), upper=math.exp(one.upper))
        card["evidence"] = {"value": one.value, "lower": one.lower, "upper": one.upper, "p": one.p, "holm": p}
    return cards


def _undecided(spec: Json, rows: Sequence[Json]) -> Json:
    """A card with its points, and with the verdict that cards.yaml gives to those that no test decides."""
    card: Json = {name: spec.get(name, "").strip() for name in _TEXTS}
    card |= {"above": spec.get("above"), "below": spec.get("below")}
    card |= {"trend": spec.get("trend", False), "log": spec.get("log", False)}
    card |= {"tests": spec.get("tests", TRAINED), "points": [], "evidence": None}
    for source in spec["points"]:
        card["points"] += points_of(source, rows)
    for one in card["points"]:
        if "only" in spec and one["make"] not in spec["only"]:
            one["kind"] = "not a test"
    card["verdict"] = CardVerdict(spec.get("verdict", "undetermined"))
    card["figure"] = f"paper/results/cards/{spec['name']}.png" if card["points"] else ""
    return card


def makes_of(card: Json) -> dict[str, list[Json]]:
    """Make -> the teachers that the claim is tested on."""
    makes: dict[str, list[Json]] = defaultdict(list)
    for one in card["points"]:
        if one["kind"] == card["tests"]:
            makes[one["make"]].append(one)
    return dict(makes)


def _evidence(card: Json) -> Evidence | None:
    makes = makes_of(card).values()
    above = card["above"]
    below = card["below"]
    if card["trend"]:
        pairs = [list(zip(column(teachers, "p"), column(teachers, "value"))) for teachers in makes]
        return trend_within_makes(pairs, above, below)
    values = []
    for teachers in makes:
        own = column(teachers, "value")
        # Ratios are averaged as logarithms, so that twice and half cancel.
        values.append(list(map(math.log, own)) if card["log"] else own)
    if card["log"]:
        above = math.log(above) if above is not None else None
        below = math.log(below) if below is not None else None
    return mean_over_makes(values, above, below)


def num_on_side(card: Json) -> int:
    """How many makes have their mean, or their trend, on the claim's side."""
    above, below = bounds_of(card["above"], card["below"])
    count = 0
    for teachers in makes_of(card).values():
        value = fmean(column(teachers, "value"))
        if card["trend"]:
            # The bound of a trend is 0, and the slope has the sign of the covariance with p.
            value = covariance(column(teachers, "p"), column(teachers, "value"))
        count += above < value < below
    return count


# The figure

_MARKERS = {TRAINED: ("o", BLUE), UNTRAINED: ("o", ORANGE), "published": ("D", VERMILION), "not a test": ("x", GREY)}
_OTHER_MARKER = ("s", GREEN)


def draw(card: Json) -> Any:
    """A card's teachers: over stochastic depth, or a line of points for each make, with the interval below."""
    points: dict[str, list[Json]] = defaultdict(list)
    for one in card["points"]:
        points[one["make"]].append(one)
    return _draw_trend(card, points) if card["trend"] else _draw_makes(card, list(points))


def _draw_trend(card: Json, points: dict[str, list[Json]]) -> Any:
    figure, axes = pyplot().subplots(figsize=(6.4, 2.6))
    styles = [(VERMILION, "o"), (BLUE, "s"), (GREEN, "D")]
    for (make, own), (colour, marker) in zip(points.items(), styles):
        label = f"{make} ({len(own)} teachers)"
        axes.plot(column(own, "p"), column(own, "value"), marker, color=colour, label=label, markersize=5, alpha=0.8)
    axes.set(xlabel="stochastic depth p of the teacher", ylabel=card["axis"])
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_makes(card: Json, makes: list[str]) -> Any:
    found = card["evidence"]
    names = list(makes)
    if found is not None:
        names.append("mean of makes, 95 %")
    figure, axes = pyplot().subplots(figsize=(6.4, 0.75 + 0.27 * len(names)))
    _shade_claimed(axes, card)
    kinds = list(dict.fromkeys(column(card["points"], "kind")))
    for kind in kinds:
        marker, colour = _MARKERS.get(kind, _OTHER_MARKER)
        own = where(card["points"], kind=kind)
        places = list(map(makes.index, column(own, "make")))
        face = "none" if kind == UNTRAINED else colour
        axes.plot(
            column(own, "value"),
            places,
            marker,
            color=colour,
            markerfacecolor=face,
            label=kind,
            markersize=6,
            alpha=0.8,
        )
    if found is not None:
        ends = [[found["value"] - found["lower"]], [found["upper"] - found["value"]]]
        axes.errorbar([found["value"]], [len(makes)], xerr=ends, fmt="|", color="black", capsize=3, markersize=8)
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
    bounds = [bound for bound in (card["above"], card["below"]) if bound is not None]
    shown = bounds + column(card["points"], "value")
    if card["evidence"] is not None:
        shown += [card["evidence"]["lower"], card["evidence"]["upper"]]
    low = min(shown)
    high = max(shown)
    if card["log"]:
        low /= 2
        high *= 2
    else:
        margin = 0.06 * (high - low)
        low -= margin
        high += margin
    above, below = bounds_of(card["above"], card["below"])
    axes.axvspan(max(low, above), min(high, below), color="#EEEEEE", linewidth=0, zorder=0)
    for bound in bounds:
        axes.axvline(bound, color=GREY, linewidth=0.8, zorder=1)
    axes.set_xlim(low, high)


def main(config: Claims) -> Json:
    # Imported here because the pages are made of cards, from this file.
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
