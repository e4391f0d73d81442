"""Each claim of the paper as a rule over an experiment's values: what was measured, and whether it agrees.

`RULES` states the rules, for the page as well. A `yes` that rests on one seed says so.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from math import sqrt
from statistics import fmean
from typing import Any, NamedTuple

from raptor.experiments.outcome import data_label

Values = dict[str, Any]
NOT_RUN = "not run"
STRONG_RHO, STRONG_R, MAX_P = 0.6, 0.7, 0.05
NEAR_Z = 0.8
PAPER_RECOVERY = {
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


def claims_stochastic_depth(values: Values | None) -> list[Claim]:
    """Similarity, R2 and accuracy against p, and their association."""
    titles = {
        "similarity": "layer-layer similarity (mean off the diagonal) rises with p",
        "within_phases": "similarity within phases rises with p",
        "bounded_r2": "teacher-student R2 (bounded) of the last layer rises with p",
        "r2": "the same, plain R2",
    }
    peak, gap = "teacher accuracy peaks at a middle p", "the accuracy gap between teacher and raptor closes with p"
    strong = "similarity and R2 (bounded) correlate strongly"
    if not values or not values.get("statistics"):
        return [Claim(says) for says in (*titles.values(), peak, gap, strong)]
    trends = values["statistics"]["trends"]
    claims = [Claim(says, _trend_text(trends[name]), rises(trends[name])) for name, says in titles.items()]
    share = f"; share of the teacher's accuracy kept: {_trend_text(trends['recovery'])}"
    claims.append(accuracy_peak(values["rows"], peak))
    claims.append(Claim(gap, _trend_text(trends["gap"]) + share, falls(trends["gap"])))
    found = values["statistics"]["correlations"]["similarity/bounded_r2"]
    left = values["statistics"].get("given_p", {}).get("similarity/bounded_r2")
    given = "" if left is None else f"; with p held fixed (partial correlation) {left:.2f}"
    return [*claims, Claim(strong, _correlation_text(found) + given, correlates(found))]


def rises(trend: Values) -> str:
    rho = (trend["spearman"] or {}).get("value")
    return _monotone(rho, trend["p_rise"])


def falls(trend: Values) -> str:
    rho = (trend["spearman"] or {}).get("value")
    return _monotone(None if rho is None else -rho, trend["p_fall"])


def _monotone(rho: float | None, p: float | None) -> str:
    if rho is None or p is None or rho <= 0:
        return "no"
    return "yes" if rho >= STRONG_RHO and p < MAX_P else "partly"


def correlates(found: Values) -> str:
    r = found["pearson"]
    if r is None or r["value"] <= 0:
        return "no"
    return "yes" if r["value"] >= STRONG_R and r["lower"] > 0 else "partly"


def accuracy_peak(rows: list[Values], says: str) -> Claim:
    """The p with the best mean accuracy over seeds: a peak when it is neither the smallest nor the largest p.

    Within two standard errors of an end, by the number of held-out images, it is one only `partly`.
    """
    by_p = defaultdict(list)
    for row in rows:
        by_p[row["p"]].append(row["teacher"]["accuracy"])
    mean = {p: fmean(values) for p, values in sorted(by_p.items())}
    best = max(mean, key=lambda p: mean[p])
    low, high = min(mean), max(mean)
    text = f"best at p = {best:g}: {mean[best]:.1%}; p = {low:g}: {mean[low]:.1%}; p = {high:g}: {mean[high]:.1%}"
    num_images = rows[0]["raptor"]["num_images"]
    error = _error(mean[best], num_images)
    clear = error is not None and mean[best] - max(mean[low], mean[high]) > 2 * error
    return Claim(says, f"{text} ({num_images} images)", "no" if best in (low, high) else "yes" if clear else "partly")


def claims_partitions(values: Values | None) -> list[Claim]:
    """Where max-cut stands among random partitions, in their deviations, for each k."""
    says = "max-cut beats random contiguous partitions in accuracy, near or above one standard deviation (k = {})"
    if not values or not values["rows"]:
        return [Claim(says.format("2, 3, 4"))]
    claims = []
    for k, ways in values["statistics"].items():
        chosen = ways.get("maxcut", {})
        accuracy, r2 = chosen.get("accuracy"), chosen.get("r2_last")
        if not accuracy or accuracy["deviation"] is None:  # fewer than two random ones yet
            claims.append(Claim(says.format(k)))
            continue
        text = f"accuracy {_z_text(accuracy, True)}; R2 {_z_text(r2)}"
        claims.append(Claim(says.format(k), text, beats(accuracy["z"])))
    return claims


def beats(z: float | None) -> str:
    if z is None:  # the random ones do not differ
        return "–"
    if z <= 0:
        return "no"
    return "yes" if z >= NEAR_Z else "partly"


def claims_untrained(values: Values | None) -> list[Claim]:
    """Trained against untrained, and untrained against overfitted."""
    settings = (values or {}).get("settings", {})
    made = f"p = {settings.get('p', 0.3):g}, k = {settings.get('k', 3)}"
    layers = f"training increases layer-layer similarity (mean off the diagonal, {made})"
    phases = f"training increases similarity within phases ({made})"
    follows = "training increases reconstruction of the output cls ({} R2)"
    easier = "untrained ViTs are easier to reconstruct than overfitted ones ({} R2, output cls)"
    metrics = {"bounded": "bounded_r2", "plain": "r2"}
    names = [layers, phases, *(follows.format(m) for m in metrics), *(easier.format(m) for m in metrics)]
    found = _by_kind(values["rows"]) if values else {}
    if not values or not {"trained", "untrained"} <= set(found):
        return [Claim(says) for says in names]
    claims = [
        _larger(says, found, "trained", "untrained", lambda r, name=name: r["similarity"][name])
        for says, name in ((layers, "off_diagonal"), (phases, "within_phases"))
    ]
    for says, a, b in ((follows, "trained", "untrained"), (easier, "untrained", "overfitted")):
        for name, metric in metrics.items():
            if b not in found:
                claims.append(Claim(says.format(name)))
                continue
            measure = lambda r, m=metric: r["raptor"]["curves"]["cls"][m][-1]  # noqa: E731
            claims.append(_larger(says.format(name), found, a, b, measure))
    return claims


def _by_kind(rows: list[Values]) -> dict[str, list[Values]]:
    found = defaultdict(list)
    for row in rows:
        found[row["kind"]].append(row)
    return found


def _larger(says: str, found: dict[str, list[Values]], a: str, b: str, measure: Any) -> Claim:
    """Whether a measure is larger for `a` than for `b`: for every seed, for the mean alone, or not."""
    of_a, of_b = ([measure(row) for row in found[kind]] for kind in (a, b))
    if None in (*of_a, *of_b):
        return Claim(says, f"{a} or {b} has no finite value", "no")
    text = f"{a} {fmean(of_a):.3f}, {b} {fmean(of_b):.3f} ({len(of_a)} and {len(of_b)} seeds)"
    agrees = "yes" if min(of_a) > max(of_b) else "partly" if fmean(of_a) > fmean(of_b) else "no"
    return Claim(says, text, _seeded(agrees, min(len(of_a), len(of_b))))


def _seeded(agrees: str, num_seeds: int) -> str:
    return f"{agrees} (one seed)" if agrees == "yes" and num_seeds < 2 else agrees


def claims_swaps(values: Values | None) -> list[Claim]:
    """Accuracy kept after swapping blocks, mean over pairs and over the teachers that learned something."""
    within, across = (
        "swapping two blocks within a phase costs little",
        "swapping two blocks across phases breaks the model",
    )
    rows = [r for r in values["rows"] if r.get("accuracy", 0) > 2 * r.get("chance", 1)] if values else []
    if not values or not values["rows"]:
        return [Claim(within), Claim(across)]
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


def _kept(rows: list[Values], kind: str) -> float | None:
    shares = [r["compared_accuracy"][kind] / r["accuracy"] for r in rows if r["compared_accuracy"][kind] is not None]
    return fmean(shares) if shares else None


def claims_ablation(values: Values | None) -> list[Claim]:
    """Whether each row of Table 2 improves on the one before it."""
    collapse = "teacher forcing alone collapses (3.9 of 84.5 %)"
    steps = {
        "2": "the autoregressive loss brings the largest gain (+ 68.8 points)",
        "3": "depth scaling adds (+ 2.5)",
        "4": "weighting cls in the last phase adds (+ 1.5)",
        "5": "the joint stage adds (+ 5.7)",
        "6": "fitting the probe again adds (+ .6)",
    }
    lines = {line["number"]: line for line in (values or {}).get("table", []) if line["accuracy"] is not None}
    first = lines.get("1")
    share = first["accuracy"] / max(first["teacher_accuracy"], 1e-9) if first else None
    verdict = NOT_RUN if share is None else "yes" if share <= 0.2 else "partly" if share <= 0.5 else "no"
    text = NOT_RUN
    if first is not None:
        text = f"{first['accuracy']:.1%}, the teacher {first['teacher_accuracy']:.1%}: {share:.0%} kept"
    rows = (values or {}).get("rows") or [{}]
    num_images, num_seeds = rows[0].get("num_images"), len({row.get("seed") for row in rows})
    claims = [Claim(collapse, text, _seeded(verdict, num_seeds))]
    gains = {
        n: lines[n]["accuracy"] - lines[str(int(n) - 1)]["accuracy"]
        for n in steps
        if {n, str(int(n) - 1)} <= set(lines)
    }
    for number, says in steps.items():
        if number not in gains:
            claims.append(Claim(says))
            continue
        gain, accuracy = gains[number], lines[number]["accuracy"]
        error = _error(accuracy, num_images)
        agrees = "no" if gain <= 0 else "yes" if error is not None and gain > 2 * error else "partly"
        if number == "2" and agrees == "yes":
            agrees = _largest(gain, [gains[n] for n in gains if n != number], len(steps) - 1, error)
        text = f"{100 * gain:+.1f} points, to {accuracy:.1%}" + ("" if error is None else f" (± {100 * error:.1f})")
        claims.append(Claim(says, text, _seeded(agrees, num_seeds)))
    return claims


def _largest(gain: float, others: list[float], num_others: int, error: float | None) -> str:
    """Whether a gain is the largest of all, beyond two errors of a difference of gains; they share a row, so root 3."""
    margin = 2 * sqrt(3) * (error or 0.0)
    if any(other - gain > margin for other in others):
        return "no"
    return "yes" if len(others) == num_others and all(gain - other > margin for other in others) else "partly"


def _error(accuracy: float, num_images: int | None) -> float | None:
    """Standard error of the difference between two accuracies of about this size, as if on images of their own."""
    return sqrt(2 * accuracy * (1 - accuracy) / num_images) if num_images else None


def claims_table1(values: Values | None) -> list[Claim]:
    """Recovery of each task at each k beside the paper's, and whether accuracy and R2 rise with k."""
    titles = {"classify": "ImageNet-1k accuracy", "segment": "ADE20K mIoU", "depth": "NYUv2 RMSE"}
    rows = {row["k"]: row for row in (values or {}).get("rows", []) if row["k"] != "teacher"}
    claims = []
    for task, title in titles.items():
        for k, paper in PAPER_RECOVERY[task].items():
            says = f"k = {k} keeps {paper:.1%} of the teacher's {title}"
            found = rows.get(k, {}).get("scores", {}).get(task, {}).get("recovery", {})
            if found.get("mean") is None:
                claims.append(Claim(says))
                continue
            near = found["mean"] - paper
            agrees = "yes" if near >= -0.02 else "partly" if near >= -0.06 else "no"
            spread = "" if found["deviation"] is None else f" ± {100 * found['deviation']:.1f}"
            where = _measured_on(values or {}, rows[k], task)
            claims.append(Claim(says, f"{100 * found['mean']:.1f}{spread} %{where}", agrees))
    return [*claims, _rises_with_k(rows)]


def _measured_on(values: Values, row: Values, task: str) -> str:
    """Our data, which is not the paper's, and how often the best learning rate was the grid's smallest or largest."""
    spec = values.get("settings", {}).get("data" if task == "classify" else task)
    at_edge, num = row["scores"][task].get("at_edge"), row.get("num_seeds")
    parts = [data_label(spec)] if spec else []
    parts += [f"learning rate at the grid's edge in {at_edge} of {num} probes"] if at_edge else []
    return f" ({'; '.join(parts)})" if parts else ""


def _rises_with_k(rows: dict[str, Values]) -> Claim:
    says = "accuracy and R2 rise with k (Figure 5)"
    if len(rows) < 2:
        return Claim(says)
    ordered = [rows[k] for k in sorted(rows, key=int)]
    num_seeds = min(row.get("num_seeds", 1) for row in ordered)
    both = [[row["scores"]["classify"] for row in ordered], [row["r2"]["all"]["r2"] for row in ordered]]
    if any(found["mean"] is None for scores in both for found in scores):
        return Claim(says, "a score is not finite", "no")
    steps = [[_step(a, b, num_seeds) for a, b in pairwise(scores)] for scores in both]
    up = [all(rise > 0 for rise, _ in pairs) for pairs in steps]
    clear = all(rise > 2 * error for pairs in steps for rise, error in pairs)
    shown = [", ".join(f"{found['mean']:.3f}" for found in scores) for scores in both]
    whole = both[0][-1]["mean"] > both[0][0]["mean"]
    agrees = "yes" if clear else "partly" if any(up) or whole else "no"
    return Claim(says, f"accuracy {shown[0]}; R2 {shown[1]}", _seeded(agrees, num_seeds))


def _step(a: Values, b: Values, num_seeds: int) -> tuple[float, float]:
    """How far the mean rises from `a` to `b`, and its standard error over seeds (0 where there is one)."""
    deviations = [found.get("deviation") or 0.0 for found in (a, b)]
    return b["mean"] - a["mean"], sqrt(sum(d**2 for d in deviations) / num_seeds)


def _trend_text(trend: Values) -> str:
    rho, p = trend["spearman"], trend["p_rise"]
    if trend["first"] is None:
        return "no finite value"
    ends = f"{trend['first']:.3f} at the smallest p, {trend['last']:.3f} at the largest"
    if rho is None or p is None:
        return ends
    smaller = min(p, trend["p_fall"])
    return f"{ends}; Spearman {_interval(rho)} (one-sided p {smaller:.4f}, {trend['num']} runs)"


def _correlation_text(found: Values) -> str:
    if found["pearson"] is None:
        return f"undefined over {found['num']} runs"
    return f"Pearson {_interval(found['pearson'])}, Spearman {_interval(found['spearman'])}, {found['num']} runs"


def _interval(found: Values) -> str:
    return f"{found['value']:.2f} [{found['lower']:.2f}, {found['upper']:.2f}]"


def _z_text(found: Values | None, percent: bool = False) -> str:
    if not found or found["mean"] is None or found["deviation"] is None:
        return NOT_RUN
    number = (lambda v: f"{v:.1%}") if percent else (lambda v: f"{v:.3f}")
    z = "no spread" if found["z"] is None else f"z = {found['z']:+.2f}"
    sample = f"random {number(found['mean'])} ± {number(found['deviation'])}, {found['num']} of them"
    return f"{number(found['value'])} ({sample}; {z}; above {found['below']:.0%} of them)"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
