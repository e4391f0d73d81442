"""Each claim of the paper as a rule over the results of an experiment: what was measured, and whether it agrees.

`RULES` states the rules, for the page as well. A `yes` from one seed says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean
from typing import Any, NamedTuple

from raptor.experiments.outcome import data_label
from raptor.experiments.records import (
    Ablation,
    AblationLine,
    Correlation,
    Interval,
    MeanOverSeeds,
    Partitions,
    StochasticDepth,
    StochasticDepthRow,
    SwapRow,
    Swaps,
    Table1,
    Table1Row,
    Trend,
    Untrained,
    UntrainedRow,
    ZScore,
)

NOT_RUN = "not run"
_STRONG_RHO, _STRONG_R, _MAX_P = 0.6, 0.7, 0.05
_NEAR_Z = 0.8
_PAPER_RECOVERY = {
    "classify": {"2": 81.2 / 84.5, "3": 83.0 / 84.5, "4": 83.2 / 84.5},
    "segment": {"2": 39.6 / 47.5, "3": 43.0 / 47.5, "4": 43.6 / 47.5},
    "depth": {"2": 0.578 / 0.648, "3": 0.578 / 0.618, "4": 0.578 / 0.607},
}


RULES = (
    "Rules: a rise with p needs Spearman's rho of at least .6 and a one-sided permutation p below .05; a strong "
    "correlation r of at least .7 and an interval above 0; trained against untrained, every seed of one above every "
    "seed of the other; max-cut a z of at least .8; swaps, at least 90 % kept within phases and at most 50 % across; "
    "collapse, at most 20 % of the teacher's accuracy; an ingredient, a gain of more than two standard errors from "
    "the number of images, as if they were different ones; recovery, at most 2 points below the paper's; a rise with "
    "k, more than two standard errors over seeds at each k. What goes the same way but less is `partly`. Intervals "
    "are 95 %, by bootstrap."
)


class Claim(NamedTuple):
    """One line of the table."""

    says: str
    measured: str = NOT_RUN
    agrees: str = NOT_RUN
    where: str = ""


def claims_stochastic_depth(found: StochasticDepth | None) -> list[Claim]:
    """Similarity, R2 and accuracy against p, and their association."""
    titles = {
        "similarity": "layer-layer similarity (mean off the diagonal) rises with p",
        "within_phases": "similarity within phases rises with p",
        "bounded_r2": "teacher-student R2 (bounded) of the last layer rises with p",
        "r2": "the same, plain R2",
    }
    peak, gap = "teacher accuracy peaks at a middle p", "the accuracy gap between teacher and raptor closes with p"
    strong = "similarity and R2 (bounded) correlate strongly"
    if found is None or not found.statistics.trends:
        return [Claim(says) for says in (*titles.values(), peak, gap, strong)]
    trends = found.statistics.trends
    claims = [Claim(says, _trend_text(trends[name]), _rises(trends[name])) for name, says in titles.items()]
    share = f"; share of the teacher's accuracy kept: {_trend_text(trends['recovery'])}"
    claims.append(_accuracy_peak(found.rows, peak))
    claims.append(Claim(gap, _trend_text(trends["gap"]) + share, _falls(trends["gap"])))
    both = found.statistics.correlations["similarity/bounded_r2"]
    left = found.statistics.given_p.get("similarity/bounded_r2")
    given = "" if left is None else f"; with p held fixed (partial correlation) {left:.2f}"
    return [*claims, Claim(strong, _correlation_text(both) + given, _correlates(both))]


def _rises(trend: Trend) -> str:
    return _monotone(trend.spearman.value if trend.spearman else None, trend.p_rise)


def _falls(trend: Trend) -> str:
    return _monotone(-trend.spearman.value if trend.spearman else None, trend.p_fall)


def _monotone(rho: float | None, p: float | None) -> str:
    if rho is None or p is None or rho <= 0:
        return "no"
    return "yes" if rho >= _STRONG_RHO and p < _MAX_P else "partly"


def _correlates(found: Correlation) -> str:
    r = found.pearson
    if r is None or r.value <= 0:
        return "no"
    return "yes" if r.value >= _STRONG_R and r.lower > 0 else "partly"


def _accuracy_peak(rows: Sequence[StochasticDepthRow], says: str) -> Claim:
    """The p with the best mean accuracy over seeds: a peak when it is neither the smallest nor the largest p.

    Within two standard errors of an end, by the number of held-out images, the verdict is `partly`.
    """
    by_p = defaultdict(list)
    for row in rows:
        by_p[row.p].append(row.teacher.accuracy)
    mean = {p: fmean(values) for p, values in sorted(by_p.items())}
    best = max(mean, key=lambda p: mean[p])
    low, high = min(mean), max(mean)
    text = f"best at p = {best:g}: {mean[best]:.1%}; p = {low:g}: {mean[low]:.1%}; p = {high:g}: {mean[high]:.1%}"
    num_images = rows[0].raptor.num_images
    error = _error(mean[best], num_images)
    clear = error is not None and mean[best] - max(mean[low], mean[high]) > 2 * error
    return Claim(says, f"{text} ({num_images} images)", "no" if best in (low, high) else "yes" if clear else "partly")


def claims_partitions(found: Partitions | None) -> list[Claim]:
    """Where max-cut stands among random partitions, in their deviations, for each k."""
    says = "max-cut beats random contiguous partitions in accuracy, near or above one standard deviation (k = {})"
    if found is None or not found.rows:
        return [Claim(says.format("2, 3, 4"))]
    claims = []
    for k, ways in found.statistics.items():
        chosen = ways.get("maxcut", {})
        accuracy, r2 = chosen.get("accuracy"), chosen.get("r2_last")
        if accuracy is None or accuracy.deviation is None:  # fewer than two random ones yet
            claims.append(Claim(says.format(k)))
            continue
        text = f"accuracy {_z_text(accuracy, True)}; R2 {_z_text(r2)}"
        claims.append(Claim(says.format(k), text, _beats(accuracy.z)))
    return claims


def _beats(z: float | None) -> str:
    if z is None:  # the random ones do not differ
        return "–"
    if z <= 0:
        return "no"
    return "yes" if z >= _NEAR_Z else "partly"


def claims_untrained(found: Untrained | None) -> list[Claim]:
    """Trained against untrained, and untrained against overfitted."""
    settings = found.settings if found else {}
    made = f"p = {settings.get('p', 0.3):g}, k = {settings.get('k', 3)}"
    layers = f"training increases layer-layer similarity (mean off the diagonal, {made})"
    phases = f"training increases similarity within phases ({made})"
    follows = "training increases reconstruction of the output cls ({} R2)"
    easier = "untrained ViTs are easier to reconstruct than overfitted ones ({} R2, output cls)"
    metrics: dict[str, _Measure] = {
        "bounded": lambda row: row.raptor.curves["cls"].bounded_r2[-1],
        "plain": lambda row: row.raptor.curves["cls"].r2[-1],
    }
    names = [layers, phases, *(follows.format(m) for m in metrics), *(easier.format(m) for m in metrics)]
    rows = _by_kind(found.rows) if found else {}
    if not {"trained", "untrained"} <= set(rows):
        return [Claim(says) for says in names]
    claims = [
        _larger(layers, rows, "trained", "untrained", lambda row: row.similarity.off_diagonal),
        _larger(phases, rows, "trained", "untrained", lambda row: row.similarity.within_phases),
    ]
    for says, a, b in ((follows, "trained", "untrained"), (easier, "untrained", "overfitted")):
        for name, measure in metrics.items():
            claims.append(_larger(says.format(name), rows, a, b, measure) if b in rows else Claim(says.format(name)))
    return claims


_Measure = Callable[[UntrainedRow], float | None]


def _by_kind(rows: Sequence[UntrainedRow]) -> dict[str, list[UntrainedRow]]:
    found = defaultdict(list)
    for row in rows:
        found[row.kind].append(row)
    return found


def _larger(says: str, rows: dict[str, list[UntrainedRow]], a: str, b: str, measure: _Measure) -> Claim:
    """Whether a measure is larger for `a` than for `b`: for every seed, only for the mean, or not."""
    of_a, of_b = ([value for row in rows[kind] if (value := measure(row)) is not None] for kind in (a, b))
    if len(of_a) < len(rows[a]) or len(of_b) < len(rows[b]):
        return Claim(says, f"{a} or {b} has no finite value", "no")
    text = f"{a} {fmean(of_a):.3f}, {b} {fmean(of_b):.3f} ({len(of_a)} and {len(of_b)} seeds)"
    agrees = "yes" if min(of_a) > max(of_b) else "partly" if fmean(of_a) > fmean(of_b) else "no"
    return Claim(says, text, _seeded(agrees, min(len(of_a), len(of_b))))


def _seeded(agrees: str, num_seeds: int) -> str:
    return f"{agrees} (one seed)" if agrees == "yes" and num_seeds < 2 else agrees


def claims_swaps(found: Swaps | None) -> list[Claim]:
    """Accuracy kept after swapping blocks, mean over pairs and over the teachers that learned something."""
    within, across = (
        "swapping two blocks within a phase costs little",
        "swapping two blocks across phases breaks the model",
    )
    if found is None or not found.rows:
        return [Claim(within), Claim(across)]
    rows = [row for row in found.rows if (row.accuracy or 0) > 2 * (row.chance or 1)]
    if not rows:
        return [Claim(says, "no teacher reaches twice chance", "–") for says in (within, across)]
    kept = {kind: _kept(rows, kind) for kind in ("within", "across", "within_matched", "across_matched")}
    matched = f"at equal distance {_percent(kept['within_matched'])} within, {_percent(kept['across_matched'])} across"
    inside, outside = kept["within"], kept["across"]
    text = f"{{}} of the accuracy kept, mean over pairs and {len(rows)} teachers ({matched})"
    little = "no" if inside is None or inside < 0.75 else "yes" if inside >= 0.9 else "partly"
    breaks = "no" if outside is None or outside > 0.75 else "yes" if outside <= 0.5 else "partly"
    return [
        Claim(within, text.format(_percent(inside)), little),
        Claim(across, text.format(_percent(outside)), breaks),
    ]


def _kept(rows: Sequence[SwapRow], kind: str) -> float | None:
    """Share of the accuracy kept, mean over teachers; None where no teacher has such pairs."""
    shares = []
    for row in rows:
        mean = row.compared_accuracy.mean(kind) if row.compared_accuracy else None
        if mean is not None and row.accuracy:
            shares.append(mean / row.accuracy)
    return fmean(shares) if shares else None


def claims_ablation(found: Ablation | None) -> list[Claim]:
    """Whether each row of Table 2 improves on the one before it."""
    collapse = "teacher forcing by itself collapses (3.9 of 84.5 %)"
    steps = {
        "2": "the autoregressive loss brings the largest gain (+ 68.8 points)",
        "3": "depth scaling adds (+ 2.5)",
        "4": "weighting cls in the last phase adds (+ 1.5)",
        "5": "the joint stage adds (+ 5.7)",
        "6": "fitting the probe again adds (+ .6)",
    }
    table = found.table if found else []
    reached = {line.number: line.accuracy for line in table if line.accuracy is not None}
    rows = found.rows if found else []
    num_images, num_seeds = rows[0].num_images if rows else None, max(1, len({row.seed for row in rows}))
    claims = [_collapses(collapse, table, num_seeds)]
    before = {number: str(int(number) - 1) for number in steps}
    gains = {n: reached[n] - reached[before[n]] for n in steps if {n, before[n]} <= set(reached)}
    for number, says in steps.items():
        if number not in gains:
            claims.append(Claim(says))
            continue
        gain, accuracy = gains[number], reached[number]
        error = _error(accuracy, num_images)
        agrees = "no" if gain <= 0 else "yes" if error is not None and gain > 2 * error else "partly"
        if number == "2" and agrees == "yes":
            agrees = _largest(gain, [gains[n] for n in gains if n != number], len(steps) - 1, error)
        text = f"{100 * gain:+.1f} points, to {accuracy:.1%}" + ("" if error is None else f" (± {100 * error:.1f})")
        claims.append(Claim(says, text, _seeded(agrees, num_seeds)))
    return claims


def _collapses(says: str, table: Sequence[AblationLine], num_seeds: int) -> Claim:
    """Whether the first row of Table 2 loses most of the teacher's accuracy."""
    first = next((line for line in table if line.number == "1"), None)
    if first is None or first.accuracy is None or first.teacher_accuracy is None:
        return Claim(says)
    share = first.accuracy / max(first.teacher_accuracy, 1e-9)
    verdict = "yes" if share <= 0.2 else "partly" if share <= 0.5 else "no"
    text = f"{first.accuracy:.1%}, the teacher {first.teacher_accuracy:.1%}: {share:.0%} kept"
    return Claim(says, text, _seeded(verdict, num_seeds))


def _largest(gain: float, others: list[float], num_others: int, error: float | None) -> str:
    """Whether a gain is the largest, by more than two standard errors of a difference of gains.

    Two gains that share a row have three independent accuracies, hence the factor sqrt(3).
    """
    margin = 2 * sqrt(3) * (error or 0.0)
    if any(other - gain > margin for other in others):
        return "no"
    return "yes" if len(others) == num_others and all(gain - other > margin for other in others) else "partly"


def _error(accuracy: float, num_images: int | None) -> float | None:
    """Standard error of the difference between two accuracies of about this size, as if on different images."""
    return sqrt(2 * accuracy * (1 - accuracy) / num_images) if num_images else None


def claims_table1(found: Table1 | None) -> list[Claim]:
    """Recovery of each task at each k beside the paper's, and whether accuracy and R2 rise with k."""
    titles = {"classify": "ImageNet-1k accuracy", "segment": "ADE20K mIoU", "depth": "NYUv2 RMSE"}
    rows = {row.k: row for row in found.rows if row.k != "teacher"} if found else {}
    settings = found.settings if found else {}
    claims = []
    for task, title in titles.items():
        for k, paper in _PAPER_RECOVERY[task].items():
            says = f"k = {k} keeps {paper:.1%} of the teacher's {title}"
            score = rows[k].scores.get(task) if k in rows else None
            kept = score.recovery if score else None
            if kept is None or kept.mean is None:
                claims.append(Claim(says))
                continue
            near = kept.mean - paper
            agrees = "yes" if near >= -0.02 else "partly" if near >= -0.06 else "no"
            spread = "" if kept.deviation is None else f" ± {100 * kept.deviation:.1f}"
            where = _measured_on(settings, rows[k], task)
            claims.append(Claim(says, f"{100 * kept.mean:.1f}{spread} %{where}", agrees))
    return [*claims, _rises_with_k(rows)]


def _measured_on(settings: dict[str, Any], row: Table1Row, task: str) -> str:
    """Our data, which is not the paper's, and how often the best learning rate was the grid's smallest or largest."""
    spec = settings.get("data" if task == "classify" else task)
    at_edge = row.scores[task].at_edge
    parts = [data_label(spec)] if spec else []
    parts += [f"learning rate at the grid's edge in {at_edge} of {row.num_seeds} probes"] if at_edge else []
    return f" ({'; '.join(parts)})" if parts else ""


def _rises_with_k(rows: dict[str, Table1Row]) -> Claim:
    says = "accuracy and R2 rise with k (Figure 5)"
    if len(rows) < 2:
        return Claim(says)
    ordered = [rows[k] for k in sorted(rows, key=int)]
    num_seeds = min(row.num_seeds for row in ordered)
    scores_of: list[list[MeanOverSeeds]] = [
        [row.scores["classify"] for row in ordered],
        [row.r2["all"].r2 for row in ordered],
    ]
    both = [[(f.mean, f.deviation or 0.0) for f in scores if f.mean is not None] for scores in scores_of]
    if any(len(scores) < len(ordered) for scores in both):
        return Claim(says, "a score is not finite", "no")
    steps = [[_step(a, b, num_seeds) for a, b in pairwise(scores)] for scores in both]
    up = [all(rise > 0 for rise, _ in pairs) for pairs in steps]
    clear = all(rise > 2 * error for pairs in steps for rise, error in pairs)
    shown = [", ".join(f"{mean:.3f}" for mean, _ in scores) for scores in both]
    whole = both[0][-1][0] > both[0][0][0]
    agrees = "yes" if clear else "partly" if any(up) or whole else "no"
    return Claim(says, f"accuracy {shown[0]}; R2 {shown[1]}", _seeded(agrees, num_seeds))


def _step(a: tuple[float, float], b: tuple[float, float], num_seeds: int) -> tuple[float, float]:
    """How far the mean rises from `a` to `b`, both (mean, deviation over seeds), and the standard error of that."""
    return b[0] - a[0], sqrt((a[1] ** 2 + b[1] ** 2) / num_seeds)


def _trend_text(trend: Trend) -> str:
    if trend.first is None or trend.last is None:
        return "no finite value"
    ends = f"{trend.first:.3f} at the smallest p, {trend.last:.3f} at the largest"
    if trend.spearman is None or trend.p_rise is None or trend.p_fall is None:
        return ends
    smaller = min(trend.p_rise, trend.p_fall)
    return f"{ends}; Spearman {_interval(trend.spearman)} (one-sided p {smaller:.4f}, {trend.num} runs)"


def _correlation_text(found: Correlation) -> str:
    if found.pearson is None or found.spearman is None:
        return f"undefined over {found.num} runs"
    return f"Pearson {_interval(found.pearson)}, Spearman {_interval(found.spearman)}, {found.num} runs"


def _interval(found: Interval) -> str:
    return f"{found.value:.2f} [{found.lower:.2f}, {found.upper:.2f}]"


def _z_text(found: ZScore | None, percent: bool = False) -> str:
    if found is None or found.mean is None or found.deviation is None:
        return NOT_RUN
    number = (lambda v: f"{v:.1%}") if percent else (lambda v: f"{v:.3f}")
    z = "no spread" if found.z is None else f"z = {found.z:+.2f}"
    sample = f"random {number(found.mean)} ± {number(found.deviation)}, {found.num} of them"
    return f"{number(found.value)} ({sample}; {z}; above {found.below:.0%} of them)"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
