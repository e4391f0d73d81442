"""Linear probes: what a frozen surrogate is good for, beside its teacher."""

from __future__ import annotations

from raptor.probes.result import ProbeReport, Scores
from raptor.report.charts import Section, Series, described, number, percent
from raptor.report.markup import bullet_list, table
from raptor.report.results import TASKS, Results

LEAD = (
    "One linear head on frozen features, trained alike on both sides: do the surrogate's states still hold the answers?"
)
_HEAD = (
    "task",
    "metric",
    "teacher",
    "surrogate",
    "recovery",
    "without the image",
    "last epoch (teacher, surrogate)",
    "images scored",
)


def probes(results: Results) -> Section:
    section = Section("probes", "Probes", "Linear probes", LEAD)
    found = results.probes
    missing = [task for task in TASKS if task not in found]
    if missing:
        section.hint = f"raptor probe --task {missing[0]}"
    if not found:
        return section
    if missing:
        section.hint_reason = f"Not probed yet: {', '.join(missing)}."
    num_layers = None
    if results.facts:
        num_layers = results.facts.num_layers
    bars = Series("surrogate / teacher", [], [], colour="side-surrogate")
    rows = []
    remarks = []
    for task, report in found.items():
        # A probe of one side only has no share of the other.
        if report.recovery is not None:
            bars.x.append(task)
            bars.y.append(100 * report.recovery)
        rows.append(_row(task, report, num_layers))
        for remark in filter(None, (report.caution, report.unequal)):
            remarks.append(f"{task}: {remark}.")
    if bars.x:
        section.body.append(described("recovery", [bars]))
    section.body.append(table(_HEAD, rows))
    if remarks:
        section.body.append(bullet_list(remarks))
    return section


def _row(task: str, report: ProbeReport, num_layers: int | None) -> tuple[str, ...]:
    """A line of the table. It names a layer before the last one, a closed form and the images.

    num_layers: of the model, where it is known.
    """
    known = next(iter(report.results.values()))
    what = task
    # Only what differs from the usual probe is named, so that the column stays narrow.
    if known.layer != num_layers:
        what += f", layer {known.layer}"
    if known.closed_form:
        what += f", {known.closed_form} in closed form"
    metric = known.metric.replace("_", " ")
    metric += ", higher is better" if known.higher_is_better else ", lower is better"
    chosen: list[str] = []
    last: list[str] = []
    for side in ("teacher", "surrogate"):
        result = report.results.get(side)
        if result is None:
            chosen.append("–")
            last.append("–")
            continue
        score = _score(result.chosen, known.metric)
        if result.unfinished:
            score += f" ({result.unfinished})"
        chosen.append(score)
        last.append(_score(result.last, known.metric))
    floors = ", ".join(f"{percent(share)} by {name}" for name, share in report.floors.items())
    return what, metric, *chosen, percent(report.recovery), floors or "–", ", ".join(last), report.images


def _score(scores: Scores | None, metric: str) -> str:
    if scores is None:
        return "–"
    mean = number(scores.mean[metric])
    deviation = scores.deviation.get(metric)
    if deviation is None:
        return mean
    return f"{mean} ± {number(deviation, 2)}"
