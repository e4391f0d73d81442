"""How it was made: commands, config, versions, time, and the training curve."""

from __future__ import annotations

import yaml

from raptor.provenance import Provenance
from raptor.report.charts import Chart, Section, Series, finite_values, number
from raptor.report.markup import command, escape, paragraph, table
from raptor.report.results import Results, TrainingLoss

LEAD = "Every number on this page comes from the files of one folder."


def provenance(results: Results) -> Section:
    section = Section("made", "Provenance", "How it was made", LEAD)
    rows = [_row(name, found) for name, found in results.provenance().items()]
    versions = {row[-1] for row in rows} - {"–"}
    head: tuple[str, ...] = ("file", "command", "seconds", "device", "versions")
    if len(versions) == 1:
        head, rows = head[:-1], [row[:-1] for row in rows]
    section.after = table(head, rows, numeric=False)
    if len(versions) == 1:
        section.after += paragraph(f"Versions: {versions.pop()}.", "caption")
    chart = _training_chart(results.training)
    section.charts = [chart] if chart else []
    if results.config:
        text = escape(yaml.safe_dump(dict(results.config), sort_keys=False, allow_unicode=True))
        section.after += (
            f"<details><summary>config.yaml, everything resolved</summary><pre tabindex='0'>{text}</pre></details>"
        )
    section.after += f"<p>Make this page again: {command(results.on_run('report'))}</p>"
    return section


def _row(name: str, found: Provenance) -> tuple[str, ...]:
    versions = ", ".join(f"{package} {version}" for package, version in found.versions.items())
    return f"{name}.json", found.command or "–", number(found.seconds), found.device or "–", versions or "–"


def _training_chart(training: list[TrainingLoss]) -> Chart | None:
    """Loss over the steps of each stage."""
    stages: dict[str, list[tuple[int, float]]] = {}
    for row in training:
        stages.setdefault(row.stage, []).append((row.step, row.loss))
    series: list[Series] = []
    for i, (stage, points) in enumerate(stages.items()):
        thin = points[:: -(-len(points) // 400)]
        series.append(
            {
                "name": stage,
                "x": [p[0] for p in thin],
                "y": [p[1] for p in thin],
                "plain": True,
                "colour": f"palette-{i}",
            }
        )
    values = finite_values([y for s in series for y in s["y"]])
    if len(values) < 2:
        return None
    return Chart(
        id="training",
        kind="lines",
        title="Training",
        caption="Loss of each stage; the stages measure different things.",
        alt=f"Training loss from {number(values[0])} to {number(values[-1])}.",
        series=series,
        x={"label": "step"},
        y={"label": "loss", "log": min(values) > 0},
        wide=True,
    )
