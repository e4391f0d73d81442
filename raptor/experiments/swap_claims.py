"""The paper's claims about block swaps of one model: the turn of the last state and the predictions that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np

from raptor.dynamics.interventions import WITHOUT, InterventionsFile, compare_pairs
from raptor.experiments.evidence import Claim, Evidence
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

    paired: deviation over images of the difference at equal distance. Other intervals take all pairs as fully
    correlated, so they are too wide rather than too narrow. head: which head predicts.
    """
    within, across, near, far = (shares[name] for name in ("within", "across", "within_matched", "across_matched"))
    by = f"mean over pairs ({head})" if head else "mean over pairs"
    both = f"{near:.0%} stay within, {far:.0%} across (at any distance {within:.0%} and {across:.0%})"
    spread = _deviation(near) + _deviation(far) if paired is None else paired
    made: tuple[tuple[str, float, float, float | None, float | None, str], ...] = (
        (f"{_CHEAP} (share of predictions that stay above .9)", within, _deviation(within), 0.9, None, by),
        (f"{_BREAKS} (share of predictions that stay below .5)", across, _deviation(across), None, 0.5, by),
        (f"at equal distance more predictions stay after {_THAN}", near - far, spread, 0.0, None, both),
    )
    claims = []
    for says, value, deviation, above, below, text in made:
        claim = Claim(place=SWAPS, says=says + (_REST if without else ""))
        if np.isfinite(value):
            half, least = 1.96 * deviation / sqrt(num_images), -1.0 if above == 0 else 0.0
            lower, upper = max(least, value - half), min(1.0, value + half)
            evidence = Evidence(value=value, lower=lower, upper=upper, num=num_images)
            claim = replace(claim, measured=text, evidence=replace(evidence, above=above, below=below))
        claims.append(claim)
    return claims


_CHEAP, _BREAKS = (
    "swapping two blocks within a phase costs little",
    "swapping two blocks across phases breaks the model",
)
_THAN = "a swap within a phase than across phases"
_REST = ", without block 1"


def _deviation(share: float) -> float:
    return sqrt(share * (1 - share)) if np.isfinite(share) else np.nan


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
