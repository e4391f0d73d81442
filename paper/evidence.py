"""A number, what it rests on, and the verdict on a claim that follows from it: one rule for every claim.

A claim says that a number lies above `above` and below `below`. It agrees where the whole 95 % interval does, disagrees
where the whole interval lies outside, and is undetermined in between. What depends on training needs at least three
seeds, what is measured of a given model an interval over images; with less than that it is undetermined. A run on a
smaller budget than the paper's may confirm what a surrogate reaches, but not refute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from raptor.fidelity.bootstrap import LEVEL
from raptor.streaming import Record

_MIN_SEEDS = 3
_MIN_IMAGES = 16

RULES = """**Verdicts.** Each claim is a number with bounds. The bounds are the paper's where it gives a number; else
they are those that its words ask for, and stand in the row. With the 95 % interval of our measurement a claim

- *agrees* where the whole interval lies within the bounds;
- *disagrees* where the whole interval lies outside;
- is *undetermined* in between, and always where there is one seed;
- is *not tested at this budget* where it was not run, or where a surrogate falls short after less training than the
  paper's. Such a run can confirm what a surrogate reaches, but not refute it: rows of Table 1 and Figure 5 agree or
  stay open, and ours are of a smaller model on easier tasks. The same holds for what the paper says of teachers that
  overfit where ours do not.

Where the intervals come from:

- What depends on training needs at least three seeds (Student's t), or at least three teachers trained in different
  ways (Student's t; for correlations a bootstrap over at least five teachers). For the peak over p (Figure 4C) each
  seed is judged at the p that the other seeds choose, because the best of several p looks better than it is.
- What is measured of a given model has an interval over images (bootstrap; for the pooled DMD a jackknife). Its
  difference from untrained models needs at least three of those.
- What is counted has no interval.

Of several measurements on the same model and data, the one with the narrowest interval stands here. A row without a
verdict names a recipe that could give one; where it is that of its own run, with more seeds, teachers or training."""


class Verdict(StrEnum):
    """What an experiment says about a claim."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    UNDETERMINED = "undetermined"
    NOT_TESTED = "not tested at this budget"


class Basis(StrEnum):
    """What an interval is over: images of a given model, seeds of one training, or models trained in different ways.

    What is counted, such as FLOPs, has no error and so no interval.
    """

    IMAGES = "images"
    SEEDS = "seeds"
    RUNS = "runs"
    COUNT = "counted"


@dataclass(frozen=True, kw_only=True)
class Evidence(Record):
    """A number with its 95 % interval, and where a claim says it lies.

    Attributes:
        num: how many images, seeds or runs the interval is over.
        above, below: the claim is that `above < value < below`; None for no bound.
        smaller_budget: the number is what a run with less training than the paper's reached.
    """

    value: float | None
    lower: float | None = None
    upper: float | None = None
    basis: str = Basis.IMAGES
    num: int = 0
    above: float | None = None
    below: float | None = None
    smaller_budget: bool = False

    def bounds(self) -> str:
        """What the claim says of the number, such as `> 0`."""
        parts = [f"{sign} {bound:.3g}" for sign, bound in ((">", self.above), ("<", self.below)) if bound is not None]
        return " and ".join(parts)


_ENOUGH = {Basis.IMAGES: _MIN_IMAGES, Basis.SEEDS: _MIN_SEEDS, Basis.RUNS: _MIN_SEEDS, Basis.COUNT: 0}


def counted(value: float, above: float | None = None, below: float | None = None) -> Evidence:
    """A number that was counted."""
    return Evidence(value=value, lower=value, upper=value, basis=Basis.COUNT, above=above, below=below)


def judge(evidence: Evidence | None) -> Verdict:
    """The verdict on a claim; None where nothing was measured."""
    if evidence is None or evidence.value is None or not isfinite(evidence.value):
        return Verdict.NOT_TESTED
    found = _by_interval(evidence)
    if found is Verdict.DISAGREES and evidence.smaller_budget:
        return Verdict.NOT_TESTED
    return found if evidence.num >= _ENOUGH[Basis(evidence.basis)] else Verdict.UNDETERMINED


def _by_interval(evidence: Evidence) -> Verdict:
    """The verdict that the interval gives, however few seeds or images it rests on."""
    lower, upper = evidence.lower, evidence.upper
    if lower is None or upper is None:
        return Verdict.UNDETERMINED
    above = -float("inf") if evidence.above is None else evidence.above
    below = float("inf") if evidence.below is None else evidence.below
    if lower > above and upper < below:
        return Verdict.AGREES
    return Verdict.DISAGREES if upper <= above or lower >= below else Verdict.UNDETERMINED


def over_seeds(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean over seeds with its 95 % interval by Student's t; one seed has no interval."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return mean, mean - half, mean + half


def of_counts(num_right: float, num: int) -> tuple[float, float, float]:
    """A share of `num` images with its 95 % interval by Wilson's formula."""
    found = stats.binomtest(round(num_right), num).proportion_ci(LEVEL, method="wilson")
    return num_right / num, float(found.low), float(found.high)


@dataclass(frozen=True, kw_only=True)
class Claim(Record):
    """One claim of the paper on one teacher: a row of the page.

    Attributes:
        place: where the paper makes it. says: what it says.
        on: the teacher and the data.
        measured: the measurement in words, with what else a reader must know.
        evidence: the number that decides; None where nothing was measured.
        source: the JSON file. number: the key of the number in it, where it is one entry.
        untrained_too: whether every untrained model beside it meets the bounds, too; None where there is none.
        command: what made the file. machine: where it ran. figure: the picture. recipe: what would test the claim,
            where it was not tested.
    """

    place: str
    says: str
    on: str = ""
    measured: str = ""
    evidence: Evidence | None = None
    source: str = ""
    number: str = ""
    untrained_too: bool | None = None
    command: str = ""
    machine: str = ""
    figure: str = ""
    recipe: str = ""

    @property
    def verdict(self) -> Verdict:
        return judge(self.evidence)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"verdict": str(self.verdict)}
