"""Linear probes: what a frozen surrogate is good for, beside its teacher."""

from __future__ import annotations

from raptor.probes.result import ProbeReport, Scores
from raptor.report.charts import Section, Series, described, number, percent
from raptor.report.markup import bullet_list, table
from raptor.report.results import TASKS, Results

_SIDES = ("teacher", "surrogate")


def probes(results: Results) -> Section:
    found = results.probes
    # A model without a surrogate is nobody's teacher.
    has_surrogate = any("surrogate" in report.results for report in found.values())
    section = Section.named("probes", has_surrogate)
    missing = [task for task in TASKS if task not in found]
    if missing:
        section.hint = f"raptor probe --task {missing[0]}"
    if not found:
        return section
    if missing:
        section.hint_reason = f"Not probed yet: {', '.join(missing)}."
    head = ["task", "metric", *_SIDES, "recovery", "without the image", "last epoch (teacher, surrogate)"]
    if not has_surrogate:
        head = ["task", "metric", "score", "without the image", "last epoch"]
    bars = Series("surrogate / teacher", [], [], colour="side-surrogate")
    rows = []
    remarks = []
    for task, report in found.items():
        # A probe of one side only has no share of the other.
        if report.recovery is not None:
            bars.x.append(task)
            bars.y.append(100 * report.recovery)
        floors = ", ".join(f"{percent(share)} by {name}" for name, share in report.floors.items()) or "–"
        chosen, last = _scores(report)
        scores = [*chosen, percent(report.recovery), floors, ", ".join(last)]
        if not has_surrogate:
            scores = [chosen[0], floors, last[0]]
        rows.append([*_named(task, report, results), *scores, report.images])
        for remark in filter(None, (report.caution, report.unequal)):
            remarks.append(f"{task}: {remark}.")
    if bars.x:
        section.body.append(described("recovery", [bars]))
    section.body.append(table([*head, "images scored"], rows))
    if remarks:
        section.body.append(bullet_list(remarks))
    return section


def _named(task: str, report: ProbeReport, results: Results) -> tuple[str, str]:
    """The task, with what differs from the usual probe (a layer before the last one, a closed form), and its metric."""
    known = next(iter(report.results.values()))
    if results.facts is None or known.layer != results.facts.num_layers:
        task += f", layer {known.layer}"
    if known.closed_form:
        task += f", {known.closed_form} in closed form"
    better = "higher" if known.higher_is_better else "lower"
    return task, f"{known.metric.replace('_', ' ')}, {better} is better"


def _scores(report: ProbeReport) -> tuple[list[str], list[str]]:
    """Of each side the score of the chosen heads, and of the heads after the last epoch."""
    chosen = []
    last = []
    for side in _SIDES:
        result = report.results.get(side)
        if result is None:
            chosen.append("–")
            last.append("–")
            continue
        score = _score(result.chosen, result.metric)
        if result.unfinished:
            score += f" ({result.unfinished})"
        chosen.append(score)
        last.append(_score(result.last, result.metric))
    return chosen, last


def _score(scores: Scores, metric: str) -> str:
    mean = number(scores.mean[metric])
    deviation = scores.deviation.get(metric)
    if deviation is None:
        return mean
    return f"{mean} ± {number(deviation, 2)}"
