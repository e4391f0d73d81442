"""Linear probes: what a frozen surrogate is good for, beside its teacher."""

from __future__ import annotations

from typing import Any

from raptor.report.charts import Chart, Section, number, percent
from raptor.report.markup import table
from raptor.report.results import TASKS, Results

LEAD = (
    "One linear head on frozen features, trained alike on both sides: do the surrogate's states still hold the answers?"
)


def probes(results: Results) -> Section:
    section = Section("probes", "Probes", "Linear probes", LEAD)
    found = {task: results.files[f"probe-{task}"] for task in TASKS if f"probe-{task}" in results.files}
    missing = [task for task in TASKS if task not in found]
    if missing:
        section.hint = f"raptor probe {results.folder} --task {missing[0]}"
        section.hint_reason = f"Not probed yet: {', '.join(missing)}." if found else ""
    if not found:
        return section
    kept = {task: value for task, entry in found.items() if (value := _recovery(entry)) is not None}
    if kept:
        section.charts = [_recovery_chart(kept)]
    head = ("task", "metric", "teacher", "surrogate", "recovery", "last epoch (teacher, surrogate)", "images scored")
    section.after = table(head, [_row(task, entry, kept.get(task)) for task, entry in found.items()])
    return section


def _recovery(entry: dict[str, Any]) -> float | None:
    value = entry.get("recovery")
    return None if value is None else float(value)


def _recovery_chart(kept: dict[str, float]) -> Chart:
    words = ", ".join(f"{task} {percent(value)}" for task, value in kept.items())
    return Chart(
        id="recovery",
        kind="bars",
        title="Recovery",
        caption="100 % is the teacher. For errors, recovery is teacher over surrogate.",
        alt=f"Share of the teacher's score that the surrogate keeps: {words}.",
        series=[
            {"name": "surrogate / teacher", "x": list(kept), "y": [100 * v for v in kept.values()],
             "colour": "side-surrogate"},
        ],
        x={"label": "task"},
        y={"label": "recovery (%)", "from_zero": True},
        extra={"line": 100},
        wide=True,
    )  # fmt: skip


def _row(task: str, entry: dict[str, Any], kept: float | None) -> tuple[Any, ...]:
    sides = entry["results"]
    known = next(side for side in sides.values() if side)
    metric = known["metric"]
    direction = "higher is better" if known.get("higher_is_better", True) else "lower is better"

    def score(side: str, which: str) -> str:
        result = sides.get(side)
        if not result:
            return "–"
        mean, deviation = result[which]["mean"][metric], (result[which].get("deviation") or {}).get(metric)
        return number(mean) + (f" ± {number(deviation, 2)}" if deviation is not None else "")

    return (
        task, f"{metric.replace('_', ' ')}, {direction}", score("teacher", "chosen"), score("surrogate", "chosen"),
        percent(kept), f"{score('teacher', 'last')}, {score('surrogate', 'last')}",
        number(known["num_images"].get("reported")),
    )  # fmt: skip
