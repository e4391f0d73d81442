"""How it was made: commands, config, versions, time, and the training curve."""

from __future__ import annotations

from typing import Any

import yaml

from raptor.report.charts import Chart, Section, finite_values, number
from raptor.report.markup import command, escape, paragraph, table
from raptor.report.results import Results, provenance_of

LEAD = "Every number on this page comes from the files of one folder."


def made(results: Results) -> Section:
    section = Section("made", "Provenance", "How it was made", LEAD)
    rows = [_row(name, entry) for name, entry in results.files.items()]
    versions = {row[-1] for row in rows} - {"–"}
    head: tuple[str, ...] = ("file", "command", "seconds", "device", "versions")
    if len(versions) == 1:
        head, rows = head[:-1], [row[:-1] for row in rows]
    section.after = table(head, rows, numeric=False)
    if len(versions) == 1:
        section.after += paragraph(f"Versions: {versions.pop()}.", "caption")
    chart = _training(results.metrics)
    section.charts = [chart] if chart else []
    if results.config:
        text = escape(yaml.safe_dump(results.config, sort_keys=False, allow_unicode=True))
        section.after += (
            f"<details><summary>config.yaml, everything resolved</summary><pre tabindex='0'>{text}</pre></details>"
        )
    section.after += f"<p>Make this page again: {command(f'raptor report {results.folder}')}</p>"
    return section


def _row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    known = provenance_of(entry)
    versions = known.get("versions")
    words = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else "–"
    seconds = known.get("seconds")
    return (
        f"{name}.json", str(known.get("command") or "–"), number(seconds) if seconds is not None else "–",
        str(known.get("device") or "–"), words,
    )  # fmt: skip


def _training(metrics: list[dict[str, Any]]) -> Chart | None:
    """Loss over the steps of each stage, from metrics.jsonl."""
    stages: dict[str, list[tuple[float, float]]] = {}
    for row in metrics:
        if row.get("loss") is not None and row.get("step") is not None:
            stages.setdefault(str(row.get("stage", "training")), []).append((row["step"], row["loss"]))
    series: list[dict[str, Any]] = []
    for i, (stage, points) in enumerate(stages.items()):
        thin = points[:: -(-len(points) // 400)]
        series.append({
            "name": stage, "x": [p[0] for p in thin], "y": [p[1] for p in thin], "plain": True,
            "colour": f"palette-{i}",
        })  # fmt: skip
    values = finite_values([y for s in series for y in s["y"]])
    if len(values) < 2:
        return None
    return Chart(
        id="training", kind="lines", title="Training",
        caption="Loss of each stage; the stages measure different things.",
        alt=f"Training loss from {number(values[0])} to {number(values[-1])}.", series=series,
        x={"label": "step"}, y={"label": "loss", "log": min(values) > 0}, wide=True,
    )  # fmt: skip
