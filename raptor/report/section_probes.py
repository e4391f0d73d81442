"""Linear probes: what a frozen surrogate is good for, beside its teacher."""

from __future__ import annotations

from raptor.data.by_name import DENSE_KINDS
from raptor.probes.result import ProbeReport, Scores
from raptor.report.charts import Chart, Section, number, percent
from raptor.report.markup import bullet_list, table
from raptor.report.results import TASKS, Results

LEAD = (
    "One linear head on frozen features, trained alike on both sides: do the surrogate's states still hold the answers?"
)


def probes(results: Results) -> Section:
    section = Section("probes", "Probes", "Linear probes", LEAD)
    found = results.probes
    missing = [task for task in TASKS if task not in found]
    if missing:
        section.hint = results.adds("probe", _task_options(missing[0], results))
        others = [results.notes[f"probe-{task}"] for task in missing if f"probe-{task}" in results.notes]
        section.hint_reason = " ".join([*others, *([f"Not probed yet: {', '.join(missing)}."] if found else [])])
    if not found:
        return section
    kept = {task: value for task, entry in found.items() if (value := entry.recovery) is not None}
    if kept:
        section.charts = [_recovery_chart(kept)]
    head = ("task", "metric", "teacher", "surrogate", "recovery", "last epoch (teacher, surrogate)", "images scored")
    num_layers = results.facts.num_layers if results.facts else None
    section.after = table(head, [_row(task, entry, kept.get(task), num_layers) for task, entry in found.items()])
    told = [(task, remark) for task, entry in found.items() for remark in (entry.caution, entry.unequal) if remark]
    section.after += bullet_list([f"{task}: {remark}." for task, remark in told]) if told else ""
    return section


def _task_options(task: str, results: Results) -> str:
    """The options of `raptor probe`; a run whose images have no target per pixel needs other ones for dense tasks."""
    kind = str(results.config.get("data", "")).partition(":")[0]
    needs_other = task != "classify" and results.has_model and kind not in DENSE_KINDS
    return f"--task {task} --data nyuv2:PATH" if needs_other else f"--task {task}"


def _recovery_chart(kept: dict[str, float]) -> Chart:
    words = ", ".join(f"{task} {percent(value)}" for task, value in kept.items())
    return Chart(
        id="recovery",
        kind="bars",
        title="Recovery",
        caption="100 % is the teacher. For errors, recovery is teacher over surrogate.",
        alt=f"Share of the teacher's score that the surrogate keeps: {words}.",
        series=[
            {
                "name": "surrogate / teacher",
                "x": list(kept),
                "y": [100 * v for v in kept.values()],
                "colour": "side-surrogate",
            },
        ],
        x={"label": "task"},
        y={"label": "recovery (%)", "from_zero": True},
        extra={"line": 100},
        wide=True,
    )


def _row(task: str, entry: ProbeReport, kept: float | None, num_layers: int | None) -> tuple[str, ...]:
    """A line of the table; states before the last layer, a closed form and the images are named.

    num_layers: of the model, where it is known.
    """
    known = next(iter(entry.results.values()))
    direction = "higher is better" if known.higher_is_better else "lower is better"
    teacher, surrogate = (entry.results.get(side) for side in ("teacher", "surrogate"))
    chosen = [_score(None if side is None else side.chosen, known.metric) for side in (teacher, surrogate)]
    chosen = [
        f"{text} ({side.unfinished})" if side is not None and side.unfinished else text
        for text, side in zip(chosen, (teacher, surrogate))
    ]
    last = [_score(None if side is None else side.last, known.metric) for side in (teacher, surrogate)]
    what = [task]
    what += [f"layer {known.layer}"] if known.layer != num_layers else []
    what += [f"{known.closed_form} in closed form"] if known.closed_form else []
    return (
        ", ".join(what),
        f"{known.metric.replace('_', ' ')}, {direction}",
        *chosen,
        percent(kept),
        ", ".join(last),
        entry.images,
    )


def _score(scores: Scores | None, metric: str) -> str:
    if scores is None:
        return "–"
    deviation = scores.deviation.get(metric)
    return number(scores.mean[metric]) + (f" ± {number(deviation, 2)}" if deviation is not None else "")
