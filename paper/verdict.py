"""A claim of the paper, and the rule of its verdict.

A claim says that a number lies between its bounds. It agrees where the whole 95 % interval does, disagrees where the
whole interval lies outside, and is undetermined in between. What depends on training needs at least three seeds, what
is measured of a given model an interval over images; with less than that it is undetermined. A smaller budget than the
paper's is no excuse: the row disagrees all the same. Where our number and the paper's mean different things, the row is
not comparable. A row is about one model or one experiment; `cards.py` judges claims over teachers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite

from quantities import Number
from sweep import Json

# Enough for a verdict. However many untrained twins, their difference to one trained model is about one training.
_ENOUGH = {"images": 16, "seeds": 3, "runs": 3, "twins": inf, "counted": 0}


class Verdict(StrEnum):
    """What an experiment says about a claim."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    UNDETERMINED = "undetermined"
    NOT_COMPARABLE = "not comparable"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the paper on one teacher: a row of claims.json, whose entries stand in this order."""

    place: str  # where the paper makes it
    says: str
    on: str = ""  # the teacher and the data
    number: Number | None = None  # what decides; None where nothing was measured
    above: float | None = None  # its bounds
    below: float | None = None
    # The same number of untrained models of the same make, each with its cut where that counts.
    untrained: tuple[tuple[Number, str], ...] = ()
    source: str = ""  # the JSON file
    command: str = ""  # what made it
    machine: str = ""  # where it ran
    figure: str = ""
    recipe: str = ""  # what would test the claim, where it was not tested
    not_comparable: str = ""  # why our number does not mean what the paper's does; empty where it does

    @property
    def verdict(self) -> Verdict:
        if self.not_comparable:
            return Verdict.NOT_COMPARABLE
        return judge(self.number, self.above, self.below)

    @property
    def untrained_too(self) -> bool | None:
        """Whether every untrained model beside it meets the bounds, too; None where there is none."""
        if not self.untrained:
            return None
        return all(judge(number, self.above, self.below) is Verdict.AGREES for number, _ in self.untrained)

    def to_dict(self) -> Json:
        saved = dict(vars(self))
        if self.number is not None:
            saved["number"] = vars(self.number)
        saved["untrained"] = [{**vars(number), "cut": cut} for number, cut in self.untrained]
        return {**saved, "untrained_too": self.untrained_too, "verdict": str(self.verdict)}


def judge(number: Number | None, above: float | None, below: float | None) -> Verdict:
    """The verdict on a claim that the number lies between the bounds."""
    if number is None or number.value is None or not isfinite(number.value):
        return Verdict.NOT_TESTED
    if number.num < _ENOUGH[number.basis] or number.lower is None or number.upper is None:
        return Verdict.UNDETERMINED
    above, below = bounds_of(above, below)
    if number.lower > above and number.upper < below:
        return Verdict.AGREES
    if number.upper <= above or number.lower >= below:
        return Verdict.DISAGREES
    return Verdict.UNDETERMINED


def bounds_of(above: float | None, below: float | None) -> tuple[float, float]:
    """The bounds as numbers: a bound that a claim lacks is infinite."""
    return -inf if above is None else above, inf if below is None else below
