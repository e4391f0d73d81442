"""The paper's claims about block swaps: the turn of the last state, the predictions that stay, the accuracy kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt

import numpy as np
from evidence import Basis, Claim, Evidence, over_seeds
from records import SwapRow, Swaps

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.swaps import WITHOUT, compare_pairs
from raptor.phases import Phases

SWAPS = "Section 2 (camera-ready)"


def claims_interventions(found: InterventionsFile) -> list[Claim]:
    """Block swaps of one model: how far the last state turns and which predictions stay, within and across phases."""
    if found.teacher is None:
        return []
    swaps = found.teacher.swaps
    turn, stays = swaps.angle["all"], swaps.agreement
    claims = []
    for number, without in enumerate(WITHOUT):
        std = {name: values[number] for name, values in swaps.matched_std.items()}
        num = swaps.num_images
        claims.append(turn_claim(swaps.pairs, turn.mean, turn.std, swaps.phases, num, without, std.get("turn")))
        if stays is not None:
            means = compare_pairs(swaps.pairs, stays.mean, swaps.phases, without)
            claims += prediction_claims(means, num, without, std.get("agreement"), found.head or "")
    return [replace(claim, figure="interventions-swaps") for claim in claims]


def prediction_claims(
    shares: dict[str, float], num_images: int, without: Sequence[int], paired: float | None = None, head: str = ""
) -> list[Claim]:
    """Shares of the predictions that stay after a swap, means over pairs; NaN where there is no such pair.

    paired: deviation over images of the difference at equal distance, never taken as less than 1 / images. Other
    intervals (Wilson's) take all pairs as fully correlated, so they are too wide rather than too narrow. head: which
    head predicts.
    """
    within, across, near, far = (shares[name] for name in ("within", "across", "within_matched", "across_matched"))
    by = f"mean over pairs ({head})" if head else "mean over pairs"
    both = f"{near:.0%} stay within, {far:.0%} across (at any distance {within:.0%} and {across:.0%})"
    apart = _difference(near, far, num_images, paired)
    made: tuple[tuple[str, tuple[float, float, float], float | None, float | None, str], ...] = (
        (f"{_CHEAP} (share of predictions that stay above .9)", _share(within, num_images), 0.9, None, by),
        (f"{_BREAKS} (share of predictions that stay below .5)", _share(across, num_images), None, 0.5, by),
        (f"at equal distance more predictions stay after {_THAN}", apart, 0.0, None, both),
    )
    claims = []
    for says, (value, lower, upper), above, below, text in made:
        claim = Claim(place=SWAPS, says=says + (_REST if without else ""))
        if np.isfinite(value):
            evidence = Evidence(value=value, lower=lower, upper=upper, num=num_images, above=above, below=below)
            claim = replace(claim, measured=text, evidence=evidence)
        claims.append(claim)
    return claims


def _share(share: float, num: int) -> tuple[float, float, float]:
    """A mean share over `num` images with its 95 % interval by Wilson's formula; NaN stays NaN."""
    centre, spread = share + 1.96**2 / (2 * num), 1.96 * sqrt(share * (1 - share) / num + (1.96 / (2 * num)) ** 2)
    return share, (centre - spread) / (1 + 1.96**2 / num), (centre + spread) / (1 + 1.96**2 / num)


def _difference(near: float, far: float, num: int, paired: float | None) -> tuple[float, float, float]:
    """The difference of two shares of the same images with its 95 % interval."""
    if paired is None:
        (_, near_low, near_high), (_, far_low, far_high) = _share(near, num), _share(far, num)
        return near - far, near_low - far_high, near_high - far_low
    half = 1.96 * max(paired, 1 / num) / sqrt(num)
    return near - far, max(-1.0, near - far - half), min(1.0, near - far + half)


_CHEAP, _BREAKS = (
    "swapping two blocks within a phase costs little",
    "swapping two blocks across phases breaks the model",
)
_THAN = "a swap within a phase than across phases"
_REST = ", without block 1"


def turn_says(without: Sequence[int]) -> str:
    rest = _REST if without else ""
    return f"at equal distance a swap across phases turns the last state more than one within{rest}"


def turn_claim(
    pairs: Sequence[tuple[int, int]],
    turn: np.ndarray,
    deviation: np.ndarray | None,
    phases: Phases,
    num_images: int,
    without: Sequence[int],
    paired: float | None = None,
) -> Claim:
    """How much more a swap across phases turns the last state; `turn` and its deviation over images are `(pairs,)`.

    paired: deviation over images of the difference itself. Without it the interval takes the deviations of all pairs as
    fully correlated, so it is too wide rather than too narrow.
    """
    claim = Claim(place=SWAPS, says=turn_says(without))
    means = compare_pairs(pairs, turn, phases, without)
    value = means["across_matched"] - means["within_matched"]
    if not np.isfinite(value):
        return claim
    text = f"{means['across_matched']:.2f} rad across, {means['within_matched']:.2f} within"
    text += f" (at any distance {means['across']:.2f} and {means['within']:.2f})"
    evidence = Evidence(value=value, num=num_images, above=0)
    spread = paired
    if spread is None and deviation is not None:
        errors = compare_pairs(pairs, deviation, phases, without)
        spread = errors["across_matched"] + errors["within_matched"]
    if spread is None:
        text += "; the run kept no deviations over images, so there is no interval"
    else:
        half = 1.96 * spread / sqrt(num_images)
        evidence = replace(evidence, lower=value - half, upper=value + half)
    return replace(claim, measured=text, evidence=evidence)


def claims_swaps(found: Swaps | None) -> list[Claim]:
    """Swapped blocks: the accuracy kept, over the teachers that learned something; the turn of the last state.

    A model that is not of the sweep over p is judged over images, by the turn and by the predictions that stay.
    """
    rows = found.rows if found else []
    named = [row for row in rows if row.p is None]
    claims = [claim for row in named for claim in _turns_of(row, found)]
    if rows and len(named) == len(rows):
        return claims
    learned = [row for row in rows if (row.accuracy or 0) > 2 * (row.chance or 1)]
    return [*_claims_kept(learned), *_turns_over(learned), *claims]


def _turns_of(row: SwapRow, found: Swaps | None) -> list[Claim]:
    """The turn of one model's last state and the predictions that stay, with the recipe that made the file."""
    phases, turn = Phases.from_lengths(row.phases), np.array(row.angle)
    deviation = None if row.angle_std is None else np.array(row.angle_std)
    paired = row.matched_std.get("turn", [None] * len(WITHOUT))
    claims = [
        turn_claim(row.pairs, turn, deviation, phases, row.num_images, without, own)
        for without, own in zip(WITHOUT, paired)
    ]
    paired = row.matched_std.get("agreement", [None] * len(WITHOUT))
    for without, stays, own in zip(WITHOUT, (row.compared.get("agreement"), row.without_first_agreement), paired):
        if stays is not None:
            shares = {name: np.nan if (v := stays.mean(name)) is None else v for name in _KINDS}
            claims += prediction_claims(shares, row.num_images, without, own)
    return [replace(claim, recipe=found.made_by() if found else "") for claim in claims]


def _turns_over(rows: Sequence[SwapRow]) -> list[Claim]:
    """The same over teachers."""
    claims = []
    for without in WITHOUT:
        claim = Claim(place=SWAPS, says=turn_says(without))
        known = [row for row in rows if row.angle]
        means = [compare_pairs(r.pairs, np.array(r.angle), Phases.from_lengths(r.phases), without) for r in known]
        values = [d for m in means if np.isfinite(d := m["across_matched"] - m["within_matched"])]
        if values:
            evidence = _over_teachers(values, above=0.0)
            claim = replace(claim, measured=f"rad, mean over pairs and {len(values)} teachers", evidence=evidence)
        claims.append(claim)
    return claims


_KINDS = ("within", "across", "within_matched", "across_matched")


def _claims_kept(rows: Sequence[SwapRow]) -> list[Claim]:
    within = f"{_CHEAP} (share of the accuracy kept above .9)"
    across = f"{_BREAKS} (share kept below .5)"
    more = "at equal distance a swap within a phase keeps more than one across phases"
    made: dict[str, tuple[float | None, float | None, Callable[[dict[str, float]], float]]] = {
        within: (0.9, None, lambda kept: kept["within"]),
        across: (None, 0.5, lambda kept: kept["across"]),
        more: (0.0, None, lambda kept: kept["within_matched"] - kept["across_matched"]),
    }
    claims = []
    for without in WITHOUT:
        kept = [_kept(row, without) for row in rows]
        for says, (above, below, quantity) in made.items():
            claim = Claim(place=SWAPS, says=says + (_REST if without else ""))
            values = [v for shares in kept if np.isfinite(v := quantity(shares))]
            if values:
                evidence = _over_teachers(values, above, below)
                text = f"{evidence.value:.1%} of the accuracy, mean over pairs and {len(values)} teachers"
                claim = replace(claim, measured=text, evidence=evidence)
            claims.append(claim)
    return claims


def _over_teachers(values: list[float], above: float | None = None, below: float | None = None) -> Evidence:
    value, lower, upper = over_seeds(values)
    num = len(values)
    return Evidence(value=value, lower=lower, upper=upper, basis=Basis.RUNS, num=num, above=above, below=below)


def _kept(row: SwapRow, without: Sequence[int]) -> dict[str, float]:
    """Share of the accuracy kept, means over pairs; NaN where there is no such pair."""
    assert row.accuracy
    if row.swapped_accuracy:
        kept = np.array(row.swapped_accuracy) / row.accuracy
        return compare_pairs(row.pairs, kept, Phases.from_lengths(row.phases), without)
    means = row.compared_accuracy if not without else row.without_first_accuracy
    found = {name: means.mean(name) if means is not None else None for name in _KINDS}
    return {name: np.nan if value is None else value / row.accuracy for name, value in found.items()}
