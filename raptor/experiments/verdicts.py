"""Each claim of the paper about its experiments as a number with an interval, from the results of ours.

`RULES` says in words what the page needs to be read; the rule of the verdict itself is in `evidence.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from statistics import fmean
from typing import Any

import numpy as np

from raptor.dynamics.interventions import WITHOUT, compare_pairs
from raptor.experiments.evidence import Basis, Claim, Evidence, over_seeds
from raptor.experiments.outcome import data_label
from raptor.experiments.records import (
    Ablation,
    AblationRow,
    Correlation,
    Interval,
    PartitionRow,
    Partitions,
    ProbedRaptor,
    ProbedTeacher,
    StochasticDepth,
    StochasticDepthRow,
    SwapRow,
    Swaps,
    Table1,
    Table1Row,
    TeacherScores,
    Trend,
    Untrained,
    UntrainedRow,
    ZScore,
)
from raptor.experiments.statistics import correlation, trend
from raptor.experiments.swap_claims import SWAPS, prediction_claims, turn_claim, turn_says
from raptor.fidelity.heads import share_kept
from raptor.phases import Phases
from raptor.train.schedule import Budget

NOT_RUN = "not run"
_STRONG_R = 0.7
_MIN_PAIRS = 5  # four pairs are in one order by chance in 1 of 24 draws, and every resample of them then is too
_NOT_STRONG_R = 0.5
_NEAR_Z = 0.8
_OVERFIT = 0.1  # a teacher overfits when it is so much better on training images
_PAPER_IMAGES = 40_000_000  # 20 epochs of 1,000,000 images in each of two stages
_EPOCH = 50_000  # images of CIFAR-100, on which the paper trains its small teachers
_BATCH_SIZE = 128  # the default recipe's when tables did not record it
_PAPER_RECOVERY = {
    "classify": {"2": 81.2 / 84.5, "3": 83.0 / 84.5, "4": 83.2 / 84.5},
    "segment": {"2": 39.6 / 47.5, "3": 43.0 / 47.5, "4": 43.6 / 47.5},
    "depth": {"2": 0.578 / 0.648, "3": 0.578 / 0.618, "4": 0.578 / 0.607},
}


RULES = """**Verdicts.** Each claim is a number with bounds. The bounds are the paper's where it gives a number; else
they are those that its words ask for, and stand in the row. With the 95 % interval of our measurement a claim

- *agrees* where the whole interval lies within the bounds;
- *disagrees* where the whole interval lies outside;
- is *undetermined* in between, and always where there is one seed;
- is *not tested at this budget* where it was not run, or where a surrogate falls short after less training than the
  paper's. Such a run can confirm what a surrogate reaches, but not refute it.

Where the intervals come from:

- What depends on training needs at least three seeds (Student's t), or at least three teachers trained in different
  ways (Student's t; for correlations a bootstrap over at least five teachers).
- What is measured of a given model has an interval over images (bootstrap; for the pooled DMD a jackknife). Its
  difference from untrained models needs at least three of those.
- What is counted has no interval.

Of several measurements on the same model and data, the one with the narrowest interval stands here."""


def claims_stochastic_depth(found: StochasticDepth | None) -> list[Claim]:
    """Similarity, R2 and accuracy against p, and their association."""
    titles = {
        "similarity": ("Figure 4A", "layer-layer similarity (mean off the diagonal) rises with stochastic depth p"),
        "within_phases": ("Figure 4A", "similarity within phases rises with p"),
        "bounded_r2": ("Figure 4D", "teacher-student R2 (bounded) of the last layer rises with p"),
        "r2": ("Figure 4D", "plain R2 of the last layer rises with p"),
    }
    layerwise = {g: Claim(place="Figure 4B", says=f"{_LAYERWISE.format(g)} rises with p") for g in ("cls", "patches")}
    peak = Claim(place="Figure 4C", says="teacher accuracy peaks at a middle p")
    gap = Claim(place="Figure 4C", says="the accuracy gap between teacher and raptor narrows with p")
    strong = Claim(place="Figure 4E", says="similarity and R2 (bounded) are strongly associated")
    decoupled = Claim(
        place="Figure 4C", says="the raptor's accuracy is decoupled from R2: they do not rise and fall together"
    )
    trends = found.statistics.trends if found else {}
    of_p = {row.p for row in found.rows} if found else set()
    if found is None or not trends or len(of_p) == 1:
        rises = [Claim(place=place, says=says) for place, says in titles.values()]
        empty = [*rises, *layerwise.values(), peak, gap, decoupled, strong]
        return [*empty, _at_one_p(found, *of_p)] if found is not None and trends else empty
    claims = [_with_trend(Claim(place=place, says=says), trends.get(name)) for name, (place, says) in titles.items()]
    share = f"share of the teacher's accuracy kept: {_trend_text(trends['recovery'])}"
    narrowed = _with_trend(gap, trends["gap"], falls=True)
    both = found.statistics.correlations["similarity/bounded_r2"]
    return [
        *claims,
        *(_layerwise(found.rows, g, claim) for g, claim in layerwise.items()),
        _accuracy_peak(found.rows, peak),
        replace(narrowed, measured=f"{narrowed.measured}; {share}"),
        _decoupled(found.rows, decoupled),
        replace(
            strong,
            measured=_correlation_text(both, number=False) + _given_p(found),
            evidence=_of_correlation(both, above=_STRONG_R),
        ),
    ]


def _at_one_p(found: StochasticDepth, p: float) -> Claim:
    """What seeds at one p say: only the association, which is then not that of both with p."""
    both = found.statistics.correlations["similarity/bounded_r2"]
    says = f"similarity and R2 (bounded) are strongly associated at one p as well (p = {p:g})"
    claim = Claim(place="Figure 4E", says=says, measured=_correlation_text(both, number=False))
    return replace(claim, evidence=_of_correlation(both, above=_STRONG_R))


_LAYERWISE = "layerwise R2 (bounded, mean over layers) of {}"


def _layerwise(rows: Sequence[StochasticDepthRow], group: str, claim: Claim) -> Claim:
    """The trend of the mean over layers, and at how many layers the R2 rises by itself."""
    known = [(row.p, row.raptor.curves[group].bounded_r2) for row in rows if group in row.raptor.curves]
    finite = [(p, [float(v) for v in curve]) for p, curve in known if None not in curve]  # type: ignore[arg-type]
    if not finite:
        return claim
    p = [p for p, _ in finite]
    found = _with_trend(claim, trend(p, [fmean(curve) for _, curve in finite]))
    signs = [correlation(p, list(layer)).spearman for layer in zip(*(curve for _, curve in finite))]
    rises = sum(s is not None and s.lower > 0 for s in signs)
    return replace(found, measured=f"{found.measured}; it rises at {rises} of {len(signs)} layers")


def _given_p(found: StochasticDepth) -> str:
    """What is left of the association with p held fixed: over all p, and at the p with the most seeds."""
    left = found.statistics.given_p.get("similarity/bounded_r2")
    text = "" if left is None else f"; with p held fixed (partial correlation) {left:.2f}"
    by_p = defaultdict(list)
    for row in found.rows:
        if row.raptor.bounded_r2_last is not None:
            by_p[row.p].append((row.similarity.off_diagonal, row.raptor.bounded_r2_last))
    p = max(by_p, key=lambda p: len(by_p[p]))
    if len(by_p[p]) < 5:
        return text
    at_p = correlation([x for x, _ in by_p[p]], [y for _, y in by_p[p]])
    return f"{text}; at p = {p:g} only: {_correlation_text(at_p)}"


def _with_trend(claim: Claim, trend: Trend | None, falls: bool = False) -> Claim:
    if trend is None:
        return claim
    evidence = _of_correlation(trend, spearman=True, above=None if falls else 0.0, below=0.0 if falls else None)
    return replace(claim, measured=_trend_text(trend, number=False), evidence=evidence)


def _of_correlation(
    found: Correlation, spearman: bool = False, above: float | None = None, below: float | None = None
) -> Evidence | None:
    """The correlation with its interval, which fewer than five pairs do not have; None where it is not defined."""
    r = found.spearman if spearman else found.pearson
    if r is None:
        return None
    lower, upper = (r.lower, r.upper) if found.num >= _MIN_PAIRS else (None, None)
    num = found.num
    return Evidence(value=r.value, lower=lower, upper=upper, basis=Basis.RUNS, num=num, above=above, below=below)


def _decoupled(rows: Sequence[StochasticDepthRow], claim: Claim) -> Claim:
    known = [(row.raptor.accuracy, row.raptor.bounded_r2_last) for row in rows]
    pairs = [(a, r) for a, r in known if a is not None and r is not None]
    found = correlation([a for a, _ in pairs], [r for _, r in pairs])
    return replace(
        claim, measured=_correlation_text(found, number=False), evidence=_of_correlation(found, below=_NOT_STRONG_R)
    )


def _accuracy_peak(rows: Sequence[StochasticDepthRow], claim: Claim) -> Claim:
    """The best accuracy at a middle p minus the better one of the two ends, means over seeds.

    The interval is the wider one of that over images and, seed by seed, Student's. The paper speaks of teachers that
    overfit without stochastic depth; others test nothing.
    """
    by_p: dict[float, dict[int, TeacherScores]] = defaultdict(dict)
    for row in rows:
        by_p[row.p][row.seed] = row.teacher
    p = sorted(by_p)
    if len(p) < 3:
        return claim
    mean = {q: fmean(t.accuracy for t in by_p[q].values()) for q in p}
    best, end = max(p[1:-1], key=lambda q: mean[q]), max((p[0], p[-1]), key=lambda q: mean[q])
    num_images, num_seeds = rows[0].raptor.num_images, min(len(by_p[best]), len(by_p[end]))
    half = 2 * (_error(mean[best], num_images * num_seeds) or 0.0)
    gain, over = mean[best] - mean[end], fmean(t.train_accuracy - t.accuracy for t in by_p[p[0]].values())
    by_seed = [t.accuracy - by_p[end][seed].accuracy for seed, t in by_p[best].items() if seed in by_p[end]]
    if len(by_seed) > 1:
        _, lower, upper = over_seeds(by_seed)
        half = max(half, 0.5 * (upper - lower))  # type: ignore[operator]
    text = f"{mean[best]:.1%} at p = {best:g}, {mean[p[0]]:.1%} at {p[0]:g}, {mean[p[-1]]:.1%} at {p[-1]:g}"
    text += f" ({num_images} images); at p = {p[0]:g} training images are {over:+.1%} better"
    evidence = Evidence(
        value=gain,
        lower=gain - half,
        upper=gain + half,
        basis=Basis.SEEDS,
        num=num_seeds,
        above=0.0,
        smaller_budget=over < _OVERFIT,
    )
    return replace(claim, measured=text, evidence=evidence)


def claims_partitions(found: Partitions | None) -> list[Claim]:
    """Where max-cut stands among random partitions, in their deviations, for each k."""
    says = "max-cut beats random contiguous partitions, near or above one standard deviation of their accuracy (k = {})"
    claims = [] if found is not None and found.statistics else [Claim(place="Figure 3", says=says.format("2, 3, 4"))]
    for k, ways in (found.statistics if found is not None else {}).items():
        claim = Claim(place="Figure 3", says=says.format(k))
        scores = ways.get("maxcut", {})
        accuracy = scores.get("accuracy")
        if found is None or accuracy is None or accuracy.z is None:
            claims.append(claim)
            continue
        z = found.maxcut_z.get(k) or [accuracy.z]
        value, lower, upper = over_seeds(z)
        text = f"accuracy {_z_text(accuracy, True)}; R2 {_z_text(scores.get('r2_last'))}{_longest(found, k)}"
        evidence = Evidence(value=value, lower=lower, upper=upper, basis=Basis.SEEDS, num=len(z), above=_NEAR_Z)
        claims.append(replace(claim, measured=text, evidence=evidence))
    return [*claims, _two_blocks(found.rows if found is not None else [])]


def _two_blocks(rows: Sequence[PartitionRow]) -> Claim:
    """Whether the max-cut raptors with two blocks keep what the paper's do, within 2 points; ours train for less."""
    says = "raptors with 2 blocks closely match the accuracy of the full model"
    claim = Claim(place="Figure 3", says=says, recipe="partitions")
    cut = [row for row in rows if row.k == 2 and row.way == "maxcut"]
    kept = [row.accuracy / row.teacher_accuracy for row in cut if row.accuracy is not None and row.teacher_accuracy]
    if not kept:
        return claim
    value, lower, upper = over_seeds(kept)
    bound = _PAPER_RECOVERY["classify"]["2"] - 0.02
    evidence = Evidence(value=value, lower=lower, upper=upper, basis=Basis.SEEDS, num=len(kept), above=bound)
    return replace(claim, measured=f"{value:.1%} kept", evidence=replace(evidence, smaller_budget=True))


def _longest(found: Partitions, k: int) -> str:
    both = found.longest_phase.get(k)
    if both is None:
        known = {tuple(r.phases): r.accuracy for r in found.rows if r.k == k and r.accuracy is not None and r.seed == 0}
        both = correlation([float(max(lengths)) for lengths in known], list(known.values()))
    if both.pearson is None:
        return ""
    return f"; accuracy with the longest phase: Pearson {_interval(both.pearson)} over {both.num} partitions"


def claims_untrained(found: Untrained | None) -> list[Claim]:
    """Trained against untrained, for every token group, and untrained against overfitted.

    Teachers that were trained only briefly test the second only: what training does depends on how long it goes on.
    """
    settings = found.settings if found else {}
    rows = _by_kind(found.rows) if found else {}
    others = []
    for name, field in (("bounded", "bounded_r2"), ("plain", "r2")):
        says = f"untrained ViTs are easier to reconstruct than overfitted ones ({name} R2 of the output cls)"
        others.append(
            _larger("Key findings (camera-ready)", says, rows, _last("cls", field), "untrained", "overfitted")
        )
    others.append(_random_start(rows))
    return others if _briefly_trained(settings) else [*_claims_of_training(rows, settings), *others]


def _claims_of_training(rows: dict[str, list[UntrainedRow]], settings: dict[str, Any]) -> list[Claim]:
    made = f"p = {settings.get('p', 0.3):g}, k = {settings.get('k', 3)}"
    groups = list(rows["trained"][0].similarity.means) if rows.get("trained") else ["all"]
    claims = []
    for group in groups or ["all"]:
        layers = f"training increases layer-layer similarity of {group} tokens (mean off the diagonal, {made})"
        phases = f"training increases similarity within phases of {group} tokens ({made})"
        claims.append(_larger("Figure 11A", layers, rows, _similarity(group, "off_diagonal")))
        claims.append(_larger("Figure 11B", phases, rows, _similarity(group, "within_phases")))
    follows = "training increases reconstruction of the output {} ({} R2)"
    for group in ("cls", "patches"):
        for name, field in (("bounded", "bounded_r2"), ("plain", "r2")):
            claims.append(_larger("Figure 11C", follows.format(group, name), rows, _last(group, field)))
    gain = "training increases what reconstruction of the output {} gains over the best null model (plain R2)"
    return claims + [_larger("Figure 11C", gain.format(group), rows, _gain(group)) for group in ("cls", "patches")]


def _briefly_trained(settings: dict[str, Any]) -> bool:
    """Whether teachers saw fewer images than the paper's in ten epochs; not known of budgets in seconds."""
    budget = Budget.parse(settings.get("teacher_budget", "20epochs"))
    per_unit = {"epochs": _EPOCH, "steps": settings.get("teacher_batch", 0)}
    return budget.unit in per_unit and budget.amount * per_unit[budget.unit] < 10 * _EPOCH


_Measure = Callable[[UntrainedRow], float | None]


def _similarity(group: str, field: str) -> _Measure:
    def measure(row: UntrainedRow) -> float | None:
        means = row.similarity.means.get(group)
        return getattr(means if means is not None else row.similarity, field)

    return measure


def _last(group: str, field: str) -> _Measure:
    def measure(row: UntrainedRow) -> float | None:
        curves = row.raptor.curves.get(group)
        return None if curves is None else getattr(curves, field)[-1]

    return measure


def _gain(group: str) -> _Measure:
    def measure(row: UntrainedRow) -> float | None:
        own, null = _last(group, "r2")(row), row.raptor.best_null(group) if row.raptor.nulls else None
        return None if own is None or null is None else own - null

    return measure


def _by_kind(rows: Sequence[UntrainedRow]) -> dict[str, list[UntrainedRow]]:
    found = defaultdict(list)
    for row in rows:
        found[row.kind].append(row)
    return found


def _larger(
    place: str,
    says: str,
    rows: dict[str, list[UntrainedRow]],
    measure: _Measure,
    a: str = "trained",
    b: str = "untrained",
) -> Claim:
    """Whether a measure is larger for `a` than for `b`: the difference, seed by seed."""
    claim = Claim(place=place, says=says)
    of_a, of_b = ({row.seed: measure(row) for row in rows.get(kind, [])} for kind in (a, b))
    pairs = [(x, of_b.get(seed)) for seed, x in of_a.items()]
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if not known:
        return claim
    value, lower, upper = over_seeds([x - y for x, y in known])
    text = f"{a} {fmean(x for x, _ in known):.3f}, {b} {fmean(y for _, y in known):.3f}"
    evidence = Evidence(value=value, lower=lower, upper=upper, basis=Basis.SEEDS, num=len(known), above=0.0)
    return replace(claim, measured=text, evidence=evidence)


def _random_start(rows: dict[str, list[UntrainedRow]]) -> Claim:
    claim = Claim(
        place="Figure 11, Section 2", says="a raptor can also reconstruct the states of a randomly initialised ViT"
    )
    values = [v for row in rows.get("untrained", []) if (v := _last("cls", "r2")(row)) is not None]
    if not values:
        return claim
    value, lower, upper = over_seeds(values)
    evidence = Evidence(value=value, lower=lower, upper=upper, basis=Basis.SEEDS, num=len(values), above=0.5)
    return replace(claim, measured=f"plain R2 of the output cls {value:.3f}", evidence=evidence)


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
    config = re.search(r"--config \S*?([\w-]+)\.yaml", found.command if found else "")
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
    return [replace(claim, recipe=config[1] if config else "") for claim in claims]


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
    within = "swapping two blocks within a phase costs little (share of the accuracy kept above .9)"
    across = "swapping two blocks across phases breaks the model (share kept below .5)"
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
            claim = Claim(place=SWAPS, says=says + (", without block 1" if without else ""))
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


def claims_ablation(found: Ablation | None) -> list[Claim]:
    """Whether each row of Table 2 improves on the one before it, seed by seed."""
    base = found.settings.get("base", "paper") if found else "paper"
    place = "Table 2" if base == "paper" else f"Table 2, with the {base} recipe"
    collapse = "teacher forcing by itself collapses (3.9 of 84.5 %: below a fifth of the teacher's accuracy)"
    largest = "the autoregressive loss brings the largest gain (+ 68.8 points): its lead over the next"
    second = "the joint stage brings the second largest gain (+ 5.7 points): its lead over the rest"
    steps = {
        "3": "depth scaling adds (+ 2.5 points)",
        "4": "weighting cls in the last phase adds (+ 1.5 points)",
        "5": "the joint stage adds (+ 5.7 points)",
        "6": "fitting the probe again adds (+ .6 points)",
    }
    rows = _by_number(found.rows) if found else {}
    num_images = found.rows[0].num_images if found and found.rows else None
    claims = [
        _collapse(_seeded(place, collapse, rows, num_images, lambda of: of["1"] / of["teacher"], below=0.2), rows)
    ]
    claims.append(_seeded(place, largest, rows, num_images, lambda of: _lead(of, "2"), above=0.0))
    claims.append(_seeded(place, second, rows, num_images, lambda of: _lead(of, "5", but="2"), above=0.0))
    for number, says in steps.items():
        before = str(int(number) - 1)
        claims.append(
            _seeded(place, says, rows, num_images, lambda of, n=number, b=before: of[n] - of[b], above=0.0)  # type: ignore[misc]
        )
    return [_of_budget(claim, found is not None and _is_small(found)) for claim in claims]


def _of_budget(claim: Claim, small: bool) -> Claim:
    """A gain that is missing may come with more training; that teacher forcing does not collapse needs no more."""
    if claim.evidence is None or claim.evidence.above is None:
        return claim
    return replace(claim, evidence=replace(claim.evidence, smaller_budget=small))


def _collapse(claim: Claim, rows: dict[int, dict[str, float]]) -> Claim:
    """The claim, undecided where both rows keep little: then nothing was learned that could collapse."""
    e, kept = claim.evidence, [of["2"] / of["teacher"] for of in rows.values() if {"2", "teacher"} <= of.keys()]
    if e is None or e.value is None or e.below is None or e.value > e.below or (kept and fmean(kept) > e.below):
        return claim
    beside = f"with the autoregressive loss {fmean(kept):.1%}" if kept else "the autoregressive row was not run"
    text = f"{claim.measured}; {beside}, so that it is not known what a trained one keeps"
    return replace(claim, measured=text, evidence=replace(e, value=None, lower=None, upper=None))


def _is_small(found: Ablation) -> bool:
    """Whether the rows saw fewer images than the paper's."""
    steps = [sum(row.num_steps.values()) for row in found.rows if row.num_steps]
    return bool(steps) and max(steps) * found.settings.get("batch_size", _BATCH_SIZE) < _PAPER_IMAGES


def _by_number(rows: Sequence[AblationRow]) -> dict[int, dict[str, float]]:
    """Seed -> row number (and `teacher`) -> accuracy."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        numbers = {row.row[0]: row.accuracy, "teacher": row.teacher_accuracy}
        numbers |= {"6": row.refit.accuracy} if row.refit is not None else {}
        found[row.seed] |= {name: value for name, value in numbers.items() if value is not None}
    return found


def _lead(of: dict[str, float], row: str, but: str = "") -> float:
    """A row's gain minus the largest gain of another one; rows in `but` are left out."""
    gains = {b: of[b] - of[a] for a, b in pairwise("123456") if b not in but}
    return gains.pop(row) - max(gains.values())


def _seeded(
    place: str,
    says: str,
    rows: dict[int, dict[str, float]],
    num_images: int | None,
    quantity: Callable[[dict[str, float]], float],
    above: float | None = None,
    below: float | None = None,
) -> Claim:
    """A claim about a quantity of each seed's accuracies; seeds without a row it needs are left out."""
    claim, values, used = Claim(place=place, says=says), [], []
    for of in rows.values():
        try:
            values.append(quantity(of))
        except KeyError:
            continue
        used.append(of)
    if not values:
        return claim
    value, lower, upper = over_seeds(values)
    seeds = "one seed" if len(values) == 1 else f"{len(values)} seeds"
    text = f"{value:.1%} ({seeds})" if below is not None else f"{100 * value:+.1f} points ({seeds})"
    if lower is None and num_images:  # of one seed: at most two standard errors by the number of images
        half = 2 * (sqrt(0.5 / num_images) if below is None else sqrt(0.25 / num_images) / used[0]["teacher"])
        lower, upper = value - half, value + half
    evidence = Evidence(
        value=value, lower=lower, upper=upper, basis=Basis.SEEDS, num=len(values), above=above, below=below
    )
    return replace(claim, measured=text, evidence=evidence)


def _error(accuracy: float, num_images: int | None) -> float | None:
    """Standard error of the difference between two accuracies of about this size, as if on different images."""
    return sqrt(2 * accuracy * (1 - accuracy) / num_images) if num_images else None


def claims_table1(found: Table1 | None) -> list[Claim]:
    """Recovery of each task at each k beside the paper's, the smaller ViT, and how accuracy and R2 go with k."""
    titles = {
        "classify": "of the teacher's ImageNet-1k accuracy",
        "segment": "of the teacher's ADE20K mIoU",
        "depth": "on NYUv2 depth (the teacher's RMSE over its own)",
    }
    raptors = [cell for cell in found.cells.values() if isinstance(cell, ProbedRaptor)] if found else []
    teacher = found.cells.get("teacher") if found else None
    rows = {row.k: row for row in found.rows if row.k != "teacher"} if found else {}
    settings = found.settings if found else {}
    small = bool(raptors) and _images_seen(raptors[0], settings) < _PAPER_IMAGES
    claims = []
    for task, title in titles.items():
        for k, paper in _PAPER_RECOVERY[task].items():
            claim = Claim(place="Table 1", says=f"k = {k} keeps {paper:.1%} {title}; within 2 points")
            kept = _recoveries(raptors, teacher, int(k), task)
            if not kept:
                claims.append(claim)
                continue
            value, lower, upper = over_seeds(kept)
            text = f"{value:.1%}{_measured_on(settings, rows[k], task)}, {_images_text(raptors[0], settings)}"
            evidence = Evidence(
                value=value,
                lower=lower,
                upper=upper,
                basis=Basis.SEEDS,
                num=len(kept),
                above=paper - 0.02,
                smaller_budget=small,
            )
            claims.append(replace(claim, measured=text, evidence=evidence))
    claims.append(_strongest(raptors, teacher, small))
    claims.append(Claim(place="Table 1", says="k = 3 of a ViT-B is more accurate than the smaller DINOv2 ViT-S"))
    return [*claims, *_along_k(raptors, small)]


def _strongest(raptors: Sequence[ProbedRaptor], teacher: ProbedRaptor | ProbedTeacher | None, small: bool) -> Claim:
    """Whether every k keeps more in classification than in the other tasks, seed by seed."""
    says = "strongest on classification: the share kept there minus the larger one of the other tasks, smallest over k"
    claim = Claim(place="Section 3", says=says)
    by_seed: dict[int, list[float]] = defaultdict(list)
    by_k: dict[int, list[list[float]]] = defaultdict(list)
    for raptor in raptors:
        own = {task: _recoveries([raptor], teacher, raptor.k, task) for task in _PAPER_RECOVERY}
        if all(own.values()):
            first, *others = (kept for (kept,) in own.values())
            by_seed[raptor.seed].append(first - max(others))
            by_k[raptor.k].append([first, *others])
    if not by_seed:
        return claim
    value, lower, upper = over_seeds([min(found) for found in by_seed.values()])
    evidence = Evidence(value=value, lower=lower, upper=upper, basis=Basis.SEEDS, num=len(by_seed), above=0.0)
    means = ((k, np.mean(by_k[k], axis=0)) for k in sorted(by_k))
    text = "; ".join(f"k = {k}: " + ", ".join(f"{kept:.1%}" for kept in mean) for k, mean in means)
    text = f"classification, segmentation, depth at {text}"
    return replace(claim, measured=text, evidence=replace(evidence, smaller_budget=small))


def _images_seen(raptor: ProbedRaptor, settings: dict[str, Any]) -> int:
    return sum(raptor.num_steps.values()) * (settings.get("batch_size") or _BATCH_SIZE)


def _images_text(raptor: ProbedRaptor, settings: dict[str, Any]) -> str:
    return f"after {_images_seen(raptor, settings):,} images (the paper: {_PAPER_IMAGES:,})"


def _recoveries(
    raptors: Sequence[ProbedRaptor], teacher: ProbedRaptor | ProbedTeacher | None, k: int, task: str
) -> list[float]:
    """Score as a share of the teacher's, of each seed."""
    own = teacher.probes.get(task) if teacher is not None else None
    if own is None or own.score is None:
        return []
    kept = []
    for raptor in raptors:
        found = raptor.probes.get(task)
        if raptor.k == k and found is not None and found.num_steps == own.num_steps:
            share = share_kept(found.score, own.score, own.higher_is_better)
            kept += [] if share is None else [share]
    return kept


def _measured_on(settings: dict[str, Any], row: Table1Row, task: str) -> str:
    """Our data, which is not the paper's, and how often the best learning rate was the grid's smallest or largest."""
    spec = settings.get("data" if task == "classify" else task)
    at_edge = row.scores[task].at_edge
    parts = [data_label(spec)] if spec else []
    parts += [f"learning rate at the grid's edge in {at_edge} of {row.num_seeds} probes"] if at_edge else []
    return f" ({'; '.join(parts)})" if parts else ""


def _along_k(raptors: Sequence[ProbedRaptor], small: bool) -> list[Claim]:
    """Accuracy and R2 rise with k, and accuracy saturates: its gain from 3 to 4 is below half of that from 2 to 3."""
    by_k: dict[int, dict[int, ProbedRaptor]] = defaultdict(dict)
    for raptor in raptors:
        by_k[raptor.k][raptor.seed] = raptor
    scores: dict[str, Callable[[ProbedRaptor], float | None]] = {
        "accuracy": lambda raptor: raptor.probes["classify"].score,
        "R2 of the last layer": lambda raptor: raptor.r2_last,
    }
    claims = []
    for name, score in scores.items():
        curves = _curves(by_k, score)
        smallest = [min(b - a for a, b in pairwise(curve)) for curve in curves]
        claims.append(_of_k(f"{name} rises with k (smallest step)", smallest, sorted(by_k), curves, small, above=0.0))
    curves = [curve for curve in _curves(by_k, scores["accuracy"]) if len(curve) > 2]
    rest = [(curve[2] - curve[1]) - 0.5 * (curve[1] - curve[0]) for curve in curves]
    says = "accuracy rises markedly from k = 2 to 3 and saturates at k = 4 (second gain below half of the first)"
    return [*claims, _of_k(says, rest, sorted(by_k), curves, small, below=0.0)]


def _curves(
    by_k: dict[int, dict[int, ProbedRaptor]], score: Callable[[ProbedRaptor], float | None]
) -> list[list[float]]:
    """The scores over k of each seed that has all of them."""
    seeds = sorted(set.intersection(*(set(found) for found in by_k.values()))) if len(by_k) > 1 else []
    curves = [[score(by_k[k][seed]) for k in sorted(by_k)] for seed in seeds]
    return [[v for v in curve if v is not None] for curve in curves if None not in curve]


def _of_k(
    says: str,
    values: list[float],
    ks: list[int],
    curves: list[list[float]],
    small: bool,
    above: float | None = None,
    below: float | None = None,
) -> Claim:
    claim = Claim(place="Figure 5", says=says)
    if not values:
        return claim
    value, lower, upper = over_seeds(values)
    shown = ", ".join(f"{v:.3f}" for v in np.mean(curves, axis=0))
    evidence = Evidence(
        value=value,
        lower=lower,
        upper=upper,
        basis=Basis.SEEDS,
        num=len(values),
        above=above,
        below=below,
        smaller_budget=small,
    )
    return replace(claim, measured=f"{shown} at k = {', '.join(map(str, ks))}", evidence=evidence)


def _trend_text(trend: Trend, number: bool = True) -> str:
    """The ends of a trend and its rank correlation, whose number is left out where it stands beside the text."""
    if trend.first is None or trend.last is None:
        return "no finite value"
    ends = f"{trend.first:.3f} at the smallest p, {trend.last:.3f} at the largest"
    if trend.spearman is None or trend.p_rise is None or trend.p_fall is None:
        return ends
    rank = f"Spearman {_interval(trend.spearman)}" if number else "Spearman"
    return f"{rank} (one-sided p {min(trend.p_rise, trend.p_fall):.4f}); {ends}"


def _correlation_text(found: Correlation, number: bool = True) -> str:
    if found.pearson is None or found.spearman is None:
        return f"undefined over {found.num} runs"
    if number:
        return f"Pearson {_interval(found.pearson)}, Spearman {_interval(found.spearman)}, {found.num} runs"
    return f"Pearson; Spearman {_interval(found.spearman)}"


def _interval(found: Interval) -> str:
    return f"{found.value:.2f} [{found.lower:.2f}, {found.upper:.2f}]"


def _z_text(found: ZScore | None, percent: bool = False) -> str:
    if found is None or found.mean is None or found.deviation is None:
        return NOT_RUN
    number = (lambda v: f"{v:.1%}") if percent else (lambda v: f"{v:.3f}")
    z = "no spread" if found.z is None else f"z = {found.z:+.2f}"
    sample = f"random {number(found.mean)} ± {number(found.deviation)}, {found.num} of them"
    return f"{number(found.value)} ({sample}; {z}; above {found.below:.0%} of them)"
