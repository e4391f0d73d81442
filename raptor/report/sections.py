"""The sections of the page, in the order of the argument. Each is a function of `Results`."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import yaml

from raptor.provenance import Provenance
from raptor.report.basins import basins
from raptor.report.charts import Axis, Chart, Section, Series, finite_values, number
from raptor.report.dynamics import dynamics
from raptor.report.fidelity import fidelity
from raptor.report.interventions import interventions
from raptor.report.markup import command, paragraph, table
from raptor.report.overview import overview
from raptor.report.phases import phases
from raptor.report.probes import probes
from raptor.report.results import Results, TrainingLoss
from raptor.report.strips import NO_IMAGES, ImagesFile

_MAX_STEPS = 400  # of a training curve; more could not be told apart


def images(results: Results) -> Section:
    """A few images through depth: patch tokens as colours, the teacher above the surrogate."""
    lead = (
        "Each patch is coloured by its state on three principal components of the teacher's patches at that layer. "
        "The same colour means the same state: scrub through depth and compare the rows."
    )
    section = Section("seen", "Images", "What the model sees", lead)
    found = results.images
    if found is not None and found.images:
        section.html = '<div id="strip" class="strip"></div>'
        section.after = paragraph(_caption(found), "caption")
        return section
    section.hint_reason = results.notes.get("images", "")
    if not (results.folder / "surrogate").is_dir() and not results.config.get("model"):
        section.hint = f"raptor distill MODEL --data DATA --k 3 --out {results.folder}"
    elif section.hint_reason == NO_IMAGES:
        section.hint = results.on_run("report", "--images 4")
    else:
        section.hint = results.on_run("report", "" if results.module else "--data DATA")
    return section


def _caption(found: ImagesFile) -> str:
    ends = [finite_values(row.cosine)[-1] for row in found.images if row.cosine]
    text = f"Images of {found.data}. Look for objects that appear out of the ground."
    if ends:
        mean = number(sum(ends) / len(ends))
        text += f" At the last layer the mean cosine between teacher and surrogate patches is {mean}."
    return text


def provenance(results: Results) -> Section:
    """How it was made: commands, config, versions, time, and the training curve."""
    lead = "Every number on this page comes from the files of one folder."
    section = Section("made", "Provenance", "How it was made", lead)
    rows = [_row(name, found) for name, found in results.provenance().items()]
    versions = {row[-1] for row in rows} - {"–"}
    head: tuple[str, ...] = ("file", "command", "seconds", "device", "versions")
    if len(versions) == 1:
        same = paragraph(f"Versions: {versions.pop()}.", "caption")
        section.after = table(head[:-1], [row[:-1] for row in rows], numeric=False) + same
    else:
        section.after = table(head, rows, numeric=False)
    chart = _training(results.training)
    if chart is not None:
        section.charts = [chart]
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


def _training(training: list[TrainingLoss]) -> Chart | None:
    """Loss over the steps of each stage."""
    stages: dict[str, list[TrainingLoss]] = {}
    for row in training:
        stages.setdefault(row.stage, []).append(row)
    series: list[Series] = []
    for i, (stage, rows) in enumerate(stages.items()):
        shown = rows[:: -(-len(rows) // _MAX_STEPS)]
        steps, losses = [row.step for row in shown], [row.loss for row in shown]
        series.append(Series(stage, steps, losses, colour=f"palette-{i}", plain=True))
    values = [value for one in series for value in finite_values(one.y)]
    if len(values) < 2:
        return None
    return Chart(
        id="training",
        kind="lines",
        title="Training",
        caption="Look for a loss that has stopped falling. The stages measure different things.",
        series=series,
        x=Axis("step"),
        y=Axis("loss", log=min(values) > 0),
        wide=True,
    )


SECTIONS: tuple[Callable[[Results], Section], ...] = (
    overview,
    phases,
    fidelity,
    probes,
    dynamics,
    basins,
    interventions,
    images,
    provenance,
)
