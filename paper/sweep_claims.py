"""The paper's claims about teachers trained from scratch: stochastic depth, partitions, trained against untrained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from statistics import fmean
from typing import Any

from estimates import correlation, trend
from evidence import Basis, Claim, Evidence, over_seeds
from records import (
    Correlation,
    Interval,
    PartitionRow,
    Partitions,
    StochasticDepth,
    StochasticDepthRow,
    TeacherScores,
    Trend,
    Untrained,
    UntrainedRow,
    ZScore,
)
from table_claims import PAPER_RECOVERY

from raptor.train.schedule import Budget

_STRONG_R = 0.7
_MIN_PAIRS = 5  # four pairs are in one order by chance in 1 of 24 draws, and every resample of them then is too
_NOT_STRONG_R = 0.5  # in size: an inverse association is one too
_NEAR_Z = 0.8
_OVERFIT = 0.1  # a teacher overfits when it is so much better on training images
_EPOCH = 50_000  # images of CIFAR-100, on which the paper trains its small teachers, and of tiny-imagenet-100


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
        place="Figure 4C", says="the raptor's accuracy is decoupled from R2: no strong association, direct or inverse"
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
    claims = [
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
    # Teachers that overfit need no longer training; more seeds of the same settle what is open.
    return [replace(c, recipe=found.made_by()) for c in claims] if _overfit_by(found.rows) >= _OVERFIT else claims


def _overfit_by(rows: Sequence[StochasticDepthRow]) -> float:
    """By how much teachers at the smallest p are better on training images than on others."""
    first = min(row.p for row in rows)
    return fmean(row.teacher.train_accuracy - row.teacher.accuracy for row in rows if row.p == first)


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
    evidence = _of_correlation(found, above=-_NOT_STRONG_R, below=_NOT_STRONG_R)
    if evidence is not None:  # teachers that do not overfit get worse with every p: accuracy and R2 both follow p
        evidence = replace(evidence, smaller_budget=_overfit_by(rows) < _OVERFIT)
    return replace(claim, measured=_correlation_text(found, number=False), evidence=evidence)


_ByP = dict[float, dict[int, TeacherScores]]
"""p -> seed -> the scores of the teacher."""


def _accuracy_peak(rows: Sequence[StochasticDepthRow], claim: Claim) -> Claim:
    """The best accuracy at a middle p minus the better one of the two ends.

    The best of several p is better than it will be again, so each seed is judged at the p that the other seeds choose.
    With one seed that has every p there are no others: the gain is then that of the means, and no verdict follows.
    The interval is the wider one of that over images and Student's over seeds. The paper speaks of teachers that
    overfit without stochastic depth; others test nothing.
    """
    by_p: _ByP = defaultdict(dict)
    for row in rows:
        by_p[row.p][row.seed] = row.teacher
    p = sorted(by_p)
    if len(p) < 3:
        return claim
    mean = {q: fmean(t.accuracy for t in by_p[q].values()) for q in p}
    best, end = _peak_and_end(mean)
    num_images, over = rows[0].raptor.num_images, _overfit_by(rows)
    text = f"{mean[best]:.1%} at p = {best:g}, {mean[p[0]]:.1%} at {p[0]:g}, {mean[p[-1]]:.1%} at {p[-1]:g}"
    text += f" ({num_images} images); at p = {p[0]:g} training images are {over:+.1%} better"
    gains = _left_out_gains(by_p)
    num_seeds = max(1, len(gains))
    gain, half = mean[best] - mean[end], 2 * (_error(mean[best], num_images * num_seeds) or 0.0)
    if gains:
        gain, lower, upper = over_seeds(gains)
        half = max(half, 0.5 * (upper - lower))  # type: ignore[operator]
        text += f"; p chosen on the other seeds{_left_out_text(by_p, len(gains))}"
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


def _peak_and_end(mean: dict[float, float]) -> tuple[float, float]:
    """The p between the smallest and the largest that has the highest mean, and the better one of these two."""
    first, *middle, last = sorted(mean)
    return max(middle, key=lambda q: mean[q]), max((first, last), key=lambda q: mean[q])


def _left_out_gains(by_p: _ByP) -> list[float]:
    """The gain of each seed that every p has, at the p that the other ones choose; none where there is one seed."""
    seeds = sorted(set.intersection(*(set(found) for found in by_p.values())))
    if len(seeds) < 2:
        return []
    gains = []
    for seed in seeds:
        others = [other for other in seeds if other != seed]
        best, end = _peak_and_end({q: fmean(found[s].accuracy for s in others) for q, found in by_p.items()})
        gains.append(by_p[best][seed].accuracy - by_p[end][seed].accuracy)
    return gains


def _left_out_text(by_p: _ByP, num: int) -> str:
    num_all = len(set().union(*by_p.values()))
    return "" if num == num_all else f"; {num} of {num_all} seeds have every p"


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
    bound = PAPER_RECOVERY["classify"]["2"] - 0.02
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
    """Whether teachers saw their images fewer than ten times; not known of budgets in seconds."""
    budget = Budget.parse(settings.get("teacher_budget", "20epochs"))
    epochs = {"epochs": 1.0, "steps": settings.get("teacher_batch", 0) / (settings.get("limit") or _EPOCH)}
    return budget.unit in epochs and budget.amount * epochs[budget.unit] < 10


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


def _error(accuracy: float, num_images: int | None) -> float | None:
    """Standard error of the difference between two accuracies of about this size, as if on different images."""
    return sqrt(2 * accuracy * (1 - accuracy) / num_images) if num_images else None


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
        return "not run"
    number = (lambda v: f"{v:.1%}") if percent else (lambda v: f"{v:.3f}")
    z = "no spread" if found.z is None else f"z = {found.z:+.2f}"
    sample = f"random {number(found.mean)} ± {number(found.deviation)}, {found.num} of them"
    return f"{number(found.value)} ({sample}; {z}; above {found.below:.0%} of them)"
